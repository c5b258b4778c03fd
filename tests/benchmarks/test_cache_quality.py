"""kvad bench cache-quality and endless: what is hidden, what is found, and that a cache that forgets is seen to."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvad.benchmarks import cache_quality
from kvad.benchmarks.cache_quality import (
    LINES_FILE,
    MIN_FULL_RECALL,
    QualityOptions,
    bench_quality,
    greedy_answers,
    measure_cell,
    measure_perplexity,
    text_rows,
)
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
LINES = [f"Line {number} of a text that nobody wrote.\n" for number in range(40)]


@pytest.fixture(scope="module")
def looker():
    model, tokenizer = make_looker()
    return LLM(model, tokenizer, CacheConfig(max_num_seqs=1, max_seq_len=512))


@pytest.fixture(scope="module")
def spoken(looker):
    return choose_language("auto", looker.tokenizer, list, [looker.tokenizer.special_tokens.separator])


def forget(monkeypatch, share):
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
def test_every_question_is_answered_by_what_was_said_once(seed):
    words, bound, questions = synthetic.episode(400, seed).split(), {}, 0
    at = 0
    while at + synthetic.LINKS + 2 < len(words):
        if words[at] == "?":
            at += 2
            asked = words[at - 1]
            while asked in bound:
                assert words[at] == bound[asked]
                asked, at = words[at], at + 1
            assert asked in synthetic.VALUES
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
def test_a_task_is_a_function_of_its_seed(kind, name, spoken):
    language = spoken if name == "lookup" else EnglishLanguage(BYTES, LINES)
    length = 96 if name == "lookup" else 1500
    one, again, other = (make_task(kind, language, length, 0.5, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.prompt != other.prompt and one.expected != other.expected
    assert len(one.prompt) + len(one.question) + one.answer_tokens == length


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["single", "many"])
def test_the_needle_stands_at_its_depth(kind, depth, spoken):
    task = make_task(kind, spoken, 256, depth, 7)
    opening, key = spoken.opening, task.question[-1]
    needle = (key, *spoken.encode(task.expected[0]))
    (at,) = [at for at in task.needle_positions if task.prompt[at : at + 2] == needle]
    others = 2 * task.needle_positions.index(at)
    hay = 256 - len(opening) - 2 * len(task.needle_positions) - len(task.question) - task.answer_tokens
    assert task.depth == (at - len(opening) - others) / hay
    assert abs(task.depth - depth) <= 5 / hay, "nearest edge of a sentence"
    assert task.prompt[: len(opening)] == opening
    assert task.prompt.count(key) == 1


@pytest.mark.parametrize("told", [False, True])
def test_a_cut_comes_right_behind_what_was_read(spoken, told):
    task = make_task("many", spoken, 100, 0.5, 3, align=16, question_in_prompt=told)
    assert len(task.prompt) == 96 and len(task.prompt) + len(task.question) + task.answer_tokens <= 100
    assert (task.prompt[-2:] == task.question) is told
    assert len(make_task("many", spoken, 100, 0.5, 3, align=128, question_in_prompt=told).prompt) == 97


def test_many_hides_the_asked_one_among_others(spoken):
    task = make_task("many", spoken, 240, 0.5, 3)
    keys = [task.prompt[at] for at in task.needle_positions]
    assert len(set(keys)) == len(keys) == 11 and task.question[-1] in keys
    assert list(task.needle_positions) == sorted(task.needle_positions)


def test_a_chain_leads_from_the_question_to_the_value(spoken):
    task = make_task("chain", spoken, 96, 0.25, 5)
    told = {task.prompt[at]: task.prompt[at + 1] for at in task.needle_positions}
    found, word = [], task.question[-1]
    while word in told:
        word = told[word]
        found.append(word)
    assert found == spoken.encode(" ".join(task.expected)) and len(found) == synthetic.LINKS
    assert task.depth == pytest.approx(0.25, abs=0.1)


def test_english_needles_stand_between_lines():
    language = EnglishLanguage(BYTES, LINES)
    task = make_task("single", language, 1500, 0.5, 1)
    (at,), text = task.needle_positions, BYTES.decode(list(task.prompt))
    needle = BYTES.decode(list(task.prompt[at:])).split("\n")[0]
    assert needle.startswith("One of the special magic numbers for ") and task.expected[0] in needle
    assert BYTES.decode(list(task.prompt[:at])).endswith(".\n") and text.count("magic") == 1
    name = needle.split(" for ")[1].split(" is:")[0]
    assert name in BYTES.decode(list(task.question))


def test_what_does_not_fit_is_refused(spoken):
    with pytest.raises(UsageError, match=r"a many task does not fit in 8 tokens: .* take 1\d"):
        make_task("many", spoken, 8, 0.5, 0)


def test_shares():
    language = EnglishLanguage(BYTES, LINES)
    assert language.answer_score(("1234567",), BYTES.encode(" 1234567. And so on")) == 1
    assert language.answer_score(("ABCDE", "FGHIJ", "KLMNO", "PQRST"), BYTES.encode("ABCDE, KLMNO, XXXXX")) == 0.5
    words = train_tokenizer("word", [" ".join(synthetic.vocabulary())])
    asked = LookupLanguage(words)
    assert asked.answer_score(("k1", "v2"), words.encode("k1 v2 the")) == 1
    assert (
        asked.answer_score(("k1", "v2"), words.encode("k1 v3"))
        == asked.answer_score(("k1", "v2"), words.encode("k1"))
        == 0
    )


def test_which_language(spoken):
    assert isinstance(spoken, LookupLanguage)
    assert isinstance(choose_language("auto", BYTES, lambda: LINES), EnglishLanguage)
    with pytest.raises(UsageError, match="does not know the words of the lookup language"):
        choose_language("lookup", BYTES, list)
    with pytest.raises(UsageError, match="unknown language"):
        choose_language("danish", BYTES, list)
    with pytest.raises(DataError, match="no lines"):
        choose_language("english", BYTES, lambda: [" \n"])


# ---------------------------------------------------------------- measures


class FakeEngine:
    """Answers every task with the same words, whatever the cache; remembers what it was given."""

    def __init__(self, said):
        self.said, self.submitted, self.pieces = said, [], []
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))

    def add_request(self, tokens, sampling):
        number = len(self.submitted)
        self.submitted.append((tokens, sampling))
        self.pieces += [StreamChunk(number, 0, token_id=token) for token in self.said]
        return number

    @property
    def idle(self):
        return not self.pieces

    def step(self):
        return [self.pieces.pop(0)]


def test_answers_of_a_fake_model(spoken):
    tasks = [make_task("single", spoken, 64, 0.5, seed) for seed in range(3)]
    right = spoken.encode(tasks[1].expected[0])
    engine = FakeEngine([*tasks[1].question, *right])
    shares = [
        spoken.answer_score(task.expected, said)
        for task, said in zip(tasks, greedy_answers(engine, tasks), strict=True)
    ]
    assert shares == [float(task.expected == tasks[1].expected) for task in tasks] and shares[1] == 1
    for task, (tokens, sampling) in zip(tasks, engine.submitted, strict=True):
        said = [*tokens]
        for token in task.question:
            assert sampling.allowed_tokens_fn(said) == (token,), "the question is put in its mouth"
            said.append(token)
        assert tokens == task.prompt and len(sampling.allowed_tokens_fn(said)) == VOCAB


@pytest.mark.parametrize("asked", ["before", "after"])
@pytest.mark.parametrize("kind", TASK_KINDS)
def test_the_full_cache_finds_everything(looker, spoken, kind, asked):
    found = measure_cell(
        looker, FULL, spoken, kind, 96, 0.5, replace(SMALL, question_position=asked, samples_per_cell=4, max_num_seqs=2)
    )
    assert found.recall == 1 > MIN_FULL_RECALL and found.tasks == (8 if kind == "chain" else 4)


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_cache_that_forgets_finds_less(looker, spoken, asked, monkeypatch):
    options = replace(SMALL, question_position=asked, samples_per_cell=8, prefill_chunk_size=16)
    found = []
    for share in (0.0, 0.08, 0.5):
        forget(monkeypatch, share)
        found.append(measure_cell(looker, FULL, spoken, "single", 96, 0.2, options).recall)
    assert found[0] == 1 > found[1] > found[2] == 0


def test_the_price_of_a_text(looker, spoken, monkeypatch):
    texts = [[*spoken.opening, *spoken.encode(synthetic.episode(60, seed))] for seed in range(2)]
    full = measure_perplexity(looker, FULL, texts, 16)
    assert full.ratio == pytest.approx(1, abs=1e-4) and full.kl < 1e-5 and full.agree == 1
    assert full.tokens == sum(map(len, texts)) - 2
    total = -sum(looker.score(text).total_logprob for text in texts)
    assert full.perplexity == pytest.approx(math.exp(total / full.tokens), rel=1e-4)
    (half,) = select_variants(["bfloat16"])[1:]
    stored = measure_perplexity(looker, half, texts, 16)
    forget(monkeypatch, 0.3)
    lost = measure_perplexity(looker, FULL, texts, 16)
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


def test_a_perplexity_beyond_all_floats(looker, spoken):
    (window,) = select_variants(["window"], [0.875])[1:]
    text = [*spoken.opening, *spoken.encode(synthetic.episode(39, 0))]
    lost = measure_perplexity(looker, window, [text], 16)
    assert lost.perplexity == math.inf and lost.kl > 1, "its logits are in the thousands"


# ---------------------------------------------------------------- the bench


def bench(llm, language, out, names=("bfloat16",), options=NEEDLES, **more):
    texts = [[*language.opening, *language.encode(synthetic.episode(39, seed))] for seed in range(options.num_texts)]
    folder = None if out is None else ResultFolder(out, more.pop("overwrite", False))
    return bench_quality(llm, select_variants(names), language, texts, options, out=folder, **more)


def test_a_line_per_measurement_and_a_row_per_cache(looker, spoken, tmp_path):
    seen = []
    result = bench(looker, spoken, tmp_path, options=SMALL, progress=lambda *what: seen.append(what))
    lines = [json.loads(line) for line in (tmp_path / LINES_FILE).read_text().splitlines()]
    assert len(lines) == len(result.lines) == 2 * (1 + 2 * 2 * 2 + 2)
    assert seen[-1][1] == seen[-1][2] == len(lines)
    assert {line["cache"] for line in lines} == {"full", "bfloat16"} and all(line["digest"] for line in lines)
    assert not result.notes and [row.cache for row in result.summary] == ["full", "bfloat16"]
    assert result.summary[0].memory == 1 and 0.5 < result.summary[1].memory < 0.6, "positions are not halved"
    assert all(row.recall == {"single": 1, "many": 1, "chain": 1} for row in result.summary)


def test_a_bench_goes_on_where_it_stopped(looker, spoken, tmp_path, monkeypatch):
    whole = bench(looker, spoken, tmp_path).summary
    path = tmp_path / LINES_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:30])  # stopped in the middle of a line
    measured = []

    def counted(*given):
        measured.append(given)
        return measure_cell(*given)

    monkeypatch.setattr(cache_quality, "measure_cell", counted)
    assert bench(looker, spoken, tmp_path).summary == whole
    assert len(measured) == len(lines) - 4 - 1, "one of the lines that were missing is a text's"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [json.loads(line) for line in lines]


def test_another_models_lines_are_not_gone_on_from(looker, spoken, tmp_path):
    bench(looker, spoken, tmp_path, ())
    with pytest.raises(UsageError, match="was measured with other options"):
        bench(looker, spoken, tmp_path, (), replace(NEEDLES, seed=1))
    bench(looker, spoken, tmp_path, (), replace(NEEDLES, seed=1), overwrite=True)
    other = LLM(build(looker.model.config, dtype=torch.float32), looker.tokenizer, looker.cache_config)
    with pytest.raises(UsageError, match="was measured with another model"):
        bench(other, spoken, tmp_path, (), replace(NEEDLES, seed=1))


def test_a_policy_and_a_format_are_measured_together(looker, spoken):
    text = [*spoken.opening, *spoken.encode(synthetic.episode(79, 0))]
    variants = select_variants(["window", "window+int8"], [0.75])
    result = bench_quality(looker, variants, spoken, [text], replace(SMALL, tasks=(), prefill_chunk_size=8))
    assert [(line["cache"], line["ratio"]) for line in result.lines] == [
        ("full", 0.0),
        ("window", 0.75),
        ("window+int8", 0.75),
    ]
    _, window, both = result.summary
    assert both.memory < window.memory < 1 and both.kl == pytest.approx(window.kl, rel=0.5)
    assert not result.notes


def test_a_model_that_finds_nothing_says_nothing(looker, spoken):
    blind = LLM(build(looker.model.config, dtype=torch.float32), looker.tokenizer, looker.cache_config)
    result = bench(blind, spoken, None, options=SMALL)
    assert result.informative_cells == () and len(result.notes) == len(TASK_KINDS)
    assert "the full cache finds 0.00 at 40, 0.00 at 48 tokens, not more than 0.95" in result.notes[0]
    full, half = result.summary
    assert full.recall["single"] == 0 and half.recall["single"] is None and half.perplexity is not None


def test_a_cache_that_cannot_be_for_this_model_is_noted(looker, spoken):
    odd = Variant("odd", 0.5, lambda _length, _every: {"layout": "round"})
    result = bench_quality(looker, [FULL, odd], spoken, [], NEEDLES)
    assert len(result.notes) == 1 and result.notes[0].startswith(
        "odd 0.5: not for this model: cache.layout: must be one of 'paged', 'contiguous', got 'round'"
    )
    assert result.summary[0].recall == {"single": 1} and result.summary[1].recall == {"single": None}


def test_lengths_beyond_the_limit(looker, spoken):
    with pytest.raises(UsageError, match=r"2,048 tokens is beyond the model's limit of 1,024"):
        bench(looker, spoken, None, (), replace(SMALL, lengths=(2048,)))


def test_when_a_policy_cuts(looker, spoken):
    seen = []

    def fields(length, every):
        seen.append((length, every))
        return {}

    for cut in ("chunk", "prompt"):
        options = replace(SMALL, evict_after=cut, prefill_chunk_size=16, samples_per_cell=1)
        measure_cell(looker, Variant("x", 0.5, fields), spoken, "single", 96, 0.5, options)
    assert seen == [(80, 16), (80, 80)]


def test_a_field_that_the_cache_lacks_is_named(looker):
    with pytest.raises(UsageError, match=r"new 0.5: this build's cache cannot: .*'telepathy'"):
        build_engine(
            looker, Variant("new", 0.5, lambda _length, _every: {"telepathy": 1}), 8, rows=1, capacity=8, chunk=8
        )


def test_rows_of_text():
    language = EnglishLanguage(BYTES, LINES)
    rows = text_rows(language, LINES, [1], 3, 50)
    assert [len(row) for row in rows] == [50] * 3 and {row[0] for row in rows} == {1}
    assert (
        rows[0][1:] == language.encode("\n".join(LINES))[:49] and rows[2][1:] == language.encode("\n".join(LINES))[-49:]
    )
    with pytest.raises(DataError, match="more --text"):
        text_rows(language, ["short"], [], 1, 50)


# ---------------------------------------------------------------- endless


@pytest.fixture(scope="module")
def talker():
    return LLM(build(model_config(), dtype=torch.float32), None, CacheConfig(max_num_seqs=1, max_seq_len=64))


def test_a_stream_within_the_limit_costs_what_its_windows_cost(talker):
    tokens = torch.randint(0, 60, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    seen = []
    result = bench_streaming(talker, FULL, tokens, span=32, chunk=8, progress=lambda *what: seen.append(what))
    assert [(one.start, one.stop) for one in result.spans] == [(0, 32), (32, 64), (64, 96)]
    assert result.flatness == pytest.approx(1, abs=1e-4) and result.mean == pytest.approx(1, abs=1e-4)
    assert result.raw > 1.01, "the text is not equally hard everywhere"
    assert seen[-1] == ("reference", 96, 96)


def test_a_stream_that_forgets_more_and_more_is_not_flat(talker, monkeypatch):
    tokens = torch.randint(0, 60, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    forget(monkeypatch, 0.5)
    result = bench_streaming(talker, FULL, tokens, span=32, chunk=4)
    assert result.flatness > 1.01 and result.worst >= result.mean


def test_the_reference_is_computed_from_windows(talker):
    limit = talker.model.config.max_seq_len
    tokens = torch.randint(0, 60, (3 * limit + 5,), generator=torch.Generator().manual_seed(1)).tolist()
    found = reference_logprobs_windowed(talker, tokens)
    end = 2 * limit
    for at in (end - 1, end - limit // 4):  # the last and the first that this window scores
        said = talker.logits(tokens[end - limit : end]).double().log_softmax(-1)
        assert found[at] == pytest.approx(float(said[limit - 1 - (end - at), tokens[at]]), abs=1e-4)
    assert found[0] == 0 and bool((found[1:] < 0).all())
    assert torch.allclose(reference_logprobs_windowed(talker, tokens[:limit]), found[:limit], atol=1e-4)


def test_a_stream_of_less_than_two_spans(talker):
    with pytest.raises(UsageError, match="less than two spans of 100"):
        bench_streaming(talker, FULL, list(range(60)), span=100)


# ---------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def checkpoint(looker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("looker") / "model"
    save_checkpoint(folder, looker.model.config, looker.model.state_dict(), looker.tokenizer)
    return folder


FEW = ("--lengths", "40,48", "--depths", "0,1", "--samples-per-cell", 1, "--num-texts", 1)
FEW += ("--variants", "bfloat16", "--prefill-chunk-size", 32)


def test_the_command_writes_lines_and_figures(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    ran = run(capsys, "bench", "cache-quality", checkpoint, *FEW, "--out", tmp_path / "out")
    assert ran.code == 0 and "language lookup" in ran.out and "bfloat16" in ran.out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {LINES_FILE, "cache-quality.json", "cache-quality-single.svg", "cache-quality-many.png"} <= names
    drawn = (tmp_path / "out" / "cache-quality-single.svg").read_text()
    assert "<svg" in drawn and "recall of single" in drawn and "bfloat16" in drawn
    again = run(capsys, "bench", "cache-quality", checkpoint, *FEW, "--out", tmp_path / "out", "--json")
    result = json.loads(again.out)
    assert result["summary"][0]["recall"] == {"single": 1, "many": 1, "chain": 1} and result["language"] == "lookup"


def test_the_command_asks_another_model_in_english(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(LINES))
    model = write_model(tmp_path / "model", limit=700)
    asked = ("--lengths", 500, "--tasks", "single", "--depths", 0.5, "--samples-per-cell", 1, "--num-texts", 1)
    asked += ("--text", text)
    ran = run(capsys, "bench", "cache-quality", model, *asked, "--text-length", 64, "--variants", "full")
    assert ran.code == 0 and "language english" in ran.out
    assert "kvad: single: the full cache finds 0.00 at 500 tokens" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_what_the_command_refuses(checkpoint, capsys, arguments, said):
    ran = run(capsys, "bench", "cache-quality", checkpoint, "--num-texts", 0, *arguments)
    assert ran.code == 2 and said in ran.err and "Traceback" not in ran.err


def test_the_endless_command(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(LINES))
    model = write_model(tmp_path / "model")
    asked = ("--variant", "full", "--num-tokens", 90, "--span-length", 30, "--text", text)
    ran = run(capsys, "bench", "streaming", model, *asked, "--out", tmp_path / "out")
    assert ran.code == 0 and "flatness 1.0000" in ran.out
    lines = [json.loads(line) for line in (tmp_path / "out" / "bench-streaming.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and lines[2]["stop"] == 90 and lines[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert all(line["machine"] and "commit" in line and line["model"] == str(model) for line in lines)
    assert json.loads(run(capsys, "bench", "streaming", model, *asked, "--json").out)["limit"] == 96
    long = run(capsys, "bench", "streaming", model, "--variant", "full", "--num-tokens", 100_000, "--text", text)
    assert long.code == 2 and "add files with --text" in long.err
    more = ("--variant", "full", "--num-tokens", 200, "--span-length", 50, "--text", text)
    past = run(capsys, "bench", "streaming", model, *more)
    assert past.code == 2 and "must have at most 96 tokens, got 200" in past.err
    assert run(capsys, "bench", "streaming", model, "--variant", "windw").code == 2


def test_corpora(tmp_path, capsys):
    ran = run(capsys, "data", "create", "lookup", tmp_path / "a", "--num-words", 500, "--json")
    told = json.loads(ran.out)
    assert ran.code == 0 and told["texts"] == len((tmp_path / "a" / "texts.txt").read_text().splitlines())
    run(capsys, "data", "create", "lookup", tmp_path / "b", "--num-words", 500)
    assert (tmp_path / "a" / "texts.txt").read_bytes() == (tmp_path / "b" / "texts.txt").read_bytes()
    again = run(capsys, "data", "create", "lookup", tmp_path / "b")
    assert again.code == 2 and "is not empty" in again.err
    assert run(capsys, "data", "create", "lookup", tmp_path / "c", "--max-words", 3).code == 2
    (tmp_path / "file").write_text("mine")
    for kind in ("lookup", "python", "copy", "reverse"):
        ran = run(capsys, "data", "create", kind, tmp_path / "file")
        assert ran.code == 2 and "file is a file, not a folder" in ran.err


@pytest.mark.parametrize("name", ["copy", "reverse"])
def test_drills(tmp_path, capsys, name):
    told = json.loads(run(capsys, "data", "create", name, tmp_path / "a", "--json").out)
    pairs = {
        part: [line.split("\t") for line in (tmp_path / "a" / f"{part}.tsv").read_text().splitlines()]
        for part in ("train", "dev", "test")
    }
    assert told["pairs"] == {part: len(lines) for part, lines in pairs.items()}
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
