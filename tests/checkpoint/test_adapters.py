"""Adapters in PEFT's layout, compared with golden files that PEFT wrote (``tests/hf_parity/adapters.py``)."""

import json
import re
from dataclasses import replace

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
)
from kvad.checkpoint.export import import_hf, write_merged
from kvad.checkpoint.folder import read_json
from kvad.checkpoint.loader import load_model, load_weights, open_checkpoint
from kvad.checkpoint.peft import find_targets, match_targets, mergeable_linears, trainable_linears
from kvad.errors import CheckpointError, ConfigError
from kvad.llm import LLM
from kvad.model import whole_sequences
from kvad.model.lora import AdapterSet, LoraFactors, merge_weight, unsupported_layer
from kvad.model.no_cache import NoCache
from tests.hf_parity import adapters, checkpoint
from tests.support.uncached import run_uncached

SETTINGS = {"use_rslora": False, "dropout": 0.0}


def logits(model, arrays):
    source, target = arrays["long/input_ids"].reshape(-1).tolist(), arrays.get("long/decoder_input_ids")
    if target is None:
        return run_uncached(model, source).numpy()
    return run_uncached(model, target.reshape(-1).tolist(), source=source).numpy()


@pytest.fixture
def golden(tmp_path):
    """Return a function that writes a case: PEFT's base and adapter, the base's input, the logits of both."""

    def make(case):
        meta, arrays = checkpoint.load("4.57", case)
        base = checkpoint.write(meta, arrays, tmp_path / case / "base")
        adapter, expected = adapters.load(case)
        folder = tmp_path / case / "adapter"
        folder.mkdir()
        config = {**adapter["config"], "base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(adapters.tensors(adapter), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return base, folder, arrays, expected

    return make


def format_of(opened):
    return adapter_format(opened, str(opened.path), base_fingerprint(opened))


def random_factors(shapes, scale):
    return {name: LoraFactors(torch.randn(2, i), torch.randn(o, 2), scale) for name, (o, i) in shapes.items()}


@pytest.mark.parametrize("case", adapters.CASES)
def test_a_peft_adapter_has_the_logits_of_peft(golden, case):
    base, folder, arrays, expected = golden(case)
    merged = logits(load_model(folder, "float64")[0], arrays)  # the adapter's config names the base
    assert np.array_equal(merged, logits(load_weights(merge_adapter(open_checkpoint(base), folder), "float64"), arrays))
    # transformers computes the other families' norms in float32.
    tolerance = 1e-12 if case in ("gpt2", "bart", "falcon-new-decoder") else 2e-5
    assert np.abs(merged - expected).max() < tolerance
    assert np.abs(logits(load_model(base, "float64")[0], arrays) - expected).max() > 0.5, "the adapter has no effect"


@pytest.mark.parametrize("case", adapters.CASES)
def test_an_adapter_that_a_request_chooses_has_the_logits_of_peft(golden, case):
    base, folder, arrays, expected = golden(case)
    source, target = arrays["long/input_ids"].reshape(-1).tolist(), arrays.get("long/decoder_input_ids")
    texts = [source] if target is None else [target.reshape(-1).tolist(), source]
    with LLM.load(base, dtype="float64", adapters={"x": folder}, max_num_seqs=1, max_seq_len=32) as llm:
        ours = llm.logits(*texts, adapter="x").numpy()
        assert np.abs(ours - expected).max() < (1e-12 if case in ("gpt2", "bart", "falcon-new-decoder") else 2e-5)
        assert np.abs(llm.logits(*texts).numpy() - expected).max() > 0.5, "the adapter has no effect"


@pytest.mark.parametrize("case", ["deepseek-v2", "gptj", "lfm2", "qwen2-moe", "t5"])
def test_the_terms_of_all_layers_equal_merged_weights(case, tmp_path):
    meta, arrays = checkpoint.load("4.57", case)
    opened = open_checkpoint(checkpoint.write(meta, arrays, tmp_path / "base"))
    model, shapes = load_weights(opened, "float64"), mergeable_linears(opened.config)
    torch.manual_seed(0)
    names = [name for name in shapes if unsupported_layer(opened.config, [name]) is None]
    factors = random_factors({name: shapes[name] for name in names}, 0.05)
    outputs = []
    for used in (None, AdapterSet(model, {"x": factors}).select([(1, 7)]), None):
        step = whole_sequences([[3, 4, 5, 6, 7, 8, 9]], torch.device("cpu"))._replace(adapters=used)
        if opened.config.kind == "encoder-decoder":
            step = step._replace(encoder_input=step)
        with torch.inference_mode():
            outputs.append(model.logits(model(step, NoCache(model.config)), step.logit_indices))
        for name in names if used is not None else ():  # for the last output
            layer = model.get_submodule(name)
            layer.weight.data = merge_weight(layer.weight.data, factors[name])
    without, added, merged = outputs
    assert (added - merged).abs().max() < 1e-10 < 0.1 < (without - merged).abs().max()


@pytest.mark.parametrize("case", adapters.CASES)
def test_written_adapters_equal_pefts(golden, case, tmp_path):
    base, folder, _, _ = golden(case)
    opened, expected = open_checkpoint(base), read_json(folder / "adapter_config.json")
    settings = {**SETTINGS, "use_rslora": expected["use_rslora"]}
    factors = open_adapter(folder).factors(opened)
    save_adapter(
        tmp_path / "a", format_of(opened), factors, rank=expected["r"], alpha=expected["lora_alpha"], **settings
    )
    tensors, peft_tensors = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "a", folder))
    assert tensors.keys() == peft_tensors.keys()
    assert all(np.array_equal(tensors[name], peft_tensors[name]) for name in tensors)
    config = read_json(tmp_path / "a" / "adapter_config.json")
    names = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "base_model_name_or_path", "fan_in_fan_out")
    assert {name: config[name] for name in names} == {name: expected[name] for name in names}
    assert expected["task_type"] in (None, config["task_type"])
    modules = find_targets(opened.family, opened.config).modules
    targets = {name for name in modules for end in config["target_modules"] if f".{name}".endswith(f".{end}")}
    assert targets == {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in peft_tensors}


@pytest.mark.parametrize("case", ["gpt2", "falcon-new-decoder", "bloom", "phi3", "modernbert"])
@pytest.mark.parametrize("parts", ["qv", "all"])
def test_adapters_of_a_fused_module_round_trip(case, parts, tmp_path):
    """Adapters of q, k and v become one adapter of the module that has all three, block by block."""
    meta, arrays = checkpoint.load("4.57", case)
    opened = open_checkpoint(checkpoint.write(meta, arrays, tmp_path / "base"))
    shapes = trainable_linears(opened.config)
    chosen = {name: shape for name, shape in shapes.items() if parts == "all" or name.endswith((".q", ".v"))}
    torch.manual_seed(0)
    factors = random_factors(chosen, 3.0)
    save_adapter(tmp_path / "a", format_of(opened), factors, rank=2, alpha=6.0, **SETTINGS)
    read_back = open_adapter(tmp_path / "a").factors(opened)
    assert read_back.keys() == factors.keys()
    for name, (a, b, scale) in factors.items():
        assert (
            torch.equal(read_back[name].a, a) and torch.equal(read_back[name].b, b) and read_back[name].scale == scale
        )
    # PEFT reads no adapter.json: one product with the weight of the fused module.
    (tmp_path / "a" / "adapter.json").unlink()
    peft_factors = open_adapter(tmp_path / "a").factors(opened)
    for name, shape in shapes.items():
        zero = torch.zeros(shape)
        expected = merge_weight(zero, factors[name]) if name in factors else zero
        product = merge_weight(zero, peft_factors[name]) if name in peft_factors else zero
        assert torch.allclose(product, expected, atol=1e-5)


def test_a_merged_model_has_the_layout_of_its_base(golden, tmp_path):
    base, folder, arrays, expected = golden("llama-tied")
    write_merged(merge_adapter(open_checkpoint(base), folder), tmp_path / "hf")
    configs = [read_json(path / "config.json") for path in (base, tmp_path / "hf")]
    assert {**configs[1], "dtype": 0, "torch_dtype": 0} == {**configs[0], "dtype": 0, "torch_dtype": 0}
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == set(load_file(base / "model.safetensors"))
    assert np.abs(logits(load_model(tmp_path / "hf", "float64")[0], arrays) - expected).max() < 1e-4
    import_hf(open_checkpoint(base), tmp_path / "native")  # the same base under kvad's names, with its family recorded
    write_merged(merge_adapter(open_checkpoint(tmp_path / "native"), folder), tmp_path / "merged", torch.float64)
    model, opened = load_model(tmp_path / "merged")
    assert opened.stored_dtype == torch.float64 and opened.files is not None
    assert np.abs(logits(model, arrays) - expected).max() < 2e-5


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
    factors = random_factors(shapes, 1.5)
    save_adapter(tmp_path / "a", format_of(opened), factors, rank=2, alpha=3.0, **SETTINGS)
    assert read_json(tmp_path / "a" / "adapter.json")["names"] == "kvad"
    names = set(load_file(tmp_path / "a" / "adapter_model.safetensors"))
    assert "base_model.model.decoder.layers.0.attention.q.lora_A.weight" in names
    merged = load_model(tmp_path / "a", "float64")[0]
    weight = model.decoder.layers[1].mlp.gate.weight.double()
    a, b, scale = factors["decoder.layers.1.mlp.gate"]
    assert (merged.decoder.layers[1].mlp.gate.weight - (weight + scale * b.double() @ a.double())).abs().max() < 1e-12


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_unsupported_adapter_options_are_refused(golden, changes, message):
    _, folder, _, _ = golden("llama")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        load_weights(open_checkpoint(folder))


def test_another_base_is_refused(golden):
    _, folder, _, _ = golden("llama")
    other, *_ = golden("gpt2")
    with pytest.raises(CheckpointError, match="is no adaptable layer of this model"):
        load_weights(merge_adapter(open_checkpoint(other), folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    for changed, message in (
        ({**tensors, name: tensors[name][:, 1:].copy()}, "do not fit the model's"),
        ({key: tensor for key, tensor in tensors.items() if key != name}, r"lora_A\.weight is missing"),
        ({**tensors, "base_model.model.x.lora_embedding_A": tensors[name]}, "lora_embedding_A is not supported"),
    ):
        save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_weights(open_checkpoint(folder))


def test_adapters_that_requests_choose_must_fit_their_base(golden, tmp_path):
    base, folder, _, _ = golden("llama")
    other, *_ = golden("gpt2")

    def refused(message, model=base, **paths):
        with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
            LLM.load(model, adapters=paths)
        assert "\n" not in str(caught.value)

    path = re.escape(str(folder / "adapter_model.safetensors"))
    refused(f"{path}: model.layers.0.*_proj is no adaptable layer", other, x=folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    for changed, message in (
        ({**tensors, name: tensors[name][:, 1:].copy()}, f"{path}: .*q_proj: A .* do not fit the model's"),
        (
            {key: tensor for key, tensor in tensors.items() if key != name},
            rf"{path}: .*q_proj\.lora_A\.weight is missing",
        ),
    ):
        save_file(changed, folder / "adapter_model.safetensors")
        refused(message, x=folder)
    opened = open_checkpoint(base)
    shapes = mergeable_linears(opened.config)
    for number, names in enumerate((["head"], ["decoder.layers.0.attention.q"])):
        form = format_of(opened) if number == 0 else replace(format_of(opened), fingerprint="0" * 64)
        factors = random_factors({name: shapes[name] for name in names}, 1.0)
        save_adapter(tmp_path / str(number), form, factors, rank=2, alpha=2.0, **SETTINGS)
    refused(re.escape(f"{tmp_path / '0'}: head: only layers of the decoder"), x=tmp_path / "0")
    refused(re.escape(f"{tmp_path / '1'}: this adapter was trained on another model"), x=tmp_path / "1")
    refused("is not an adapter: it is a complete model", x=base)
    refused("is not an adapter: no such folder", x=tmp_path / "none")
    refused("a name must be printable text, got ' x'", **{" x": folder})
    refused("other adapters require their base", folder, x=folder)


def test_an_incomplete_adapter_is_refused(golden, tmp_path):
    base, folder, _, _ = golden("llama")
    opened = open_checkpoint(base)
    factors = open_adapter(folder).factors(opened)
    save_adapter(tmp_path / "a", format_of(opened), factors, rank=3, alpha=12.0, **SETTINGS)
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


def test_a_base_in_half_precision_is_merged_in_float32_and_rounded_once():
    torch.manual_seed(0)
    weight, a, b = torch.randn(48, 32).bfloat16(), torch.randn(4, 32), torch.randn(48, 4)
    expected = (weight.double() + 1.5 * b.double() @ a.double()).bfloat16()
    assert torch.equal(merge_weight(weight, LoraFactors(a, b, 1.5)), expected)


def test_the_merge_command_writes_a_model(golden, tmp_path):
    from click.testing import CliRunner

    from kvad.cli.main import cli

    base, folder, arrays, expected = golden("gpt2")
    arguments = ["merge", str(base), str(folder), "--out", str(tmp_path / "merged")]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "written" in result.output
    assert np.abs(logits(load_model(tmp_path / "merged", "float64")[0], arrays) - expected).max() < 1e-5
    with pytest.raises(Exception, match="exists"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
