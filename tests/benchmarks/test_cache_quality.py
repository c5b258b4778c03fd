"""kvad bench cache-quality and streaming: needle tasks, measures, and caches that lose tokens."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from kvad.benchmarks import cache_quality
from kvad.benchmarks.cache_quality import LINES_FILE, QualityOptions, bench_quality, measure_cell, measure_perplexity
from kvad.benchmarks.needle_tasks import TASK_KINDS, EnglishLanguage, LookupLanguage, choose_language, make_task
from kvad.benchmarks.results import ResultFolder
from kvad.benchmarks.streaming_perplexity import bench_streaming, reference_logprobs_windowed
from kvad.benchmarks.variants import Variant, build_engine, known_variants, select_variants, variant_fields
from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.checkpoint.native import save_checkpoint
from kvad.datasets import synthetic
from kvad.engine import StreamChunk
from kvad.errors import DataError, UsageError
from kvad.llm import LLM
from kvad.planning.cache_presets import POLICY_BUILDERS
from kvad.text.tokenizer import train_tokenizer
from tests.support.cache_trace_models import make_looker
from tests.support.cli_checkpoints import run, write_model
from tests.support.random_models import build, model_config

FULL = select_variants([])[0]
SMALL = QualityOptions(
    lengths=(40, 48), depths=(0.0, 1.0), samples_per_cell=2, num_texts=1, text_length=40, prefill_chunk_size=32
)
NEEDLES = replace(SMALL, tasks=("single",))
BYTES = train_tokenizer("byte", [])
VOCAB = 300
LINES = [f"Line {number} of a text for haystacks.\n" for number in range(40)]


@pytest.fixture(scope="module")
def llm():
    model, tokenizer = make_looker()
    return LLM(model, tokenizer, CacheConfig(max_num_seqs=1, max_seq_len=512))


@pytest.fixture(scope="module")
def language(llm):
    return choose_language("auto", llm.tokenizer, list, [llm.tokenizer.special_tokens.separator])


def lose_positions(monkeypatch, share):
    """Make every KVCache lose ``share`` of the positions older than four tokens, at every step."""
    rng, open_step = torch.Generator().manual_seed(0), KVCache.open

    def lossy_open(self, step):
        for positions in self.positions:
            lost = torch.rand(positions.shape, generator=rng) < share
            positions[lost & (positions < step.positions.min() - 4)] = -1
        return open_step(self, step)

    monkeypatch.setattr(KVCache, "open", lossy_open)


# ---------------------------------------------------------------- the language


def test_episodes_are_a_function_of_the_seed():
    one, again, other = (list(synthetic.episodes(2000, 200, seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert sum(len(text.split()) for text in one) >= 2000
    assert all(synthetic.MIN_WORDS <= len(text.split()) <= 200 for text in one)
    assert {word for text in one for word in text.split()} <= set(synthetic.vocabulary())


@pytest.mark.parametrize("seed", range(12))
def test_every_question_has_one_answer_in_the_text(seed):
    words, bound, questions = synthetic.episode(400, seed).split(), {}, 0
    at = 0
    while at + synthetic.LINKS + 2 < len(words):
        if words[at] == "?":
            at += 2
            word = words[at - 1]
            while word in bound:
                assert words[at] == bound[word]
                word, at = words[at], at + 1
            assert word in synthetic.VALUES
            questions += 1
        elif words[at] in synthetic.KEYS:
            assert words[at] not in bound, "a key is bound once"
            bound[words[at]] = words[at + 1]
            at += 2
        else:
            at += 1
    assert questions


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize("kind", TASK_KINDS)
@pytest.mark.parametrize("name", ["lookup", "english"])
def test_a_task_is_a_function_of_its_seed(kind, name, language):
    task_language = language if name == "lookup" else EnglishLanguage(BYTES, LINES)
    length = 96 if name == "lookup" else 1500
    one, again, other = (make_task(kind, task_language, length, 0.5, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.prompt != other.prompt and one.expected != other.expected
    assert len(one.prompt) + len(one.question) + one.answer_tokens == length


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["single", "many"])
def test_needle_is_at_its_depth(kind, depth, language):
    task = make_task(kind, language, 256, depth, 7)
    opening, key = language.opening, task.question[-1]
    needle = (key, *language.encode(task.expected[0]))
    (at,) = [at for at in task.needle_positions if task.prompt[at : at + 2] == needle]
    others = 2 * task.needle_positions.index(at)
    hay = 256 - len(opening) - 2 * len(task.needle_positions) - len(task.question) - task.answer_tokens
    assert task.depth == (at - len(opening) - others) / hay
    assert abs(task.depth - depth) <= 5 / hay, "nearest edge of a sentence"
    assert task.prompt[: len(opening)] == opening
    assert task.prompt.count(key) == 1


@pytest.mark.parametrize("in_prompt", [False, True])
def test_prompt_length_is_a_multiple_of_the_alignment(language, in_prompt):
    task = make_task("many", language, 100, 0.5, 3, align=16, question_in_prompt=in_prompt)
    assert len(task.prompt) == 96 and len(task.prompt) + len(task.question) + task.answer_tokens <= 100
    assert (task.prompt[-2:] == task.question) is in_prompt
    assert len(make_task("many", language, 100, 0.5, 3, align=128, question_in_prompt=in_prompt).prompt) == 97


def test_many_has_distractors(language):
    task = make_task("many", language, 240, 0.5, 3)
    keys = [task.prompt[at] for at in task.needle_positions]
    assert len(set(keys)) == len(keys) == 11 and task.question[-1] in keys
    assert list(task.needle_positions) == sorted(task.needle_positions)


def test_chain_leads_from_the_question_to_the_value(language):
    task = make_task("chain", language, 96, 0.25, 5)
    links = {task.prompt[at]: task.prompt[at + 1] for at in task.needle_positions}
    found, word = [], task.question[-1]
    while word in links:
        word = links[word]
        found.append(word)
    assert found == language.encode(" ".join(task.expected)) and len(found) == synthetic.LINKS
    assert task.depth == pytest.approx(0.25, abs=0.1)


def test_english_needles_are_between_lines():
    language = EnglishLanguage(BYTES, LINES)
    task = make_task("single", language, 1500, 0.5, 1)
    (at,), text = task.needle_positions, BYTES.decode(list(task.prompt))
    needle = BYTES.decode(list(task.prompt[at:])).split("\n")[0]
    assert needle.startswith("One of the special magic numbers for ") and task.expected[0] in needle
    assert BYTES.decode(list(task.prompt[:at])).endswith(".\n") and text.count("magic") == 1
    name = needle.split(" for ")[1].split(" is:")[0]
    assert name in BYTES.decode(list(task.question))


def test_task_that_does_not_fit_is_refused(language):
    with pytest.raises(UsageError, match=r"a many task does not fit in 8 tokens: .* take 1\d"):
        make_task("many", language, 8, 0.5, 0)


def test_answer_scores():
    english = EnglishLanguage(BYTES, LINES)
    assert english.answer_score(("1234567",), BYTES.encode(" 1234567. And so on")) == 1
    assert english.answer_score(("ABCDE", "FGHIJ", "KLMNO", "PQRST"), BYTES.encode("ABCDE, KLMNO, XXXXX")) == 0.5
    words = train_tokenizer("word", [" ".join(synthetic.vocabulary())])
    lookup = LookupLanguage(words)
    scores = [lookup.answer_score(("k1", "v2"), words.encode(text)) for text in ("k1 v2 the", "k1 v3", "k1")]
    assert scores == [1, 0, 0]


def test_choice_of_language(language):
    assert isinstance(language, LookupLanguage)
    assert isinstance(choose_language("auto", BYTES, lambda: LINES), EnglishLanguage)
    with pytest.raises(UsageError, match="does not know the words of the lookup language"):
        choose_language("lookup", BYTES, list)
    with pytest.raises(UsageError, match="unknown language"):
        choose_language("danish", BYTES, list)
    with pytest.raises(DataError, match="no lines"):
        choose_language("english", BYTES, lambda: [" \n"])


# ---------------------------------------------------------------- measures


class FakeEngine:
    """Generates the same tokens for every task and records its requests."""

    def __init__(self, tokens):
        self.tokens, self.requests, self.chunks = tokens, [], []
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))

    def add_request(self, prompt, sampling):
        request = len(self.requests)
        self.requests.append((prompt, sampling))
        self.chunks += [StreamChunk(request, 0, token_id=token) for token in self.tokens]
        return request

    @property
    def idle(self):
        return not self.chunks

    def step(self):
        return [self.chunks.pop(0)]


def test_answers_of_a_fake_engine(language):
    tasks = [make_task("single", language, 64, 0.5, seed) for seed in range(3)]
    engine = FakeEngine([*tasks[1].question, *language.encode(tasks[1].expected[0])])
    answers = zip(tasks, cache_quality.greedy_answers(engine, tasks), strict=True)
    scores = [language.answer_score(task.expected, answer) for task, answer in answers]
    assert scores == [float(task.expected == tasks[1].expected) for task in tasks] and scores[1] == 1
    for task, (prompt, sampling) in zip(tasks, engine.requests, strict=True):
        tokens = [*prompt]
        for token in task.question:
            assert sampling.allowed_tokens_fn(tokens) == (token,), "the question is forced"
            tokens.append(token)
        assert prompt == task.prompt and len(sampling.allowed_tokens_fn(tokens)) == VOCAB


@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("kind", TASK_KINDS)
def test_full_cache_finds_every_needle(llm, language, kind, position):
    options = replace(SMALL, question_position=position, samples_per_cell=4, max_num_seqs=2)
    found = measure_cell(llm, FULL, language, kind, 96, 0.5, options)
    assert found.recall == 1 > cache_quality.MIN_FULL_RECALL and found.tasks == (8 if kind == "chain" else 4)


@pytest.mark.parametrize("position", ["before", "after"])
def test_lost_positions_reduce_recall(llm, language, position, monkeypatch, in_pytorch):
    options = replace(SMALL, question_position=position, samples_per_cell=8, prefill_chunk_size=16)
    found = []
    for share in (0.0, 0.08, 0.5):
        lose_positions(monkeypatch, share)
        found.append(measure_cell(llm, FULL, language, "single", 96, 0.2, options).recall)
    assert found[0] == 1 > found[1] > found[2] == 0


def test_lost_positions_increase_perplexity(llm, language, monkeypatch, in_pytorch):
    texts = [[*language.opening, *language.encode(synthetic.episode(60, seed))] for seed in range(2)]
    full = measure_perplexity(llm, FULL, texts, 16)
    assert full.ratio == pytest.approx(1, abs=1e-4) and full.kl < 1e-5 and full.agree == 1
    assert full.tokens == sum(map(len, texts)) - 2
    total = -sum(llm.score(text).total_logprob for text in texts)
    assert full.perplexity == pytest.approx(math.exp(total / full.tokens), rel=1e-4)
    (half,) = select_variants(["bfloat16"])[1:]
    stored = measure_perplexity(llm, half, texts, 16)
    lose_positions(monkeypatch, 0.3)
    lost = measure_perplexity(llm, FULL, texts, 16)
    assert stored.kl < lost.kl and lost.ratio > 1.1 and lost.agree < 1


def test_variants():
    assert [one.label for one in select_variants(["full", "bfloat16"], (0.5,))] == ["full", "bfloat16"]
    assert Variant("x", 0.875, variant_fields("full")).budget(512) == 64
    assert {"full", "bfloat16"} <= set(known_variants())
    assert all(len(select_variants([name], (0.5, 0.75))) == 3 for name in POLICY_BUILDERS if name in known_variants())
    with pytest.raises(UsageError, match="unknown cache 'bfloat61'"):
        select_variants(["bfloat61"])
    with pytest.raises(UsageError, match="between 0 and 1"):
        select_variants(["full"], (1.0,))


def test_overflowing_perplexity_is_infinite(llm, language):
    (window,) = select_variants(["window"], [0.875])[1:]
    text = [*language.opening, *language.encode(synthetic.episode(39, 0))]
    lost = measure_perplexity(llm, window, [text], 16)
    assert lost.perplexity == math.inf and lost.kl > 1, "its logits are in the thousands"


# ---------------------------------------------------------------- the benchmark


def bench(llm, language, out, names=("bfloat16",), options=NEEDLES, **more):
    texts = [[*language.opening, *language.encode(synthetic.episode(39, seed))] for seed in range(options.num_texts)]
    folder = None if out is None else ResultFolder(out, more.pop("overwrite", False))
    return bench_quality(llm, select_variants(names), language, texts, options, out=folder, **more)


def test_lines_and_summary(llm, language, tmp_path):
    progress = Mock()
    result = bench(llm, language, tmp_path, options=SMALL, progress=progress)
    lines = [json.loads(line) for line in (tmp_path / LINES_FILE).read_text().splitlines()]
    assert len(lines) == len(result.lines) == 2 * (1 + 2 * 2 * 2 + 2)
    assert progress.call_args.args[1:] == (len(lines), len(lines))
    assert {line["cache"] for line in lines} == {"full", "bfloat16"} and all(line["digest"] for line in lines)
    assert not result.notes and [row.cache for row in result.summary] == ["full", "bfloat16"]
    assert result.summary[0].memory == 1 and 0.5 < result.summary[1].memory < 0.6, "positions are not halved"
    assert all(row.recall == {"single": 1, "many": 1, "chain": 1} for row in result.summary)


def test_stopped_benchmark_is_continued(llm, language, tmp_path, monkeypatch):
    whole = bench(llm, language, tmp_path).summary
    path = tmp_path / LINES_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:30])  # stopped in the middle of a line
    counted = Mock(side_effect=measure_cell)
    monkeypatch.setattr(cache_quality, "measure_cell", counted)
    assert bench(llm, language, tmp_path).summary == whole
    assert counted.call_count == len(lines) - 4 - 1, "one of the missing lines is that of the texts"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [json.loads(line) for line in lines]


def test_lines_of_another_model_or_options_are_refused(llm, language, tmp_path):
    bench(llm, language, tmp_path, ())
    with pytest.raises(UsageError, match="was measured with other options"):
        bench(llm, language, tmp_path, (), replace(NEEDLES, seed=1))
    bench(llm, language, tmp_path, (), replace(NEEDLES, seed=1), overwrite=True)
    other = LLM(build(llm.model.config, dtype=torch.float32), llm.tokenizer, llm.cache_config)
    with pytest.raises(UsageError, match="was measured with another model"):
        bench(other, language, tmp_path, (), replace(NEEDLES, seed=1))


def test_policy_with_a_format(llm, language):
    text = [*language.opening, *language.encode(synthetic.episode(79, 0))]
    variants = select_variants(["window", "window+int8"], [0.75])
    result = bench_quality(llm, variants, language, [text], replace(SMALL, tasks=(), prefill_chunk_size=8))
    expected = [("full", 0.0), ("window", 0.75), ("window+int8", 0.75)]
    assert [(line["cache"], line["ratio"]) for line in result.lines] == expected
    _, window, both = result.summary
    assert both.memory < window.memory < 1 and both.kl == pytest.approx(window.kl, rel=0.5)
    assert not result.notes


def test_recall_of_an_untrained_model_is_not_measured(llm, language):
    untrained = LLM(build(llm.model.config, dtype=torch.float32), llm.tokenizer, llm.cache_config)
    result = bench(untrained, language, None, options=SMALL)
    assert len(result.notes) == len(TASK_KINDS)
    assert "the full cache finds 0.00 at 40 tokens, not more than 0.95 (longer tasks are skipped)" in result.notes[0]
    assert not any(line.get("length") == 48 for line in result.lines if line["measure"] != "text")
    full, half = result.summary
    assert full.recall["single"] == 0 and half.recall["single"] is None and half.perplexity is not None


def test_unsupported_variant_is_noted(llm, language):
    odd = Variant("odd", 0.5, lambda _length, _every: {"layout": "round"})
    result = bench_quality(llm, [FULL, odd], language, [], NEEDLES)
    assert len(result.notes) == 1 and result.notes[0].startswith(
        "odd 0.5: not for this model: cache.layout: must be one of 'paged', 'contiguous', got 'round'"
    )
    assert result.summary[0].recall == {"single": 1} and result.summary[1].recall == {"single": None}


def test_lengths_beyond_the_limit_are_refused(llm, language):
    with pytest.raises(UsageError, match=r"2,048 tokens is beyond the model's limit of 1,024"):
        bench(llm, language, None, (), replace(SMALL, lengths=(2048,)))


def test_interval_of_evictions(llm, language):
    fields = Mock(return_value={})
    for timing in ("chunk", "prompt"):
        options = replace(SMALL, evict_after=timing, prefill_chunk_size=16, samples_per_cell=1)
        measure_cell(llm, Variant("x", 0.5, fields), language, "single", 96, 0.5, options)
    assert [call.args for call in fields.call_args_list] == [(80, 16), (80, 80)]


def test_unknown_field_is_refused(llm):
    with pytest.raises(UsageError, match=r"new 0.5: this build's cache cannot: .*'telepathy'"):
        build_engine(llm, Variant("new", 0.5, lambda _length, _every: {"telepathy": 1}), 8, rows=1, capacity=8, chunk=8)


def test_text_rows():
    language = EnglishLanguage(BYTES, LINES)
    rows = cache_quality.text_rows(language, LINES, [1], 3, 50)
    assert [len(row) for row in rows] == [50] * 3 and {row[0] for row in rows} == {1}
    ids = language.encode("\n".join(LINES))
    assert rows[0][1:] == ids[:49] and rows[2][1:] == ids[-49:]
    with pytest.raises(DataError, match="more --text"):
        cache_quality.text_rows(language, ["short"], [], 1, 50)


# ---------------------------------------------------------------- streaming


@pytest.fixture(scope="module")
def random_llm():
    return LLM(build(model_config(), dtype=torch.float32), None, CacheConfig(max_num_seqs=1, max_seq_len=64))


def test_stream_within_the_limit_is_flat(random_llm):
    tokens = torch.randint(0, 60, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    progress = Mock()
    result = bench_streaming(random_llm, FULL, tokens, span=32, chunk=8, progress=progress)
    assert [(one.start, one.stop) for one in result.spans] == [(0, 32), (32, 64), (64, 96)]
    assert result.flatness == pytest.approx(1, abs=1e-4) and result.mean == pytest.approx(1, abs=1e-4)
    assert result.raw > 1.01, "the text is not equally hard everywhere"
    assert progress.call_args.args == ("reference", 96, 96)


def test_stream_that_loses_positions_is_not_flat(random_llm, monkeypatch, in_pytorch):
    tokens = torch.randint(0, 60, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    lose_positions(monkeypatch, 0.5)
    result = bench_streaming(random_llm, FULL, tokens, span=32, chunk=4)
    assert result.flatness > 1.01 and result.worst >= result.mean


def test_streaming_reference_uses_windows(random_llm):
    limit = random_llm.model.config.max_seq_len
    tokens = torch.randint(0, 60, (3 * limit + 5,), generator=torch.Generator().manual_seed(1)).tolist()
    found = reference_logprobs_windowed(random_llm, tokens)
    end = 2 * limit
    for at in (end - 1, end - limit // 4):  # the last and the first that this window scores
        logprobs = random_llm.logits(tokens[end - limit : end]).double().log_softmax(-1)
        assert found[at] == pytest.approx(float(logprobs[limit - 1 - (end - at), tokens[at]]), abs=1e-4)
    assert found[0] == 0 and bool((found[1:] < 0).all())
    assert torch.allclose(reference_logprobs_windowed(random_llm, tokens[:limit]), found[:limit], atol=1e-4)


def test_stream_of_less_than_two_spans_is_refused(random_llm):
    with pytest.raises(UsageError, match="less than two spans of 100"):
        bench_streaming(random_llm, FULL, list(range(60)), span=100)


# ---------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def checkpoint(llm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm") / "model"
    save_checkpoint(folder, llm.model.config, llm.model.state_dict(), llm.tokenizer)
    return folder


FEW = ("--lengths", "40,48", "--depths", "0,1", "--samples-per-cell", 1, "--num-texts", 1)
FEW += ("--variants", "bfloat16", "--prefill-chunk-size", 32)


def test_command_writes_lines_and_figures(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    result = run(capsys, "bench", "cache-quality", checkpoint, *FEW, "--out", tmp_path / "out")
    assert result.code == 0 and "language lookup" in result.out and "bfloat16" in result.out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {LINES_FILE, "cache-quality.json", "cache-quality-single.svg", "cache-quality-many.png"} <= names
    svg = (tmp_path / "out" / "cache-quality-single.svg").read_text()
    assert "<svg" in svg and "recall of single" in svg and "bfloat16" in svg
    again = run(capsys, "bench", "cache-quality", checkpoint, *FEW, "--out", tmp_path / "out", "--json")
    result = json.loads(again.out)
    assert result["summary"][0]["recall"] == {"single": 1, "many": 1, "chain": 1} and result["language"] == "lookup"


def test_command_uses_english_for_other_models(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(LINES))
    model = write_model(tmp_path / "model", limit=700)
    options = ("--lengths", 500, "--tasks", "single", "--depths", 0.5, "--samples-per-cell", 1, "--num-texts", 1)
    options += ("--text", text)
    options += ("--text-length", 64)
    result = run(capsys, "bench", "cache-quality", model, *options, "--variants", "full")
    quick = run(capsys, "bench", "cache-quality", model, *options, "--quick", "--json")
    summary = json.loads(quick.out)["summary"]
    assert {(row["cache"], row["ratio"]) for row in summary} >= {("full", 0), ("snapkv", 0.5)} and len(summary) == 6
    assert result.code == 0 and "language english" in result.out
    assert "kvad: single: the full cache finds 0.00 at 500 tokens" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--variants", "fulll"), "unknown cache 'fulll'"),
        (("--compression-ratios", "0.5,x"), "--compression-ratios: '0.5,x' is not a list of numbers"),
        (("--compression-ratios", "2"), "between 0 and 1"),
        (("--tasks", "singel"), "unknown task 'singel'"),
        (("--depths", "1.5"), "from 0 to 1"),
        (("--lengths", "4096"), "beyond the model's limit"),
        (("--lengths", "6", "--variants", "full"), "does not fit in 6 tokens"),
        (("--samples-per-cell", 0), "at least 1"),
    ],
)
def test_invalid_options_are_refused(checkpoint, capsys, arguments, message):
    result = run(capsys, "bench", "cache-quality", checkpoint, "--num-texts", 0, *arguments)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err


def test_streaming_command(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(LINES))
    model = write_model(tmp_path / "model")
    options = ("--variant", "full", "--num-tokens", 90, "--span-length", 30, "--text", text)
    result = run(capsys, "bench", "streaming", model, *options, "--out", tmp_path / "out")
    assert result.code == 0 and "flatness 1.0000" in result.out
    lines = [json.loads(line) for line in (tmp_path / "out" / "bench-streaming.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and lines[2]["stop"] == 90 and lines[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert all(line["machine"] and "commit" in line and line["model"] == str(model) for line in lines)
    assert json.loads(run(capsys, "bench", "streaming", model, *options, "--json").out)["limit"] == 96
    long = run(capsys, "bench", "streaming", model, "--variant", "full", "--num-tokens", 100_000, "--text", text)
    assert long.code == 2 and "add files with --text" in long.err
    more = ("--variant", "full", "--num-tokens", 200, "--span-length", 50, "--text", text)
    past = run(capsys, "bench", "streaming", model, *more)
    assert past.code == 2 and "must have at most 96 tokens, got 200" in past.err
    assert run(capsys, "bench", "streaming", model, "--variant", "windw").code == 2


def test_lookup_corpora(tmp_path, capsys):
    result = run(capsys, "data", "create", "lookup", tmp_path / "a", "--num-words", 500, "--json")
    summary = json.loads(result.out)
    assert result.code == 0 and summary["texts"] == len((tmp_path / "a" / "texts.txt").read_text().splitlines())
    run(capsys, "data", "create", "lookup", tmp_path / "b", "--num-words", 500)
    assert (tmp_path / "a" / "texts.txt").read_bytes() == (tmp_path / "b" / "texts.txt").read_bytes()
    again = run(capsys, "data", "create", "lookup", tmp_path / "b")
    assert again.code == 2 and "is not empty" in again.err
    assert run(capsys, "data", "create", "lookup", tmp_path / "c", "--max-words", 3).code == 2
    (tmp_path / "file").write_text("mine")
    for kind in ("lookup", "python", "copy", "reverse"):
        result = run(capsys, "data", "create", kind, tmp_path / "file")
        assert result.code == 2 and "file is a file, not a folder" in result.err


@pytest.mark.parametrize("name", ["copy", "reverse"])
def test_copy_and_reverse_corpora(tmp_path, capsys, name):
    summary = json.loads(run(capsys, "data", "create", name, tmp_path / "a", "--json").out)
    pairs = {
        part: [line.split("\t") for line in (tmp_path / "a" / f"{part}.tsv").read_text().splitlines()]
        for part in ("train", "dev", "test")
    }
    assert summary["pairs"] == {part: len(lines) for part, lines in pairs.items()}
    step, low, high = (1, 1, 10) if name == "copy" else (-1, 0, 49)
    for source, target in (pair for lines in pairs.values() for pair in lines):
        assert source.split()[::step] == target.split()
    sources = [[int(word) for word in source.split()] for source, _ in pairs["train"]]
    assert (min(map(min, sources)), max(map(max, sources))) == (low, high)
    lengths = {part: {len(source.split()) for source, _ in lines} for part, lines in pairs.items()}
    assert lengths["train"] == ({10} if name == "copy" else set(range(1, 26)))
    assert max(lengths["test"]) == (10 if name == "copy" else 30)  # longer than anything that was trained on
    run(capsys, "data", "create", name, tmp_path / "b")
    run(capsys, "data", "create", name, tmp_path / "c", "--seed", 1)
    texts = [(tmp_path / folder / "dev.tsv").read_text() for folder in "abc"]
    assert texts[0] == texts[1] != texts[2]
