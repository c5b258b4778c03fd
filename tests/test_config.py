"""The config: it round-trips, names the key of whatever is wrong, and refuses what could not run."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from kvad import config as cfg
from kvad.config.model import AttentionSpec, ModelConfig, attention_specs
from kvad.config.serialization import from_dict, override, to_dict
from kvad.errors import ConfigError
from tests.models import HEADS, NORMS, POSITIONS, model_config
from tests.pairwise import pairwise

LONGROPE = cfg.LongRopeScalingConfig((1.0, 1.5), (2.0, 3.0), 16, factor=4.0)


def whole() -> ModelConfig:
    """Every field away from its default."""
    mixer = cfg.AttentionConfig(
        6,
        3,
        8,
        5,
        cfg.RopeConfig(500.0, 0.5, True, LONGROPE),
        causal=False,
        window=7,
        qkv_bias=True,
        out_bias=True,
        qk_norm="full",
        logit_softcap=20.0,
        sink_logits=True,
        softmax_scale=0.3,
    )
    norm = cfg.NormConfig("layer", 1e-3, bias=True, unit_offset=True)
    alibi = dataclasses.replace(mixer, position=cfg.AlibiConfig(), softmax_scale="none")
    t5 = dataclasses.replace(mixer, position=cfg.T5BiasConfig(16, 50, True, False), softmax_scale="default")
    kinds = {
        "L": cfg.LayerConfig(mixer, cfg.PlainMLPConfig(40, "relu2", bias=True), norm),
        "A": cfg.LayerConfig(alibi, cfg.GatedMLPConfig(30, "gelu_tanh", bias=True), cfg.NormConfig()),
        "T": cfg.LayerConfig(t5, cfg.GatedMLPConfig(30), norm),
    }
    return ModelConfig(
        24,
        67,
        64,
        cfg.StackConfig(5, kinds, "LLAT", norm_position="sandwich", final_norm=False),
        embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(80, offset=2), 2.0, norm),
        head=cfg.LanguageHeadConfig(bias=True, logit_softcap=30.0, logit_scale=0.25),
        tie_embeddings=False,
        dropout=cfg.DropoutConfig(0.1, 0.2, 0.3, 0.4),
    )


def plain(**changes: Any) -> dict[str, Any]:
    """A small valid config as JSON values, with dotted keys set."""
    data = {
        "width": 24,
        "vocab": 67,
        "limit": 64,
        "embed": {},
        "decoder": {
            "layers": 2,
            "kinds": {
                "L": {
                    "attention": {"heads": 6, "head_dim": 8, "position": {"kind": "rope"}},
                    "mlp": {"kind": "gated", "hidden": 40},
                    "norm": {},
                }
            },
            "pattern": "L",
        },
        "head": {},
    }
    return override(data, changes)


L = "decoder.layer_types.L"
P = f"{L}.attention.position"

# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("case", pairwise({"position": POSITIONS, "norm": NORMS, "heads": HEADS}))
def test_configs_survive_json(case: dict[str, str]) -> None:
    config = model_config(**case)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_every_field_survives_json() -> None:
    config = whole()
    data = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(data) == config
    assert data["decoder"]["kinds"]["L"]["attention"]["position"]["scaling"] == {
        "kind": "longrope",
        "short": [1.0, 1.5],
        "long": [2.0, 3.0],
        "original": 16,
        "factor": 4.0,
        "attention_factor": None,
    }
    default = ModelConfig.from_dict(plain())
    for field in dataclasses.fields(ModelConfig):
        if field.name not in ("width", "vocab", "limit", "encoder", "source"):
            assert getattr(config, field.name) != getattr(default, field.name)


@pytest.mark.parametrize("cls", typing.get_args(cfg.RopeScalingConfig), ids=lambda cls: cls.__name__)
def test_every_scaling_is_told_by_its_kind(cls: type[Any]) -> None:
    given = {"factor": 2.0, "original": 32, "short": (1.0, 1.0), "long": (2.0, 2.0)}
    scaling = cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})
    rope = cfg.RopeConfig(scaling=scaling)
    assert from_dict(cfg.RopeConfig, to_dict(rope)) == rope


def test_what_is_left_out_has_its_default() -> None:
    config = ModelConfig.from_dict(plain())
    assert config.decoder.layer_types["L"] == cfg.LayerConfig(
        cfg.AttentionConfig(6, head_dim=8), cfg.GatedMLPConfig(40)
    )
    assert (config.tie_embeddings, config.head, config.embedding.scale) == (True, cfg.LanguageHeadConfig(), 1.0)


def test_whole_numbers_will_do_for_floats_and_not_the_other_way() -> None:
    scale = ModelConfig.from_dict(plain(**{"embedding.scale": 2})).embedding.scale
    assert scale == 2.0 and type(scale) is float
    assert (
        ModelConfig.from_dict(plain(**{f"{L}.attention.scale": 1})).decoder.layer_types["L"].attention.softmax_scale
        == 1.0
    )
    with pytest.raises(ConfigError, match=r"width: expected int, found 24\.0"):
        ModelConfig.from_dict(plain(width=24.0))


# ---------------------------------------------------------------- files


def test_load_reads_a_config_and_a_checkpoint_s(tmp_path: Path) -> None:
    alone, inside = tmp_path / "a.json", tmp_path / "b.json"
    alone.write_text(json.dumps(whole().to_dict()))
    inside.write_text(json.dumps({"format": 1, "model": whole().to_dict()}))
    assert ModelConfig.load(alone) == ModelConfig.load(inside) == whole()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file: .*config.json"),
        (b"{width", "config.json is not JSON"),
        (b"\xff\xfe\x00", "config.json is not JSON"),
        (b"[1, 2]", "expected an object of keys, found list"),
        (b"{}", "config.json: missing key width"),
        (b'{"model": 3}', "ModelConfig: expected an object, found 3"),
    ],
)
def test_load_says_what_is_wrong_with_a_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.load(path)


# ---------------------------------------------------------------- keys and types

WRONG_KEYS: list[tuple[dict[str, Any], str, str]] = [  # changes, message, hint
    ({"widht": 3}, "unknown key widht", "did you mean 'width'?"),
    ({"decoder.layer": 3}, "unknown key decoder.layer", "did you mean 'layers'?"),
    ({f"{L}.attention.kvheads": 3}, f"unknown key {L}.attention.kvheads", "did you mean 'kv_heads'?"),
    ({f"{L}.mlp.kind": "gatde"}, f"{L}.mlp.kind: 'gatde' is not known", "did you mean 'gated'?"),
    ({f"{P}.kind": "ropes"}, f"{P}.kind: 'ropes' is not known", "did you mean 'rope'?"),
    ({f"{L}.mlp": {"hidden": 3}}, f"missing key {L}.mlp.kind", "known: experts, gated, plain"),
    ({"embedding.position": {"size": 3}}, "missing key embedding.position.kind", "known: learned, sinusoidal"),
    ({P: {"buckets": 3}}, f"unknown key {P}.buckets", "known: fraction, interleaved, kind, scaling, theta"),
    ({f"{P}": {"kind": 3}}, f"{P}.kind: 3 is not known", "known: alibi, own, rope, t5"),
    ({f"{P}.scaling": {"kind": "yarm"}}, f"{P}.scaling.kind: 'yarm' is not known", "did you mean 'yarn'?"),
    ({f"{P}.scaling": {"kind": "yarn", "factor": 2.0}}, f"missing key {P}.scaling.original", ""),
    ({"decoder.layer_pattern": "LG"}, "decoder.layer_pattern names kind 'G'", "known: L"),
    (
        {"decoder.layer_types.G": {"attention": {"heads": 6, "head_dim": 8}, "mlp": {"kind": "gated", "hidden": 40}}},
        "decoder.layer_types.G is in no place of the pattern 'L'",
        "leave it out",
    ),
    ({"embedding.position": {"kind": "learned"}}, "missing key embedding.position.num_positions", ""),
]


@pytest.mark.parametrize(("changes", "message", "hint"), WRONG_KEYS)
def test_wrong_keys_are_named_with_the_nearest_right_one(changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(plain(**changes))
    assert (caught.value.message, caught.value.hint) == (message, hint)


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("width", "24", "width: expected int, found '24'"),
    ("width", True, "width: expected int, found True"),
    ("width", None, "width: expected int, found None"),
    ("tie", 1, "tie: expected bool, found 1"),
    ("embedding.scale", float("nan"), "embedding.scale: expected a finite number, found nan"),
    ("embedding.scale", float("inf"), "embedding.scale: expected a finite number, found inf"),
    ("embedding.scale", True, "embedding.scale: expected float, found True"),
    ("decoder", 3, "decoder: expected an object or null, found 3"),
    ("decoder.layer_types", [1], "decoder.layer_types: expected an object, found [1]"),
    ("decoder.layer_types", {"L": 5}, "decoder.layer_types.L: expected an object, found 5"),
    (f"{L}.mlp", 5, f"{L}.mlp: expected an object, found 5"),
    (f"{L}.mlp", None, f"{L}.mlp: expected an object, found None"),
    (f"{L}.attention.window", "wide", f"{L}.attention.window: expected int, found 'wide'"),
    (f"{L}.attention.scale", "nono", f"{L}.attention.scale: 'nono' is not one of 'default', 'none'"),
    (f"{L}.mlp.activation", "swish", f"{L}.mlp.activation: 'swish' is not one of 'gelu', "),
    (f"{P}", 4, f"{P}: expected an object or null, found 4"),
    (
        f"{P}.scaling",
        {"kind": "longrope", "short": 1.0, "long": [], "original": 4},
        f"{P}.scaling.short: expected a list, found 1.0",
    ),
    (
        f"{P}.scaling",
        {"kind": "longrope", "short": [1.0, "x"], "long": [], "original": 4},
        f"{P}.scaling.short[1]: expected float, found 'x'",
    ),
    ("decoder.norm_position", "middle", "decoder.norm_position: 'middle' is not one of 'pre', 'post', "),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG_TYPES)
def test_wrong_types_are_named_with_what_was_found(key: str, value: Any, message: str) -> None:
    data = plain()
    *parents, last = key.split(".")
    node: Any = data
    for name in parents:
        node = node[name]
    node[last] = value
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("key", ["width", "vocab", "limit", "decoder.num_layers", f"{L}.attention", f"{L}.mlp"])
def test_what_has_no_default_must_be_there(key: str) -> None:
    data = plain()
    *parents, last = key.split(".")
    node = data
    for name in parents:
        node = node[name]
    del node[last]
    with pytest.raises(ConfigError, match=f"^missing key {key}$"):
        ModelConfig.from_dict(data)


# ---------------------------------------------------------------- overrides


def test_overrides_reach_any_depth_and_leave_the_original() -> None:
    data = whole().to_dict()
    kept = json.loads(json.dumps(data))
    changed = override(data, {"decoder.num_layers": 9, f"{P}.theta": 7.0, "tie": True, "head": {"bias": False}})
    assert data == kept
    config = ModelConfig.from_dict(changed)
    assert (config.decoder.num_layers, config.tie_embeddings, config.head) == (9, True, cfg.LanguageHeadConfig())
    position = config.decoder.layer_types["L"].attention.position
    assert isinstance(position, cfg.RopeConfig) and position.theta == 7.0


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("decodr.layers", "unknown key 'decodr'", "did you mean 'decoder'?"),
        ("decoder.layer_types.L.mixr.num_heads", "unknown key 'decoder.layer_types.L.mixr'", "did you mean 'mixer'?"),
        ("width.x", "unknown key 'width'", "did you mean 'width'?"),
    ],
)
def test_overrides_of_what_is_not_there(key: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(plain(), {key: 3})
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_an_override_of_an_unknown_last_key_is_found_when_read() -> None:
    with pytest.raises(ConfigError, match=r"unknown key decoder\.layrs \(did you mean 'layers'\?\)"):
        ModelConfig.from_dict(override(plain(), {"decoder.layrs": 3}))


# ---------------------------------------------------------------- what cannot be right


def yarn(**more: Any) -> dict[str, Any]:
    return {f"{P}.scaling": {"kind": "yarn", "factor": 2.0, "original": 16, **more}}


def longrope(**more: Any) -> dict[str, Any]:
    return {f"{P}.scaling": {"kind": "longrope", "short": [1.0] * 4, "long": [1.0] * 4, "original": 16, **more}}


def t5(**more: Any) -> dict[str, Any]:
    return {P: {"kind": "t5", **more}}


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    *(({key: 0}, f"{key}: must be at least 1, found 0") for key in ("width", "vocab", "limit", "decoder.num_layers")),
    ({"decoder.layer_pattern": ""}, "decoder.layer_pattern is empty"),
    ({f"{L}.attention.heads": 0}, f"{L}.attention.heads: must be at least 1, found 0"),
    ({f"{L}.attention.kv_heads": 0}, f"{L}.attention.kv_heads: must be at least 1, found 0"),
    ({f"{L}.attention.kv_heads": 4}, f"{L}.attention.kv_heads: 4 does not divide heads 6"),
    ({f"{L}.attention.head_dim": None, "width": 25}, f"{L}.attention.heads: 6 does not divide width 25"),
    ({f"{L}.attention.head_dim": 0}, f"{L}.attention.head_dim: must be at least 1, found 0"),
    ({f"{L}.attention.value_dim": 0}, f"{L}.attention.value_dim: must be at least 1, found 0"),
    ({f"{L}.attention.window": 0}, f"{L}.attention.window: must be at least 1, found 0"),
    ({f"{L}.attention.softcap": 0.0}, f"{L}.attention.softcap: must be above 0, found 0.0"),
    ({f"{L}.attention.norm": {}}, f"{L}.attention.norm: of q and k, which qk_norm none leaves as they are"),
    (
        {f"{L}.attention.norm": {"eps": -1.0}, f"{L}.attention.qk_norm": "head"},
        f"{L}.attention.norm.eps: must not be negative, found -1.0",
    ),
    (
        {P: {"kind": "alibi", "rounded": True}, f"{L}.attention.causal": False},
        f"{P}.rounded: only a causal layer rounds by the key's position",
    ),
    ({f"{L}.mlp.hidden": 0}, f"{L}.mlp.hidden: must be at least 1, found 0"),
    ({f"{L}.norm.eps": -1.0}, f"{L}.norm.eps: must not be negative, found -1.0"),
    ({"embedding.norm": {"eps": -1.0}}, "embedding.norm.eps: must not be negative, found -1.0"),
    ({"head.softcap": 0.0}, "head.softcap: must be above 0, found 0.0"),
    ({f"{P}.fraction": 0.0}, f"{P}.fraction: 0.0 of head_dim 8 is 0 dims, not an even number"),
    ({f"{P}.fraction": 1.5}, f"{P}.fraction: 1.5 of head_dim 8 is 12 dims, not an even number"),
    ({f"{P}.fraction": 0.4}, f"{P}.fraction: 0.4 of head_dim 8 is 3 dims, not an even number"),
    ({f"{P}.theta": 0.0}, f"{P}.theta: must be above 0, found 0.0"),
    ({f"{P}.scaling": {"kind": "linear", "factor": 0.0}}, f"{P}.scaling.factor: must be above 0, found 0.0"),
    (
        {f"{P}.scaling": {"kind": "dynamic", "factor": 2.0, "original": 0}},
        f"{P}.scaling.original: must be at least 1, found 0",
    ),
    (
        {f"{P}.fraction": 0.25, f"{P}.scaling": {"kind": "dynamic", "factor": 2.0, "original": 8}},
        f"{P}.scaling.kind: dynamic needs more than 2 rotated dims",
    ),
    (
        {f"{P}.scaling": {"kind": "llama3", "factor": 2.0, "original": 8, "high_freq_factor": 1.0}},
        f"{P}.scaling.high_freq_factor: must exceed low_freq_factor 1.0",
    ),
    (yarn(beta_fast=0.5), f"{P}.scaling.beta_fast: 0.5 is below beta_slow 1.0"),
    (yarn(beta_slow=0.0), f"{P}.scaling.beta_slow: must be above 0, found 0.0"),
    (yarn(attention_factor=-1.0), f"{P}.scaling.attention_factor: must be above 0, found -1.0"),
    (longrope(short=[1.0] * 3), f"{P}.scaling.short: 3 factors for 4 frequencies"),
    (longrope(long=[1.0] * 5), f"{P}.scaling.long: 5 factors for 4 frequencies"),
    (longrope(long=[1.0, 1.0, 0.0, 1.0]), f"{P}.scaling.long[2]: must be above 0, found 0.0"),
    (t5(buckets=1), f"{P}.buckets: must be at least 2, found 1"),
    (t5(buckets=3, bidirectional=True), f"{P}.buckets: must be at least 4, found 3"),
    (t5(buckets=32, max_distance=16), f"{P}.max_distance: must exceed the 16 exact buckets, found 16"),
    (
        {"embedding.position": {"kind": "learned", "size": 63}},
        "embedding.position: limit 64 (+ offset 0) exceeds the table's 63 rows",
    ),
    (
        {"embedding.position": {"kind": "learned", "size": 65, "offset": 2}},
        "embedding.position: limit 64 (+ offset 2) exceeds the table's 65 rows",
    ),
    (
        {"embedding.position": {"kind": "learned", "size": 65, "offset": -1}},
        "embedding.position.offset: must be at least 0, found -1",
    ),
    (
        {"embedding.position": {"kind": "sinusoidal"}, "width": 25},
        "embedding.position.kind sinusoidal needs an even width, found 25",
    ),
    (
        {"embedding.position": {"kind": "sinusoidal", "base": 0.0}},
        "embedding.position.base: must be above 0, found 0.0",
    ),
    (
        {"embedding.position": {"kind": "sinusoidal", "form": "fairseq"}, "width": 2},
        "embedding.position.form fairseq needs a width of at least 4, found 2",
    ),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_what_cannot_be_right_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(plain(**changes))
    assert caught.value.message == message


@pytest.mark.parametrize(
    "changes",
    [
        {f"{L}.attention.window": 1, f"{L}.attention.kv_heads": 1},
        {f"{P}.fraction": 0.25, f"{P}.scaling": {"kind": "linear", "factor": 0.5}},
        {"embedding.position": {"kind": "learned", "size": 66, "offset": 2}},
        {"embedding.position": {"kind": "sinusoidal", "form": "fairseq"}, "width": 4},
        t5(buckets=2, max_distance=2),
        t5(buckets=4, max_distance=2, bidirectional=True),
        yarn(beta_fast=1.0),
        longrope(),
        {f"{L}.norm.eps": 0.0, f"{L}.attention.position": None},
    ],
)
def test_what_stands_at_the_edge_is_allowed_and_runs(changes: dict[str, Any]) -> None:
    import torch

    from kvad.model.no_cache import NoCache
    from kvad.model.transformer import Transformer
    from kvad.model_input import ModelInput, SubBatch

    config = ModelConfig.from_dict(plain(**changes))
    positions = torch.arange(64)
    step = ModelInput(positions, positions, (SubBatch(1, 64, 64),), positions, max_seq_lens=torch.full((64,), 64))
    model = Transformer(config)
    with torch.no_grad():
        assert bool(model.logits(model(step, NoCache(config)), step.logit_indices).isfinite().all())


def test_a_config_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="vocab: must be at least 1, found 0"):
        dataclasses.replace(whole(), vocab_size=0)


# ---------------------------------------------------------------- what a memory must hold


def test_mixers_say_what_each_layer_asks_of_a_memory() -> None:
    """Five layers of the pattern LLAT; a window as long as the limit is none; dims and heads by default."""
    spec = AttentionSpec(False, 7, 3, 8, 5)
    assert attention_specs(whole()) == (spec,) * 5
    wide = ModelConfig.from_dict(plain(**{f"{L}.attention.window": 64, f"{L}.attention.head_dim": None}))
    assert attention_specs(wide) == (AttentionSpec(True, None, 6, 4, 4),) * 2
    narrow = ModelConfig.from_dict(plain(**{f"{L}.attention.window": 63}))
    assert {spec.window for spec in attention_specs(narrow)} == {63}
    mixed = model_config(heads="window-mix", layers=5)
    assert [spec.window for spec in attention_specs(mixed)] == [7, None, 7, None, 7]
    assert [mixed.decoder.layer_type(i) for i in range(5)] == list("LGLGL")


# ---------------------------------------------------------------- encoders, and both

E = "encoder.layer_types.L"


def both(**changes: Any) -> dict[str, Any]:
    """A small valid encoder-decoder as JSON values, with dotted keys set."""
    data = plain()
    kind = data["decoder"]["kinds"]["L"]
    data["encoder"] = {"layers": 2, "kinds": {"L": {**kind, "attention": {**kind["attention"], "causal": False}}}}
    cross = {"heads": 6, "head_dim": 8, "position": None, "causal": False}
    data["decoder"]["kinds"]["L"] = {**kind, "cross": cross}
    data["source"] = {"limit": 32, "embed": {}}
    return override(data, changes)


def test_an_encoder_decoder_s_memory_holds_its_own_and_its_cross_attention() -> None:
    config = ModelConfig.from_dict(both())
    own, cross = AttentionSpec(True, None, 6, 8, 8), AttentionSpec(False, None, 6, 8, 8, is_cross_attention=True)
    assert config.kind == "encoder-decoder" and attention_specs(config) == (own, own, cross, cross)
    assert cfg.encoder_attention_specs(config) == (AttentionSpec(False, None, 6, 8, 8),) * 2
    alone = both()
    del alone["decoder"], alone["source"]
    encoder = ModelConfig.from_dict(alone)
    assert encoder.kind == "encoder" and attention_specs(encoder) == () and encoder.stack is encoder.encoder
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": None, "decoder": None}, "a model needs a decoder, an encoder, or both"),
        ({"source": None}, "source is missing"),
        ({"encoder": None}, f"{L}.cross_attention: there is no encoder to attend to"),
        ({f"{L}.cross_attention": None}, f"{L}.cross_attention is missing"),
        ({f"{L}.cross_attention.causal": True}, f"{L}.cross_attention: sees the whole source, without positions"),
        (
            {f"{L}.cross_attention.position": {"kind": "alibi"}},
            f"{L}.cross_attention: sees the whole source, without positions",
        ),
        ({"decoder.norm_position": "parallel"}, f"{L}.cross_attention: not known with norm_place parallel"),
        ({"encoder_input.max_seq_len": 0}, "encoder_input.max_seq_len: must be at least 1, found 0"),
        ({"encoder_input.vocab_size": 0}, "encoder_input.vocab_size: must be at least 1, found 0"),
        ({"head": {"kind": "pooled"}}, "head.kind: a decoder ends in a language head, found pooled"),
        ({"head": {"kind": "language", "transform": {"width": 8}}}, "tie: the table is 24 wide, the head reads 8"),
        ({f"{E}.mlp": {"kind": "experts", "hidden": 8, "count": 2, "active": 3}}, f"{E}.mlp.count: must be at least 3"),
        (
            {f"{E}.first_norm": False, "encoder.norm_position": "post"},
            f"{E}.first_norm: only a layer of norm_place pre",
        ),
    ],
)
def test_what_an_encoder_decoder_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(both(**changes))
    assert caught.value.message.startswith(message), caught.value.message


def test_a_source_belongs_to_both_alone() -> None:
    with pytest.raises(ConfigError, match="source: only an encoder-decoder has one"):
        ModelConfig.from_dict({**plain(), "source": {"limit": 3}})
