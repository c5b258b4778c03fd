"""Every family compared with transformers 4.57 and 5 by the golden files of ``tests/hf_parity``.

Outputs agree at torch's default tolerances for float32 with a KL divergence of at most 1e-9; tensors and config are
written back unchanged.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvad.checkpoint import hf_layout
from kvad.checkpoint.conversion import HFConfigReader, read_tensors, resolve_config, write_tensors
from kvad.checkpoint.families import FAMILIES, find_family
from kvad.checkpoint.families._hf_class import with_attention
from kvad.checkpoint.hf_layout import choose_family, describe_nearest_family
from kvad.config.layers import StackConfig
from kvad.errors import CheckpointError, UsageError
from kvad.verify.run import verify
from kvad.verify.scenario import ScenarioOptions, build_prompts
from tests.support.golden_models import CASES, DIFFERENT, META, READ, REFUSED, RUNS, GoldenModel, case_id, divergence

each_case = pytest.mark.parametrize("case", READ, ids=case_id)


@each_case
def test_outputs_equal_the_reference(case: tuple[str, str]) -> None:
    if case in DIFFERENT:
        pytest.skip(DIFFERENT[case])
    golden = GoldenModel(case)
    model = golden.model()
    for run in RUNS:
        outputs, expected = golden.outputs(run, model), golden.expected(run)
        # Sums of float32 round differently on other processors: 1.4e-5 between a Xeon and the references' EPYC.
        torch.testing.assert_close(outputs, expected, rtol=1.3e-6, atol=3e-5)
        assert divergence(outputs, expected) <= 1e-9
        if f"{run}/pooler_output" in golden.arrays:
            torch.testing.assert_close(golden.pooled(run, model), golden.tensor(f"{run}/pooler_output"))


@each_case
def test_tensors_and_config_are_written_back(case: tuple[str, str]) -> None:
    golden = GoldenModel(case)
    family = golden.family
    written = dict(write_tensors(family, golden.config, golden.weights))
    optional = {family.head[0]} if family.head and golden.config.tie_embeddings else set()
    for name, tensor in golden.stored.items():
        if name in written:
            assert torch.equal(written[name], tensor), name
        elif name not in optional:
            assert any(re.fullmatch(pattern, name.removeprefix(family.prefix)) for pattern in family.ignored), name
    assert family.read(HFConfigReader(family.write(golden.config), "config.json")) == golden.config


@each_case
def test_unused_keys_of_a_config_are_listed(case: tuple[str, str]) -> None:
    """A file of transformers or kvad has none; a new key and one inside a part are named."""
    content = META[case]["config"]
    family = find_family(content["model_type"])

    def unused(content: dict[str, Any]) -> tuple[str, ...]:
        fields = HFConfigReader(content, "config.json")
        family.read_config(fields)
        return fields.unused_keys()

    assert unused(content) == unused(family.write(family.read(HFConfigReader(content, "")))) == ()
    rope = {name: {**content[name], "mystery": 7} for name in ("rope_parameters",) if _has_scaling(content, name)}
    changed = {**content, "mystery_scale": 3, "num_beams": 9, "mystery_dropout": 0.5, "mystery_null": None, **rope}
    assert unused(changed) == (*(f"{name}.mystery" for name in rope), "mystery_scale")


NATIVE = {  # case -> name in the file of ``save_pretrained`` -> name in transformers' module
    **{case: {} for case in ("qwen2-moe", "qwen3-moe", "glm4-moe", "deepseek-v3", "lfm2-moe")},
    "mixtral": {"block_sparse_moe": "mlp"},
    "minimax-m2": {"block_sparse_moe": "mlp"},
    "phimoe": {"block_sparse_moe.gate": "mlp.router", "block_sparse_moe": "mlp"},
    "granitemoe": {
        "router.layer": "router", "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
    },
    "ernie4-5-moe": {"mlp.moe_statics": "mlp.gate.moe_statics"},
    "exaone-moe": {"mlp.e_score": "mlp.gate.e_score"},
    "hy-v3": {"mlp.router": "mlp", "expert_bias": "e_score_correction_bias", "shared_mlp": "shared_experts"},
    "gpt-neox": {"embed_out": "lm_head"},
}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_stacked_experts_of_transformers_5_are_read(name: str) -> None:
    """``save_original_format=False`` writes one tensor of all experts, gate above up, and other names."""
    golden = GoldenModel(("5", name))
    stored = dict(golden.stored)
    for old, new in NATIVE[name].items():
        stored = {key.replace(old, new): tensor for key, tensor in stored.items()}
    single = re.compile(r"(.*\.experts)\.\d+\.(?:gate_proj|up_proj|down_proj|w[123])\.weight")
    blocks = {match[1] for tensor_name in stored if (match := single.fullmatch(tensor_name))}
    stacked = {name: tensor for name, tensor in stored.items() if not single.fullmatch(name)}
    for block in blocks:
        has_numbers = f"{block}.0.w1.weight" in stored
        gate, down, up = ("w1", "w2", "w3") if has_numbers else ("gate_proj", "down_proj", "up_proj")
        count = sum(name.startswith(f"{block}.") and name.endswith(f".{up}.weight") for name in stored)
        gates, downs, ups = (
            torch.stack([stored[f"{block}.{i}.{part}.weight"] for i in range(count)]) for part in (gate, down, up)
        )
        stacked |= {f"{block}.gate_up_proj": torch.cat([gates, ups], dim=1), f"{block}.down_proj": downs}
    weights = dict(read_tensors(golden.family, golden.config, stored=stacked, where="model.safetensors"))
    assert stacked.keys() != golden.stored.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in golden.weights.items())
    if name != "glm4-moe":
        return
    block = next(iter(blocks))
    fewer = {**stacked, f"{block}.down_proj": stacked[f"{block}.down_proj"][1:]}
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight is missing"):
        dict(read_tensors(golden.family, golden.config, stored=fewer, where="model.safetensors"))


def _has_scaling(content: dict[str, Any], name: str) -> bool:
    part = content.get(name)
    return isinstance(part, dict) and part.get("rope_type") in ("llama3", "yarn")


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2", "gemma2", "bert-tokens", "t5", "marian", "phi3-longrope"])
def test_the_nearest_family_of_an_unknown_type_is_named(name: str) -> None:
    """Keys and tensors select the family; its name in a new type decides among equal ones."""
    golden = GoldenModel(("4.57", name))
    content, family = META["4.57", name]["config"], META["4.57", name]["config"]["model_type"]
    fields = HFConfigReader({**content, "model_type": "zzz", "qk_clip": 3}, "config.json")
    prefix = f"The nearest family is {family}: it does not read qk_clip"
    assert describe_nearest_family(fields, list(golden.stored)) == f"{prefix}."
    more = describe_nearest_family(fields, [*golden.stored, "model.layers.0.gate.weight", "model.layers.1.gate.weight"])
    assert more.startswith(f"{prefix}; it lacks ") and more.endswith("layers.N.gate.weight.")
    with pytest.raises(CheckpointError, match=r"'zzz' is not known .*nearest family is .* it does not read qk_clip"):
        hf_layout._family(fields)


def test_a_similar_name_selects_the_nearest_family() -> None:
    content = {**META["4.57", "qwen3"]["config"], "model_type": "qwen4"}
    text = describe_nearest_family(HFConfigReader(content, "config.json"))
    assert text == "The nearest family is qwen3: it reads all keys, but the code may differ."
    assert describe_nearest_family(HFConfigReader({"model_type": "zzz"}, "config.json")) == ""


def test_any_value_of_a_key_is_read_or_refused() -> None:
    """Values of other types and sizes raise errors of users, never a bug's."""
    for name in ("gpt2", "llama-llama3", "gemma3", "falcon-new-decoder", "mpt", "bert-sequence", "t5", "bart"):
        content = META["4.57", name]["config"]
        family = find_family(content["model_type"])
        for key in content.keys() - {"model_type"}:
            for value in (0, -1, 10**9, 10**18, 1e300, "x", [], {}, True, [[]], ["x"]):
                with suppress(UsageError):
                    family.read_config(HFConfigReader({**content, key: value}, "config.json"))


@pytest.mark.parametrize("case", [case for case in CASES if case[1] in REFUSED], ids="-".join)
def test_unsupported_options_are_refused(case: tuple[str, str]) -> None:
    config = META[case]["config"]
    with pytest.raises(CheckpointError, match=REFUSED[case[1]]):
        find_family(config["model_type"]).read(HFConfigReader(config, "config.json"))


def test_a_dropped_tensor_is_detected() -> None:
    """Without any tensor of GPT-2 the logits differ, except for biases of keys, which cancel in the softmax."""
    golden = GoldenModel(("4.57", "gpt2"))
    model, expected = golden.model(), golden.expected("long")
    for name, parameter in model.named_parameters():
        if not name.endswith("attention.k.bias"):
            value = parameter.detach().clone()
            parameter.data.zero_()
            with pytest.raises(AssertionError):
                torch.testing.assert_close(golden.outputs("long", model), expected)
            parameter.data.copy_(value)
    torch.testing.assert_close(golden.outputs("long", model), expected)


def test_every_family_has_a_case() -> None:
    tested = {meta["config"]["model_type"] for meta in META.values()}
    assert set(FAMILIES) <= tested | set(MULTIMODAL), sorted(set(FAMILIES) - tested)


# Families whose text is read -> a case of the text model.
MULTIMODAL = {"gemma3": "gemma3", "gemma4": "gemma4", "mistral3": "ministral3", "qwen3_5": "qwen3-5"}


@pytest.mark.parametrize("case", ["qwen3-next", "qwen3-5"])
def test_layers_that_predict_further_tokens_are_not_read(case: str) -> None:
    """Nor are the keys of them, and of positions of images."""
    golden = GoldenModel(("5", case))
    stored = {**golden.stored, "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    content = golden.meta["config"]
    family = find_family(content["model_type"])
    weights = dict(read_tensors(family, golden.config, stored, "model.safetensors"))
    assert weights.keys() == golden.weights.keys()
    if case == "qwen3-5":
        rope = {**content["rope_parameters"], "mrope_section": [11, 11, 10], "mrope_interleaved": True}
        fields = HFConfigReader({**content, "rope_parameters": rope, "attn_output_gate": True}, "config.json")
        assert family.read_config(fields) == golden.config and fields.unused_keys() == ()
        with pytest.raises(CheckpointError, match="attn_output_gate False is not supported"):
            family.read_config(fields.derive({**content, "attn_output_gate": False}))


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_the_text_of_a_multimodal_file_is_read(model_type: str) -> None:
    """Names are those of the hub's files, or those of transformers' modules; it is written as its text model."""
    golden = GoldenModel(("5", MULTIMODAL[model_type]))
    text = golden.meta["config"]
    fields = HFConfigReader({"model_type": model_type, "text_config": text, "vision_config": {}}, "config.json")
    family = find_family(model_type)
    config = family.read_config(fields)
    assert fields.unused_keys() == ()
    for prefix in ("language_model.model.", "model.language_model."):
        stored = {name.replace("model.", prefix, 1): tensor for name, tensor in golden.stored.items()}
        tower = "visual" if model_type == "qwen3_5" else "vision_tower"
        stored[f"model.{tower}.patch_conv.weight"] = torch.zeros(2)
        assert resolve_config(family, config, stored) == golden.config
        weights = dict(read_tensors(family, golden.config, stored, "model.safetensors"))
        assert all(torch.equal(weights[name], tensor) for name, tensor in golden.weights.items())
    layout = choose_family(golden.config, model_type)
    assert layout.content["model_type"] == text["model_type"]
    assert layout.family.read(HFConfigReader(layout.content, "config.json")) == golden.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: must be 0"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input: must be 0"),  # the default of the class
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2"),
        ({"enable_moe_block": True}, "enable_moe_block True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 4]}, "the last layer must be full_attention"),
        ({"per_layer_config": {"4": {"head_dim": 16}}}, "per_layer_config is not supported"),
        ({"per_layer_config": {"2": {"head_dim": 16}, "4": {"head_dim": 8}}}, "per_layer_config is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn'"),
    ],
)
def test_gemma_4_with_other_parts_is_refused(changes: dict[str, Any], message: str) -> None:
    content = {**META["5", "gemma4"]["config"], **changes}
    with pytest.raises(CheckpointError, match=message):
        find_family("gemma4_text").read(HFConfigReader(content, "config.json"))


def test_sizes_of_gemma_4_by_layer_or_for_the_model() -> None:
    """Newer files have the sizes of full layers by layer."""
    content = META["5", "gemma4"]["config"]
    older = {name: value for name, value in content.items() if name != "per_layer_config"}
    older |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    family = find_family("gemma4_text")
    assert family.read(HFConfigReader(older, "")) == family.read(HFConfigReader(content, ""))


@pytest.mark.parametrize("scale", [2.0, 0.9])
def test_a_scale_without_an_integer_scalar_is_refused(scale: float) -> None:
    config = GoldenModel(("4.57", "t5gemma")).config
    assert config.encoder is not None and config.decoder is not None

    def scaled(stack: StackConfig) -> StackConfig:
        layers = stack.layer_types.items()
        return replace(stack, layer_types={name: with_attention(layer, softmax_scale=scale) for name, layer in layers})

    with pytest.raises(CheckpointError, match="t5gemma cannot express"):
        choose_family(replace(config, encoder=scaled(config.encoder), decoder=scaled(config.decoder)), "t5gemma")


# ---------------------------------------------------------------- the cache, for every family

# Both versions have the same weights, so one of them is enough.
CACHED = [case for case in READ if case[0] == "4.57" or ("4.57", case[1]) not in READ]
FLOAT32_TOO = ("llama", "gemma2", "bloom", "t5", "mixtral")  # a family does not choose the dtype


@pytest.mark.parametrize("case", CACHED, ids=lambda case: case[1])
def test_every_cache_is_exact(case: tuple[str, str]) -> None:
    golden = GoldenModel(case)
    if golden.config.decoder is None:
        with pytest.raises(UsageError, match="encoder"):
            verify(golden.model(), [[1]], ScenarioOptions())
        return
    dtypes = ("float64", "float32") if case[1] in FLOAT32_TOO else ("float64",)
    options = ScenarioOptions(dtypes=dtypes, num_seqs=3, prefill_chunk_size=6, block_size=4, tokens=7)
    report = verify(golden.model(), build_prompts(golden.config, options, None), options)
    assert {entry.verdict for entry in report.cases} == {"exact"}, report.verdict()
    assert all(entry.max_dlogit <= 1e-10 for entry in report.cases if entry.dtype == "float64")


# Classes that are newer and always write layer_types; by default every layer of Ministral has a window.
NEWER = ("gemma4_text", "mellum", "ministral")


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in READ
        if "layer_types" in (content := META[case]["config"]) and content["model_type"] not in NEWER
    ],
    ids=case_id,
)
def test_older_files_without_layer_types_are_the_same_model(case: tuple[str, str]) -> None:
    """Files written before transformers 4.53 have the rule only: an interval, a first layer, or the class's default."""
    content = META[case]["config"]
    older = {key: value for key, value in content.items() if key != "layer_types"}
    if content["model_type"] == "gemma3_text":
        older["sliding_window_pattern"] = 3  # the golden's own; the class's is 6
    if content["model_type"].startswith("lfm2"):
        older["full_attn_idxs"] = [at for at, kind in enumerate(content["layer_types"]) if kind == "full_attention"]
    if "linear_attention" in content["layer_types"]:
        older["full_attention_interval"] = content["layer_types"].index("full_attention") + 1
    family = find_family(content["model_type"])
    assert family.read(HFConfigReader(older, "")) == family.read(HFConfigReader(content, ""))
