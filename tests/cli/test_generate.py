"""``kvad generate``: its output, its options, interrupts, and errors of one line."""

import json
import re
import signal

import pytest

from kvad.cache.device.kv_cache import KVCache
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.native import open_folder, save_checkpoint
from kvad.cli.commands import generate
from kvad.engine.scheduling.request import SamplingParams
from kvad.llm import LLM
from kvad.ops.batch_invariant import TileSizes
from tests.cli.test_main import assert_loads_no_torch
from tests.support.cli_checkpoints import LIMIT, write_model

GREEDY = ("--temperature", 0)


def test_only_the_continuation_goes_to_stdout(kvad, model, llm):
    result = kvad("generate", model, "def ", "--max-tokens", 12, "--seed", 5)
    assert result == (0, llm.generate("def ", max_tokens=12, seed=5).text + "\n", "")


def test_streams_while_generating(kvad, model, monkeypatch):
    calls = []
    echo = generate.click.echo
    monkeypatch.setattr(generate.click, "echo", lambda *a, **k: (calls.append(a), echo(*a, **k)))
    result = kvad("generate", model, "def ", "--max-tokens", 12, *GREEDY)
    streamed = len(calls)
    calls.clear()
    assert kvad("generate", model, "def ", "--max-tokens", 12, *GREEDY, "--no-stream").out == result.out
    assert streamed > 4 and len(calls) == 2


def test_samples_are_labeled_and_in_order(kvad, model, llm):
    result = kvad("generate", model, "ab", "cd", "--n", 2, "--seed", 1, "--max-tokens", 7)
    expected = ""
    for number, completion in enumerate(llm.generate(["ab", "cd"], n=2, seed=1, max_tokens=7), 1):
        for i, sample in enumerate(completion.choices, 1):
            expected += f"==> prompt {number}, sample {i}: {['ab', 'cd'][number - 1]!r} <==\n{sample.text}\n"
    assert result.out == expected
    assert kvad("generate", model, "ab", "cd", "--n", 2, "--seed", 1, "--max-tokens", 7, "--no-stream").out == expected


def test_queued_sequences_are_generated_too(kvad, model):
    wide = kvad("generate", model, "a", "b", "c", *GREEDY, "--max-tokens", 5)
    assert kvad("generate", model, "a", "b", "c", *GREEDY, "--max-tokens", 5, "--max-num-seqs", 1).out == wide.out


def test_compile_reaches_the_engine(kvad, model, monkeypatch):
    real, compilations = LLM.load, []

    def load(*arguments, **options):
        llm = real(*arguments, **options)
        compilations.append(llm.model.compiler)
        return llm

    monkeypatch.setattr(LLM, "load", load)
    arguments = ("generate", model, "a", "bcd", *GREEDY, "--max-tokens", 5, "--no-stream")
    assert kvad(*arguments, "--compile").out == kvad(*arguments).out
    compiled, plain = (compiler.num_compilations for compiler in compilations)
    assert compiled > 0 == plain
    assert "compile: is not supported with deterministic" in kvad(*arguments, "--compile", "--deterministic").err


def test_deterministic_reaches_the_engine(kvad, model, monkeypatch):
    real, kernels = LLM.load, []

    def load(*arguments, **options):
        llm = real(*arguments, **options)
        kernels.append((llm.engine.kv_cache.kernel, llm.model.kernel))
        return llm

    monkeypatch.setattr(LLM, "load", load)
    arguments = ("generate", model, "a", "bcd", *GREEDY, "--max-tokens", 5, "--no-stream")
    assert kvad(*arguments, "--deterministic").out == kvad(*arguments).out
    (tiles, same), plain = kernels
    assert isinstance(tiles, TileSizes) and same == tiles and plain == ("auto", "auto")


def test_echo_and_ids(kvad, model, llm):
    text = llm.generate("hey", max_tokens=5, temperature=0).text
    assert kvad("generate", model, "hey", "--echo", "--max-tokens", 5, *GREEDY).out == f"hey{text}\n"
    ids = " ".join(str(byte) for byte in b"hey")
    assert kvad("generate", model, "--ids", ids, "--max-tokens", 5, *GREEDY).out == f"{text}\n"
    assert kvad("generate", model, "--ids", ids.replace(" ", ","), "--max-tokens", 5, *GREEDY).out == f"{text}\n"


@pytest.mark.parametrize(
    ("arguments", "prompt"), [(["-"], "né\n"), ([], "né\n"), (["-", "--raw"], "né\n\n"), (["--raw"], "né\n\n")]
)
def test_prompt_from_stdin_loses_one_newline_unless_raw(kvad, model, llm, arguments, prompt):
    """As ``echo TEXT | kvad generate``."""
    result = kvad("generate", model, *arguments, "--max-tokens", 5, *GREEDY, stdin="né\n\n".encode())
    assert result.out == llm.generate(prompt, max_tokens=5, temperature=0).text + "\n"


@pytest.mark.parametrize("prompt", [(), ("",), ("--ids", "")])
def test_empty_prompt_uses_opening_token(kvad, model, llm, prompt):
    result = kvad("generate", model, *prompt, "--max-tokens", 5, *GREEDY, stdin=b"")
    assert result.out == llm.generate([256], max_tokens=5, temperature=0).text + "\n"
    assert result.err == "kvad: the prompt is empty: generating from the opening token <|endofdoc|>\n"


def test_every_sampling_option_reaches_the_engine(kvad, model, monkeypatch):
    seen = []
    real = LLM.stream
    monkeypatch.setattr(
        LLM,
        "stream",
        lambda self, prompt, sampling, **salts: (seen.append(sampling), real(self, prompt, sampling, **salts))[1],
    )
    options = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "min_tokens": 2, "seed": 4, "n": 2, "logprobs": 1,
        "prompt_logprobs": 2, "max_tokens": 3,
    }  # fmt: skip
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    flags += ["--logit-bias", "7=-5.5", "--logit-bias", "8=1", "--stop", "ab", "--bad-word", "x", "--ignore-eos"]
    assert kvad("generate", model, "hi", *flags).code == 0
    (sampling,) = seen
    bad = ((32, 120), (120,))
    given = SamplingParams(**options, logit_bias={7: -5.5, 8: 1.0}, stop=("ab",), bad_words_ids=bad, ignore_eos=True)
    assert sampling == given


def test_a_random_seed_is_printed_and_repeats_the_output(kvad, model, llm):
    first = kvad("generate", model, "hey", "hey", "--max-tokens", 9)
    seed = re.fullmatch(r"kvad: seed: (\d+)\n", first.err)[1]
    second = kvad("generate", model, "hey", "hey", "--max-tokens", 9)
    assert second.out != first.out and second.err != first.err
    repeated = kvad("generate", model, "hey", "hey", "--max-tokens", 9, "--seed", seed, "--json")
    record = json.loads(repeated.out)
    texts = [completion["choices"][0]["text"] for completion in record["completions"]]
    assert record["seed"] == int(seed) and repeated.err == "" and texts[0] != texts[1]
    assert texts == [done.text for done in llm.generate(["hey", "hey"], seed=int(seed), max_tokens=9)]
    assert all(text in first.out for text in texts)
    assert kvad("generate", model, "hey", "--max-tokens", 3, *GREEDY).err == ""


def test_a_cache_salt_separates_requests(kvad, model, tmp_path):
    def hits(*flags):
        folder = ("--prefix-cache-dir", tmp_path / "blocks", "--block-size", 4)
        result = kvad("generate", model, "hello there, you", "--max-tokens", 2, *GREEDY, "--json", *folder, *flags)
        return json.loads(result.out)["completions"][0]["usage"]["num_cached_tokens"]

    assert [hits(), hits(), hits("--cache-salt", "a"), hits("--cache-salt", "a"), hits("--cache-salt", "b")] == [
        0, 12, 0, 12, 0,
    ]  # fmt: skip


def test_bad_words_and_stop_work(kvad, model):
    """The logit bias makes every token an "a"."""

    def sample(*flags):
        result = kvad("generate", model, "hi", *GREEDY, "--max-tokens", 6, "--logit-bias", "97=500", "--json", *flags)
        return json.loads(result.out)["completions"][0]["choices"][0]

    assert sample()["text"] == "aaaaaa" and sample()["finish_reason"] == "length"
    assert 97 not in sample("--bad-word", "a")["token_ids"]
    assert "aa" not in sample("--bad-word", "aa")["text"] and "a" in sample("--bad-word", "aa")["text"]
    stopped = sample("--stop", "aaa")
    assert (stopped["text"], stopped["finish_reason"], len(stopped["token_ids"])) == ("", "stop", 3)


def test_the_output_has_the_form_that_is_given(kvad, model, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text('{"enum": ["a", 7]}')
    grammar.write_text('start: DIGIT "+" DIGIT\nDIGIT: /[0-9]/')
    for flags, pattern in (
        (("--json-schema", schema), '"a"|7'),
        (("--json-schema", '{"enum": ["é"]}'), '"é"'),
        (("--json-object", "--logit-bias", "125=500"), r"\{\s*\}"),
        (("--regex", "[a-c]{3}"), "[a-c]{3}"),
        (("--grammar", grammar), r"\d\+\d"),
        (("--choice", "yes", "--choice", "no, never"), "yes|no, never"),
    ):
        result = kvad("generate", model, "hi", "--seed", 1, "--n", 2, "--json", *flags)
        samples = json.loads(result.out)["completions"][0]["choices"]
        assert all(sample["finish_reason"] == "stop" and re.fullmatch(pattern, sample["text"]) for sample in samples)


def test_json(kvad, model, llm):
    result = kvad(f"generate {model} hey --n 2 --max-tokens 4 --seed 3 --logprobs 2 --prompt-logprobs 1 --stats --json")
    assert result.err == "" and result.out.count("\n") == 1
    record = json.loads(result.out)
    (completion,) = record["completions"]
    expected = llm.generate("hey", n=2, max_tokens=4, seed=3, logprobs=2, prompt_logprobs=1)
    assert record["seed"] == 3 and record["model"] == str(model) and record["interrupted"] is False
    assert completion["prompt"] == "hey" and completion["prompt_token_ids"] == [104, 101, 121]
    assert completion["usage"]["num_prompt_tokens"] == 3 and completion["usage"]["num_completion_tokens"] == 8
    assert [s["token_ids"] for s in completion["choices"]] == [list(s.token_ids) for s in expected.choices]
    assert [s["text"] for s in completion["choices"]] == [s.text for s in expected.choices]
    assert [s["logprob"] for s in completion["prompt_logprobs"]] == pytest.approx(
        [s.logprob for s in expected.prompt_logprobs], abs=1e-4
    )
    one = completion["choices"][0]["logprobs"][0]
    assert one["token_id"] == expected.tokens[0] and len(one["top_logprobs"]) == 2 and one["text"]
    stats = record["stats"]
    assert stats["completion_tokens"] == 8 and stats["prompt_tokens"] == 3 and stats["steps"] >= 4
    assert stats["cache"][0]["peak"] >= 1 and stats["cache"][0]["used"] == 0
    assert stats["engine_ms"] > 0 and stats["model_ms"] > 0 and stats["first_token"] < stats["seconds"]


def test_search_settings_of_the_checkpoint(kvad, tmp_path):
    """The checkpoint's beams apply; a length penalty alone is for them; sampling options drop them."""

    def write(name, **sampling):
        opened, generation = open_folder(write_model(tmp_path / name)), GenerationConfig(sampling=sampling)
        save_checkpoint(tmp_path / name, opened.config, dict(opened.weights()), opened.tokenizer, generation=generation)
        return tmp_path / name

    def token_ids(folder, *flags):
        result = kvad("generate", folder, "ab", "--max-tokens", 8, "--json", *flags)
        assert result.code == 0 and result.err == "", result
        return json.loads(result.out)["completions"][0]["choices"][0]["token_ids"]

    folder = write("beams", num_beams=3, temperature=0.0, length_penalty=2.0)
    with LLM.load(folder, max_num_seqs=3) as llm:
        searched = [list(llm.generate("ab", max_tokens=8, num_beams=3, length_penalty=a).tokens) for a in (2.0, -50.0)]
    assert token_ids(folder) == searched[0] and token_ids(folder, "--length-penalty", -50) == searched[1]
    greedy = write("greedy", temperature=0.0)
    for model in (folder, greedy):
        sampled = [token_ids(model, "--seed", seed) for seed in range(3)]
        assert len(set(map(tuple, sampled))) > 1
        for flags in (("--temperature", 1), ("--top-p", 1)):
            assert token_ids(model, *flags, "--seed", 2) == sampled[2]
        for flags in (("--seed", 2, "--temperature", 0), ("--num-beams", 1)):
            assert token_ids(model, *flags) == token_ids(greedy)
    result = kvad("generate", folder, "ab", "--length-penalty", 1.5, "--seed", 3)
    assert (result.code, result.out) == (2, "") and "seed: cannot be combined with num_beams=3" in result.err
    result = kvad("generate", greedy, "ab", "--length-penalty", 1.5)
    assert (result.code, result.out) == (2, "") and "length_penalty: requires num_beams above 1" in result.err
    result = kvad("generate", tmp_path / "absent", "ab", "--length-penalty", 1000)
    assert result.code == 2 and "length_penalty: must be from -100 to 100, got 1000.0" in result.err


def test_stats(kvad, model):
    result = kvad(f"generate {model} 'hey you there, what is this' --max-tokens 9 --stats --block-size 4", *GREEDY)
    texts = ("tokens/s", "the first token after", "ms in the model", "ms in the engine", "blocks in use", "peak 9")
    for text in (*texts, "hits", "preemptions"):
        assert text in result.err, text
    assert "tokens/s" not in result.out


def test_logprob_tables(kvad, model):
    result = kvad("generate", model, "hey", "--max-tokens", 3, *GREEDY, "--logprobs", 2, "--prompt-logprobs", 0)
    lines = result.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line == "log-probabilities of prompt 1")
    assert lines[at + 1].split()[:2] == ["101", "e"] and lines[at + 2].split()[:2] == ["121", "y"]
    assert "log-probabilities of prompt 1, sample 1" in lines


@pytest.mark.parametrize(
    "cache", [("--layout", "contiguous"), ("--cache-dtype", "float64"), ("--block-size", 2), ("--max-seq-len", 32)]
)
def test_cache_options_keep_the_output(kvad, model, cache):
    plain = kvad("generate", model, "hey", "--max-tokens", 8, *GREEDY)
    assert kvad("generate", model, "hey", "--max-tokens", 8, *GREEDY, *cache) == plain


def test_ctrl_c_keeps_generated_tokens(kvad, model, llm, interrupt_after):
    chunks, before = interrupt_after(4), signal.getsignal(signal.SIGINT)
    whole = llm.generate("hey", max_tokens=20, temperature=0).tokens
    for extra in ((), ("--json", "--stats")):
        chunks.clear()
        result = kvad("generate", model, "hey", "--max-tokens", 20, *GREEDY, *extra)
        assert result.code == 130 and result.err == "kvad: interrupted\n" and len(chunks) == 4
        if extra:
            record = json.loads(result.out)
            assert record["interrupted"] and record["completions"][0]["choices"][0]["finish_reason"] == "abort"
            assert record["completions"][0]["choices"][0]["token_ids"] == list(whole[:4])
            assert record["stats"]["cache"][0]["used"] == 0
        else:
            assert result.out == "".join(chunk.text for chunk in chunks) + "\n"
    assert signal.getsignal(signal.SIGINT) is before  # ignored, where a shell began the tests with &


def test_ctrl_c_prints_buffered_samples(kvad, model, interrupt_after):
    interrupt_after(8)
    result = kvad("generate", model, "a", "b", "--max-tokens", 20, "--seed", 2)
    assert result.code == 130 and result.out.count("==> prompt") == 2 and result.out.endswith("\n")


def test_model_without_tokenizer_prints_ids(kvad, tmp_path):
    bare = write_model(tmp_path / "bare", tokenizer=False)
    result = kvad("generate", bare, "--ids", "3 4", "--max-tokens", 3, *GREEDY, "--echo")
    assert [int(word) for word in result.out.split()][:2] == [3, 4] and len(result.out.split()) == 5
    for flags, message in (
        ("hi", "has no tokenizer"),
        ("", "has no tokenizer"),
        ("--ids ''", "no opening token"),
        ("--ids 3 --stop x", "stop: requires a tokenizer"),
        ("--ids 3 --bad-word x", "--bad-word: the model has no tokenizer"),
    ):
        result = kvad(f"generate {bare} {flags}", stdin=b"")
        assert result.code == 2 and message in result.err, flags


# ---------------------------------------------------------------- invalid input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temperature", -1), "temperature: must be from 0 to 100, got -1.0"),
        (("--temperature", "nan"), "temperature: must be a finite number"),
        (("--temperature", "warm"), "'warm' is not a valid float"),
        (("--top-p", 0), "top_p: must be above 0 and at most 1, got 0.0"),
        (("--top-k", -1), "top_k: must be at least 0, got -1"),
        (("--min-p", 1.5), "min_p: must be from 0 to 1, got 1.5"),
        (("--typical-p", 0), "typical_p: must be above 0 and at most 1, got 0.0"),
        (("--repetition-penalty", 0), "repetition_penalty: must be above 0 and at most 100, got 0.0"),
        (("--presence-penalty", 101), "presence_penalty: must be from -100 to 100, got 101.0"),
        (("--n", 0), "n: must be from 1 to 128, got 0"),
        (("--max-tokens", -1), "max_tokens: must be at least 0, got -1"),
        (("--min-tokens", 200), "min_tokens: must be at most max_tokens (128), got 200"),
        (("--logprobs", 101), "logprobs: must be from 0 to 100, got 101"),
        (("--logit-bias", "7"), "--logit-bias: '7' is not ID=V"),
        (("--logit-bias", "7=x"), "--logit-bias: '7=x' is not ID=V"),
        (("--stop", ""), "stop: must not contain an empty string"),
        (("--regex", "a", "--choice", "b"), "--regex and --choice exclude each other"),
        (("--json-schema", "{"), "structured_output: json_schema: line 1, column 2"),
        (("--json-schema", "absent.json"), "absent.json: No such file"),
        (("--choice", ""), "structured_output: choice: must be a list of texts that are not empty"),
        (("--regex", "a", "--num-beams", 2), "structured_output: cannot be combined with num_beams=2"),
        (("--temprature", 1), "'--temperature'"),
        (("--layout", "heap"), "'heap' is not one of 'paged', 'contiguous'"),
        (("--cache-dtype", "int3"), "'int3' is not one of"),
    ],
)
def test_invalid_values_fail_before_loading(kvad, tmp_path, flags, message):
    result = kvad("generate", tmp_path / "absent", "hi", *flags)
    first, *rest = result.err.splitlines()
    assert result.code == 2 and result.out == "" and message in first, result
    assert first.startswith("kvad: error: ") and len(rest) <= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("x" * (LIMIT + 4),), f"prompt: must have at most {LIMIT} tokens, got {LIMIT + 4}"),
        (("abcdef", "--max-seq-len", 4), "prompt: must have at most 4 tokens, got 6"),
        (("--ids", "1 2 x"), "--ids: 'x' is not a token id"),
        (("--ids", "1 999"), "token id must be below 257, got 999"),
        (("--ids", "-3"), "No such option '-3'"),
        (("hi", "--json", "--echo"), "--echo and --json exclude each other"),
        (("hi", "--logit-bias", "999=1"), "logit_bias: token id must be below 257, got 999"),
        (("hi", "--bad-word", ""), "--bad-word: must not be empty"),
        (("hi", "--regex", "a("), "structured_output: regex: unclosed group"),
        (("hi", "--max-num-seqs", 0), "cache.max_num_seqs: must be at least 1"),
        (("hi", "--block-size", 0), "cache.block_size: must be at least 1"),
        (("hi", "--max-seq-len", 0), "cache.max_seq_len: must be at least 1"),
    ],
)
def test_invalid_requests(kvad, model, flags, message):
    result = kvad("generate", model, *flags)
    assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result


def test_folder_without_checkpoint(kvad, tmp_path):
    for path, message in ((tmp_path, "is not a checkpoint"), (tmp_path / "absent", "absent")):
        result = kvad("generate", path, "hi")
        assert result.code == 2 and message in result.err and len(result.err.splitlines()) <= 2


def test_stdin_must_be_utf8(kvad, model):
    result = kvad("generate", model, "-", stdin=b"ok \xff")
    hint = "kvad: hint: Convert it, as in iconv -f LATIN1 -t UTF-8.\n"
    assert result == (2, "", f"kvad: error: standard input is not UTF-8 at byte 3 (0xFF)\n{hint}")


def test_invalid_value_loads_no_torch():
    assert_loads_no_torch("generate", "x", "--top-p", "2", code=2)


def test_cache_formats(kvad, model):
    arguments = ("generate", model, "hey you there", "--max-tokens", 6, *GREEDY, "--stats")
    result = kvad(*arguments, "--cache-dtype", "int8", "--cache-value-dtype", "int4")
    assert result.code == 0 and result.out and "in int8/int4, " in result.err and "of it scales" in result.err
    assert "in float32\n" in kvad(*arguments).err
    record = json.loads(kvad(*arguments, "--cache-key-dtype", "fp8-e4m3", "--json").out)["stats"]["cache"][0]
    assert (record["stored"], record["scale_bytes"]) == ("fp8-e4m3/float32", 0)
    assert "in int8-channel/" in kvad(*arguments, "--cache-key-dtype", "int8-channel").err
    refused = kvad(*arguments, "--cache-key-dtype", "int8-channel", "--layout", "contiguous")
    assert refused.code == 2 and "packs whole blocks" in refused.err and "'paged'" in refused.err


@pytest.mark.parametrize("policy", ["heavy-hitters(16, interval=8)", "sinks(4,8)", "tova(16, interval=8)", "full"])
def test_stats_name_the_policy_and_count_what_it_evicted(kvad, model, monkeypatch, policy):
    """Two sequences of 2 + 64 tokens, one with the length of an eviction; the count is that of the device's edits."""
    dropped = []
    apply = KVCache.apply

    def counted(cache, ops):
        dropped.extend(op.num_held - op.num_retained for group in ops.evict for op in group)
        return apply(cache, ops)

    monkeypatch.setattr(KVCache, "apply", counted)
    flags = ("--max-tokens", 63, "--ignore-eos", "--policy", policy, "--block-size", 4)
    result = kvad("generate", model, "ab", "abc", *GREEDY, *flags, "--stats")
    line = next(line for line in result.err.splitlines() if line.startswith("cache"))
    evicted = re.search(r"policy (.*), (\d+) tokens? evicted per head:", line)
    if policy == "full":
        assert evicted is None and "policy full, all tokens:" in line
    elif policy == "sinks(4,8)":
        assert int(evicted[2]) == sum(length + 1 - 4 - 8 for length in (65, 66))
    else:
        assert evicted[1].startswith(policy.partition("(")[0]) and int(evicted[2]) == sum(dropped) > 80
    assert "0 prefix blocks evicted" in result.err


def test_prefix_blocks_that_were_overwritten_are_named_so(kvad, model):
    flags = ("--max-tokens", 20, "--ignore-eos", "--block-size", 4, "--num-blocks", 12, "--max-num-seqs", 1)
    result = kvad("generate", model, "ab" * 10, "cd" * 10, *GREEDY, *flags, "--stats", "--json")
    stats = json.loads(result.out)["stats"]
    assert stats["prefix_blocks_evicted"] > 0 and stats["cache"][0]["evicted_per_head"] == 0
    assert stats["cache"][0]["policy"] == "full"
