"""--policy, --endless, --on-full, --watermark: what is said when something is full, dropped or refused."""

import json
import signal

import pytest

from kvad.cache.config import OVERFLOW_MODES
from kvad.cache.policy_parser import POLICIES, POLICY_HELP
from kvad.cli.commands import generate as module
from kvad.cli.stats import RunMeter
from kvad.llm import LLM
from tests.cli.checkpoint import LIMIT, run, write_model

GREEDY = ("--temperature", 0, "--ignore-eos")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments, stdin=None: run(capsys, *arguments, stdin=stdin, monkeypatch=monkeypatch)


@pytest.fixture
def ids(kvad, model):
    """Token ids and what ended them."""

    def generate(*flags, prompt="hello"):
        ran = kvad("generate", model, prompt, *GREEDY, "--json", *flags)
        assert ran.code == 0, ran
        (sample,) = json.loads(ran.out)["completions"][0]["samples"]
        return sample["tokens"], sample["limit"], ran.err

    return generate


def test_every_policy_has_its_line_in_the_help(kvad):
    assert [name.partition("(")[0] for name in POLICY_HELP] == list(POLICIES)
    for command in ("generate", "chat", "translate", "plan"):
        said = kvad(command, "--help").out
        for name, text in (*POLICY_HELP.items(), *OVERFLOW_MODES.items()):
            assert any(name in line and text in line for line in said.splitlines()), (command, name)


def test_a_text_that_a_limit_ended_says_which(ids):
    whole, limit, err = ids()
    assert (len(whole), limit) == (LIMIT - 5, "model")
    said = f"kvad: ended at the model's limit of {LIMIT} tokens; --endless goes on without its oldest tokens\n"
    assert err == said
    tokens, limit, err = ids("--context", 40)
    assert (tokens, limit, err) == (whole[:35], "cache", "kvad: ended at the cache's limit of 40 tokens (--context)\n")
    tokens, limit, err = ids("--max-tokens", 7)
    assert (tokens, limit, err) == (whole[:7], "max_tokens", "")


@pytest.mark.parametrize("flags", [("--on-full", "sinks"), ("--on-full", "window"), ("--endless",)])
def test_going_on(ids, flags):
    whole, _, _ = ids()
    tokens, limit, err = ids(*flags, "--max-tokens", 150)
    assert (len(tokens), limit, err) == (150, "max_tokens", "") and tokens[: len(whole)] == whole
    kept = f"window({LIMIT})" if "window" in flags else f"sinks(4, {LIMIT - 4})"
    assert ids("--endless", "--policy", kept, "--max-tokens", 150)[0] == tokens


def test_on_full_alone_ends_where_max_tokens_does_by_default(ids):
    assert len(ids("--on-full", "sinks")[0]) == 128


def test_summaries(ids):
    whole, _, _ = ids()
    tokens, limit, _ = ids("--on-full", "summarise", "--context", 48, "--block-size", 8)
    assert (len(tokens), limit) == (LIMIT - 5, "model") and tokens[:43] == whole[:43]


def test_endless_runs_until_somebody_ends_it(kvad, model, monkeypatch):
    """Ctrl-C after 300 tokens, which is three times the model's limit."""
    seen, push = [], module._Printer.push

    def note(self, key, text, *, ended):
        seen.append(text)
        if len(seen) == 300:
            signal.raise_signal(signal.SIGINT)
        push(self, key, text, ended=ended)

    monkeypatch.setattr(module._Printer, "push", note)
    ran = kvad("generate", model, "hello", *GREEDY, "--endless", "--stats")
    assert ran.code == 130 and len(seen) == 300 and "kvad: interrupted" in ran.err
    assert "window of 92" in ran.err and "generated  300 tokens" in ran.err and "ended      nothing" in ran.err


def test_stats_show_the_pool_s_use_peak_and_watermark_and_what_ended_it(kvad, model):
    asked = ("generate", model, "hello", *GREEDY, "--max-tokens", 20, "--stats", "--watermark", 0.25, "--rows", 2)
    ran = kvad(*asked)
    assert "0 of 12 blocks in use" in ran.err and "(watermark 3); peak 2 = " in ran.err
    assert "ended      1 by --max-tokens" in ran.err
    stats = json.loads(kvad(*asked, "--json").out)["stats"]
    assert stats["ended"] == {"max_tokens": 1}
    assert [stats["cache"][0][name] for name in ("used", "peak", "watermark", "total")] == [0, 2, 3, 12]


@pytest.mark.parametrize(
    ("flags", "says", "hint"),
    [
        (("--on-full", "sink"), "cache.overflow: 'sink'", "did you mean 'sinks'?"),
        (("--policy", "windw(4)"), "unknown policy 'windw'", "did you mean 'window'?"),
        (("--policy", "window(0)"), "window: size must be a whole number of at least 1", ""),
        (("--policy", "sinks(4)"), "missing a required argument: 'window'", "sinks(sinks: 'int', window: 'int')"),
        (("--rotate", "reed"), "cache.rope_at: 'reed'", "did you mean 'read'?"),
        (("--watermark", 1), "cache.watermark: 1 is no share", "from 0 to below 1"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "plan"])
def test_values_that_cannot_be_are_refused_before_anything_is_loaded(kvad, tmp_path, command, flags, says, hint):
    ran = kvad(command, tmp_path / "absent", *flags, stdin=b"")
    first, *rest = ran.err.splitlines()
    assert ran.code == 2 and ran.out == "" and first.startswith("kvad: error: ") and says in first, ran
    assert len(rest) <= 1 and hint in "".join(rest)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--endless", "--policy", "full"), "layer 0 keeps all tokens of a row"),
        (("--endless", "--policy", "sinks(4,200)"), "204 tokens kept, the model knows distances up to 96"),
        (("--endless", "--policy", "sinks(4,8)"), "a window of 8 tokens beside the sinks is less than a block of 16"),
        (("--on-full", "sinks", "--context", 10), "rows of 10 tokens are less than 4 sinks and a block of 16"),
        (("--on-full", "summarise"), "rows already end at the model's limit of 96 tokens"),
        (("--on-full", "summarise", "--context", 48, "--layout", "contiguous"), "summarised in whole blocks"),
        (("--on-full", "window", "--policy", "window(9)"), "window is window(96), and policy window(9) is given too"),
        (("--on-full", "refuse"), "5 prompt tokens and max_tokens 128 pass the model's limit, 96 tokens"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(kvad, model, flags, says):
    ran = kvad("generate", model, "hello", *flags)
    assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0] and len(ran.err.splitlines()) <= 2, ran


def test_the_plan_takes_the_same_words(kvad, model):
    def pool(*flags):
        ran = kvad("plan", model, "--rows", 2, "--json", *flags)
        assert ran.code == 0, ran
        return json.loads(ran.out)

    with LLM.load(model, rows=2, capacity=48, on_full="summarise", chunk=512) as llm:
        memory = llm.engine.kv_cache
        held = memory.payload_bytes() + memory.scale_bytes() + memory.metadata_bytes()
    assert pool("--context", 48, "--on-full", "summarise")["bytes"]["pool"] == held
    assert pool("--policy", "window(8)", "--chunk", 8) != pool("--chunk", 8)
    assert pool("--endless")["bytes"] == pool("--on-full", "sinks")["bytes"]
    assert kvad("plan", model, "--on-full", "sinks", "--fit", "64MiB").code == 0


def test_a_text_that_spills_is_the_text_and_leaves_no_file(kvad, model, ids, tmp_path):
    whole, limit, _ = ids()
    for flags in (("--spill-ram", 0), ("--spill-ram", "4KiB"), ()):
        where = ("--block-size", 4, "--context", 24, "--on-full", "spill", "--spill-dir", tmp_path, *flags)
        assert ids(*where)[:2] == (whole, limit)
        ran = kvad("generate", model, "hello", *GREEDY, "--stats", *where)
        (line,) = (line for line in ran.err.splitlines() if line.startswith("spilled "))
        assert (f"of files in {tmp_path}" in line) == bool(flags), line
        assert not list(tmp_path.iterdir())
        told = json.loads(kvad("plan", model, "--json", *where).out)
        assert (told["spilled"]["disk"] > 0) == bool(flags)
        parts = ("weights", "pool", "scratch", "activations")
        host = sum(told["spilled"][name] for name in ("ram", "staging", "sums"))
        assert told["bytes"]["total"] == host + sum(told["bytes"][name] for name in parts)


def test_what_cannot_spill_says_why(kvad, model, tmp_path):
    for flags, says in (
        ((), f"rows already end at the model's limit of {LIMIT} tokens"),
        (("--context", 24, "--layout", "contiguous"), "tokens are spilled in whole blocks"),
        (("--context", 32, "--spill-ram", "lots"), "lots"),
        (("--context", 32, "--spill-ram", 0, "--spill-dir", tmp_path / "a file"), "cannot spill to"),
    ):
        (tmp_path / "a file").write_text("")
        ran = kvad("generate", model, "hello", "--on-full", "spill", *flags)
        assert ran.code == 2 and says in ran.err, ran
        assert len(ran.err.splitlines()) == 2


# ---------------------------------------------------------------- chat


def test_a_chat_goes_on_and_says_what_is_out_of_sight(kvad, model):
    lines = "".join(f"{letter * 30}\n" for letter in "abcdef").encode()
    plain = kvad("chat", model, "--max-tokens", 6, *GREEDY, stdin=lines)
    assert "no room for a reply" in plain.err
    ran = kvad("chat", model, "--max-tokens", 6, *GREEDY, "--endless", stdin=lines + b"/kv\n")
    assert ran.code == 0 and "no room" not in ran.err and "without an end" in ran.err
    assert ran.out.startswith(plain.out.rstrip("\n")) and len(ran.out) > len(plain.out)
    told = [line for line in ran.err.splitlines() if "out of sight" in line]
    assert len(told) == 4 and told[0] == f"kvad: 18 of 113 tokens are out of sight: sinks(4, {LIMIT - 4})"
    plain_of = [line for line in plain.err.splitlines() if "out of sight" in line]
    assert not plain_of


def test_a_chat_says_what_any_policy_has_dropped(kvad, model):
    lines = b"a" * 40 + b"\n"
    for policy, says in (
        ("window(20)", "28 of 47 tokens are out of sight: window(20)"),
        ("tova(16, every=8)", "24 of 47 tokens are out of sight: tova(16, every=8)"),
        ("hierarchy(16, every=16)", "16 of 47 tokens stand in for themselves no more: hierarchy("),
    ):
        ran = kvad("chat", model, "--max-tokens", 6, *GREEDY, "--policy", policy, stdin=lines)
        assert ran.code == 0 and says in ran.err, ran.err


def test_an_endless_chat_replies_until_ctrl_c(kvad, model, monkeypatch):
    seen, see = [], RunMeter.add

    def note(self, piece):
        seen.append(piece)
        if len(seen) == 120:
            signal.raise_signal(signal.SIGINT)
        see(self, piece)

    monkeypatch.setattr(RunMeter, "add", note)
    ran = kvad("chat", model, *GREEDY, "--endless", stdin=b"hello\n")
    assert ran.code == 0 and len(seen) == 120 and "of 126 tokens are out of sight" in ran.err


# ---------------------------------------------------------------- LLM


def test_llm_takes_the_same_words(model):
    with LLM.load(model, endless=True, dtype="float64") as llm, LLM.load(model, dtype="float64") as plain:
        assert llm.cache_config.overflow == "sinks" and llm.engine.cache.policy == f"sinks(4, {LIMIT - 4})"
        done = llm.generate("hello", max_tokens=150, temperature=0, ignore_eos=True)
        short = plain.generate("hello", temperature=0, ignore_eos=True)
        assert done.limit == "max_tokens" and short.limit == "model" == short.choices[0].limit
        assert done.tokens[: len(short.tokens)] == short.tokens
        assert llm.generate("hello", temperature=0, ignore_eos=True, on_full="stop").tokens == short.tokens
        assert len(llm.encode("x" * 200)) == 200
        assert llm.generate("x" * 200, max_tokens=3).limit == "max_tokens"
        assert llm.generate("hello", max_tokens=90, stop=("\n",), seed=3).limit in (None, "max_tokens")
