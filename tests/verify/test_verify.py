"""``kvad verify``: the rules of its verdicts, that its scenario takes place, its page, its JSON, its exit codes."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.checkpoint.native import save_checkpoint
from kvad.cli.main import main
from kvad.config.layers import (
    AttentionConfig,
    DynamicScalingConfig,
    GatedMLPConfig,
    LayerConfig,
    RopeConfig,
    StackConfig,
)
from kvad.config.model import ModelConfig
from kvad.errors import EngineError, MemoryPlanError, UsageError
from kvad.model.transformer import Transformer
from kvad.text.simple_tokenizers import ByteTokenizer
from kvad.verify.replay import (
    ReplayResult,
    ReplayStream,
    ScenarioCounts,
    compare_logits,
    replay_streams,
    run_uncached,
    tolerance,
)
from kvad.verify.report import EXACT
from kvad.verify.run import verify
from kvad.verify.scenario import (
    ScenarioOptions,
    build_prompts,
    build_streams,
    check_scenario_counts,
    default_sizes,
    require_verify_memory,
)

OPTIONS = ScenarioOptions(num_seqs=3, prefill_chunk_size=8, block_size=4, tokens=8)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(vocab=64, limit=96, **mixer):
    torch.manual_seed(0)
    kinds = {"L": LayerConfig(AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, **mixer}), GatedMLPConfig(48))}
    model = Transformer(
        ModelConfig(
            hidden_size=32, vocab_size=vocab, max_seq_len=limit, decoder=StackConfig(num_layers=3, layer_types=kinds)
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return model.eval().requires_grad_(False)


def run(model, options=OPTIONS, **more):
    return verify(model, build_prompts(model.config, options, None), options, **more)


# ---------------------------------------------------------------- verdicts


def test_every_memory_gets_its_word():
    report = run(tiny())
    assert [m.structure <= EXACT for m in report.cases] == [True] * 8
    words = {(m.layout, m.dtype): m.verdict for m in report.cases}
    for layout in ("paged", "contiguous"):
        assert words[layout, "float32"] == words[layout, "float64"] == "exact"
        assert words[layout, "bfloat16"] in ("within tolerance", "lossy by design")
        assert words[layout, "float16"] == "within tolerance"
    assert not report.broken and report.verdict().startswith("exact (paged float32, paged float64, contiguous")


def test_the_scenario_takes_place():
    paged, contiguous = run(tiny(), dataclasses.replace(OPTIONS, dtypes=("float64",))).cases
    for happened in (paged.scenario_counts, contiguous.scenario_counts):
        assert all(happened[name] for name in ("chunks", "mixed", "preemptions", "recomputed", "forks")), happened
        assert happened["rows"] == 5  # three prompts, a second sample, and the row that shares a prefix
    assert paged.scenario_counts["hit_tokens"] > 0 == contiguous.scenario_counts["hit_tokens"]
    assert paged.compared == paged.scenario_counts["tokens"]


@pytest.mark.parametrize(
    ("happened", "what"),
    [
        (ScenarioCounts(hit_tokens=4, chunks=1), "preemption"),
        (ScenarioCounts(preemptions=1, chunks=1), "prefix hit"),
        (ScenarioCounts(preemptions=1, hit_tokens=4), "chunked prompt"),
    ],
)
def test_what_silently_did_not_happen_is_an_error(happened, what):
    streams = [ReplayStream(tuple(range(20)), ((1, 2),))]
    with pytest.raises(EngineError, match=f"the requested {what} did not occur"):
        check_scenario_counts(happened, streams, OPTIONS, "paged")


def test_without_preemption_and_hits_nothing_is_recomputed():
    options = dataclasses.replace(OPTIONS, preempt=False, prefix_hit=False, dtypes=("float64",))
    for memory in run(tiny(), options).cases:
        assert memory.verdict == "exact"
        assert (
            memory.scenario_counts["preemptions"]
            == memory.scenario_counts["recomputed"]
            == memory.scenario_counts["hit_tokens"]
            == 0
        )


def test_one_row_is_enough():
    assert not run(tiny(), dataclasses.replace(OPTIONS, num_seqs=1, dtypes=("float64",))).broken


@pytest.mark.parametrize("limit", [4, 12, 40])
def test_a_low_limit_is_no_obstacle(limit):
    model = tiny(limit=limit)
    tokens, block_size = default_sizes(model.config, None, None)
    options = ScenarioOptions(
        num_seqs=4, tokens=tokens, block_size=block_size, prefill_chunk_size=2, dtypes=("float64",), preempt=limit > 4
    )
    assert not run(model, options).broken


def test_lossy_by_design():
    """Scores so sharp that rounding a key moves whole weights: the structure is exact, the loss is the precision's."""
    report = run(tiny(softmax_scale=12.0), dataclasses.replace(OPTIONS, dtypes=("bfloat16", "float64")))
    assert [m.verdict for m in report.cases] == ["lossy by design", "exact"] * 2
    assert all(m.max_dlogit > m.tolerance for m in report.cases if m.dtype == "bfloat16")


@pytest.mark.parametrize("stored", ["int8", "int4", "fp8-e4m3", "fp8-e5m2", "int8/int4", "float32/int8"])
def test_a_lossy_format_is_never_called_exact(stored):
    """Its structure is: beside the model whose keys and values go through it."""
    report = run(tiny(), dataclasses.replace(OPTIONS, dtypes=("float32", stored)))
    assert [m.verdict for m in report.cases] == ["exact", "lossy by design"] * 2 and not report.broken
    for memory in report.cases[1::2]:
        assert memory.structure <= EXACT and memory.max_dlogit > 1e-4 and memory.kl_mean > 0
    assert report.verdict().endswith(f"lossy by design (paged {stored}, contiguous {stored})")


@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("fault", ["table", "cursor", "layer", "neighbor", "dtype", "mask", "scale"])
def test_a_fault_under_a_lossy_format_is_broken_and_named(fault, stored):
    report = run(tiny(), dataclasses.replace(OPTIONS, dtypes=(stored,), layouts=("paged",)), fault=fault)
    (memory,) = report.cases
    assert memory.verdict == "broken" and memory.structure > EXACT and memory.finding.fault == fault


def test_a_lossy_memory_that_loses_its_scales_is_broken(monkeypatch):
    """No float64 twin has scales to lose: the format's own structure shows it."""
    from kvad.cache.device.tensors import LayerTensor

    def without_scales(self, source, target):
        self.data[target] = self.data[source]

    monkeypatch.setattr(LayerTensor, "copy", without_scales)
    options = dataclasses.replace(OPTIONS, dtypes=("float64", "int8"), layouts=("paged",))
    assert [m.verdict for m in run(tiny(), options).cases] == ["exact", "broken"]


@pytest.mark.parametrize("deep", [0, 2])
def test_an_overflow_is_broken_and_named(deep):
    """float16 ends at 65,504: such a model cannot be cached in it, and that is no tolerable loss."""
    model = tiny(qkv_bias=True, position=None)
    mixer = model.decoder.layers[deep].attention
    with torch.no_grad():  # a dimension of the keys that no query asks for
        mixer.k.bias[::8] = 1e5
        mixer.q.weight[::8], mixer.q.bias[::8] = 0, 0
    report = run(model, dataclasses.replace(OPTIONS, dtypes=("float16", "bfloat16"), layouts=("paged",)))
    half, _ = report.cases
    assert half.verdict == "broken" and math.isinf(half.max_dlogit)
    assert half.finding.fault == "dtype" and half.finding.layer == deep and "ends at" in half.finding.evidence


def test_half_precision_weights_are_verified_too():
    report = run(tiny().bfloat16(), dataclasses.replace(OPTIONS, dtypes=("float32", "bfloat16"), layouts=("paged",)))
    assert report.cases[0].verdict == "exact" and not report.broken


def test_an_injected_fault_that_changes_nothing_is_an_error():
    """Prompts of one token: no step has a key ahead of a query."""
    options = dataclasses.replace(OPTIONS, prefix_hit=False, preempt=False, dtypes=("float64",))
    with pytest.raises(EngineError, match="'mask' changed nothing"):
        verify(tiny(), [[1], [2]], options, fault="mask")


# ---------------------------------------------------------------- numbers


def test_compare_knows_ties_and_divergence():
    judge = {(0, 0): torch.tensor([[0.0, 1.0], [2.0, 2.0 - 1e-6]], dtype=torch.float64)}
    same = compare_logits(ReplayResult({(0, 0): [(0, judge[0, 0])]}), judge, 1e-5)
    assert (same.max_dlogit, same.kl_max, same.divergences) == (0.0, 0.0, ())
    other = judge[0, 0].flip(-1)
    flipped = compare_logits(ReplayResult({(0, 0): [(0, other)]}), judge, 1e-5)
    first, second = flipped.divergences
    assert (first.position, first.tie, first.gap) == (0, False, 1.0)
    assert (second.position, second.tie) == (1, True)
    p = torch.tensor([0.0, 1.0]).softmax(-1)
    assert flipped.kl_max == pytest.approx(float((p * (p / p.flip(-1)).log()).sum()), rel=1e-6)


def test_nan_is_an_infinite_difference():
    judge = {(0, 0): torch.zeros(1, 3)}
    assert math.isinf(
        compare_logits(ReplayResult({(0, 0): [(0, torch.full((1, 3), math.nan))]}), judge, 0.0).max_dlogit
    )


def test_tolerance_is_what_the_rule_says():
    eps = {name: torch.finfo(getattr(torch, name)).eps for name in ("float32", "bfloat16", "float16", "float64")}
    assert tolerance("float32", 30, 1e-14) == 256 * eps["float32"] * 30
    assert tolerance("bfloat16", 30, 1e-14) == (256 * eps["float32"] + 8 * eps["bfloat16"]) * 30
    assert tolerance("float32", 30, 1e-11) == 16 * 1e-11 * eps["float32"] / eps["float64"]
    assert tolerance("float64", 30, 1e-14) == EXACT


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_replay_gives_the_judges_logits(layout):
    """Its own face: waves, forks, a tight pool, and rows of two rotary regimes side by side."""
    model = tiny(position=RopeConfig(scaling=DynamicScalingConfig(4.0, 24))).double()
    long, short = tuple(range(30)), (7, 8, 9)
    streams = [
        ReplayStream(long, ((1, 2, 3, 4, 5),)),
        ReplayStream(short, ((1, 2, 3), (4, 5, 6))),
        ReplayStream((*long[:24], 50), ((9,) * 10,), after=0),
    ]
    cache = CacheConfig(
        layout=layout,
        dtype="float64",
        block_size=4,
        max_num_seqs=4,
        max_seq_len=36,
        prefill_chunk_size=7,
        num_blocks=12 if layout == "paged" else None,
    )
    done = replay_streams(model, cache, streams, squeezes=1)
    assert done.counts.preemptions and done.counts.forks == 1
    for number, stream in enumerate(streams):
        for sample in range(len(stream.forced_tokens)):
            true = run_uncached(model, stream.tokens(sample), stream.limit)
            for start, have in done.pieces[number, sample]:
                torch.testing.assert_close(have, true[start : start + len(have)], atol=1e-12, rtol=0)
            whole = done.logits(number, sample)
            assert whole.shape == true.shape and not whole[-1].isnan().any()


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify") / "model"
    tokenizer = ByteTokenizer()
    model = tiny(vocab=tokenizer.vocab_size)
    save_checkpoint(folder, model.config, model.state_dict(), tokenizer)
    return str(folder)


SMALL = ("--num-prompts", "3", "--prefill-chunk-size", "8", "--block-size", "4", "--max-tokens", "8")


def test_the_page(checkpoint, capsys):
    assert main(["verify", checkpoint, *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("verdict: exact (paged float32")
    assert "preemptions" in out and "tokens from prefix hits" in out and "structure: float64 model and cache" in out


def test_json_holds_everything(checkpoint, capsys):
    assert main(["verify", checkpoint, *SMALL, "--json", "--layout", "paged", "--cache-dtype", "float32,bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] is False and found["injected"] is None and len(found["rules"]) == 8
    assert [(m["layout"], m["dtype"]) for m in found["cases"]] == [("paged", "float32"), ("paged", "bfloat16")]
    first = found["cases"][0]
    assert first["verdict"] == "exact" and first["structure"] <= EXACT and first["scenario_counts"]["hit_tokens"] > 0


def test_a_broken_memory_is_named_and_exits_1(checkpoint, capsys):
    assert main(["verify", checkpoint, *SMALL, "--inject-fault", "mask", "--cache-dtype", "float32"]) == 1
    out = capsys.readouterr().out
    assert (
        "fault      mask: " in out
        and "first at layer 0, sequence 1, position 0 of the float64 case" in out
        and "usually    " in out
    )
    assert out.splitlines()[-1] == "verdict: broken (paged float32, contiguous float32)"


def test_broken_json_names_it_too(checkpoint, capsys):
    assert main(["verify", checkpoint, *SMALL, "--inject-fault", "scale", "--json", "--cache-dtype", "float32"]) == 1
    found = json.loads(capsys.readouterr().out)
    finding = found["cases"][0]["finding"]
    assert found["broken"] and finding["fault"] == "scale" and finding["layer"] == 0 and finding["causes"]


def test_a_rounding_is_named_in_the_precision_that_was_promised(checkpoint, capsys):
    """The float64 twin stores float32 then: true of the twin, and no explanation of a float32 memory."""
    assert (
        main(
            [
                "verify",
                checkpoint,
                *SMALL,
                "--inject-fault",
                "dtype",
                "--layout",
                "paged",
                "--cache-dtype",
                "float32,float64",
            ]
        )
        == 1
    )
    out = capsys.readouterr().out
    single, double = out.split("broken     ")[1:]
    assert single.startswith("paged float32\n") and "of the float32 cache" in single
    assert "rounded to bfloat16, the format is float32" in single
    assert double.startswith("paged float64\n") and "of the float64 case" in double
    assert "rounded to float32, the format is float64" in double


def test_more_rows_than_fit_are_refused_before_anything_is_made(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("kvad.cache.sizing.available_bytes", lambda: 64 * 2**20)
    monkeypatch.setattr("kvad.verify.run._Run", lambda *_, **__: pytest.fail("it was begun"))
    assert main(["verify", checkpoint, "--num-prompts", "1" + "0" * 30]) == 2
    assert main(["verify", checkpoint, "--num-prompts", "100000"]) == 2
    *_, error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("kvad: error: --num-prompts 100000: verifying takes about ") and error.endswith(
        "and 64.0 MiB is available"
    )
    assert hint.startswith("kvad: hint: what would fit: --num-prompts ")


def test_what_would_fit_fits_and_one_more_does_not():
    config = tiny().config
    lengths = [len(prompt) for prompt in build_prompts(config, OPTIONS, None)]
    many = dataclasses.replace(OPTIONS, num_seqs=100_000)
    with pytest.raises(MemoryPlanError) as caught:
        require_verify_memory(config, lengths, many, 64 * 2**20)
    rows = int(caught.value.hint.rpartition(" ")[2])
    require_verify_memory(config, lengths, dataclasses.replace(many, num_seqs=rows), 64 * 2**20)
    with pytest.raises(MemoryPlanError):
        require_verify_memory(config, lengths, dataclasses.replace(many, num_seqs=rows + 1), 64 * 2**20)
    with pytest.raises(MemoryPlanError, match="not even one row fits"):
        require_verify_memory(config, lengths, many, 1000)
    require_verify_memory(config, lengths, many, None)


def test_a_flipped_byte_of_the_weights_is_named(checkpoint, capsys, tmp_path):
    folder = tmp_path / "flipped"
    shutil.copytree(checkpoint, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-9] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert main(["verify", str(folder), *SMALL, "--cache-dtype", "float32"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "model.safetensors" in said.err and "sha256" in said.err


@pytest.mark.parametrize("where", ["kvad.verify.verify", "kvad.checkpoint.loader.load_model"])
def test_ctrl_c_says_that_nothing_was_decided(checkpoint, capsys, monkeypatch, where):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    assert main(["verify", checkpoint, *SMALL]) == 130
    assert capsys.readouterr() == ("", "kvad: interrupted before every configuration was verified: no verdict\n")


def test_one_is_singular(checkpoint, capsys):
    options = ("--num-prompts", "1", "--max-tokens", "2", "--no-preempt")
    options += ("--layout", "contiguous", "--cache-dtype", "float64")
    assert main(["verify", checkpoint, *options]) == 0
    assert "1 forked sample\n" in capsys.readouterr().out


def test_own_prompts_are_the_rows(checkpoint, capsys):
    prompts = ("--prompt", "the cache remembers", "--prompt", "def ")
    small = ("--block-size", "4", "--max-tokens", "6", "--prefill-chunk-size", "8")
    small += ("--cache-dtype", "float32", "--json")
    assert main(["verify", checkpoint, *prompts, *small]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [24, 9, 9, 24]


@pytest.mark.parametrize(
    ("arguments", "word"),
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
    ],
)
def test_bad_input(checkpoint, capsys, arguments, word):
    assert main(["verify", checkpoint, *arguments]) == 2
    assert word in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "kvad: error: " in capsys.readouterr().err


def test_usage_errors_import_no_torch():
    code = (
        "import sys; from kvad.cli.main import main\n"
        "assert main(['verify', 'nowhere', '--inject-fault', 'mesk']) == 2 and main(['verify', '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_prompts_are_ragged_and_known(checkpoint):
    options = ScenarioOptions(num_seqs=4, tokens=8, prefill_chunk_size=8, block_size=4)
    config = tiny(vocab=300).config
    prompts = build_prompts(config, options, ByteTokenizer())
    assert [len(p) for p in prompts] == [25, 15, 9, 1]
    assert bytes(prompts[0]) == b"The cache remembers what "
    with pytest.raises(UsageError, match="leaves no room"):
        build_prompts(config, dataclasses.replace(options, tokens=96), None)
    streams = build_streams(tiny(vocab=300), prompts, options)
    assert streams[-1].prompt[:24] == streams[0].prompt[:24] and streams[-1].prompt != streams[0].prompt


def test_a_broken_structure_widens_no_tolerance():
    """The twin's noise is part of the float32 tolerance; a twin that is wrong must not make ties of differences."""
    options = dataclasses.replace(OPTIONS, layouts=("paged",), dtypes=("float32",))
    sound, hurt = run(tiny(), options), run(tiny(), options, fault="mask")
    assert hurt.cases[0].tolerance <= sound.cases[0].tolerance * 1.01
    assert hurt.cases[0].ties < hurt.cases[0].compared - hurt.cases[0].agree


def test_a_config_edited_by_hand_is_verified(checkpoint, capsys, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert main(["verify", str(folder), *SMALL, "--cache-dtype", "float32"]) == 0
