"""Adapters in PEFT's layout: what PEFT made is read with its logits, what kvad writes is what PEFT wrote.

The goldens are PEFT's own (``tests/hf_parity/adapters.py``).  What is more than two matrices a module is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from kvad.checkpoint.adapter import (
    adapter_format,
    base_fingerprint,
    find_adapter,
    merge_adapter,
    open_adapter,
    save_adapter,
    write_merged,
)
from kvad.checkpoint.export import import_hf
from kvad.checkpoint.folder import read_json
from kvad.checkpoint.loader import load_model, load_weights, open_checkpoint
from kvad.checkpoint.peft import find_targets, match_targets, trainable_linears
from kvad.errors import CheckpointError, ConfigError
from kvad.model.lora import LoraFactors, merge_weight
from kvad.model.no_cache import NoCache
from kvad.model_input import ModelInput, SubBatch
from tests.hf_parity import adapters, checkpoint


def _step(ids):
    tokens = torch.tensor(np.asarray(ids).reshape(-1))
    every = torch.arange(len(tokens))
    return ModelInput(
        tokens, every, (SubBatch(1, len(tokens), len(tokens)),), every, max_seq_lens=torch.full_like(every, len(tokens))
    )


@torch.inference_mode()
def logits(model, arrays):
    step = _step(arrays["long/input_ids"])
    if model.config.kind == "encoder-decoder":
        step = _step(arrays["long/decoder_input_ids"])._replace(encoder_input=step)
    return model.logits(model(step, NoCache(model.config)), step.logit_indices).numpy()


@pytest.fixture
def golden(tmp_path):
    """``golden(case)``: base and adapter as PEFT left them, the base's input, and the logits of both together."""

    def make(case):
        meta, arrays = checkpoint.load("4.57", case)
        base = checkpoint.write(meta, arrays, tmp_path / case / "base")
        said, wanted = adapters.load(case)
        folder = tmp_path / case / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(
            json.dumps({**said["config"], "base_model_name_or_path": str(base)})
        )
        save_file(adapters.tensors(said), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return base, folder, arrays, wanted

    return make


@pytest.mark.parametrize("case", adapters.CASES)
def test_a_peft_adapter_gives_pefts_logits(golden, case):
    base, folder, arrays, wanted = golden(case)
    found = logits(load_model(folder, "float64")[0], arrays)  # its config names the base
    beside = logits(load_weights(merge_adapter(open_checkpoint(base), folder), "float64"), arrays)
    assert np.array_equal(found, beside)
    near = 1e-12 if case in ("gpt2", "bart", "falcon-new-decoder") else 2e-5  # transformers norms the others in float32
    assert np.abs(found - wanted).max() < near
    assert np.abs(logits(load_model(base, "float64")[0], arrays) - wanted).max() > 0.5, "it adds nothing"


@pytest.mark.parametrize("case", adapters.CASES)
def test_written_adapters_equal_pefts(golden, case, tmp_path):
    base, folder, _, _ = golden(case)
    opened, there = open_checkpoint(base), read_json(folder / "adapter_config.json")
    factors = open_adapter(folder).factors(opened)
    form = adapter_format(opened, str(base), base_fingerprint(opened))
    how = {"rank": there["r"], "alpha": there["lora_alpha"], "use_rslora": there["use_rslora"], "dropout": 0.0}
    save_adapter(tmp_path / "ours", form, factors, **how)
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "ours", folder))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    here = read_json(tmp_path / "ours" / "adapter_config.json")
    for name in ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "base_model_name_or_path"):
        assert here[name] == there[name] or (name == "task_type" and there[name] is None), name
    assert here["fan_in_fan_out"] == there["fan_in_fan_out"]
    every = find_targets(opened.family, opened.config).modules
    hit = {module for module in every for end in here["target_modules"] if f".{module}".endswith(f".{end}")}
    assert hit == {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in theirs}


@pytest.mark.parametrize("case", ["gpt2", "falcon-new-decoder", "bloom", "phi3", "modernbert"])
@pytest.mark.parametrize("parts", ["qv", "all"])
def test_adapters_of_a_fused_module_round_trip(case, parts, tmp_path):
    """Each of q, k, v with an A of its own becomes one adapter of a module that is all three, block by block."""
    meta, arrays = checkpoint.load("4.57", case)
    opened = open_checkpoint(checkpoint.write(meta, arrays, tmp_path / "base"))
    shapes = trainable_linears(opened.config)
    chosen = [name for name in shapes if parts == "all" or name.endswith((".q", ".v"))]
    torch.manual_seed(0)
    factors = {n: LoraFactors(torch.randn(2, shapes[n][1]), torch.randn(shapes[n][0], 2), 3.0) for n in chosen}
    form = adapter_format(opened, str(opened.path), base_fingerprint(opened))
    save_adapter(tmp_path / "a", form, factors, rank=2, alpha=6.0, use_rslora=False, dropout=0.0)
    again = open_adapter(tmp_path / "a").factors(opened)
    assert again.keys() == factors.keys()
    for name, (a, b, scale) in factors.items():
        assert torch.equal(again[name].a, a) and torch.equal(again[name].b, b) and again[name].scale == scale
    # and as PEFT reads them: one product with their module's weight, turned where theirs is
    (tmp_path / "a" / "adapter.json").unlink()
    theirs = open_adapter(tmp_path / "a").factors(opened)
    for name in shapes:
        zero = torch.zeros(shapes[name])
        want = merge_weight(zero, factors[name]) if name in factors else zero
        assert torch.allclose(merge_weight(zero, theirs[name]) if name in theirs else zero, want, atol=1e-5)


def test_a_merged_model_has_the_layout_of_its_base(golden, tmp_path):
    base, folder, arrays, wanted = golden("llama-tied")
    adapted = merge_adapter(open_checkpoint(base), folder)
    write_merged(adapted, tmp_path / "hf")
    there, here = (read_json(f / "config.json") for f in (base, tmp_path / "hf"))
    assert {n: v for n, v in here.items() if n not in ("dtype", "torch_dtype")} == {
        n: v for n, v in there.items() if n not in ("dtype", "torch_dtype")
    }
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == set(load_file(base / "model.safetensors"))
    assert np.abs(logits(load_model(tmp_path / "hf", "float64")[0], arrays) - wanted).max() < 1e-4
    import_hf(open_checkpoint(base), tmp_path / "own")  # the same base under kvad's names: it came from a family
    own = merge_adapter(open_checkpoint(tmp_path / "own"), folder)
    write_merged(own, tmp_path / "own-merged", torch.float64)
    model, opened = load_model(tmp_path / "own-merged")
    assert opened.stored_dtype == torch.float64 and opened.files is not None
    assert np.abs(logits(model, arrays) - wanted).max() < 2e-5


def test_the_fingerprint_covers_base_and_adapter(golden):
    base, folder, _, _ = golden("llama-tied")
    before = merge_adapter(open_checkpoint(base), folder)
    assert before.fingerprint() == merge_adapter(open_checkpoint(base), folder).fingerprint()
    path = folder / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    after = merge_adapter(open_checkpoint(base), folder)
    assert after.adapter_fingerprint != before.adapter_fingerprint and after.fingerprint() != before.fingerprint()


def test_an_adapter_of_a_native_model_has_kvads_names(tmp_path):
    from kvad.checkpoint.native import save_checkpoint
    from kvad.model.transformer import Transformer
    from tests.support.random_models import model_config

    model = Transformer(model_config("t5", "sandwich", "sinks"))
    save_checkpoint(tmp_path / "base", model.config, model.state_dict(), None)
    opened = open_checkpoint(tmp_path / "base")
    shapes = trainable_linears(opened.config)
    factors = {n: LoraFactors(torch.randn(2, i), torch.randn(o, 2), 1.5) for n, (o, i) in shapes.items()}
    form = adapter_format(opened, str(opened.path), base_fingerprint(opened))
    save_adapter(tmp_path / "a", form, factors, rank=2, alpha=3.0, use_rslora=False, dropout=0.0)
    assert read_json(tmp_path / "a" / "adapter.json")["names"] == "kvad"
    names = set(load_file(tmp_path / "a" / "adapter_model.safetensors"))
    assert "base_model.model.decoder.layers.0.attention.q.lora_A.weight" in names
    both = load_model(tmp_path / "a", "float64")[0]
    weight = model.decoder.layers[1].mlp.gate.weight.double()
    a, b, scale = factors["decoder.layers.1.mlp.gate"]
    assert (both.decoder.layers[1].mlp.gate.weight - (weight + scale * b.double() @ a.double())).abs().max() < 1e-12


# ---------------------------------------------------------------- bad input


def _edited(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all': trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "the base's weights were changed"),
        ({"tomorrow": {"x": 1}}, "tomorrow .* is not supported"),
        ({"r": 0}, "r: must be a number above 0, got 0"),
        ({"r": 4}, "has rank 3, its config has 4"),
        ({"rank_pattern": [3]}, "rank_pattern: must be an object"),
        ({"base_model_name_or_path": "/no/such"}, "its base cannot be opened: no such folder: /no/such"),
        ({"base_model_name_or_path": None}, "does not name its base"),
    ],
)
def test_unsupported_adapter_options_are_refused(golden, changes, said):
    _, folder, _, _ = golden("llama")
    _edited(folder, **changes)
    with pytest.raises(CheckpointError, match=said):
        load_weights(open_checkpoint(folder))


def test_another_base_is_refused(golden):
    _, folder, _, _ = golden("llama")
    other, *_ = golden("gpt2")
    with pytest.raises(CheckpointError, match="is no adaptable layer of this model"):
        load_weights(merge_adapter(open_checkpoint(other), folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    save_file({**tensors, name: tensors[name][:, 1:].copy()}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="do not fit the model's"):
        load_weights(open_checkpoint(folder))
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lora_A\.weight is missing"):
        load_weights(open_checkpoint(folder))
    save_file({**tensors, "base_model.model.x.lora_embedding_A": tensors[name]}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lora_embedding_A is not supported"):
        load_weights(open_checkpoint(folder))


def test_an_incomplete_adapter_is_refused(golden, tmp_path):
    base, folder, _, _ = golden("llama")
    opened = open_checkpoint(base)
    form = adapter_format(opened, str(base), base_fingerprint(opened))
    save_adapter(
        tmp_path / "a", form, open_adapter(folder).factors(opened), rank=3, alpha=12.0, use_rslora=False, dropout=0.0
    )
    path = tmp_path / "a" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tmp_path / "a")
    assert find_adapter(base) is None and find_adapter(tmp_path / "none") is None


def test_matrices_of_experts_have_no_adapters(tmp_path):
    meta, arrays = checkpoint.load("4.57", "mixtral")
    opened = open_checkpoint(checkpoint.write(meta, arrays, tmp_path / "base"))
    assert {name.rpartition(".")[2] for name in match_targets(opened.config, ["all"])} == {"q", "k", "v", "out"}
    with pytest.raises(ConfigError, match="'gate' matches no linear layer"):
        match_targets(opened.config, ["gate"])


def test_the_command_merges_and_the_merged_model_runs(golden, tmp_path):
    from click.testing import CliRunner

    from kvad.cli.main import cli

    base, folder, arrays, wanted = golden("gpt2")
    out = tmp_path / "merged"
    done = CliRunner().invoke(cli, ["merge", str(base), str(folder), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and "written" in done.output
    assert np.abs(logits(load_model(out, "float64")[0], arrays) - wanted).max() < 1e-5
    with pytest.raises(Exception, match="exists"):
        CliRunner().invoke(cli, ["merge", str(base), str(folder), "--out", str(out)], catch_exceptions=False)
