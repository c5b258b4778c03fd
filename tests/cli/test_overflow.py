"""``--policy``, ``--endless``, ``--overflow``, ``--watermark``: limits, evicted tokens, offload and invalid values."""

import json

import pytest

from kvad.cache.config import OVERFLOW_MODES
from kvad.cache.policy_parser import POLICIES, POLICY_HELP
from kvad.llm import LLM
from tests.support.cli_checkpoints import LIMIT

GREEDY = ("--temperature", 0, "--ignore-eos")


@pytest.fixture
def generate(kvad, model):
    """Generate from "hello"; return the token ids, the limit that ended them, and stderr."""

    def call(*flags):
        result = kvad("generate --json", model, "hello", *GREEDY, *flags)
        assert result.code == 0, result
        (sample,) = json.loads(result.out)["completions"][0]["choices"]
        return sample["token_ids"], sample["limit"], result.err

    return call


@pytest.fixture(scope="module")
def whole(llm):
    """Token ids from "hello" to the model's limit."""
    return list(llm.generate("hello", temperature=0, ignore_eos=True).tokens)


def test_help_lists_every_policy(kvad):
    assert [name.partition("(")[0] for name in POLICY_HELP] == list(POLICIES)
    for command in ("generate", "chat", "translate", "plan"):
        lines = kvad(command, "--help-all").out.splitlines()
        for name, text in (*POLICY_HELP.items(), *OVERFLOW_MODES.items()):
            assert any(name in line and text in line for line in lines), (command, name)


def test_limit_that_ended_the_text_is_reported(generate, whole):
    tokens, limit, err = generate()
    assert (tokens, len(whole), limit) == (whole, LIMIT - 5, "model")
    assert err == f"kvad: ended at the model's limit of {LIMIT} tokens; --endless continues without the oldest tokens\n"
    message = "kvad: ended at the cache's limit of 40 tokens (--max-seq-len)\n"
    assert generate("--max-seq-len", 40) == (whole[:35], "cache", message)
    assert generate("--max-tokens", 7) == (whole[:7], "max_tokens", "")
    assert len(generate("--overflow", "sinks")[0]) == 128  # default of --max-tokens


@pytest.mark.parametrize("flags", [("--overflow", "sinks"), ("--overflow", "window"), ("--endless",)])
def test_continues_beyond_the_limit(generate, whole, flags):
    tokens, limit, err = generate(*flags, "--max-tokens", 120)
    assert (len(tokens), limit, err) == (120, "max_tokens", "") and tokens[: len(whole)] == whole
    policy = f"window({LIMIT})" if "window" in flags else f"sinks(4, {LIMIT - 4})"
    assert generate("--endless", "--policy", policy, "--max-tokens", 120)[0] == tokens


def test_summarize(generate, whole):
    tokens, limit, _ = generate("--overflow", "summarize", "--max-seq-len", 48, "--block-size", 8)
    assert (len(tokens), limit) == (LIMIT - 5, "model") and tokens[:43] == whole[:43]


def test_endless_runs_until_ctrl_c(kvad, model, interrupt_after):
    """Ctrl-C after 200 tokens, which is twice the model's limit."""
    chunks = interrupt_after(200)
    result = kvad("generate", model, "hello", *GREEDY, "--endless", "--stats")
    assert result.code == 130 and len(chunks) == 200 and "kvad: interrupted" in result.err
    assert "generated   200 tokens" in result.err and "ended       nothing" in result.err
    assert f"policy sinks(4, 92), {5 + 200 + 1 - LIMIT} tokens evicted per head" in result.err


def test_stats_of_the_pool(kvad, model):
    command = (f"generate {model} hello --max-tokens 20 --stats --watermark 0.25 --max-num-seqs 2", *GREEDY)
    assert "0 of 4 blocks in use" in kvad(*command).err  # two sequences of 5 + 20 tokens
    command = (*command, "--max-seq-len", LIMIT)
    result = kvad(*command)
    assert "0 of 12 blocks in use" in result.err and "(watermark 3); peak 2 = " in result.err
    assert "ended       1 by --max-tokens" in result.err
    stats = json.loads(kvad(*command, "--json").out)["stats"]
    assert stats["finish_limits"] == {"max_tokens": 1}
    assert [stats["cache"][0][name] for name in ("used", "peak", "watermark", "total")] == [0, 2, 3, 12]


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
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
def test_invalid_values_fail_before_loading(kvad, tmp_path, command, flags, message, hint):
    result = kvad(command, tmp_path / "absent", *flags, stdin=b"")
    first, *rest = result.err.splitlines()
    assert result.code == 2 and result.out == "" and first.startswith("kvad: error: ") and message in first, result
    assert len(rest) <= 1 and hint in "".join(rest)


@pytest.mark.parametrize(
    ("flags", "message"),
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
def test_unsupported_options(kvad, model, flags, message):
    result = kvad("generate", model, "hello", *flags)
    assert (
        result.code == 2
        and result.out == ""
        and message in result.err.splitlines()[0]
        and len(result.err.splitlines()) <= 2
    ), result


def test_plan_accepts_the_same_options(kvad, model):
    def pool(*flags):
        result = kvad("plan", model, "--max-num-seqs", 2, "--json", *flags)
        assert result.code == 0, result
        return json.loads(result.out)

    with LLM.load(model, max_num_seqs=2, max_seq_len=48, overflow="summarize", prefill_chunk_size=512) as llm:
        memory = llm.engine.kv_cache
        pool_bytes = memory.payload_bytes() + memory.scale_bytes() + memory.metadata_bytes()
    assert pool("--max-seq-len", 48, "--overflow", "summarize")["bytes"]["pool"] == pool_bytes
    assert pool("--policy", "window(8)", "--prefill-chunk-size", 8) != pool("--prefill-chunk-size", 8)
    assert pool("--endless")["bytes"] == pool("--overflow", "sinks")["bytes"]
    assert kvad("plan", model, "--overflow", "sinks", "--fit-memory", "64MiB").code == 0


def test_offload_keeps_the_text_and_leaves_no_file(kvad, model, generate, whole, tmp_path):
    for limits in (("--offload-ram", 0), ("--offload-ram", "4KiB"), ()):
        flags = ("--block-size", 4, "--max-seq-len", 24, "--overflow", "offload", "--offload-dir", tmp_path, *limits)
        assert generate(*flags)[:2] == (whole, "model")
        result = kvad("generate", model, "hello", *GREEDY, "--stats", *flags)
        (line,) = (line for line in result.err.splitlines() if line.startswith("offloaded "))
        assert (f"of files in {tmp_path}" in line) == bool(limits), line
        assert not list(tmp_path.iterdir())
        plan = json.loads(kvad("plan", model, "--json", *flags).out)
        assert (plan["offload"]["disk_bytes"] > 0) == bool(limits)
        host = sum(plan["offload"][name] for name in ("ram_bytes", "staging_bytes", "checksum_bytes"))
        parts = sum(plan["bytes"][name] for name in ("weights", "pool", "scratch", "activations"))
        assert plan["bytes"]["total"] == host + parts


def test_unsupported_offload(kvad, model, tmp_path):
    (tmp_path / "file").write_text("")
    for flags, message in (
        ("", f"max_seq_len must be below the model's limit of {LIMIT} tokens"),
        ("--max-seq-len 24 --layout contiguous", "tokens are offloaded in whole blocks"),
        ("--max-seq-len 32 --offload-ram lots", "lots"),
        (f"--max-seq-len 32 --offload-ram 0 --offload-dir {tmp_path}/file", "offload_dir: cannot write to"),
    ):
        result = kvad(f"generate {model} hello --overflow offload {flags}")
        assert result.code == 2 and message in result.err and len(result.err.splitlines()) == 2, result


# ---------------------------------------------------------------- chat


def test_endless_chat_reports_evicted_tokens(kvad, model):
    lines = "".join(f"{letter * 30}\n" for letter in "abcdef").encode()
    plain = kvad("chat", model, "--max-tokens", 6, *GREEDY, stdin=lines)
    assert "no room for a reply" in plain.err
    result = kvad("chat", model, "--max-tokens", 6, *GREEDY, "--endless", stdin=lines + b"/kv\n")
    assert result.code == 0 and "no room" not in result.err and "tokens without a limit" in result.err
    assert result.out.startswith(plain.out.rstrip("\n")) and len(result.out) > len(plain.out)
    evicted = [line for line in result.err.splitlines() if "were evicted" in line]
    assert len(evicted) == 4 and evicted[0] == f"kvad: 18 of 113 tokens were evicted: sinks(4, {LIMIT - 4})"
    assert "were evicted" not in plain.err


def test_chat_reports_evicted_tokens_of_any_policy(kvad, model):
    lines = b"a" * 40 + b"\n"
    for policy, message in (
        ("window(20)", "28 of 47 tokens were evicted: window(20)"),
        ("tova(16, interval=8)", "24 of 47 tokens were evicted: tova(16, interval=8)"),
        ("tiered(16, interval=16)", "16 of 47 tokens were quantized or summarized: tiered("),
    ):
        result = kvad("chat", model, "--max-tokens", 6, *GREEDY, "--policy", policy, stdin=lines)
        assert result.code == 0 and message in result.err, result.err


def test_endless_chat_replies_until_ctrl_c(kvad, model, interrupt_after):
    chunks = interrupt_after(120)
    result = kvad("chat", model, *GREEDY, "--endless", stdin=b"hello\n")
    assert result.code == 0 and len(chunks) == 120 and "of 126 tokens were evicted" in result.err


# ---------------------------------------------------------------- LLM


def test_llm_accepts_the_same_options(model):
    with LLM.load(model, endless=True, dtype="float64") as llm, LLM.load(model, dtype="float64") as plain:
        assert llm.cache_config.overflow == "sinks" and llm.engine.cache.policy == f"sinks(4, {LIMIT - 4})"
        long = llm.generate("hello", max_tokens=110, temperature=0, ignore_eos=True)
        short = plain.generate("hello", temperature=0, ignore_eos=True)
        assert long.limit == "max_tokens" and short.limit == "model" == short.choices[0].limit
        assert long.tokens[: len(short.tokens)] == short.tokens
        assert llm.generate("hello", temperature=0, ignore_eos=True, overflow="stop").tokens == short.tokens
        assert len(llm.encode("x" * 200)) == 200
        assert llm.generate("x" * 200, max_tokens=3, ignore_eos=True).limit == "max_tokens"
        assert llm.generate("hello", max_tokens=90, stop=("\n",), seed=3).limit in (None, "max_tokens")
