"""kvad bench cache: FLOPs compared with torch, equal output of all curves, and slow caches are detected."""

import dataclasses
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvad.benchmarks import cache_speed
from kvad.benchmarks.cache_speed import CURVE_NAMES, ConcatCache, bench_cache, loglog_slope
from kvad.cache.config import CacheConfig
from kvad.cache.groups import group_bytes
from kvad.cli.commands.bench import bench_lines, write_results
from kvad.config import flops
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import RequestError
from kvad.inspection.plot import build_series, read_jsonl
from kvad.llm import LLM
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from tests.support.lab_models import CONFIGS, tiny
from tests.support.random_models import build

COUNTED = ("plain", "mha", "mqa", "dims", "biases", "pattern")


def make_llm(config=None, **cache):
    config = tiny(limit=128) if config is None else config
    model = build(config, dtype=torch.float32)
    return LLM(model, None, CacheConfig(**{"max_seq_len": config.max_seq_len, "max_num_seqs": 2, **cache}))


def step_of(tokens, first=0):
    ids = torch.arange(tokens)
    return ModelInput(ids, ids + first, (SubBatch(1, tokens, first + tokens),), torch.tensor([tokens - 1]))


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize("name", COUNTED)
def test_flops_without_a_cache_equal_those_of_torch(name):
    config, step = CONFIGS[name], step_of(7)
    model = Transformer(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(step, NoCache(config, kernel="reference")), step.logit_indices)
    assert counter.get_total_flops() == flops.uncached_pass(config, 7).flops


@pytest.mark.parametrize("name", ["plain", "mha", "mqa", "dims", "biases"])
def test_flops_with_the_cache_equal_those_of_torch(name):
    """Through the real engine, with blocks of one slot, so that no slot is read that holds nothing."""
    config = CONFIGS[name]
    cache = CacheConfig(max_num_seqs=1, max_seq_len=32, block_size=1, enable_prefix_caching=False)
    model = Transformer(config).requires_grad_(False)  # torch's counter wants a graph of what could have one
    engine = Engine(model.eval(), cache, EngineConfig(kernel="reference"))
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=6, temperature=0))
    counted = []
    while not engine.idle:
        with FlopCounterMode(display=False) as counter:
            engine.step()
        counted.append(counter.get_total_flops())
    expected = [flops.cached_pass(config, 5, 5).flops]
    expected += [flops.cached_pass(config, 1, length).flops for length in range(6, 11)]
    assert counted == expected
    assert sum(counted) == flops.generation_cost(config, 5, 6)[0].flops


@pytest.mark.parametrize("tokens", [2, 64, 512])
def test_gain_equals_document_004(tokens):
    """4.7: 2N/3 times the attention, N/2 times the projections; exactly (2N + 1) / 3 and (N + 1) / 2."""
    cached, fresh = flops.generation_cost(CONFIGS["plain"], 1, tokens)
    assert fresh.attention / cached.attention == pytest.approx((2 * tokens + 1) / 3, rel=1e-12)
    assert fresh.projections / cached.projections == pytest.approx((tokens + 1) / 2, rel=1e-12)
    formula = flops.closed_form_flops(tokens)
    assert formula == (2 * tokens / 3, tokens / 2)
    assert fresh.head == cached.head


def test_bytes_of_the_cache_equal_the_pool():
    config = CONFIGS["mqa"]
    engine = Engine(Transformer(config), CacheConfig(max_num_seqs=1, max_seq_len=32, dtype="bfloat16"))
    held = sum(group_bytes(group).per_token_payload for group in engine.kv_cache_manager.groups)
    cost = flops.cached_pass(config, 1, 20, stored=2)
    assert (cost.bytes_written, cost.bytes_read) == (held, 20 * held)
    assert cost.bytes == cost.weights + 21 * held


def test_window_limits_the_flops():
    config = CONFIGS["pattern"]
    near, far = flops.cached_pass(config, 1, 10), flops.cached_pass(config, 1, 60)
    whole = flops.uncached_pass(config, 60)
    assert near.attention < far.attention < whole.attention / 60


# ---------------------------------------------------------------- the curves


@pytest.mark.parametrize("name", ["plain", "pattern", "alibi", "t5", "biases", "window"])
def test_concatenated_cache_equals_the_model(name):
    config = CONFIGS[name]
    model = Transformer(config).double().eval()
    grown, logits = ConcatCache(model), []
    with torch.no_grad():
        whole = step_of(12)
        expected = model.logits(model(whole, NoCache(config)), whole.token_ids)
        for first, count in ((0, 5), (5, 1), (6, 1), (7, 1), (8, 4)):
            ids = torch.arange(first, first + count)
            step = ModelInput(ids, ids, (SubBatch(1, count, first + count),), torch.arange(count))
            logits.append(model.logits(model(step, grown), step.logit_indices))
    assert (torch.cat(logits) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_the_three_curves_generate_the_same_tokens(layout):
    with make_llm(dtype="float32", layout=layout) as llm:
        result = bench_cache(llm, (4, 9, 20), 2)
        expected = llm.generate([0], max_tokens=20, temperature=0, ignore_eos=True).tokens
        runner = cache_speed._Bench(llm, [0], (4, 9, 20))
        for name in CURVE_NAMES:
            assert list(runner._steps[name](20)) == list(expected)
    assert len(set(expected)) > 4 and result.outputs_agree == 20 and result.layout == layout
    assert result.tokens == (4, 9, 20) and set(result.curves) == set(CURVE_NAMES)
    for curve in result.curves.values():
        assert list(curve.seconds) == sorted(curve.seconds) and curve.seconds[0] > 0
        for low, middle, high in zip(curve.fastest, curve.seconds, curve.slowest, strict=True):
            assert low <= middle <= high
    assert result.speedup[-1] == result.curves["recompute"].seconds[-1] / result.curves["cache"].seconds[-1]
    assert result.engine_ms > 0 and result.model_ms > 0 and result.prompt == 1


def test_different_outputs_are_detected(monkeypatch):
    with make_llm() as llm:
        real = cache_speed._Bench._recomputed

        def wrong(self, total):
            for at, token in enumerate(real(self, total)):
                yield token if at != 6 else (token + 1) % 61

        monkeypatch.setattr(cache_speed._Bench, "_recomputed", wrong)
        assert bench_cache(llm, (4, 9), 1).outputs_agree == 6


def test_slow_cache_is_detected(monkeypatch):
    """With a fake clock, token n takes n seconds, so the total is quadratic."""
    with make_llm() as llm:
        now = [0.0]

        def costly(self, total):
            for at in range(total):
                now[0] += at + 1.0
                yield 0

        monkeypatch.setattr(cache_speed._Bench, "_cached", costly)
        monkeypatch.setattr(cache_speed.time, "perf_counter", lambda: now[0])
        runner = cache_speed._Bench(llm, [0], (32, 64))
        seconds = runner.run(64)["cache"]
        assert seconds == [at + 1.0 for at in range(64)]
        curve = cache_speed._curve([seconds], (32, 64))
        assert curve.seconds == (528.0, 2080.0) and curve.exponent == pytest.approx(math.log2(2080 / 528))
        assert curve.early == 32_000.0 and curve.late == 56_500.0


def test_loglog_slope():
    assert loglog_slope((64, 128, 256), (5.0, 10.0, 20.0)) == pytest.approx(1)
    assert loglog_slope((64, 128, 256), (5.0, 20.0, 80.0)) == pytest.approx(2)


def test_llm_is_unchanged_and_progress_is_reported():
    with make_llm() as llm:
        before = llm.engine.kv_cache_manager.stats()
        seen = []
        bench_cache(llm, (4, 9), 2, lambda *at: seen.append(at), prompt=[5, 6])
        assert llm.engine.kv_cache_manager.stats() == before and llm.engine.times.steps == 0
    assert len(seen) == 12 and {name for name, _, _ in seen} == set(CURVE_NAMES)
    assert [done for name, done, _ in seen if name == "cat"] == [4, 9, 13, 18] and seen[0][2] == 18


@pytest.mark.parametrize(
    ("tokens", "repeats", "message"),
    [
        ((64,), 1, "two different numbers"),
        ((1, 8), 1, "each at least 2"),
        ((8, 8), 1, "two different numbers"),
        ((8, 16), 0, "repeats: must be at least 1, got 0"),
        ((64, 128), 1, "1 prompt tokens and 128 new ones exceed the model's limit of 128"),
    ],
)
def test_invalid_marks_are_refused(tokens, repeats, message):
    with make_llm() as llm, pytest.raises(RequestError) as caught:
        bench_cache(llm, tokens, repeats)
    assert message in caught.value.message


def test_marks_up_to_the_limit():
    with make_llm(CONFIGS["plain"]) as llm:
        room = llm.model.config.max_seq_len - 1
        assert bench_cache(llm, (2, room), 1).outputs_agree == room


# ---------------------------------------------------------------- output


@pytest.fixture(scope="module")
def result():
    with make_llm() as llm:
        return bench_cache(llm, (8, 16, 32), 1)


def test_lines_are_flat_json_with_machine_and_commit(result):
    lines = result.lines()
    assert len(lines) == 9 and {line["curve"] for line in lines} == set(CURVE_NAMES)
    for line in lines:
        assert json.loads(json.dumps(line)) == line
        assert line["what"] == "bench cache" and "cores" in line["machine"] and "commit" in line
    (one,) = [line for line in lines if line["curve"] == "recompute" and line["tokens"] == 32]
    assert (
        one["flops"] == result.counted[-1].recomputed.flops and one["seconds"] == result.curves["recompute"].seconds[-1]
    )


def test_text_shows_times_exponents_counts_and_the_formula(result):
    text = "\n".join(bench_lines(result))
    shown = ("torch.cat", "recompute", "exponent", "flatness", "2N/3", "N/2", "21.3", "16.0")
    for words in (*shown, "all three generate the same first 32 of 32 tokens"):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 110


def test_results_are_written_as_json_lines_and_figures(result, tmp_path):
    pytest.importorskip("matplotlib")
    files = write_results(result, tmp_path / "new")
    assert [path.name for path in files] == ["bench-cache.png", "bench-cache.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG") and b"torch.cat" in files[1].read_bytes()
    whole = json.loads((tmp_path / "new" / "bench-cache.json").read_text("utf-8"))
    assert whole["tokens"] == [8, 16, 32] and whole["counted"][2]["cached"]["attention"] > 0
    assert {*whole} == {field.name for field in dataclasses.fields(result)}
    lines = read_jsonl(tmp_path / "new" / "bench-cache.jsonl")
    assert [one.name for one in build_series(lines, "tokens", ["seconds"], by="curve")] == list(CURVE_NAMES)
