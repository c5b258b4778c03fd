"""The page of the server: its files without a browser, and what a user does, in Chromium."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvad.server.api.panel import MAX_RUN_LINES
from kvad.server.app import PAGE_FILES, PAGE_HEADERS, STATIC
from kvad.server.routing import merge_replies
from kvad.train.monitoring.metrics import MetricsFile, read_metrics
from tests.server.conftest import KEYS
from tests.support.cli_checkpoints import write_adapter
from tests.support.server import END_THINK, THINK, ServerProcess, forced, open_stream, parse_events, write_translator

FILES = {name: (STATIC / name).read_bytes().decode("utf-8", "replace") for name in PAGE_FILES.values()}
TEMML = {"temml.min.js", "temml.css", "Temml.woff2"}  # a package of others, loaded with the first formula
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js") and name not in TEMML}
HTML = FILES["index.html"]
HELLO = [{"role": "user", "content": "hello"}]
NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML")

# ---------------------------------------------------------------- files


def foreign_addresses(text):
    """Return the addresses of other hosts in a file."""
    return [
        url for url in re.findall(r"(?:https?:)?//[a-z0-9][\w.-]*\.[a-z]{2,}[^\s\"'`)]*", text) if url not in NAMESPACES
    ]


def unsafe_scripts(text):
    """Return the calls that make HTML or code of a text."""
    return re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|javascript:", text
    )


class Inline(HTMLParser):
    """Collects what a content security policy without 'unsafe-inline' refuses, and the files that are referenced."""

    def __init__(self, text):
        super().__init__()
        self.refused, self.files, self._in_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        self.refused += [name for name in names if name.startswith("on") or name == "style"]
        self.files += [names[name] for name in ("src", "href") if names.get(name) and not names[name].startswith("#")]
        self._in_script = tag == "script"
        if tag in ("style", "base", "iframe", "object", "embed"):
            self.refused.append(tag)

    def handle_data(self, data):
        if self._in_script and data.strip():
            self.refused.append("script")

    def handle_endtag(self, tag):
        self._in_script = False


def test_every_referenced_file_is_served():
    imported = {(name, path) for name, text in SCRIPTS.items() for path in re.findall(r'from "([^"]+)"', text)}
    assert {path for _, path in imported} <= {f"./{name}" for name in SCRIPTS}
    assert set(Inline(HTML).files) <= set(FILES)
    loaded = re.findall(r'(?:href|src): "([\w.]+)"', SCRIPTS["markdown.js"])
    fonts = re.findall(r"url\('([\w.]+)'\)", FILES["temml.css"])
    assert {*loaded, *fonts} == TEMML <= set(FILES)
    assert set(SCRIPTS) == {path[2:] for _, path in imported} | {"app.js"}, "a script that no other one imports"


def test_names_in_scripts_exist():
    scripts = "".join(SCRIPTS.values())
    ids = set(re.findall(r'\bid="([\w-]+)"', HTML)) | set(re.findall(r'\bid: "([\w-]+)"', scripts))
    assert set(re.findall(r'byId\("([\w-]+)"\)', scripts)) <= ids
    icons = re.findall(r'(?:\bicon|iconButton)\("([\w-]+)"', scripts)
    assert icons and {f"i-{name}" for name in icons} <= ids
    colors = set(re.findall(r"--([\w-]+):", FILES["style.css"]))
    assert set(re.findall(r'\bcolor\("([\w-]+)"\)', scripts)) <= colors


def test_no_other_host_no_inline_code():
    for text in FILES.values():
        assert foreign_addresses(text) == []
        assert unsafe_scripts(text) == []
    assert Inline(HTML).refused == []
    policy = PAGE_HEADERS["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src" not in policy  # falls back to default-src


def test_checks_of_files_find_violations():
    assert foreign_addresses('<script src="https://cdn.example.org/x.js">') == ["https://cdn.example.org/x.js"]
    assert foreign_addresses("@import url(//fonts.example.org/a)") == ["//fonts.example.org/a"]
    assert unsafe_scripts("a.innerHTML = b; eval(c)") == ["innerHTML", "eval("]
    assert Inline('<p onclick="x()"><script>y</script><script src="z.js"></script>').refused == ["onclick", "script"]


# ---------------------------------------------------------------- a running server


def test_fields_of_the_page(server):
    fields = {"messages": HELLO, **forced(*b"ABC"), "return_token_ids": True, "request_id": "page-1"}
    reply = server.post("/v1/chat/completions", **fields).json()
    assert reply["id"] == "chatcmpl-page-1"
    assert reply["choices"][0]["token_ids"] == [*b"ABC"]
    events = parse_events(server.post("/v1/chat/completions", stream=True, **fields).text)
    assert [token for event in events[:-1] for token in event["choices"][0]["token_ids"]] == [*b"ABC"]
    bad = server.post("/v1/chat/completions", **{**fields, "request_id": "a b"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")

    connection = open_stream(server, "a long text", max_tokens=3000, request_id="page-2")
    state = server.wait_for(
        lambda state: any(each["blocks"] and len(each["blocks"][0]) > 2 for each in state["sequences"])
    )
    connection.close()
    (sequence,) = state["sequences"]
    assert sequence["request_id"] == "page-2"
    assert {state["pools"][0][block - state["first_block"]] for block in sequence["blocks"][0]} == {"u"}
    server.wait_for(lambda state: not state["sequences"])


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with playwright.sync_playwright() as driver:
        browser_path = browser_path or driver.chromium.executable_path  # downloaded by playwright
        if not Path(browser_path).exists():
            pytest.skip("no Chromium: apt-get install chromium, or python -m playwright install chromium")
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open a server's page; console errors and requests of other hosts fail the test."""
    problems, contexts = [], []

    def open_page(server, *, size=(1440, 900), key=None, **device):
        credentials = None if key is None else {"username": "any", "password": key}
        width, height = size
        viewport = {"width": width, "height": height}
        options = {"color_scheme": "light", "http_credentials": credentials, "viewport": viewport, **device}
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(server.url) else problems.append(request.url))
        page.route("**/completions", without_end)
        page.goto(server.url)
        page.wait_for_selector("body:not(.loading)")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in problems if "status of 400" not in text] == []  # one refused request is part of a test


@pytest.fixture
def page(open_page, server):
    return open_page(server, key=KEYS[0])


def without_end(route):
    """Let the model ignore its end token, so that a text is as long as it was asked for."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


A_LINK = (
    '<a href="http://a.example/b_(c)" target="_blank" rel="noopener noreferrer nofollow" '
    'title="http://a.example/b_(c)">'
)
DISPLAYED = '<span class="formula displayed" tabindex="0" role="group" aria-label="Formula">'
MARKDOWN = {
    "**a** *b* `c<d`": "<p><strong>a</strong> <em>b</em> <code>c&lt;d</code></p>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[x](javascript:alert(1))": "<p><span>x</span></p>",
    "![x](http://a.example/b)": '<p><a href="http://a.example/b" target="_blank" rel="noopener noreferrer nofollow" '
    'title="http://a.example/b">x</a></p>',
    "# T\n- a\n  - b\n- c": "<h2>T</h2><ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> q\nr": "<blockquote><p>q<br>r</p></blockquote>",
    "a_b_c 2*3*4 ** x": "<p>a_b_c 2<em>3</em>4 ** x</p>",
    "\\*a\\*": "<p>*a*</p>",
    "***a*** **b**": "<p><strong><em>a</em></strong> <strong>b</strong></p>",
    "x<br>y<b>": "<p>x<br>y&lt;b&gt;</p>",
    "\\(a_1*b*\\) $$ _x_ $$ \\(": f'<p><span class="formula">a_1*b*</span> {DISPLAYED}_x_</span> (</p>',
    "[`x` http://a.example](http://a.example/b_(c))": f"<p>{A_LINK}<code>x</code> http://a.example</a></p>",
    "http://a.example/b_(c), (http://a.example/b_(c))": f"<p>{A_LINK}http://a.example/b_(c)</a>, "
    f"({A_LINK}http://a.example/b_(c)</a>)</p>",
}
FORMULAS = {  # when Temml is loaded; {} is MathML
    "a $x_1^2$ b": "<p>a {} b</p>",
    "It is\n$$\nx = a\n+ b\n$$\nso.": "<p>It is</p>{}<p>so.</p>",
    "- \\[ \\frac{a}{b} \\]": "<ul><li>{}</li></ul>",
    "\\(\\frac{a\\)": '<p><span class="formula">\\frac{a</span></p>',  # Temml cannot read it
    "\\(\\def\\a{\\a\\a}\\a\\)": '<p><span class="formula">\\def\\a{\\a\\a}\\a</span></p>',  # it would not end
    "$5 and $6, $HOME/$USER, US$1, \\$x$": "<p>$5 and $6, $HOME/$USER, US$1, $x$</p>",
}
NO_LINK = "\\(\\href{javascript:alert(1)}{x} <img src=x>\\)"  # a formula has no links and no HTML
HUGE = "\\(\\rule{9000em}{9000pt}\\)"
RENDER = """async (texts) => {
  const { MarkdownView } = await import("/markdown.js");
  return texts.map((text) => {
    const [whole, parts] = [0, 1].map(() => document.createElement("div"));
    new MarkdownView(whole).update(text);
    const view = new MarkdownView(parts);
    for (let end = text.length < 500 ? 0 : text.length; end <= text.length; end++) view.update(text.slice(0, end));
    return [whole.innerHTML, parts.innerHTML];
  });
}"""


def check_markdown(page):
    """Markdown becomes safe nodes, the same ones when the text arrives in parts."""
    code, table = "```py\nx = 1\n```\nafter", "| a | b |\n|---|--:|\n| 1 | 2 |\n\nafter"
    results = page.evaluate(RENDER, [*MARKDOWN, code, table, "*" * 3000 + "[" * 3000 + ">" * 3000])
    for (text, expected), (whole, parts) in zip(MARKDOWN.items(), results, strict=False):
        assert whole == expected, text
        assert parts == whole
    assert all(whole == parts for whole, parts in results)
    code_html, table_html = results[len(MARKDOWN)][0], results[len(MARKDOWN) + 1][0]
    assert '<span class="hl-n">1</span>' in code_html
    assert code_html.endswith("<p>after</p>")
    assert "<th>a</th>" in table_html
    assert '<td style="text-align: right;">2</td>' in table_html
    page.wait_for_function("() => window.temml")  # the formula in MARKDOWN has loaded it
    results = page.evaluate(RENDER, [*FORMULAS, HUGE, NO_LINK])
    assert all(whole == parts for whole, parts in results)
    for (text, expected), (whole, _) in zip(FORMULAS.items(), results, strict=False):
        assert re.sub(r'<span class="formula[^>]*><math.*?</math></span>', "{}", whole) == expected, text
    assert "<mfrac>" in results[2][0]
    sizes = re.findall(r"(?:width|height)[=:]\s?\"?([\d.]+)(?:em|pt)", results[-2][0])
    assert sizes and all(float(size) <= 400 for size in sizes), results[-2][0]
    assert not re.search(r"<a\b|<img|href=", results[-1][0])


def legend(page):
    """Return the numbers of the legend by the code of a kind of block."""
    items = page.locator(".legend li").evaluate_all(
        "all => all.map(item => [item.dataset.code, item.lastChild.textContent])"
    )
    return {int(code): int(text.replace(",", "")) for code, text in items}


FIELDS = """async () => {
  const { requestFields, timeoutField } = await import("/settings.js");
  const settings = (await import("/store.js")).loadSettings();
  const fields = (sessions) => requestFields({ settings, model: { features: { sessions } } }, { id: "c1" });
  return [fields(true), fields(false), timeoutField(settings)];
}"""


def check_cache_settings(page):
    """What a request may choose of the cache is in the settings, and is sent."""
    sampling = {"temperature": 0.7, "max_tokens": 5}
    given = {"overflow": "stop", "cache_salt": "mine", "timeout": 9}
    page.click("#new-conversation")
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "5")
    page.select_option("[data-name=overflow]", given["overflow"])
    page.fill("[data-name=cache_salt]", given["cache_salt"])
    page.fill("[data-name=timeout]", str(given["timeout"]))
    assert page.locator("[data-name=enable_thinking], [data-name=reasoning_effort]").count() == 0
    with page.expect_request("**/chat/completions") as request:
        page.fill("#message", "hello")
        page.press("#message", "Enter")
    body = request.value.post_data_json
    assert body.items() >= {**sampling, **given}.items() and "session" not in body
    page.get_by_text("Stopped at the limit of 5 new tokens.").wait_for()
    page.check("[data-name=session]")
    with_session, without, of_translation = page.evaluate(FIELDS)
    assert without == {**sampling, **given} and with_session == {**without, "session": "c1"}
    assert of_translation == {"timeout": 9}
    page.click("text=Reset to defaults")
    assert page.evaluate(FIELDS)[0] == {"temperature": 0.7, "max_tokens": 512}
    assert not page.is_checked("[data-name=session]")


STOP_AFTER_400 = """() => new MutationObserver((_, observer) => {
  if (!(document.querySelector("article.assistant .markdown")?.textContent.length > 400)) return;
  observer.disconnect();
  document.getElementById("send").click();
}).observe(document.getElementById("thread"), { subtree: true, childList: true })"""


MANY_CONVERSATIONS = """async () => {
  const store = await import("/store.js");
  for (let number = 1; number <= 9; number++) {
    const conversation = store.create("completion");
    store.save(Object.assign(conversation, { title: `Number ${number}`, text: "a text" }));
  }
}"""


def test_page(page, server):
    check_markdown(page)
    answer = page.locator("article.assistant")
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "")  # to the end of the context
    page.click("#tab-cache")

    # A message is answered; Stop ends the answer and frees the sequence; the panel shows its blocks.
    page.evaluate(STOP_AFTER_400)
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    page.wait_for_selector("text=You stopped this answer")
    server.wait_for(lambda state: not state["sequences"])
    page.wait_for_selector(".legend li[data-code='5']:not(.none)")  # kept in the prefix cache
    assert sum(legend(page)[code] for code in range(6)) == len(server.cache()["pools"][0])

    # Scrolled away from the end, a button leads back to it.
    to_end = page.get_by_label("To the end")
    assert to_end.is_hidden()
    page.set_viewport_size({"width": 1440, "height": 200})
    page.evaluate("document.getElementById('thread').scrollTop = 0")
    to_end.click()
    to_end.wait_for(state="hidden")
    page.set_viewport_size({"width": 1440, "height": 900})

    # Regenerate makes a second version, with token details; both can be shown.
    first = answer.locator(".markdown").inner_text()
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "12")
    page.click("#toggle-tokens")
    answer.get_by_label("Regenerate").click()
    page.wait_for_selector("text=2/2")
    page.wait_for_selector("#send:not(.stop)")
    assert page.locator("article.assistant .token").count() == 12
    page.locator("article.assistant .token").nth(3).click()
    page.wait_for_selector("#panel-attention >> text=Start the server with --attention")
    page.click("#toggle-tokens")
    answer.get_by_label("Previous version").click()
    assert answer.locator(".markdown").inner_text() == first

    # Conversations and messages survive a reload; both themes have their colors.
    page.reload()
    page.wait_for_selector("text=1/2")
    assert page.locator("#conversations li").count() == 1
    backgrounds = []
    for theme in ("dark", "light"):
        page.click(f".theme [data-theme={theme}]")
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1] == "rgb(255, 255, 255)"

    check_cache_settings(page)

    # Many conversations can be searched.
    assert page.locator("#search").is_hidden()
    page.evaluate(MANY_CONVERSATIONS)
    page.reload()
    page.fill("#search", "NUMBER 3")
    assert page.locator("#conversations .open").all_text_contents() == ["Number 3now"]
    page.fill("#search", "")
    assert page.locator("#conversations li").count() == 11

    # Completion mode continues a text in place.
    page.click("[data-mode=completion]")
    assert "Here the model does not answer" in page.locator(".intro").inner_text()
    page.fill("#completion-text", "once __upon__ a time")
    page.press("#completion-text", "Control+Enter")
    page.wait_for_selector("#view-completion .branches, #view-completion [aria-label=Regenerate]")
    assert page.inner_text("#title").startswith("once __upon__ a time")  # a title is the text as it is
    assert "the context has" not in page.locator("#view-completion .meter").inner_text()
    assert page.input_value("#completion-text").startswith("once __upon__ a time")
    assert len(page.input_value("#completion-text")) > len("once __upon__ a time")

    # An error of the API is shown in plain words with its field.
    page.click("#tab-settings")
    page.fill("[data-name=stop]", "\n".join(map(str, range(40))))
    page.press("#completion-text", "Control+Enter")
    assert "stop" in page.locator("#view-completion .error").inner_text()


def test_a_running_answer(page, server):
    """What a user does while an answer is written neither ends it nor writes two at the same time."""
    article, items = page.locator("article"), page.locator("#conversations li")
    page.fill("#message", "hello")
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "5")
    page.press("#message", "Enter")
    page.wait_for_selector("#send:not(.stop)")

    # What is selected stays selected.
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.bubble'))")
    article.nth(1).get_by_label("Regenerate").evaluate("button => button.click()")
    page.locator("article.assistant .branches").wait_for()
    assert page.evaluate("getSelection().toString()") == "hello"
    page.fill("[data-name=max_tokens]", "")

    # One message at a time is edited. Another one is sent meanwhile; the edited one replaces its answer.
    article.nth(1).get_by_label("Edit").click()
    article.nth(0).get_by_label("Edit").click()
    assert page.locator(".edit").count() == 1 and page.locator("article.assistant .markdown").inner_text()
    page.fill("#message", "more")
    page.press("#message", "Enter")
    server.wait_for(lambda state: len(state["sequences"]) == 1)
    page.fill(".edit", "other")
    with page.expect_request("**/chat/completions"):
        page.press(".edit", "Control+Enter")
    server.wait_for(lambda state: len(state["sequences"]) == 1 and state["sequences"][0]["tokens"] > 60)
    assert article.count() == 2 and page.locator("article.user .branches").inner_text() == "2/2"
    page.locator("article.user").get_by_label("Previous version").click()
    page.get_by_text("You stopped this answer").wait_for()
    page.locator("article.user").get_by_label("Next version").click()

    # Enter keeps the next message, and the answer goes on. The list of conversations keeps the focus.
    page.fill("#message", "next")
    page.press("#message", "Enter")
    assert page.input_value("#message") == "next" and page.locator("#send.stop").count() == 1
    items.locator(".open").press("Enter")
    assert page.evaluate("document.activeElement.className") == "open"

    # A conversation that is deleted while it is written stays deleted, also when another one is shown.
    page.click("#new-conversation")
    page.click("#conversations .more")
    with page.expect_event("requestfailed"):  # it is stopped
        page.click("text=Delete")
    server.wait_for(lambda state: not state["sequences"])
    page.wait_for_timeout(100)
    assert items.count() == 0 and page.evaluate("localStorage.getItem('kvad.conversations')") == "[]"
    page.click("text=Undo")
    assert items.count() == 1 and article.count() == 2


def test_ends_of_an_answer(page):
    """A full context, and an error in the middle of an answer, whose text is kept and continued."""
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "")
    delta = {"choices": [{"index": 0, "delta": {"content": "**A"}}]}
    full = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    failed = {"error": {"message": "it <b>failed", "code": "engine_error"}}
    bodies = []
    page.route("**/chat/completions", lambda route: route.fulfill(body=bodies[-1]))
    for last, texts in ((full, ["the context is full"]), (failed, ["It <b>failed.", "Continue"])):
        bodies.append("".join(f"data: {json.dumps(each)}\n\n" for each in (delta, last)) + "data: [DONE]\n\n")
        page.fill("#message", "hello")
        page.press("#message", "Enter")
        page.wait_for_selector("#send:not(.stop)")
        shown = page.locator("article.assistant").last.inner_text()
        assert all(text in shown for text in ("**A", *texts)), shown

    # One text is completed at a time.
    page.click("[data-mode=completion]")
    page.fill("#completion-text", "a")
    page.press("#completion-text", "Control+Enter")
    page.click("#new-conversation")
    page.fill("#completion-text", "b")
    page.press("#completion-text", "Control+Enter")
    page.get_by_text("Another text is being written").wait_for()
    page.locator("#conversations .open", has_text="a").last.click()
    page.press("#completion-text", "Escape")


def test_two_tabs(page):
    """A tab shows what another one has written; when it is closed, it replaces nothing."""
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "5")

    def send(text):
        page.fill("#message", text)
        page.press("#message", "Enter")
        page.wait_for_selector("#send:not(.stop)")

    send("one")
    other = page.context.new_page()
    other.goto(page.url)
    other.locator("article.assistant").wait_for()
    send("two")
    other.locator("article.assistant >> nth=1").wait_for()
    other.close(run_before_unload=True)
    page.reload()
    page.locator("article.assistant >> nth=1").wait_for()


# ---------------------------------------------------------------- the cache panel

CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, index) => value * a + below[index] * (1 - a));
  const background = (element) => rgba(getComputedStyle(element).backgroundColor);
  const behind = (element) => (element ? over(background(element), behind(element.parentElement)) : [255, 255, 255]);
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const weak = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const [text, element] = [walker.currentNode.data.trim(), walker.currentNode.parentElement];
    const isVisible = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!text || !isVisible || element.closest("script, .offscreen, .skip")) continue;
    const back = behind(element);
    const [one, other] = [luminance(over(rgba(getComputedStyle(element).color), back)), luminance(back)];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) weak.push(`${text.slice(0, 30)} (${element.className}): ${ratio.toFixed(2)}`);
  }
  return weak;
}"""


def wait_until(page, expression, value):
    """Wait until a function of the page returns a value; the page's policy forbids ``wait_for_function``."""
    end = time.monotonic() + 10
    while (shown := page.evaluate(expression)) != value:
        assert time.monotonic() < end, f"{expression}: {shown}, not {value}"
        page.wait_for_timeout(20)


def check_themes(page, *panels):
    """Text of both themes is readable: a contrast of at least 4.5 everywhere, in each of the panels."""
    for theme in ("dark", "light"):
        page.click(f".theme [data-theme={theme}]")
        for panel in panels:
            page.click(f"#tab-{panel}")
            assert page.evaluate(CONTRAST) == []


def test_enter_breaks_the_line_on_a_phone(open_page, server):
    page = open_page(server, size=(390, 844), key=KEYS[0], is_mobile=True, has_touch=True)
    page.fill("#message", "one")
    page.press("#message", "Enter")
    assert page.input_value("#message") == "one\n" and page.locator("article").count() == 0


def complete_here(page, text, tokens):
    """Continue a text in completion mode by a number of tokens."""
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", str(tokens))
    page.click("#tab-cache")
    page.fill("#completion-text", text)
    with page.expect_response("**/completions") as response:
        page.press("#completion-text", "Control+Enter")
    response.value.finished()
    page.locator("#view-completion .primary", has_text="Stop").wait_for(state="detached")


def test_cache_and_attention(start_server, open_page, llm):  # the page is closed before its server ends
    options = ("--num-blocks", 21, "--prefix-cache-ram", "1MiB", "--cache-dtype", "int8", "--max-seq-len", 320)
    server = start_server(*options, "--attention")
    page = open_page(server)
    page.click("[data-mode=completion]")
    check_cache_panel(page, server)
    check_attention(page, llm)
    check_replicas(page, server)


LEGEND = """() => {
  const number = (code) => Number(document.querySelector(`.legend [data-code="${code}"] b`).textContent);
  return { f: number(0), packed: number(8), ram: number(6) };
}"""


def check_cache_panel(page, server):
    # The first prompt is computed; the second continues it; a long one of another client evicts both.
    prompts = page.locator(".prompt")
    text = "A prompt of fifty-one characters, all of them new: "
    complete_here(page, text, 2)
    prompts.filter(has_text="51 computed: first prompt with this API key, salt and adapter").wait_for()
    complete_here(page, text + "more of it", 2)
    prompts.filter(has_text="48 of 61 tokens from cache").filter(
        has_text="13 computed: they fill no whole block"
    ).wait_for()
    assert "This text" in prompts.first.inner_text()
    server.complete("x" * 310, max_tokens=2)
    page.wait_for_selector(".events .evict >> text=/cached blocks? evicted for new tokens of request/")
    state = server.cache()
    (prompt, *_), evictions, traffic = state["prompts"], state["evictions"], state["traffic"]
    assert (prompt["miss_reason"], prompt["num_cached_tokens"]) == ("new", 0)
    num_evicted = sum(each["blocks"] for each in evictions)
    assert num_evicted == state["cache"]["evictions"][0] > 0 and {each["cause"] for each in evictions} == {"tokens"}
    assert [(row["kind"], row["place"], row["blocks_out"]) for row in traffic] == [("prefix", "ram", num_evicted)]

    # Each kind of block has its cells: free and cached ones in the pool, packed as int8, evicted ones in RAM.
    pool = server.wait_for(lambda state: not state["sequences"])["pools"][0]
    assert set(pool) == {"f", "c"}
    wait_until(page, LEGEND, {"f": pool.count("f"), "packed": pool.count("c") + num_evicted, "ram": num_evicted})
    assert sum(legend(page)[code] for code in range(6)) == len(pool)

    # The evicted prompt comes back from RAM, and the traffic shows it.
    complete_here(page, text + "more of it", 2)
    loaded = server.cache()["prompts"][0]["num_ram_tokens"]
    assert loaded > 0
    page.wait_for_selector(f".traffic td:last-child >> text={loaded // 16} block")
    assert page.locator(".prompt").first.locator(".ram").count() == 1

    # Keyboard: arrows move between blocks, also into RAM, and every block is described to screen readers.
    page.focus(".block-map")
    text_of_block = "() => document.getElementById('block-text').textContent"
    for key, block in (("ArrowRight", "Block 2"), ("ArrowRight", "Block 3"), ("End", "RAM"), ("Home", "Block 2")):
        page.keyboard.press(key)
        wait_until(page, f"{text_of_block}.split(':')[0]", block)
    assert "packed as int8" in page.evaluate(text_of_block)
    page.keyboard.press("Escape")
    page.focus("#tab-cache")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-attention", "aria-selected") == "true"
    check_themes(page, "cache", "settings", "attention")

    # Nothing is wider than a phone.
    page.set_viewport_size({"width": 390, "height": 844})
    page.click("#tab-cache")
    widths = page.evaluate("() => ['body', '#panel-cache'].map((name) => document.querySelector(name).scrollWidth)")
    assert widths == [390, 390]
    page.set_viewport_size({"width": 1440, "height": 900})


def check_replicas(page, server):
    """Requests, evictions and pools of several replicas are named with the replica, the newest prompt first."""
    state = server.cache()
    prompts = [{**state["prompts"][0], "request": number, "request_id": None} for number in (1, 2)]
    merged = merge_replies([{**state, "prompts": [prompt]} for prompt in prompts])
    events = f"data: {json.dumps(merged)}\n\n"
    page.route("**/cache/events", lambda route: route.fulfill(content_type="text/event-stream", body=events))
    page.reload()
    page.click("#tab-cache")
    page.locator(".prompt", has_text="Request 1 on replica 1").wait_for()
    names = page.locator(".prompt .spread span:first-child").all_text_contents()
    assert names == ["Request 2 on replica 2", "Request 1 on replica 1"]
    page.wait_for_selector(".events .evict >> text=/evicted for new tokens of request [0-9]+ on replica 2/")
    pools = page.locator("#panel-cache select option").all_text_contents()
    assert pools == [f"Layers 0–1, replica {number}" for number in (1, 2)]


# ---------------------------------------------------------------- attention


WEIGHTS = """() => [...document.querySelectorAll("#panel-attention .att:not(.later)")]
  .map((token) => token.title.split(": ").at(-1))"""


def check_attention(page, llm):
    """The weights of the panel are those of an uncached forward pass, for the layer and the head that are chosen."""
    page.click("#toggle-tokens")
    complete_here(page, "attend to ", 6)
    with page.expect_response("**/attention") as response:
        page.locator("#view-completion .token").nth(12).click()
    tokens = response.value.request.post_data_json["prompt"]
    assert (bytes(tokens[:10]), len(tokens)) == (b"attend to ", 13)
    for layer, head in ((0, None), (1, 3), (1, 0)):
        if str(layer) != page.input_value("#panel-attention select"):
            with page.expect_response("**/attention"):
                page.select_option("#panel-attention select", str(layer))
        page.click(f"[data-key=head{-1 if head is None else head}]")
        weights = llm.trace(tokens, [layer], cached=False).layers[layer].weights[:, -1]
        exact = (weights.mean(0) if head is None else weights[head]).tolist()
        wait_until(page, WEIGHTS, list(map(percent, exact)))

    # Keyboard: the arrow keys move the query.
    page.focus("#panel-attention .query")
    with page.expect_response("**/attention"):
        page.keyboard.press("ArrowLeft")
    weights = llm.trace(tokens[:-1], [1], cached=False).layers[1].weights[0, -1]
    wait_until(page, WEIGHTS, list(map(percent, weights.tolist())))


def percent(share):
    """Format as the page does."""
    number = f"{share * 100:.1f}" if share < 0.0995 else str(int(share * 100 + 0.5))
    return f"{number}%" if share >= 0.001 else "<0.1%"


# ---------------------------------------------------------------- translation and training


def test_thoughts_are_folded(open_page, thinker):
    """Thoughts are above the answer, as text, and shown on request; a reload keeps them."""
    page = open_page(thinker, key=KEYS[0])
    fields = forced(THINK, *b"<b>X", END_THINK, *b"AZ")
    page.route(
        "**/chat/completions", lambda route: route.continue_(post_data={**route.request.post_data_json, **fields})
    )
    page.fill("#message", "hi")
    page.press("#message", "Enter")
    page.wait_for_selector("#send:not(.stop)")
    for _ in range(2):
        answer = page.locator("article.assistant")
        answer.get_by_text("AZ").wait_for()
        assert answer.locator(".markdown").inner_text() == "AZ"
        assert (answer.locator("summary").inner_text(), answer.locator("details div").is_visible()) == (
            "Thoughts",
            False,
        )
        answer.locator("summary").press("Enter")
        assert answer.locator("details div").inner_text() == "<b>X"
        check_themes(page, "cache")
        page.reload()


def test_thinking_is_a_setting(open_page, thinker):
    """Where the chat template reads it, thinking is set below the message and in the settings, and is sent."""
    page = open_page(thinker, key=KEYS[0])
    below, panel = page.locator("#composer"), page.locator("#panel-settings")
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "3")
    page.route(
        "**/chat/completions",
        lambda route: route.continue_(post_data={**forced(*b"X", END_THINK, *b"A"), **route.request.post_data_json}),
    )
    for value, thoughts in (("off", ""), ("on", "X")):
        page.click("#new-conversation")
        below.get_by_label("Thinking").select_option(label=value)
        assert panel.get_by_label("Thinking").input_value() == ("true" if thoughts else "false")
        page.fill("#message", "hi")
        with page.expect_request("**/chat/completions") as request, page.expect_request("**/tokenize") as counted:
            page.press("#message", "Enter")
        for body in (request.value.post_data_json, counted.value.post_data_json):
            assert body["chat_template_kwargs"] == {"enable_thinking": bool(thoughts)}
        page.wait_for_selector("#send:not(.stop)")
        assert page.locator("article.assistant details div").last.text_content() == thoughts
    check_themes(page, "settings")

    # An answer is continued, and edited, with its thoughts.
    with page.expect_request("**/chat/completions") as request:
        page.get_by_role("button", name="Continue").click()
    assert request.value.post_data_json["messages"][-1] == {
        "role": "assistant", "content": "A", "reasoning_content": "X",
    }  # fmt: skip
    page.wait_for_selector("#send:not(.stop)")
    page.locator("article.assistant").last.get_by_label("Edit").click()
    page.fill(".edit", "other")
    page.get_by_role("button", name="Save").click()
    assert page.locator("article.assistant details div").last.text_content().startswith("X")

    # The keyboard changes it on a phone, where nothing is wider than the page.
    panel.get_by_label("Reasoning effort").select_option("low")
    page.set_viewport_size({"width": 390, "height": 844})
    page.click("#close-inspector")
    below.get_by_label("Reasoning effort").press("End")
    assert panel.get_by_label("Reasoning effort").input_value() == "high"
    assert page.evaluate(
        "() => [document.body, document.getElementById('composer')].map((each) => each.scrollWidth)"
    ) == [390, 390]
    page.click("#toggle-inspector")
    assert page.evaluate("document.activeElement.id") == "close-inspector"
    page.click("text=Reset to defaults")
    assert below.get_by_label("Reasoning effort").input_value() == ""


def test_adapters_are_models(start_server, open_page, model, tmp_path):
    """The base or an adapter is chosen above the theme; answers say which one wrote them."""
    write_adapter(tmp_path / "law", model, 2)
    template = "{% if enable_thinking %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    write_adapter(tmp_path / "sql", model, 3, template=template)
    adapters = [part for name in ("law", "sql") for part in ("--adapter", f"{name}={tmp_path / name}")]
    server = start_server(*adapters, "--attention", "--session-dir", tmp_path / "sessions")
    page = open_page(server)
    choice = page.get_by_label("Model", exact=True)
    assert choice.locator("option").all_inner_texts() == ["tiny", "law (adapter)", "sql (adapter)"]
    page.click("#tab-settings")
    page.fill("[data-name=max_tokens]", "3")
    page.check("[data-name=session]")
    sessions = []
    for name in ("tiny", "law"):
        choice.select_option(name)
        page.fill("#message", "hi")
        with page.expect_request("**/chat/completions") as request, page.expect_request("**/tokenize") as counted:
            page.press("#message", "Enter")
        page.wait_for_selector("#send:not(.stop)")
        assert request.value.post_data_json["model"] == counted.value.post_data_json["model"] == name
        assert page.locator("article.assistant .stats").last.inner_text().startswith(name)
        assert page.locator("article .error").count() == 0
        sessions.append(request.value.post_data_json["session"])
    assert sessions[1] == f"{sessions[0]}-law", "a session of the base is not continued by an adapter"
    assert page.locator("article.assistant .stats").first.inner_text().startswith("tiny")
    assert "Adapter\nlaw\nBase\ntiny" in page.locator(".facts").inner_text()
    page.click("#tab-attention")
    page.get_by_text("those of the base model: choose tiny").wait_for()
    check_themes(page, "settings")

    choice.select_option("sql")  # its template reads other variables: the page is built again
    page.locator("#composer").get_by_label("Thinking").wait_for()
    assert choice.input_value() == "sql"


def test_translation_and_training(open_page, tmp_path):
    """Beams of an encoder-decoder, and a training run that goes on while the page is open."""
    runs = tmp_path / "runs"
    server = ServerProcess(write_translator(tmp_path / "model"), "--runs", runs)
    try:
        metrics = begin_run(runs / "a-run")
        page = open_page(server)
        check_translation(page, server)
        check_training(page, metrics)
        page.context.close()
    finally:
        server.stop(signal.SIGKILL)


def check_translation(page, server):
    page.fill("#source-text", "ein Satz")
    page.locator("label", has_text="Beams").locator("input").fill("4")
    page.locator("label", has_text="Alternatives").locator("input").fill("3")
    page.locator("label", has_text="Length penalty").locator("input").fill("0.5")
    page.press("#source-text", "Control+Enter")
    page.wait_for_selector(".output >> nth=2")
    reply = server.post("/v1/translate", text="ein Satz", num_beams=4, n=3, length_penalty=0.5).json()
    expected = [(each["text"], f"{each['score']:.2f}") for each in reply["data"][0]["alternatives"]]
    outputs = page.locator(".output")
    assert [
        (outputs.nth(i).locator("p").text_content(), outputs.nth(i).locator(".score").text_content()) for i in range(3)
    ] == expected
    assert len(set(expected)) == 3
    page.wait_for_selector(".prompt >> text=This source text was encoded before.")
    page.locator(".prompt", has_text="Encoded now: no cached source text is the same.").wait_for()
    check_themes(page, "cache", "settings")


STEP = {"lr": 1e-3, "grad_norm": 1.0, "tokens": 100, "elapsed": 1.0, "tokens_per_second": 100.0, "eta": 60.0}


def begin_run(run):
    """Write the first steps of a run as the trainer does."""
    metrics = MetricsFile(run / "metrics.jsonl", 1)
    run.mkdir(parents=True)
    metrics._file = metrics.path.open("a", encoding="utf-8")
    for number in (1, 2, 3):
        metrics._write("step", {**STEP, "step": number, "loss": 5.0 - number})
    return metrics


def check_training(page, metrics):
    """The run continues while the page is open; the curve and the samples follow, then the end."""
    page.click("#tab-training")
    panel = page.locator("#panel-training")
    panel.get_by_text("running", exact=True).wait_for()
    panel.locator(".tile", has_text="Loss").filter(has_text="2.000").wait_for()
    metrics._write("step", {**STEP, "step": 4, "loss": 1.25})
    metrics._write("eval", {"step": 4, "val_loss": 1.5, "val_tokens": 9, "best": 1.5})
    metrics._write("samples", {"step": 4, "samples": [{"source": "ein Haus", "target": "a house", "text": "a mouse"}]})
    panel.locator(".tile", has_text="Loss").filter(has_text="1.250").wait_for()
    panel.locator(".tile", has_text="Best validation").filter(has_text="1.500").wait_for()
    assert panel.locator(".sample dd").all_text_contents() == ["ein Haus", "a house", "a mouse"]
    assert panel.locator("canvas").get_attribute("aria-label") == "Loss from 4.00 to 1.25 over 4 steps"
    check_themes(page, "training")
    metrics._write("end", {"reason": "done", "step": 4})
    panel.get_by_text("finished", exact=True).wait_for()

    # It is resumed, and shown although only its last lines are read.
    for number in range(5, 2100):
        metrics._write("step", {**STEP, "step": number, "loss": 1.125})
    panel.get_by_text("running", exact=True).wait_for()
    metrics._write("step", {**STEP, "step": 2100, "loss": 0.625})
    metrics.close()
    panel.locator(".tile", has_text="Loss").filter(has_text="0.625").wait_for()


TINY_RUN = (
    "--preset tiny --tokenizer byte --seq-len 32 --batch-size 2 --precision fp32 --steps 3000 --eval-interval 400"
    " --set model.hidden_size=16 --set decoder.num_layers=1 --set decoder.layer_types.L.mlp.intermediate_size=16"
    " --set decoder.layer_types.L.attention.num_heads=2 --set train.log_interval=1 --prompt ada"
)


@pytest.mark.long
def test_a_real_training_run(start_server, open_page, tmp_path):
    """``kvad train`` is followed while it runs, beyond the number of lines that the server sends."""
    text, run = tmp_path / "text.txt", tmp_path / "runs" / "names"
    text.write_text("ada bob cleo dan eve fay\n" * 200)
    page = open_page(start_server("--runs", tmp_path / "runs"))
    assert page.locator("#tab-training").is_hidden()
    command = [sys.executable, "-m", "kvad", "train", text, *TINY_RUN.split(), "--out", run]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        page.click("#tab-training", timeout=60_000)
        panel = page.locator("#panel-training")
        panel.get_by_text("running", exact=True).wait_for()
        panel.get_by_text("names", exact=True).wait_for()
        panel.locator(".sample").first.wait_for()
        assert process.wait(100) == 0
        panel.get_by_text("finished", exact=True).wait_for()
    finally:
        process.kill()
    lines = read_metrics(run / "metrics.jsonl")
    assert len(lines) > MAX_RUN_LINES + 1000
    lines = lines[-MAX_RUN_LINES:]
    steps, evals, samples = ([line for line in lines if line["kind"] == kind] for kind in ("step", "eval", "samples"))
    losses = steps[0]["loss"], steps[-1]["loss"]
    label = f"Loss from {losses[0]:.2f} to {losses[1]:.2f} over {steps[-1]['step']:,} steps"
    assert panel.locator("canvas").get_attribute("aria-label") == label and losses[1] < 4
    shown = panel.locator(".tile b").all_text_contents()
    best = min(line["val_loss"] for line in evals)
    assert shown[:3] == [f"{steps[-1]['step']:,}", f"{losses[1]:.3f}", f"{best:.3f}"]
    assert panel.locator(".sample dd").last.text_content() == samples[-1]["samples"][0]["text"]
