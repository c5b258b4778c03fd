"""The page of the server: its files without a browser, and what a user does, in Chromium."""

import re
import shutil
from html.parser import HTMLParser

import pytest

from kvad.server.app import PAGE_FILES, PAGE_HEADERS, STATIC
from tests.server.conftest import KEYS
from tests.support.server import forced, open_stream, parse_events

FILES = {name: (STATIC / name).read_text("utf-8") for name in PAGE_FILES.values()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
HTML = FILES["index.html"]
HELLO = [{"role": "user", "content": "hello"}]
NAMESPACES = ("http://www.w3.org/2000/svg",)

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


@pytest.fixture
def page(server):
    """A page in Chromium; console errors and requests of other hosts fail the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no chromium is installed")
    problems = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light", http_credentials={"username": "any", "password": KEYS[0]})
        page.set_default_timeout(10_000)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(server.url) else problems.append(request.url))
        page.route("**/completions", without_end)
        page.goto(server.url)
        page.wait_for_selector("body:not(.loading)")
        yield page
        browser.close()
    assert [text for text in problems if "status of 400" not in text] == []  # one refused request is part of the test


def without_end(route):
    """Let the model ignore its end token, so that a text is as long as it was asked for."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


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
}
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


STOP_AFTER_400 = """() => new MutationObserver((_, observer) => {
  if (!(document.querySelector("article.assistant .markdown")?.textContent.length > 400)) return;
  observer.disconnect();
  document.getElementById("send").click();
}).observe(document.getElementById("thread"), { subtree: true, childList: true })"""


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
    counts = page.locator(".legend b").all_text_contents()
    assert sum(int(text.replace(",", "")) for text in counts) == len(server.cache()["pools"][0])

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

    # Completion mode continues a text in place.
    page.click("[data-mode=completion]")
    page.fill("#completion-text", "once upon a time")
    page.press("#completion-text", "Control+Enter")
    page.wait_for_selector("#view-completion .branches, #view-completion [aria-label=Regenerate]")
    assert page.input_value("#completion-text").startswith("once upon a time")
    assert len(page.input_value("#completion-text")) > len("once upon a time")

    # An error of the API is shown in plain words with its field.
    page.click("#tab-settings")
    page.fill("[data-name=stop]", "\n".join(map(str, range(40))))
    page.press("#completion-text", "Control+Enter")
    assert "stop" in page.locator("#view-completion .error").inner_text()
