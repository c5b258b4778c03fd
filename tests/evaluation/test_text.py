"""Text evaluation: perplexity compared with transformers, cached with uncached scores, rows beyond the limit."""

import math
from dataclasses import replace

import pytest
import torch
import transformers

from kvad.benchmarks.scorers import CachedScorer, ScoredRow, UncachedScorer
from kvad.cache.config import CacheConfig
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.loader import load_model
from kvad.engine.engine import Engine
from kvad.errors import DataError, NumericalError, RequestError, UsageError
from kvad.evaluation import text as text_eval
from kvad.evaluation.text import EvalDocument, EvalWindow, WindowOptions, evaluate_text, extrapolate, sliding_windows
from kvad.llm import LLM
from kvad.text.tokenizer import train_tokenizer
from kvad.train.loop.run import train_model
from kvad.train.monitoring.callbacks import Callback
from tests.support.random_models import LIMIT, SOURCE_LIMIT, VOCAB, build, model_config, pair_config
from tests.train.conftest import run_config  # noqa: F401  a fixture


def ids(count, seed=0, vocab=VOCAB):
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def document(tokens):
    return EvalDocument(tokens, len(tokens), len(tokens), 1)


# ---------------------------------------------------------------- against transformers


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Return a Hugging Face model in float64, and the same checkpoint in kvad."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=24, n_layer=2, n_head=2, initializer_range=0.4
    )
    hf_model = transformers.GPT2LMHeadModel(config).double().eval()
    folder = tmp_path_factory.mktemp("gpt2")
    hf_model.save_pretrained(folder)
    return hf_model, load_model(folder, "float64")[0]


def hf_nats(model, inputs, targets):
    """Sum over targets that are not -100; the loss of transformers is rounded to float32."""
    with torch.no_grad():
        logits = model(inputs.unsqueeze(0)).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, targets[1:], reduction="sum", ignore_index=-100))


def hf_loop(model, tokens, window, stride):
    """Hugging Face's "perplexity of fixed-length models": (summed nats, how many were scored), -100 being unscored."""
    nats, count, known = 0.0, 0, 0
    for start in range(0, len(tokens), stride):
        stop = min(start + window, len(tokens))
        inputs = tokens[start:stop]
        targets = inputs.clone()
        targets[: -(stop - known)] = -100
        scored = int((targets[1:] != -100).sum())
        if scored:
            nats += hf_nats(model, inputs, targets)
        count, known = count + scored, stop
        if stop == len(tokens):
            break
    return nats, count


@pytest.mark.parametrize(("window", "stride"), [(32, 32), (32, 16), (24, 1), (7, 5)])
def test_perplexity_equals_a_loop_over_transformers(gpt2, window, stride):
    hf_model, model = gpt2
    tokens = ids(75 if stride > 1 else 36)
    nats, count = hf_loop(hf_model, tokens, window, stride)
    found = evaluate_text(UncachedScorer(model), [document(tokens)], WindowOptions(window, stride))
    assert found.scored == count and found.nats == pytest.approx(nats, rel=1e-10)
    assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-9)


def test_another_stride_differs_from_the_loop(gpt2):
    hf_model, model = gpt2
    tokens = ids(75)
    changed = evaluate_text(UncachedScorer(model), [document(tokens)], WindowOptions(32, 15))
    assert changed.nats != pytest.approx(hf_loop(hf_model, tokens, 32, 16)[0], rel=1e-6)


@pytest.mark.parametrize("opening", ["start", "window"])
def test_an_opening_token_is_read_and_never_scored(gpt2, opening):
    hf_model, model = gpt2
    tokens, bos = ids(40), torch.tensor([3])
    found = evaluate_text(UncachedScorer(model), [document(tokens)], WindowOptions(16, 8, opening), 3)
    assert found.scored == found.tokens == 40
    if opening == "start":
        nats, _ = hf_loop(hf_model, torch.cat([bos, tokens]), 16, 8)
    else:
        nats = 0.0
        for window in sliding_windows(40, 15, 8):
            known = window.scored if window.start else 0
            inputs = torch.cat([bos, tokens[window.start : window.stop]])
            targets = inputs.clone()
            targets[: known - window.start + 1] = -100
            nats += hf_nats(hf_model, inputs, targets)
    assert found.nats == pytest.approx(nats, rel=1e-10)


# ---------------------------------------------------------------- windows


def test_sliding_windows():
    assert list(sliding_windows(7, 4, 2)) == [EvalWindow(0, 4, 1), EvalWindow(2, 6, 4), EvalWindow(4, 7, 6)]
    assert list(sliding_windows(8, 4, 4)) == [EvalWindow(0, 4, 1), EvalWindow(4, 8, 5)]
    for tokens in range(1, 30):
        for stride in range(1, 6):
            scored = [at for window in sliding_windows(tokens, 5, stride) for at in range(window.scored, window.stop)]
            assert len(scored) == len(set(scored))
            assert stride == 5 or scored == list(range(1, tokens))


@pytest.mark.parametrize(
    ("window", "stride", "opening", "message"),
    [(1, 1, "none", "--window 1"), (8, 9, "none", "--stride 9"), (8, 0, "none", "--stride 0"), (8, 8, "window", "BOS")],
)
def test_invalid_windows_are_refused(window, stride, opening, message):
    with pytest.raises(UsageError, match=message):
        WindowOptions(window, stride, opening)


def test_documents_are_separate_and_windows_can_be_sampled():
    model = build(model_config())
    first, second = document(ids(50, 1)), document(ids(41, 2))
    alone = [evaluate_text(UncachedScorer(model), [one], WindowOptions(16, 8)) for one in (first, second)]
    both = evaluate_text(UncachedScorer(model), [first, second], WindowOptions(16, 8), unknown=int(first.tokens[0]))
    assert both.nats == pytest.approx(sum(one.nats for one in alone)) and both.scored == 49 + 40
    assert both.unknown == sum(int((one.tokens == first.tokens[0]).sum()) for one in (first, second)) > 0
    some = evaluate_text(UncachedScorer(model), [first, second], WindowOptions(16, 8), most=30)
    assert 0 < some.scored < both.scored and some.tokens == both.tokens == 91
    with pytest.raises(DataError, match="nothing to score"):
        evaluate_text(UncachedScorer(model), [document(ids(1))], WindowOptions(16, 8))
    with pytest.raises(UsageError, match="no token that opens"):
        evaluate_text(UncachedScorer(model), [first], WindowOptions(16, 8, "start"))


def test_loss_equals_the_validation_loss_of_training(tmp_path, run_config):  # noqa: F811
    (tmp_path / "one.txt").write_text("".join(f"{number} and {number + 1}. " for number in range(200)))
    held = []

    class Hold(Callback):
        def on_model(self, subject):
            held.append(subject)

    config = run_config(steps=2, eval_interval=2, eval_tokens=0, tokenizer={"kind": "char"})
    outcome = train_model(config, [tmp_path / "one.txt"], tmp_path / "run", callbacks=[Hold()])
    split = held[0].data.packer.validation
    begin, length = int(split._begin[0]), len(split)
    tokens = torch.from_numpy(split.store.take(range(begin, begin + length)))
    model, _ = load_model(tmp_path / "run")
    found = evaluate_text(UncachedScorer(model), [document(tokens)], WindowOptions(33, 32))
    assert found.scored == length - 1 and found.loss == pytest.approx(outcome.val_loss, rel=1e-5)


def test_nan_is_an_error():
    model = build(model_config())
    with torch.no_grad():
        model.embedding.tokens.weight.fill_(torch.nan)
    with pytest.raises(NumericalError, match="NaN"):
        UncachedScorer(model).score([ScoredRow(ids(5))])


# ---------------------------------------------------------------- through caches


@pytest.mark.parametrize("topology", ["rope-dynamic", "pair"])
def test_cached_scores_equal_uncached_scores(topology):
    model = build(pair_config() if topology == "pair" else model_config(topology))
    lengths = (80, 80, LIMIT, 1, 2, 31)
    sources = [ids(n, n, 40) if topology == "pair" else None for n in (5, 5, 9, 1, 5, 30)]
    rows = [ScoredRow(ids(n, n), source) for n, source in zip(lengths, sources, strict=True)]
    true = UncachedScorer(model).score(rows)
    sizes = {"max_num_seqs": 3, "max_seq_len": LIMIT, "max_source_len": SOURCE_LIMIT, "num_blocks": 8}
    cache = CacheConfig(dtype="float64", prefill_chunk_size=16, swap_space=0, **sizes)
    engine = Engine(model, cache)
    have = CachedScorer(engine).score(rows)
    assert engine.scheduler.stats().preemptions  # recomputed tokens are not scored twice
    assert [len(one.nats) for one in have] == [n - 1 for n in lengths]
    for a, b in zip(true, have, strict=True):
        assert torch.allclose(a.nats, b.nats, rtol=0, atol=1e-10) and bool((a.correct == b.correct).all())
    with pytest.raises(RequestError, match="shorter windows"):
        CachedScorer(engine).score([ScoredRow(ids(LIMIT + 1), sources[0])])
    engine.close()


def test_window_cache_changes_the_loss():
    model = build(model_config(), dtype=torch.float32)
    texts, how = [document(ids(120))], WindowOptions(64, 32)
    full = evaluate_text(UncachedScorer(model), texts, how)
    scores = {}
    for policy in ("full", "window(8)"):
        sizes = {"max_num_seqs": 2, "max_seq_len": 64, "prefill_chunk_size": 16, "block_size": 4}
        engine = Engine(model, CacheConfig(policy=policy, **sizes))
        scores[policy] = evaluate_text(CachedScorer(engine), texts, how)
        engine.close()
    assert scores["full"].loss == pytest.approx(full.loss, rel=1e-5) and scores["full"].scored == full.scored
    assert scores["window(8)"].loss != pytest.approx(full.loss, rel=1e-3)


# ---------------------------------------------------------------- pairs


def pair_llm():
    tokenizer = train_tokenizer("char", ["abcdefgh "], specials=("bos", "eos", "pad", "unk"))
    special = tokenizer.special_tokens
    generation = GenerationConfig(
        decoder_start_token_id=special.bos, eos_token_ids=(special.eos,), source_eos_token_id=special.eos
    )
    cache = CacheConfig(max_num_seqs=2, max_seq_len=LIMIT, dtype="float64", max_source_len=SOURCE_LIMIT)
    return LLM(build(pair_config()), tokenizer, cache, generation=generation)


def test_targets_are_scored_with_source_and_end_token():
    pairs = [("abc", "cba"), ("a", "b h"), ("hgf ed", "gf")]
    with pair_llm() as llm:
        found = text_eval.evaluate_pairs(llm, UncachedScorer(llm.model), pairs)
        nats, hits = 0.0, 0
        for source, target in pairs:
            start, ends = llm.generation.decoder_start_token_id, llm.generation.eos_token_ids
            tokens = [start, *llm.tokenizer.encode(target), *ends]
            logits = llm.logits(tokens, source).double().log_softmax(-1)[:-1]
            wanted = torch.tensor(tokens[1:])
            nats -= float(logits.gather(-1, wanted.unsqueeze(-1)).sum())
            hits += int((logits.argmax(-1) == wanted).sum())
        with pytest.raises(RequestError, match="a target has 97 tokens"):
            text_eval.build_pair_row(llm, "a", "b" * 96)
    assert found.scored == found.tokens == 3 + 3 + 2 + 3 and found.nats == pytest.approx(nats) and found.hits == hits
    assert (found.words, found.lines) == (4, 3)


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "sinusoidal", "none", "rope-dynamic"])
def test_rows_beyond_the_limit(position):
    model, trained = build(model_config(position)), LIMIT // 2
    text = ids(5 * LIMIT)
    curve = extrapolate(model, [text], trained, multiples=(1, 4), most=2 * trained)
    near, far = curve.points
    assert (near.length, far.length, near.scored, far.scored) == (trained, 2 * LIMIT, 96, 96) and curve.rows == 4
    # By hand: the same tokens, at the end of rows of either length.
    ends = [2 * LIMIT + 24 * number for number in range(13)]
    ends = [ends[number * 13 // 4] for number in range(4)]
    reader = UncachedScorer(model, 2 * LIMIT)
    for point in curve.points:
        rows = [ScoredRow(text[end - point.length : end]) for end in ends]
        nats = torch.stack([read.nats for read in reader.score(rows)])
        assert point.loss == pytest.approx(float(nats[:, -24:].mean()))
        assert point.whole == pytest.approx(float(nats.mean()))


def test_window_of_the_limit_applies_to_longer_rows():
    model = build(replace(model_config(heads="window"), max_seq_len=7))  # two layers of 7 tokens
    one, other = ids(40), ids(40)
    other[:20] = ids(20, 9)
    near, far = (UncachedScorer(model, 40).score([ScoredRow(tokens)])[0].nats[-6:] for tokens in (one, other))
    assert torch.allclose(near, far, rtol=0, atol=1e-12)  # no query reads 20 tokens back


def test_learned_positions_end_at_their_table():
    model = build(model_config("learned"))  # a table of LIMIT + 2, the first two of them unused
    curve = extrapolate(model, [ids(3 * LIMIT)], LIMIT // 2, multiples=(1, 2, 4))
    assert [point.length for point in curve.points] == [LIMIT // 2, LIMIT] and "table of 96" in curve.note
    with pytest.raises(UsageError, match="the table of learned positions ends at 96"):
        UncachedScorer(model, LIMIT + 1)
    with pytest.raises(UsageError, match="no row can be read"):
        extrapolate(model, [ids(3 * LIMIT)], LIMIT, multiples=(2, 4))


def test_short_texts_are_refused():
    model = build(model_config())
    with pytest.raises(DataError, match="longest text has 40 tokens"):
        extrapolate(model, [ids(40)], 32, multiples=(1, 2))
    with pytest.raises(UsageError, match="above 0"):
        extrapolate(model, [ids(40)], 32, multiples=(0,))
    assert text_eval.join_texts([ids(2), ids(3)], 7).tolist() == [7, *ids(2).tolist(), 7, *ids(3).tolist()]
