"""kvad generate: what is printed, where, and in which order; every option reaches the engine; bad input is one line."""

import json
import os
import signal

import pytest

from kvad.cli.commands import generate
from kvad.cli.stats import RunMeter
from kvad.engine.scheduling.request import SamplingParams
from kvad.llm import LLM
from kvad.ops.batch_invariant import TileSizes
from tests.cli.test_main import kvad_process
from tests.support.cli_checkpoints import LIMIT, run, write_model

GREEDY = ("--temperature", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(model):
    with LLM.load(model, max_num_seqs=4) as opened:
        yield opened


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments, stdin=None: run(capsys, *arguments, stdin=stdin, monkeypatch=monkeypatch)


def test_the_continuation_goes_to_stdout_and_nothing_else(kvad, model, llm):
    ran = kvad("generate", model, "def ", "--max-tokens", 12, "--seed", 5)
    assert ran == (0, llm.generate("def ", max_tokens=12, seed=5).text + "\n", "")


def test_it_streams_while_it_generates(kvad, model, monkeypatch):
    calls = []
    echo = generate.click.echo
    monkeypatch.setattr(generate.click, "echo", lambda *a, **k: (calls.append(a), echo(*a, **k)))
    ran = kvad("generate", model, "def ", "--max-tokens", 12, *GREEDY)
    streamed = len(calls)
    calls.clear()
    assert kvad("generate", model, "def ", "--max-tokens", 12, *GREEDY, "--no-stream").out == ran.out
    assert streamed > 4 and len(calls) == 2


def test_several_samples_are_labelled_and_never_mixed(kvad, model, llm):
    ran = kvad("generate", model, "ab", "cd", "--n", 2, "--seed", 1, "--max-tokens", 7)
    expected = ""
    for number, done in enumerate(llm.generate(["ab", "cd"], n=2, seed=1, max_tokens=7), 1):
        for i, sample in enumerate(done.choices, 1):
            expected += f"==> prompt {number}, sample {i}: {['ab', 'cd'][number - 1]!r} <==\n{sample.text}\n"
    assert ran.out == expected
    assert kvad("generate", model, "ab", "cd", "--n", 2, "--seed", 1, "--max-tokens", 7, "--no-stream").out == expected


def test_rows_that_wait_for_a_seat_are_generated_too(kvad, model):
    wide = kvad("generate", model, "a", "b", "c", *GREEDY, "--max-tokens", 5)
    assert kvad("generate", model, "a", "b", "c", *GREEDY, "--max-tokens", 5, "--max-num-seqs", 1).out == wide.out


def test_deterministic_reaches_the_engine(kvad, model, monkeypatch):
    real, kernels = LLM.load, []

    def load(*arguments, **options):
        llm = real(*arguments, **options)
        kernels.append((llm.engine.kv_cache.kernel, llm.model.kernel))
        return llm

    monkeypatch.setattr(LLM, "load", load)
    asked = ("generate", model, "a", "bcd", *GREEDY, "--max-tokens", 5, "--no-stream")
    assert kvad(*asked, "--deterministic").out == kvad(*asked).out
    (tiles, same), plain = kernels
    assert isinstance(tiles, TileSizes) and same == tiles and plain == ("auto", "auto")


def test_echo_and_ids(kvad, model, llm):
    text = llm.generate("hey", max_tokens=5, temperature=0).text
    assert kvad("generate", model, "hey", "--echo", "--max-tokens", 5, *GREEDY).out == f"hey{text}\n"
    ids = " ".join(str(byte) for byte in b"hey")
    assert kvad("generate", model, "--ids", ids, "--max-tokens", 5, *GREEDY).out == f"{text}\n"
    assert kvad("generate", model, "--ids", ids.replace(" ", ","), "--max-tokens", 5, *GREEDY).out == f"{text}\n"


def test_a_prompt_from_stdin_is_taken_as_it_is(kvad, model, llm):
    ran = kvad("generate", model, "-", "--max-tokens", 5, *GREEDY, stdin="né\n".encode())
    assert ran.out == llm.generate("né\n", max_tokens=5, temperature=0).text + "\n"


@pytest.mark.parametrize("prompt", [(), ("",), ("--ids", "")])
def test_an_empty_prompt_begins_with_the_opening_token_and_says_so(kvad, model, llm, prompt):
    ran = kvad("generate", model, *prompt, "--max-tokens", 5, *GREEDY)
    assert ran.out == llm.generate([256], max_tokens=5, temperature=0).text + "\n"
    assert ran.err == "kvad: the prompt is empty: generating from the opening token <|endofdoc|>\n"


def test_every_sampling_option_reaches_the_engine(kvad, model, monkeypatch):
    seen = []
    real = LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda self, prompt, sampling: (seen.append(sampling), real(self, prompt, sampling))[1]
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


def test_bad_words_and_stop_work(kvad, model):
    """A model that would say nothing but a."""

    def sample(*flags):
        ran = kvad("generate", model, "hi", *GREEDY, "--max-tokens", 6, "--logit-bias", "97=500", "--json", *flags)
        return json.loads(ran.out)["completions"][0]["choices"][0]

    assert sample()["text"] == "aaaaaa" and sample()["finish_reason"] == "length"
    assert 97 not in sample("--bad-word", "a")["token_ids"]
    assert "aa" not in sample("--bad-word", "aa")["text"] and "a" in sample("--bad-word", "aa")["text"]
    stopped = sample("--stop", "aaa")
    assert (stopped["text"], stopped["finish_reason"], len(stopped["token_ids"])) == ("", "stop", 3)


def test_json_is_one_object_with_everything(kvad, model, llm):
    ran = kvad(
        "generate",
        model,
        "hey",
        "--n",
        2,
        "--max-tokens",
        4,
        "--logprobs",
        2,
        "--prompt-logprobs",
        1,
        "--stats",
        "--json",
    )
    assert ran.err == "" and ran.out.count("\n") == 1
    found = json.loads(ran.out)
    (done,) = found["completions"]
    expected = llm.generate("hey", n=2, max_tokens=4, logprobs=2, prompt_logprobs=1)
    assert found["model"] == str(model) and found["interrupted"] is False
    assert done["prompt"] == "hey" and done["prompt_token_ids"] == [104, 101, 121]
    assert done["usage"]["num_prompt_tokens"] == 3 and done["usage"]["num_completion_tokens"] == 8
    assert [s["token_ids"] for s in done["choices"]] == [list(s.token_ids) for s in expected.choices]
    assert [s["text"] for s in done["choices"]] == [s.text for s in expected.choices]
    assert [s["logprob"] for s in done["prompt_logprobs"]] == pytest.approx(
        [s.logprob for s in expected.prompt_logprobs], abs=1e-4
    )
    one = done["choices"][0]["logprobs"][0]
    assert one["token_id"] == expected.tokens[0] and len(one["top_logprobs"]) == 2 and one["text"]
    stats = found["stats"]
    assert stats["completion_tokens"] == 8 and stats["prompt_tokens"] == 3 and stats["steps"] >= 4
    assert stats["cache"][0]["peak"] >= 1 and stats["cache"][0]["used"] == 0
    assert stats["engine_ms"] > 0 and stats["model_ms"] > 0 and stats["first_token"] < stats["seconds"]


def test_over_the_search_that_the_checkpoint_asks_for(kvad, tmp_path):
    """Its own beams have their rows; a length penalty alone is for them; what asks for samples leaves them out."""
    from kvad.checkpoint.generation_config import GenerationConfig
    from kvad.checkpoint.native import open_folder, save_checkpoint

    def write(name, **sampling):
        plain = open_folder(write_model(tmp_path / name))
        save_checkpoint(
            tmp_path / name,
            plain.config,
            dict(plain.weights()),
            plain.tokenizer,
            generation=GenerationConfig(**sampling),
        )
        return tmp_path / name

    def say(folder, *flags):
        ran = kvad("generate", folder, "ab", "--max-tokens", 8, "--json", *flags)
        assert ran.code == 0 and ran.err == "", ran
        return json.loads(ran.out)["completions"][0]["choices"][0]["token_ids"]

    folder = write("beams", sampling={"num_beams": 3, "temperature": 0.0, "length_penalty": 2.0})
    with LLM.load(folder, max_num_seqs=3) as llm:
        searched = [list(llm.generate("ab", max_tokens=8, num_beams=3, length_penalty=a).tokens) for a in (2.0, -50.0)]
    assert say(folder) == searched[0] and say(folder, "--length-penalty", -50) == searched[1]
    greedy = write("greedy", sampling={"temperature": 0.0})
    for model in (folder, greedy):
        seeded = [say(model, "--seed", seed) for seed in range(6)]
        assert len(set(map(tuple, seeded))) > 3
        assert seeded[3] == say(model, "--temperature", 1, "--seed", 3) == say(model, "--top-p", 1, "--seed", 3)
        assert say(model, "--seed", 3, "--temperature", 0) == say(model, "--num-beams", 1) == say(greedy)
    ran = kvad("generate", folder, "ab", "--length-penalty", 1.5, "--seed", 3)
    assert (ran.code, ran.out) == (2, "") and "seed: cannot be combined with num_beams=3" in ran.err
    ran = kvad("generate", greedy, "ab", "--length-penalty", 1.5)
    assert (ran.code, ran.out) == (2, "") and "length_penalty: requires num_beams above 1" in ran.err
    ran = kvad("generate", tmp_path / "absent", "ab", "--length-penalty", 1000)
    assert ran.code == 2 and "length_penalty: must be from -100 to 100, got 1000.0" in ran.err


def test_json_has_the_prompt_without_echo(kvad, model):
    ran = kvad("generate", model, "hey", "--json", "--echo")
    assert ran.code == 2 and ran.out == "" and "--echo and --json exclude each other" in ran.err


def test_stats_name_speed_cache_hits_and_pressure(kvad, model):
    ran = kvad(
        "generate", model, "hey you there, what is this", "--max-tokens", 9, *GREEDY, "--stats", "--block-size", 4
    )
    for shown in (
        "tokens/s",
        "the first token after",
        "ms in the model",
        "ms in the engine",
        "blocks in use",
        "peak 9",
        "hits",
        "preemptions",
    ):
        assert shown in ran.err, shown
    assert "tokens/s" not in ran.out


def test_logprob_tables(kvad, model):
    ran = kvad("generate", model, "hey", "--max-tokens", 3, *GREEDY, "--logprobs", 2, "--prompt-logprobs", 0)
    lines = ran.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line == "log-probabilities of prompt 1")
    assert lines[at + 1].split()[:2] == ["101", "e"] and lines[at + 2].split()[:2] == ["121", "y"]
    assert "log-probabilities of prompt 1, sample 1" in lines


@pytest.mark.parametrize(
    "cache", [("--layout", "contiguous"), ("--cache-dtype", "float64"), ("--block-size", 2), ("--max-seq-len", 32)]
)
def test_the_cache_to_order_changes_nothing(kvad, model, cache):
    plain = kvad("generate", model, "hey", "--max-tokens", 8, *GREEDY)
    assert kvad("generate", model, "hey", "--max-tokens", 8, *GREEDY, *cache) == plain


def test_ctrl_c_ends_cleanly_with_what_was_generated(kvad, model, llm, monkeypatch):
    real, seen, before = RunMeter.add, [], signal.getsignal(signal.SIGINT)

    def see(self, piece):
        real(self, piece)
        seen.append(piece)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunMeter, "add", see)
    whole = llm.generate("hey", max_tokens=20, temperature=0).tokens
    for extra in ((), ("--json", "--stats")):
        seen.clear()
        ran = kvad("generate", model, "hey", "--max-tokens", 20, *GREEDY, *extra)
        assert ran.code == 130 and ran.err == "kvad: interrupted\n" and len(seen) == 4
        if extra:
            found = json.loads(ran.out)
            assert found["interrupted"] and found["completions"][0]["choices"][0]["finish_reason"] == "abort"
            assert found["completions"][0]["choices"][0]["token_ids"] == list(whole[:4])
            assert found["stats"]["cache"][0]["used"] == 0
        else:
            assert ran.out == "".join(piece.text for piece in seen) + "\n"
    assert signal.getsignal(signal.SIGINT) is before  # ignored, where a shell began the tests with &


def test_what_was_held_back_is_shown_when_it_is_interrupted(kvad, model, monkeypatch):
    real, seen = RunMeter.add, []

    def see(self, piece):
        real(self, piece)
        seen.append(piece)
        if len(seen) == 8:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunMeter, "add", see)
    ran = kvad("generate", model, "a", "b", "--max-tokens", 20, "--seed", 2)
    assert ran.code == 130 and ran.out.count("==> prompt") == 2 and ran.out.endswith("\n")


def test_a_model_without_a_tokenizer_speaks_in_ids(kvad, tmp_path):
    bare = write_model(tmp_path / "bare", tokenizer=False)
    ran = kvad("generate", bare, "--ids", "3 4", "--max-tokens", 3, *GREEDY, "--echo")
    assert [int(word) for word in ran.out.split()][:2] == [3, 4] and len(ran.out.split()) == 5
    for prompt, says in ((("hi",), "has no tokenizer"), ((), "has no tokenizer"), (("--ids", ""), "no opening token")):
        ran = kvad("generate", bare, *prompt)
        assert ran.code == 2 and says in ran.err, prompt
    for extra, says in (
        (("--stop", "x"), "stop: requires a tokenizer"),
        (("--bad-word", "x"), "--bad-word: the model has no tokenizer"),
    ):
        ran = kvad("generate", bare, "--ids", "3", *extra)
        assert ran.code == 2 and says in ran.err


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "says"),
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
        (("--temprature", 1), "'--temperature'"),
        (("--layout", "heap"), "'heap' is not one of 'paged', 'contiguous'"),
        (("--cache-dtype", "int3"), "'int3' is not one of"),
    ],
)
def test_values_that_cannot_be_are_refused_before_anything_is_loaded(kvad, tmp_path, flags, says):
    """There is no such model: whoever looked for it would say so instead."""
    ran = kvad("generate", tmp_path / "absent", "hi", *flags)
    first, *rest = ran.err.splitlines()
    assert ran.code == 2 and ran.out == "" and says in first, ran
    assert first.startswith("kvad: error: ") and len(rest) <= 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("x" * (LIMIT + 4),), f"prompt: must have at most {LIMIT} tokens, got {LIMIT + 4}"),
        (("abcdef", "--max-seq-len", 4), "prompt: must have at most 4 tokens, got 6"),
        (("--ids", "1 2 x"), "--ids: 'x' is not a token id"),
        (("--ids", "1 999"), "token id must be below 257, got 999"),
        (("--ids", "-3"), "No such option '-3'"),
        (("hi", "--logit-bias", "999=1"), "logit_bias: token id must be below 257, got 999"),
        (("hi", "--bad-word", ""), "--bad-word: must not be empty"),
        (("hi", "--max-num-seqs", 0), "cache.max_num_seqs: must be at least 1"),
        (("hi", "--block-size", 0), "cache.block_size: must be at least 1"),
        (("hi", "--max-seq-len", 0), "cache.max_seq_len: must be at least 1"),
    ],
)
def test_what_the_model_cannot_serve_is_refused(kvad, model, flags, says):
    ran = kvad("generate", model, *flags)
    assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran


def test_a_folder_that_is_no_checkpoint(kvad, tmp_path):
    for path, says in ((tmp_path, "is not a checkpoint"), (tmp_path / "absent", "absent")):
        ran = kvad("generate", path, "hi")
        assert ran.code == 2 and says in ran.err and len(ran.err.splitlines()) <= 2


def test_stdin_that_is_not_utf8(kvad, model):
    ran = kvad("generate", model, "-", stdin=b"ok \xff")
    assert ran == (2, "", "kvad: error: standard input is not UTF-8 at byte 3 (0xFF)\n")


def test_help_and_usage_errors_do_not_import_torch():
    for arguments, code in (
        (("generate", "--help"), 0),
        (("generate", "x", "--top-p", "2"), 2),
        (("chat", "--help"), 0),
    ):
        ran = kvad_process(*arguments, code="import atexit\natexit.register(lambda: print('torch' in sys.modules))")
        assert ran.returncode == code and ran.stdout.endswith("False\n"), ran


def test_the_cache_may_be_stored_in_formats_of_its_own(kvad, model):
    asked = ("generate", model, "hey you there", "--max-tokens", 6, *GREEDY, "--stats")
    ran = kvad(*asked, "--cache-dtype", "int8", "--cache-value-dtype", "int4")
    assert ran.code == 0 and ran.out and "in int8/int4, " in ran.err and "of it scales" in ran.err
    assert "in float32\n" in kvad(*asked).err
    found = json.loads(kvad(*asked, "--cache-key-dtype", "fp8-e4m3", "--json").out)["stats"]["cache"][0]
    assert (found["stored"], found["scale_bytes"]) == ("fp8-e4m3/float32", 0)
    assert "in int8-channel/" in kvad(*asked, "--cache-key-dtype", "int8-channel").err
    refused = kvad(*asked, "--cache-key-dtype", "int8-channel", "--layout", "contiguous")
    assert refused.code == 2 and "packs whole blocks" in refused.err and "'paged'" in refused.err
