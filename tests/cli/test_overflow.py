"""--policy, --endless, --overflow, --watermark: what is said when something is full, dropped or refused."""

import json
import signal

import pytest

from kvad.cache.config import OVERFLOW_MODES
from kvad.cache.policy_parser import POLICIES, POLICY_HELP
from kvad.cli.commands import generate as module
from kvad.cli.stats import RunMeter
from kvad.llm import LLM
from tests.support.cli_checkpoints import LIMIT, run, write_model

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
        (sample,) = json.loads(ran.out)["completions"][0]["choices"]
        return sample["token_ids"], sample["limit"], ran.err

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
    said = f"kvad: ended at the model's limit of {LIMIT} tokens; --endless continues without the oldest tokens\n"
    assert err == said
    tokens, limit, err = ids("--max-seq-len", 40)
    assert (tokens, limit, err) == (
        whole[:35],
        "cache",
        "kvad: ended at the cache's limit of 40 tokens (--max-seq-len)\n",
    )
    tokens, limit, err = ids("--max-tokens", 7)
    assert (tokens, limit, err) == (whole[:7], "max_tokens", "")


@pytest.mark.parametrize("flags", [("--overflow", "sinks"), ("--overflow", "window"), ("--endless",)])
def test_going_on(ids, flags):
    whole, _, _ = ids()
    tokens, limit, err = ids(*flags, "--max-tokens", 150)
    assert (len(tokens), limit, err) == (150, "max_tokens", "") and tokens[: len(whole)] == whole
    kept = f"window({LIMIT})" if "window" in flags else f"sinks(4, {LIMIT - 4})"
    assert ids("--endless", "--policy", kept, "--max-tokens", 150)[0] == tokens


def test_on_full_alone_ends_where_max_tokens_does_by_default(ids):
    assert len(ids("--overflow", "sinks")[0]) == 128


def test_summaries(ids):
    whole, _, _ = ids()
    tokens, limit, _ = ids("--overflow", "summarize", "--max-seq-len", 48, "--block-size", 8)
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
    assert "window of 92" in ran.err and "generated   300 tokens" in ran.err and "ended       nothing" in ran.err


def test_stats_show_the_pool_s_use_peak_and_watermark_and_what_ended_it(kvad, model):
    asked = (
        "generate",
        model,
        "hello",
        *GREEDY,
        "--max-tokens",
        20,
        "--stats",
        "--watermark",
        0.25,
        "--max-num-seqs",
        2,
    )
    ran = kvad(*asked)
    assert "0 of 12 blocks in use" in ran.err and "(watermark 3); peak 2 = " in ran.err
    assert "ended       1 by --max-tokens" in ran.err
    stats = json.loads(kvad(*asked, "--json").out)["stats"]
    assert stats["finish_limits"] == {"max_tokens": 1}
    assert [stats["cache"][0][name] for name in ("used", "peak", "watermark", "total")] == [0, 2, 3, 12]


@pytest.mark.parametrize(
    ("flags", "says", "hint"),
    [
        (("--overflow", "sink"), "got 'sink'", "did you mean 'sinks'?"),
        (("--policy", "windw(4)"), "unknown policy 'windw'", "did you mean 'window'?"),
        (("--policy", "window(0)"), "window.size: must be at least 1, got 0", ""),
        (("--policy", "sinks(4)"), "missing a required argument: 'window'", "sinks(num_sinks, window)"),
        (("--rope-at", "reed"), "cache.rope_at: must be one of 'write', 'read', got 'reed'", "did you mean 'read'?"),
        (("--watermark", 1), "cache.watermark: must be in [0, 1), got 1", "Use 0, the default"),
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
        (("--endless", "--policy", "full"), "layer 0 keeps all tokens of a sequence"),
        (("--endless", "--policy", "sinks(4,200)"), "must have at most 96 tokens, got 204"),
        (("--endless", "--policy", "sinks(4,8)"), "the window must have at least a block of 16 tokens, got 8"),
        (("--overflow", "sinks", "--max-seq-len", 10), "max_seq_len 10 is less than 4 sinks and a block of 16"),
        (("--overflow", "summarize"), "max_seq_len must be below the model's limit of 96 tokens"),
        (("--overflow", "summarize", "--max-seq-len", 48, "--layout", "contiguous"), "summarized in whole blocks"),
        (("--overflow", "window", "--policy", "window(9)"), "window is window(96), but policy window(9) is given too"),
        (("--overflow", "reject"), "5 prompt tokens and max_tokens 128 exceed the model's limit, 96 tokens"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(kvad, model, flags, says):
    ran = kvad("generate", model, "hello", *flags)
    assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0] and len(ran.err.splitlines()) <= 2, ran


def test_the_plan_takes_the_same_words(kvad, model):
    def pool(*flags):
        ran = kvad("plan", model, "--max-num-seqs", 2, "--json", *flags)
        assert ran.code == 0, ran
        return json.loads(ran.out)

    with LLM.load(model, max_num_seqs=2, max_seq_len=48, overflow="summarize", prefill_chunk_size=512) as llm:
        memory = llm.engine.kv_cache
        held = memory.payload_bytes() + memory.scale_bytes() + memory.metadata_bytes()
    assert pool("--max-seq-len", 48, "--overflow", "summarize")["bytes"]["pool"] == held
    assert pool("--policy", "window(8)", "--prefill-chunk-size", 8) != pool("--prefill-chunk-size", 8)
    assert pool("--endless")["bytes"] == pool("--overflow", "sinks")["bytes"]
    assert kvad("plan", model, "--overflow", "sinks", "--fit-memory", "64MiB").code == 0


def test_a_text_that_spills_is_the_text_and_leaves_no_file(kvad, model, ids, tmp_path):
    whole, limit, _ = ids()
    for flags in (("--offload-ram", 0), ("--offload-ram", "4KiB"), ()):
        where = ("--block-size", 4, "--max-seq-len", 24, "--overflow", "offload", "--offload-dir", tmp_path, *flags)
        assert ids(*where)[:2] == (whole, limit)
        ran = kvad("generate", model, "hello", *GREEDY, "--stats", *where)
        (line,) = (line for line in ran.err.splitlines() if line.startswith("offloaded "))
        assert (f"of files in {tmp_path}" in line) == bool(flags), line
        assert not list(tmp_path.iterdir())
        told = json.loads(kvad("plan", model, "--json", *where).out)
        assert (told["offload"]["disk_bytes"] > 0) == bool(flags)
        parts = ("weights", "pool", "scratch", "activations")
        host = sum(told["offload"][name] for name in ("ram_bytes", "staging_bytes", "checksum_bytes"))
        assert told["bytes"]["total"] == host + sum(told["bytes"][name] for name in parts)


def test_what_cannot_spill_says_why(kvad, model, tmp_path):
    for flags, says in (
        ((), f"max_seq_len must be below the model's limit of {LIMIT} tokens"),
        (("--max-seq-len", 24, "--layout", "contiguous"), "tokens are offloaded in whole blocks"),
        (("--max-seq-len", 32, "--offload-ram", "lots"), "lots"),
        (
            ("--max-seq-len", 32, "--offload-ram", 0, "--offload-dir", tmp_path / "a file"),
            "offload_dir: cannot write to",
        ),
    ):
        (tmp_path / "a file").write_text("")
        ran = kvad("generate", model, "hello", "--overflow", "offload", *flags)
        assert ran.code == 2 and says in ran.err, ran
        assert len(ran.err.splitlines()) == 2


# ---------------------------------------------------------------- chat


def test_a_chat_goes_on_and_says_what_is_out_of_sight(kvad, model):
    lines = "".join(f"{letter * 30}\n" for letter in "abcdef").encode()
    plain = kvad("chat", model, "--max-tokens", 6, *GREEDY, stdin=lines)
    assert "no room for a reply" in plain.err
    ran = kvad("chat", model, "--max-tokens", 6, *GREEDY, "--endless", stdin=lines + b"/kv\n")
    assert ran.code == 0 and "no room" not in ran.err and "tokens without a limit" in ran.err
    assert ran.out.startswith(plain.out.rstrip("\n")) and len(ran.out) > len(plain.out)
    told = [line for line in ran.err.splitlines() if "were evicted" in line]
    assert len(told) == 4 and told[0] == f"kvad: 18 of 113 tokens were evicted: sinks(4, {LIMIT - 4})"
    plain_of = [line for line in plain.err.splitlines() if "were evicted" in line]
    assert not plain_of


def test_a_chat_says_what_any_policy_has_dropped(kvad, model):
    lines = b"a" * 40 + b"\n"
    for policy, says in (
        ("window(20)", "28 of 47 tokens were evicted: window(20)"),
        ("tova(16, interval=8)", "24 of 47 tokens were evicted: tova(16, interval=8)"),
        ("tiered(16, interval=16)", "16 of 47 tokens were quantized or summarized: tiered("),
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
    assert ran.code == 0 and len(seen) == 120 and "of 126 tokens were evicted" in ran.err


# ---------------------------------------------------------------- LLM


def test_llm_takes_the_same_words(model):
    with LLM.load(model, endless=True, dtype="float64") as llm, LLM.load(model, dtype="float64") as plain:
        assert llm.cache_config.overflow == "sinks" and llm.engine.cache.policy == f"sinks(4, {LIMIT - 4})"
        done = llm.generate("hello", max_tokens=150, temperature=0, ignore_eos=True)
        short = plain.generate("hello", temperature=0, ignore_eos=True)
        assert done.limit == "max_tokens" and short.limit == "model" == short.choices[0].limit
        assert done.tokens[: len(short.tokens)] == short.tokens
        assert llm.generate("hello", temperature=0, ignore_eos=True, overflow="stop").tokens == short.tokens
        assert len(llm.encode("x" * 200)) == 200
        assert llm.generate("x" * 200, max_tokens=3).limit == "max_tokens"
        assert llm.generate("hello", max_tokens=90, stop=("\n",), seed=3).limit in (None, "max_tokens")
