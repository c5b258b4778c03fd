"""Chat templates in child processes: limits of time, memory and output, for any thread, fork and failure."""

import bisect
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kvad.errors import ChatTemplateError
from kvad.text import chat_template as sandbox
from kvad.text.chat_template import RenderLimits, render_template
from kvad.text.template_worker import _Environment

DEFAULT, QUICK = RenderLimits(), RenderLimits(steps=300_000, seconds=0.1)
SPANS = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def render(source, limits=DEFAULT, **values):
    return render_template(source, {"messages": [{"role": "user", "content": "Hi"}], **values}, limits)


def error_of(source, limits=QUICK, **values):
    """Return the message of the error that a template ends with."""
    with pytest.raises(ChatTemplateError) as caught:
        render(source, limits, **values)
    assert "\n" not in str(caught.value) and caught.value.__context__ is None
    return caught.value.message


def output_of(program, *arguments):
    """Run a program in a fresh interpreter that has rendered once, and return what it prints."""
    program = (
        "import json, os, resource, sys\n"
        "from kvad.errors import ChatTemplateError\n"
        "from kvad.text.chat_template import RenderLimits, _pool, render_template\n"
        "def worker():\n"
        "    found = _pool(os.getpid()).get()\n"
        "    _pool(os.getpid()).put(found)\n"
        "    return found._process.pid\n"
        "assert render_template('{{ 1 }}', {}, RenderLimits()).text == '1'\n"
    ) + program
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture
def start_worker(monkeypatch):
    """``start_worker(program)``: a worker whose process runs ``program`` instead."""
    workers = []

    def start(program):
        monkeypatch.setattr(sandbox, "START", "import sys; sys.path += sys.argv[1:]\n" + program)
        workers.append(sandbox._Worker())
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


def request(source, seconds, max_steps):
    limits = {"max_output": 1000, "max_steps": max_steps, "seconds": seconds}
    return json.dumps({"source": source, "values": {}, "now": "2026-01-01", **limits}).encode()


# ---------------------------------------------------------------- attacks

LONG = "{% for i in range(100000) %}"
GROW = (
    "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}"
    "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}"
)
LISTS = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
ONE_HASH = "range(0, 100000 * 2305843009213693951, 2305843009213693951) | batch(2)"  # a dict of them takes 10 s
ATTACKS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loop filter": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "continue": "{% for i in range(100000) %}{% for j in range(100000) %}{% continue %}{% endfor %}{% endfor %}",
    "print": "{% set a = 'a' * 1000000 %}{% for i in range(1000) %}{{ a }}{% endfor %}",
    "print in macro": "{% macro m(a) %}" + LONG + "{{ a }}{% endfor %}{% endmacro %}{{ m('a' * 1000000) }}",
    "set block": "{% set b %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}{{ b|length }}",
    "filter block": "{% filter upper %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endfilter %}",
    "multiply": "{{ 'a' * 10**9 }}",
    "multiply left": "{{ 10**9 * 'a' }}",
    "multiply list": "{{ ([1] * 10**9)|length }}",
    "multiply tuple": "{{ ((1,) * 10**9)|length }}",
    "doubling": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "doubling ~": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "doubling list": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% set a = [1, 1] %}{% for i in a recursive %}{{ loop(a) }}{% endfor %}",
    "block": "{% block x %}{{ self.x() }}{% endblock %}",
    "call": (
        "{% macro m() %}{{ caller() }}{% endmacro %}{% macro f() %}{% call m() %}{{ f() }}{{ f() }}{% endcall %}{% "
        "endmacro %}{{ f() }}"
    ),
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "center": "{{ 'x'|center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "printf": "{{ '%1000000000d' % 1 }}",
    "printf star": "{{ '%*d' % (10**9, 1) }}",
    "printf precision": "{{ '%.1000000000f' % 1.0 }}",
    "printf filter": "{{ '%1000000000d'|format(1) }}",
    "printf mapping": "{{ ('%(a)s' * 100000) % {'a': 'b' * 100000} }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format many": "{{ ('{0}' * 50000).format('b' * 1000000) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format indirect": "{% set f = 'x'['format'] %}{{ '{:1000000000}'|attr('format')(1) }}",
    "range": "{{ range(10**9)|list }}",
    "range sum": "{{ range(10**9)|sum }}",
    "join": "{{ ('a' * 1000000).join(['b'] * 10000) }}",
    "join filter": "{{ (['b'] * 10000)|join('a' * 1000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "replace empty": "{{ ('a' * 1000000).replace('', 'b' * 1000) }}",
    "indent": "{{ ('\\n' * 100000)|indent(100000, blank=true) }}",
    "tojson indent": "{{ [1, [2]]|tojson(indent=10**9) }}",
    "tojson separators": "{{ ([1] * 100000)|tojson(separators=['a' * 100000, 'b']) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "round": "{{ 1|round(-10**9) }}{{ 5|round(10**9, 'floor') }}",
    "round down": "{{ 5|round(-1000000000) }}",
    "factorial": "{% set ns = namespace(a=3) %}{% for i in range(100000) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "wordwrap": "{{ ('a b ' * 4000)|wordwrap(1, wrapstring='x' * 1000000) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "urlize": "{{ ('www.a.com ' * 100000)|urlize }}",
    "striptags": "{{ ('<!---->' * 500000)|striptags }}",
    "pprint": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ "
        "ns.a|pprint }}"
    ),
    "shared repr": GROW + "{{ ns.a }}",
    "shared tojson": GROW + "{{ ns.a|tojson }}",
    "shared ns": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [namespace(b=ns.a), "
        "namespace(b=ns.a)] %}{% endfor %}{{ ns.a }}"
    ),
    "shared eq": GROW + "{{ ns.a == ns.b }}",
    "shared test": GROW + "{{ ns.a is eq ns.b }}",
    "shared in": GROW + "{{ ns.a in [ns.b] }}",
    "shared hash": GROW + "{{ {ns.a: 1} }}",
    "shared lookup": GROW + "{{ {}[ns.a] }}",
    "shared get": GROW + "{{ {}.get(ns.a) }}",
    "shared unique": GROW + "{{ [ns.a]|unique|list }}",
    "shared sort": GROW + "{{ [ns.a, ns.b]|sort }}",
    "shared changed": GROW + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "shared views": (
        "{% set ns = namespace(a={'a': 1}) %}{% for i in range(60) %}{% set ns.a = {'a': ns.a.values(), 'b': "
        "ns.a.values()} %}{% endfor %}{{ ns.a }}"
    ),
    "deep": "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    "hoard": (
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a, 'a' * (1000000 + i)] %}"
        "{% endfor %}"
    ),
    "hoard slices": (
        "{% set s = 'a' * 1000000 %}{% set ns = namespace(a=[]) %}{% for i in range(1, 100000) %}{% set ns.a = "
        "[ns.a, s[i:]] %}{% endfor %}"
    ),
    "hoard small": (
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% for j in range(1000) %}{% set ns.a = [ns.a, "
        "j ~ 'a'] %}{% endfor %}{% endfor %}"
    ),
    "hoard splits": (
        "{% set s = 'a ' * 200000 %}{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a, "
        "s.split()] %}{% endfor %}"
    ),
    "hoard chars": (
        "{% set s = '😀' * 200000 %}{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a, "
        "s|list] %}{% endfor %}"
    ),
    "hoard batches": (
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a, "
        "range(100000)|batch(1)|list] %}{% endfor %}"
    ),
    "hoard dicts": (
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a, dict(a=i, b=i, c=i)] %}{% "
        "endfor %}{% for i in range(100000) %}{% set ns.a = [ns.a, dict(a=i, b=i, c=i)] %}{% endfor %}"
    ),
    "split": "{{ ('a ' * 2000000).split()|length }}",
    "split comma": "{{ ('a,' * 2000000).split(',')|length }}",
    "splitlines": "{{ ('a\\n' * 2000000).splitlines()|length }}",
    "list": "{{ ('a' * 4000000)|list|length }}",
    "sorted": "{{ ('ba' * 2000000)|sort|length }}",
    "rfind": "{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}",
    "rsplit": "{{ ('a' * 4000000).rsplit('b' + 'a' * 2000000)|length }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 2000000 + 'a')|length }}",
    "trim": "{{ ('a' * 4000000)|trim('b' * 2000000 + 'a')|length }}",
    "title": "{{ ('-a' * 2000000)|title|length }}",
    "sum": "{% set a = [1] * 1000 %}{{ ([a] * 100000)|sum(start=[])|length }}",
    "map": "{{ ([1] * 100000)|map('center', 100000)|list|length }}",
    "map join": "{{ ([1] * 100000)|map('center', 100000)|join|length }}",
    "strftime": "{{ strftime_now('%100000000d') }}",
    "strftime long": "{{ strftime_now('%c' * 1000000) }}",
    "float": "{{ ('1' * 4000000)|float }}",
    "int": "{{ ('f' * 4000000)|int(base=16) }}",
    "autoescape": "{% autoescape true %}{% for i in range(100000) %}{{ '<' * 100000 }}{% endfor %}{% endautoescape %}",
    "generation": "{% generation %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endgeneration %}",
    "straight line": "{% set a = 'a' * 1000000 %}" + LONG + "{% set b = a[::-1] %}" * 2000 + "{% endfor %}",
    "straight upper": "{% set a = 'ä' * 1000000 %}" + LONG + "{% set b = a.upper() %}" * 2000 + "{% endfor %}",
    "straight in": "{% set a = 'a' * 1000000 %}" + LONG + "{% set b = 'b' in a %}" * 2000 + "{% endfor %}",
    "namespace": "{% set ns = namespace() %}{% set ns.a = ns %}{% set ns.b = [ns, ns] %}{{ ns }}",
    "odd printf": "{{ '%1000000000d' is odd }}{{ '%1000000000d' is divisibleby 2 }}",
    "shared dict of lists": GROW + "{{ dict([ns.a, 1] | batch(2)) }}",
    "shared dict of generators": GROW + "{{ dict([[ns.a, 1] | select]) }}",
    "shared filter": GROW + "{{ ns.a is filter }}",
    "shared urlencode": LISTS + "{{ [ns.a, 1] | batch(2) | urlencode }}",
    "shared varargs": (
        "{% set ns = namespace(a=1) %}{% macro m() %}{% set ns.a = varargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ m(ns.a, ns.a) }}{% endfor %}{{ {ns.a: 1} }}"
    ),
    "deep tuple": "{% set ns = namespace(a=1) %}" + LONG + "{% set ns.a = (ns.a,) %}{% endfor %}{{ {ns.a: 1} }}",
    "deep varargs": (
        "{% set ns = namespace(a=1) %}{% macro m() %}{% set ns.a = varargs %}{% endmacro %}"
        "{% for i in range(100000) %}{{ m(ns.a) }}{% endfor %}{{ {ns.a: 1} }}"
    ),
    "shared in generator": (
        "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(15) %}{% set ns.a = [ns.a, ns.a] %}"
        "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ [ns.a] in ([ns.b] * 100000) | batch(1) }}"
    ),
    "many arguments": ("{% macro f() %}{{ f(*varargs) }}{% endmacro %}{{ f(*range(100000)) }}"),
    "attribute": "{{ [1] | map(attribute='a.' * 2000000) | list }}",
    "escape twice": "{{ ('<' * 4000000) | escape | forceescape | forceescape | length }}",
    "while": (
        "{% set ns = namespace(i=0) %}{% macro w() %}{% set ns.i = ns.i + 1 %}{% if true %}{{ w() }}{% endif %}{% "
        "endmacro %}{{ w() }}"
    ),
    "not callable": "{{ ''.__class__.__mro__ }}",
    "mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "cycler": "{% set c = cycler('a' * 1000000) %}{% for i in range(100000) %}{{ c.next() }}{% endfor %}",
    "fromkeys": "{{ dict.fromkeys(range(100000), 1)|length }}",
    "encode": "{{ 'a'.encode().center(10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "xmlattr": "{{ {'a': '<' * 4000000}|xmlattr }}",
    "urlencode": "{{ ('<' * 4000000)|urlencode }}",
    "filesizeformat": "{{ ('9' * 4000000)|filesizeformat }}",
    "divisibleby": "{% set ns = namespace(a=3) %}{{ ('f' * 10000)|int(base=16) is divisibleby 3 }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends 'x' %}",
    "big kwargs": (
        "{{ dict(**{'a': 1}) }}{% set a = [1] * 100000 %}{% macro m() %}{{ varargs|length }}{% endmacro %}{% for i "
        "in range(100000) %}{{ m(*a) }}{% endfor %}"
    ),
    "loop length": (
        "{% for i in range(100000) %}{% for j in range(100000)|batch(1) %}{% if loop.length %}{% break %}{% endif "
        "%}{% endfor %}{% endfor %}"
    ),
    "select": "{% for i in range(100000) %}{{ range(100000)|select|first }}{{ range(100000)|reject|list }}{% endfor %}",
    "in generator": "{% for i in range(100000) %}{{ 'x' in range(100000)|map('string') }}{% endfor %}",
    "in range": "{% for i in range(100000) %}{{ 'x' in range(100000) }}{% endfor %}",
    "equal hashes": "{{ dict(" + ONE_HASH + ") | length }}",
    "equal hashes namespace": "{% set a = namespace(" + ONE_HASH + ") %}",
    "equal hashes unique": "{{ " + ONE_HASH + " | map('first') | unique | list | length }}",
    "printf keys": "{{ '%(' * 2600000 % {} }}",
    "long sum": "{{ " + "~".join(["'a'"] * 13_000) + " }}",
    "small ints": "{% set ns = namespace(a=[]) %}" + LONG + "{% set ns.a = [ns.a, range(100000)|list] %}{% endfor %}",
    "min": "{% for i in range(100000) %}{{ range(100000)|min }}{{ range(100000)|sum }}{% endfor %}",
}
# These end within the limits (or not, on a slow machine): they are bounded, and nothing is wrong with them.
CHEAP = {
    "divisibleby", "escape twice", "filesizeformat", "float", "fromkeys", "hoard dicts", "list", "namespace", "rfind",
    "rsplit", "shared in generator", "split", "split comma", "splitlines", "strftime", "striptags", "title",
}  # fmt: skip
HOARDS = [name for name in set(ATTACKS) - CHEAP if name.startswith(("hoard", "doubling", "multiply"))]


@pytest.mark.parametrize("name", sorted(set(ATTACKS) - CHEAP))
def test_attacks_are_refused(name):
    error_of(ATTACKS[name])


@pytest.mark.parametrize("name", sorted(CHEAP))
def test_cheap_operations_are_bounded(name):
    try:
        text = render(ATTACKS[name], QUICK).text
    except ChatTemplateError:
        text = ""
    assert len(text) < 1000


def test_default_limits():
    assert error_of(ATTACKS["loops"], DEFAULT) == "the chat template (line 1) takes more than 10,000,000 steps"
    assert error_of(ATTACKS["print"], RenderLimits()).endswith("writes more than 4,194,304 characters")


def test_work_is_counted_and_not_timed():
    """A render has as many steps on every machine, however often it ran before."""
    source = "{% for i in range(n) %}{{ messages[0].role | upper }}{% endfor %}"

    def error(n, steps, seconds=30.0):
        try:
            return render(source, RenderLimits(steps=steps, seconds=seconds), n=n) and ""
        except ChatTemplateError as caught:
            return caught.message

    needed = bisect.bisect(range(100_000), -1, key=lambda steps: -bool(error(2000, steps)))
    assert needed > 20_000
    for seconds in (1, 30, 1000):
        assert not error(2000, needed, seconds)
        assert error(2000, needed - 1, seconds).endswith(f" takes more than {needed - 1:,} steps")


def test_compilation_is_counted():
    source = "{{ " + "a ~ " * 1000 + "a }}"
    assert error_of(source, RenderLimits(steps=5000)).endswith("its compilation takes more than 5,000 steps")


def test_single_long_operation_stops_no_thread():
    """A dict of equal hashes is one call; this process renders other templates meanwhile."""
    problems = []
    attack = RenderLimits(seconds=1.0)
    thread = threading.Thread(target=lambda: problems.append(error_of(ATTACKS["equal hashes"], attack)))
    thread.start()
    renders = 0
    while thread.is_alive():
        assert render("{{ 1 }}").text == "1"
        renders += 1
    assert renders >= 10 and problems == ["the chat template took more than 1 s of CPU"]


def test_memory_is_limited():
    assert error_of("{{ 'x' * 10**10 }}", RenderLimits()) == "the chat template ran out of memory"
    sources = json.dumps([ATTACKS[name] for name in HOARDS])
    program = (
        "for source in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        render_template(source, {}, RenderLimits(seconds=0.5))\n"
        "    except ChatTemplateError:\n"
        "        continue\n"
        "    raise AssertionError(source)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    assert 40_000 < int(output_of(program, sources)) < (512 << 10)  # KiB


def test_problems_of_the_compiler_and_of_recursion():
    nested = error_of("{% for a in b %}" * 30 + "{% endfor %}" * 30, DEFAULT)
    assert nested == "the chat template cannot be read: too many statically nested blocks"
    assert error_of(ATTACKS["recursion"], DEFAULT) == "the chat template (line 1) calls itself too deeply"


def test_error_message_is_truncated():
    assert len(error_of("{{ raise_exception('a' * 1000000) }}", DEFAULT)) < 1100


@pytest.mark.parametrize("name", ["recursion", "multiply", "loops", "deep", "print"])
def test_next_render_works_after_an_attack(name):
    error_of(ATTACKS[name])
    assert render(SPANS) == sandbox.RenderedChat("userHi", ((4, 6),))


NO_MEMORY_LIMIT = "template_worker.MAX_MEMORY = 1 << 40"
NO_TIMER = "template_worker.signal.setitimer = lambda *_: None"
NO_STEP_LIMIT = "template_worker.sys.settrace = lambda _: None"
NO_OUTPUT_LIMIT = (
    "answer = template_worker._Environment.answer\n"
    "template_worker._Environment.answer = lambda self, source, values, now, max_output, max_steps:"
    " answer(self, source, values, now, 1 << 30, max_steps)"
)
LOOPS = "{% for i in range(9999) %}{% for j in range(100) %}{% endfor %}{% endfor %}x"


@pytest.mark.parametrize(
    ("fault", "source", "seconds", "steps", "text"),
    [
        (NO_MEMORY_LIMIT, "{{ ('x' * 550000000)[:1] }}", 30, 100_000, "x"),
        (NO_TIMER, LOOPS, 0.01, 10_000_000, "x"),
        (NO_STEP_LIMIT, LOOPS, 30, 100_000, "x"),
        (NO_OUTPUT_LIMIT, "{{ 'x' * 1001 }}", 30, 100_000, "x" * 1001),
    ],
)
def test_render_ends_by_the_limit_under_test(start_worker, fault, source, seconds, steps, text):
    sound = start_worker("import template_worker; template_worker.main()")
    assert "error" in sound.exchange(request(source, seconds, steps), RenderLimits(seconds=seconds))
    broken = start_worker(f"import template_worker\n{fault}\ntemplate_worker.main()")
    assert broken.exchange(request(source, seconds, steps), RenderLimits(seconds=seconds))["text"] == text


# ---------------------------------------------------------------- data and state


def test_texts_and_numbers_arrive_unchanged():
    text = '\ud83d\ude00 \udfff \0\x1f\u2028\r\n \U0001f642 \\ " </s>'  # two halves of a pair stay two
    assert render("{{ text }}", text=text).text == text
    numbers = {"a": [1, -2.5, True, None, 10**400, float("inf")]}
    assert render("{{ numbers }}", numbers=numbers).text == str(numbers)


def test_reading_the_values_does_not_count_as_render_time():
    assert render("{{ 1 }}", RenderLimits(seconds=0.05)).text == "1"
    numbers = list(range(2_000_000))
    assert render("{{ numbers | length }}", RenderLimits(seconds=0.05), numbers=numbers).text == "2000000"


def test_renders_share_no_state():
    source = "{% set c = cycler('a', 'b') %}{{ c.next() }}{% if x is undefined %}{% set x = 1 %}{% endif %}{{ x }}"
    assert [render(source).text, render(source, x=2).text, render(source).text] == ["a1", "a2", "a1"]
    assert error_of("{{ messages[5].content.x }}") and render(SPANS).spans == ((4, 6),)


def test_template_is_compiled_once():
    environment = _Environment()
    for number in range(5):
        answer = environment.answer("{{ number }}", {"number": number}, "2026-01-01", 10, 100_000)
        assert answer == {"text": str(number), "spans": []}
    assert (environment.compiled.cache_info().misses, environment.compiled.cache_info().hits) == (1, 4)


def test_the_worker_imports_no_torch():
    program = "import sys; sys.path += sys.argv[1:]; import template_worker; print(*sys.modules)"
    command = [sys.executable, "-I", "-c", program, str(Path(sandbox.__file__).parent)]
    modules = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert "jinja2" in modules and not {"torch", "numpy", "kvad"} & set(modules)


# ---------------------------------------------------------------- threads, forks, ends


def test_threads_render_during_an_attack():
    """More threads than workers: each gets its own replies, and attacks end only their own render."""
    texts, problems = [], []

    def good(number):
        for turn in range(20):
            content = f"{number}-{turn}"
            output = render_template(SPANS, {"messages": [{"role": "user", "content": content}]}, RenderLimits())
            texts.append(output == sandbox.RenderedChat(f"user{content}", ((4, 4 + len(content)),)))

    def bad():
        limits = dataclasses.replace(QUICK, seconds=60)  # its steps end it, however busy the machine is
        problems.append(error_of(ATTACKS["tree"], limits))

    threads = [threading.Thread(target=good, args=(number,)) for number in range(sandbox.MAX_WORKERS + 2)]
    threads += [threading.Thread(target=bad) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == [True] * 20 * (sandbox.MAX_WORKERS + 2)
    assert problems == ["the chat template (line 1) takes more than 300,000 steps"] * 3


def test_fork_has_a_separate_worker():
    program = (
        "before = worker()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    assert render_template('{{ 2 }}', {}, RenderLimits()).text == '2' and worker() != before\n"
        "    sys.exit(0)\n"  # with what is registered at exit
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert render_template('{{ 3 }}', {}, RenderLimits()).text == '3'\n"
        "print(before == worker())"
    )
    assert output_of(program) == "True\n"


def test_worker_ends_with_its_parent(start_worker):
    pid = int(output_of("print(worker())"))
    assert not psutil.pid_exists(pid)
    orphan = start_worker("import template_worker; template_worker.main()")
    orphan._reader.close()
    orphan._socket.close()  # as the system does for a parent that was killed
    assert orphan._process.wait(60) == 0


def test_killed_worker_is_replaced():
    assert render("{{ 1 }}").text == "1"
    pool = sandbox._pool(os.getpid())
    worker = pool.get()
    pool.put(worker)
    worker._process.send_signal(signal.SIGKILL)
    worker._process.wait(60)
    assert render("{{ 2 }}").text == "2"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended its process with status -9"),
        ("sys.stdin.buffer.read(9); print(end='\\0\\0\\1' + 'x' * 99, flush=True); sys.stdin.read()", "with status -9"),
        ("sys.stdin.buffer.read(9); print(end='\\0\\0\\0\\0\\0\\0\\0cx')", "with status 0"),
        ("import signal; signal.pause()", "took more than 0.5 s"),
    ],
)
def test_failing_worker_is_reported(start_worker, monkeypatch, program, error):
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.5 if "pause" in program else 60)
    monkeypatch.setattr(sandbox, "WAIT_FACTOR", 0)
    worker = start_worker(program)
    body = b"x" * (10_000_000 if "kill" in program else 1)
    assert error in worker.exchange(body, RenderLimits())["error"]
    assert not worker.is_alive() and worker._process.returncode is not None


def test_interrupted_render_does_not_answer_the_next_request():
    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            render(ATTACKS["loops"], RenderLimits(steps=1 << 40, seconds=1000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert render("{{ 1 }}").text == "1"


def test_garbage_collection_does_not_count_as_render_time():
    pauses = []

    def pause(phase, info):
        if len(pauses) < 5:
            pauses.append(phase)
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass

    thresholds = gc.get_threshold()
    messages = [{"role": "user", "content": "Hi"}] * 1000
    gc.callbacks.append(pause)
    gc.set_threshold(1)
    try:
        assert len(render(SPANS, RenderLimits(seconds=0.5), messages=messages).spans) == 1000
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(pause)
    assert len(pauses) == 5
