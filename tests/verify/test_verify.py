"""``kvad verify``: verdicts, the events of its scenario, its output and its exit codes."""

import dataclasses
import json
import math
import shutil

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device.tensors import LayerTensor
from kvad.cli.main import main
from kvad.config.layers import DynamicScalingConfig, RopeConfig
from kvad.errors import EngineError, MemoryPlanError, UsageError
from kvad.text.simple_tokenizers import ByteTokenizer
from kvad.verify import references, scenario
from kvad.verify.reference_model import ReferenceModel, reference_model
from kvad.verify.references import compare_logits, derive_tolerance
from kvad.verify.replay import ReplayEngine, ReplayResult, ReplayStream, ScenarioCounts
from kvad.verify.report import EXACT
from kvad.verify.run import verify
from kvad.verify.scenario import ScenarioOptions, build_prompts
from tests.cli.test_main import assert_loads_no_torch
from tests.support.uncached import run_uncached
from tests.support.verify_models import FLAGS, OPTIONS, run_verify, tiny_model

# ---------------------------------------------------------------- verdicts


def test_every_case_gets_a_verdict():
    report = run_verify(tiny_model(), dtypes=("float32", "bfloat16", "float16", "float64"))
    assert all(case.structure <= EXACT for case in report.cases) and len(report.cases) == 8
    verdicts = {(case.layout, case.dtype): case.verdict for case in report.cases}
    for layout in ("paged", "contiguous"):
        assert verdicts[layout, "float32"] == verdicts[layout, "float64"] == "exact"
        assert verdicts[layout, "bfloat16"] in ("within tolerance", "lossy by design")
        assert verdicts[layout, "float16"] == "within tolerance"
    assert not report.broken and report.verdict().startswith("exact (paged float32, paged float64, contiguous")


def test_scenario_events_occur():
    paged, contiguous = run_verify(tiny_model()).cases
    for counts in (paged.scenario_counts, contiguous.scenario_counts):
        assert all(counts[name] for name in ("chunks", "mixed", "preemptions", "recomputed", "forks")), counts
        assert counts["rows"] == 7  # three prompts, a second sample, one that shares a prefix, two that must not
    assert paged.scenario_counts["hit_tokens"] > 0 == contiguous.scenario_counts["hit_tokens"]
    assert paged.compared == paged.scenario_counts["tokens"]


@pytest.mark.parametrize(
    ("counts", "event"),
    [
        (ScenarioCounts(hit_tokens=4, chunks=1), "preemption"),
        (ScenarioCounts(preemptions=1, chunks=1), "prefix hit"),
        (ScenarioCounts(preemptions=1, hit_tokens=4), "chunked prompt"),
    ],
)
def test_missing_event_is_an_error(counts, event):
    streams = [ReplayStream(tuple(range(20)), ((1, 2),))]
    with pytest.raises(EngineError, match=f"the requested {event} did not occur"):
        scenario.check_scenario_counts(ReplayResult({}, counts), streams, OPTIONS, "paged")


def test_nothing_is_recomputed_without_preemption_and_prefix_hits():
    for case in run_verify(tiny_model(), preempt=False, prefix_hit=False).cases:
        assert case.verdict == "exact"
        assert not any(case.scenario_counts[name] for name in ("preemptions", "recomputed", "hit_tokens"))


def test_one_sequence_is_enough():
    assert not run_verify(tiny_model(), num_seqs=1).broken


@pytest.mark.parametrize("limit", [4, 12, 40])
def test_models_with_a_low_limit(limit):
    model = tiny_model(limit=limit)
    tokens, block_size = scenario.default_sizes(model.config, None, None)
    options = {"num_seqs": 4, "tokens": tokens, "block_size": block_size, "prefill_chunk_size": 2}
    assert not run_verify(model, **options, preempt=limit > 4).broken


def test_rounding_of_sharp_attention_is_within_the_derived_tolerance():
    """Rounding a key moves whole attention weights, in the plain model too."""
    mild, sharp = (
        run_verify(tiny_model(softmax_scale=scale, layers=3), dtypes=("bfloat16",), layouts=("paged",)).cases[0]
        for scale in (0.3, 12.0)
    )
    assert mild.verdict == sharp.verdict == "within tolerance" and sharp.max_dlogit > 2 * mild.tolerance


def test_rounding_beyond_the_tolerance_is_lossy_by_design(monkeypatch):
    monkeypatch.setattr(references, "NOISE_FACTOR", 0.5)
    report = run_verify(tiny_model(), dtypes=("bfloat16", "float64"), layouts=("paged",))
    assert [case.verdict for case in report.cases] == ["lossy by design", "exact"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stored", ["int8", "int4", "fp8-e4m3", "fp8-e5m2", "int8/int4", "float32/int8"])
def test_lossy_formats_have_an_exact_structure_and_are_never_exact(stored):
    report = run_verify(tiny_model(), dtypes=("float32", stored))
    assert [case.verdict for case in report.cases] == ["exact", "lossy by design"] * 2 and not report.broken
    for case in report.cases[1::2]:
        assert case.structure <= EXACT and case.max_dlogit > 1e-4 and case.kl_mean > 0
    assert report.verdict().endswith(f"lossy by design (paged {stored}, contiguous {stored})")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("fault", ["table", "cursor", "layer", "neighbor", "dtype", "mask", "scale"])
def test_fault_under_a_lossy_format_is_named(fault, stored):
    (case,) = run_verify(tiny_model(), dtypes=(stored,), layouts=("paged",), fault=fault).cases
    assert case.verdict == "broken" and case.structure > EXACT and case.finding.fault == fault


def test_lost_scales_are_broken(monkeypatch):
    """The float64 case has no scales to lose, so the format's own structure must show it."""

    def copy_without_scales(self, copies):
        for source, target, _ in copies:
            self.data[target] = self.data[source]

    monkeypatch.setattr(LayerTensor, "copy", copy_without_scales)
    report = run_verify(tiny_model(), dtypes=("float64", "int8"), layouts=("paged",))
    assert [case.verdict for case in report.cases] == ["exact", "broken"]


@pytest.mark.parametrize("layer", [0, 2])
def test_overflow_is_named(layer):
    """float16 ends at 65,504."""
    model = tiny_model(qkv_bias=True, position=None, layers=3)
    attention = model.decoder.layers[layer].attention
    with torch.no_grad():  # a dimension of the keys that no query reads
        attention.k.bias[::8] = 1e5
        attention.q.weight[::8], attention.q.bias[::8] = 0, 0
    half, _ = run_verify(model, dtypes=("float16", "bfloat16"), layouts=("paged",)).cases
    assert half.verdict == "broken" and math.isinf(half.max_dlogit)
    assert half.finding.fault == "dtype" and half.finding.layer == layer and "ends at" in half.finding.evidence


def test_half_precision_weights():
    report = run_verify(tiny_model().bfloat16(), dtypes=("float32", "bfloat16"), layouts=("paged",))
    assert report.cases[0].verdict == "exact" and not report.broken


def test_injected_fault_without_effect_is_an_error():
    """Prompts of one token: no step has a key after a query."""
    options = dataclasses.replace(OPTIONS, prefix_hit=False, preempt=False)
    with pytest.raises(EngineError, match="'mask' changed nothing"):
        verify(tiny_model(), [[1], [2]], options, fault="mask")


def test_broken_structure_does_not_widen_the_tolerance():
    """The tolerance is derived from the plain model, which has no fault."""
    options = {"layouts": ("paged",), "dtypes": ("float32",)}
    (intact,) = run_verify(tiny_model(), **options).cases
    (broken,) = run_verify(tiny_model(), **options, fault="mask").cases
    assert broken.tolerance <= intact.tolerance * 1.01
    assert broken.ties < broken.compared - broken.agree


# ---------------------------------------------------------------- numbers


def test_ties_divergences_and_kl_by_hand():
    reference = {(0, 0): torch.tensor([[0.0, 1.0], [2.0, 2.0 - 1e-6]], dtype=torch.float64)}
    same = compare_logits(ReplayResult({(0, 0): [(0, reference[0, 0])]}), reference, 1e-5)
    assert (same.max_dlogit, same.kl_max, same.agree, same.first_divergence) == (0.0, 0.0, 2, None)
    flipped = compare_logits(ReplayResult({(0, 0): [(0, reference[0, 0].flip(-1))]}), reference, 1e-5)
    first = flipped.first_divergence
    assert (first.position, first.tie, first.gap) == (0, False, 1.0)
    assert (flipped.compared, flipped.agree, flipped.ties) == (2, 0, 1)
    p = torch.tensor([0.0, 1.0]).softmax(-1)
    assert flipped.kl_max == pytest.approx(float((p * (p / p.flip(-1)).log()).sum()), rel=1e-6)


def test_an_engine_that_failed_at_once_has_no_logits_to_compare():
    comparison = compare_logits(ReplayResult({}), {}, 0.0)
    assert comparison.compared == 0 and math.isnan(comparison.kl_max)


def test_nan_is_an_infinite_difference():
    nan, reference = torch.full((1, 3), math.nan), {(0, 0): torch.zeros(1, 3)}
    assert math.isinf(compare_logits(ReplayResult({(0, 0): [(0, nan)]}), reference, 0.0).max_dlogit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tolerance_is_derived_from_the_plain_model(dtype):
    pieces = {(0, 0): [(0, torch.tensor([[3e-3, 4e-3], [0.0, 0.0]]))]}
    noise = compare_logits(ReplayResult(pieces), {(0, 0): torch.zeros(2, 2)}, 0.0)
    smaller = dataclasses.replace(noise, max_dlogit=noise.max_dlogit / 2, rms_dlogit=noise.rms_dlogit / 2)
    eps, tolerance = torch.finfo(dtype).eps, derive_tolerance([smaller, noise, smaller], dtype, 30.0)
    assert tolerance == pytest.approx((4 * 4e-3 + 30 * eps, 2 * 2.5e-3 + 30 * eps / 8), rel=1e-6)
    assert derive_tolerance([noise], torch.float64, 30.0) == (EXACT, EXACT)
    assert tolerance.allows(noise)
    assert not tolerance.allows(dataclasses.replace(noise, rms_dlogit=1.1 * tolerance.rms_dlogit))
    assert not tolerance.allows(dataclasses.replace(noise, max_dlogit=1.1 * tolerance.max_dlogit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_order_of_sums_that_is_right_by_luck_does_not_narrow_the_tolerance(dtype, monkeypatch):
    """In float32 the engine sums in an order of its own; in bfloat16 what is rounded is the same in every order."""
    whole_logits, orders = ReferenceModel.whole_logits, []

    def lucky(self, sequences, cache, *, sum_order=0, **options):
        if self.compute_dtype == dtype:
            orders.append(sum_order)
        if self.compute_dtype == torch.float32 and sum_order == 0:
            exact = reference_model(model, torch.float64)
            return [logits.float() for logits in whole_logits(exact, sequences, cache, **options)]
        return whole_logits(self, sequences, cache, sum_order=sum_order, **options)

    model = tiny_model(layers=3).to(dtype)
    monkeypatch.setattr(ReferenceModel, "whole_logits", lucky)
    (case,) = run_verify(
        model, dtypes=("bfloat16" if dtype == torch.bfloat16 else "float32",), layouts=("paged",)
    ).cases
    assert case.verdict != "broken" and sorted(set(orders)) == ([0] if dtype == torch.bfloat16 else [0, 1, 2, 3])


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_replay_equals_the_uncached_model(layout):
    """Streams that start late, forks, preemptions, and two rotary regimes; the last stream changes its own."""
    model = tiny_model(position=RopeConfig(scaling=DynamicScalingConfig(4.0, 24))).double()
    long, short = tuple(range(30)), (7, 8, 9)
    streams = [ReplayStream(long, ((1, 2, 3, 4, 5),)), ReplayStream(short, ((1, 2, 3), (4, 5, 6)))]
    streams.append(ReplayStream((*long[:20], 50), ((9,) * 10,), after=0))
    sizes = {"block_size": 4, "max_num_seqs": 4, "max_seq_len": 36, "prefill_chunk_size": 7}
    cache = CacheConfig(layout=layout, dtype="float64", num_blocks=18 if layout == "paged" else None, **sizes)
    with ReplayEngine(model, cache, streams) as replay:
        replay.run_all(squeezes=1)
    result = replay.result
    assert result.counts.preemptions and result.counts.forks == 1
    for number, stream in enumerate(streams):
        for sample in range(len(stream.forced_tokens)):
            true = run_uncached(model, stream.tokens(sample))
            for start, logits in result.pieces[number, sample]:
                torch.testing.assert_close(logits, true[start : start + len(logits)], atol=1e-12, rtol=0)
            whole = result.logits(number, sample)
            assert whole.shape == true.shape and not whole[-1].isnan().any()


def test_prompts_have_known_lengths_and_texts():
    options = dataclasses.replace(OPTIONS, num_seqs=4)
    model = tiny_model(vocab=300)
    prompts = build_prompts(model.config, options, ByteTokenizer())
    assert [len(prompt) for prompt in prompts] == [25, 15, 9, 1]
    assert bytes(prompts[0]) == b"The cache remembers what "
    with pytest.raises(UsageError, match="leaves no room"):
        build_prompts(model.config, dataclasses.replace(options, tokens=96), None)
    streams = scenario.build_streams(model, prompts, options)
    shared, salted, other = streams[-3:]
    assert shared.prompt[:24] == streams[0].prompt[:24] and shared.prompt != streams[0].prompt
    assert salted.prompt == streams[0].prompt[:5] and salted.salt and not shared.salt
    assert other.prompt[4:] == streams[0].prompt[4:9] and other.prompt[0] != streams[0].prompt[0]


def test_options_without_a_policy_are_refused():
    with pytest.raises(UsageError, match="nothing to verify"):
        ScenarioOptions(policies=())


# ---------------------------------------------------------------- memory


def test_too_many_prompts_are_refused_before_anything_is_built(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("kvad.cache.sizing.available_bytes", lambda: 64 * 2**20)
    monkeypatch.setattr("kvad.verify.run._Run", lambda *_, **__: pytest.fail("a run was built"))
    for number in ("1" + "0" * 30, "100000"):
        assert main(["verify", checkpoint, "--num-prompts", number]) in (1, 2)
    *_, error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("kvad: error: --num-prompts 100000: verifying takes about ")
    assert error.endswith("and 64.00 MiB is available")
    assert hint.startswith("kvad: hint: what would fit: --num-prompts ")


def test_suggested_number_of_prompts_is_the_largest_that_fits():
    config = tiny_model().config
    lengths = [len(prompt) for prompt in build_prompts(config, OPTIONS, None)]

    def require(num_seqs, available=64 * 2**20):
        options = dataclasses.replace(OPTIONS, num_seqs=num_seqs)
        scenario.require_verify_memory(config, lengths, options, available)

    with pytest.raises(MemoryPlanError) as error:
        require(100_000)
    largest = int(error.value.hint.rpartition(" ")[2])
    require(largest)
    with pytest.raises(MemoryPlanError):
        require(largest + 1)
    with pytest.raises(MemoryPlanError, match="not even one prompt fits"):
        require(100_000, 1000)
    require(100_000, None)


# ---------------------------------------------------------------- the command


def test_printed_page(checkpoint, capsys):
    assert main(["verify", checkpoint, *FLAGS]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("verdict: exact (paged float32")
    assert "preemptions" in out and "tokens from prefix hits" in out
    assert "structure: the engine in float64" not in out  # the rules are printed if a configuration is broken


def test_json_output(checkpoint, capsys):
    assert main(["verify", checkpoint, *FLAGS, "--json", "--layout", "paged", "--cache-dtype", "float32,bfloat16"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["broken"] is False and result["injected"] is None and len(result["rules"]) == 11
    assert [(case["layout"], case["dtype"]) for case in result["cases"]] == [
        ("paged", "float32"),
        ("paged", "bfloat16"),
    ]
    first = result["cases"][0]
    assert first["verdict"] == "exact" and first["structure"] <= EXACT and first["scenario_counts"]["hit_tokens"] > 0


def test_broken_cache_is_named_and_exits_1(checkpoint, capsys):
    command = ["verify", checkpoint, *FLAGS, "--inject-fault", "mask", "--cache-dtype", "float32"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "fault      mask: " in out and "usually    " in out and "rules      engine: the one that" in out
    assert "first at layer 0, sequence 1, position 0 of the float64 case" in out
    assert out.splitlines()[-1] == "verdict: broken (paged float32, contiguous float32)"
    assert main([*command, "--json", "--layout", "paged"]) == 1
    result = json.loads(capsys.readouterr().out)
    finding = result["cases"][0]["finding"]
    assert result["broken"] and (finding["fault"], finding["layer"]) == ("mask", 0) and finding["causes"]


def test_rounding_is_named_in_the_precision_of_the_case(checkpoint, capsys):
    """The float64 case stores float32 then, which would not explain a float32 cache."""
    options = ["--inject-fault", "dtype", "--layout", "paged", "--cache-dtype", "float32,float64"]
    assert main(["verify", checkpoint, *FLAGS, *options]) == 1
    single, double = capsys.readouterr().out.split("broken     ")[1:]
    assert single.startswith("paged float32\n") and "of the float32 cache" in single
    assert "rounded to bfloat16, the format is float32" in single
    assert double.startswith("paged float64\n") and "of the float64 case" in double
    assert "rounded to float32, the format is float64" in double


def test_changed_weights_are_refused(checkpoint, capsys, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "changed")
    command = ["verify", str(folder), *FLAGS, "--cache-dtype", "float32", "--layout", "paged"]
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-9] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert main(command) == 2
    output = capsys.readouterr()
    assert output.out == "" and "model.safetensors" in output.err and "sha256" in output.err


@pytest.mark.parametrize("function", ["kvad.verify.verify", "kvad.checkpoint.loader.load_weights"])
def test_interrupted_run_has_no_verdict(checkpoint, capsys, monkeypatch, function):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(function, interrupt)
    assert main(["verify", checkpoint, *FLAGS]) == 130
    assert capsys.readouterr() == ("", "kvad: interrupted before every configuration was verified: no verdict\n")


def test_one_forked_sample_is_singular(checkpoint, capsys):
    options = ("--num-prompts", "1", "--max-tokens", "2", "--no-preempt", "--layout", "contiguous")
    assert main(["verify", checkpoint, *options, "--cache-dtype", "float64"]) == 0
    assert "1 forked sample\n" in capsys.readouterr().out


def test_given_prompts_are_used(checkpoint, capsys):
    prompts = ("--prompt", "the cache remembers", "--prompt", "def ", "--cache-dtype", "float32", "--json")
    sizes = ("--block-size", "4", "--max-tokens", "6", "--prefill-chunk-size", "8")
    assert main(["verify", checkpoint, *prompts, *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [24, 9, 9, 24, 6, 10]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--inject-fault", "mesk"), "did you mean 'mask'"),
        (("--layout", "pagd"), "did you mean 'paged'"),
        (("--cache-dtype", "float31"), "did you mean 'float32'"),
        (("--num-prompts", "0"), "--num-prompts: must be at least 1"),
        (("--max-tokens", "96"), "the model's limit is 96"),
        (("--prompt", "def ", "--max-tokens", "4"), "no more than a block of 16"),
        (("--prompt", "a", "--num-prompts", "2"), "--num-prompts 2, but 1 prompts"),
        (("--prompt", "x" * 90, "--max-tokens", "9"), "limit of 96"),
        (("--inject-fault", "mask", "--prefill-chunk-size", "1"), "--prefill-chunk-size 1"),
        ((*FLAGS, "--policy", "windw(3)"), "did you mean 'window'"),
        ((*FLAGS, "--policy", "sinks(3)"), "The signature is sinks(num_sinks, window)"),
        ((*FLAGS, "--endless"), "layer 0 keeps all tokens of a sequence"),
        ((*FLAGS, "--policy", "full", "--endless"), "Use a policy that drops old tokens"),
        (("--round-trip", "prefix-disc"), "--round-trip: 'prefix-disc' is not known"),
        (("--round-trip", "prefix-disc"), "did you mean 'prefix-disk'?"),
        ((*FLAGS, "--round-trip", "swap", "--inject-fault", "mask"), "--inject-fault and --round-trip"),
    ],
)
def test_invalid_options_are_refused(checkpoint, capsys, options, message):
    assert main(["verify", checkpoint, *options]) == 2
    assert message in capsys.readouterr().err


def test_folder_without_checkpoint_is_refused(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "kvad: error: " in capsys.readouterr().err


def test_usage_errors_import_no_torch():
    assert_loads_no_torch("verify", "nowhere", "--inject-fault", "mesk", code=2)
