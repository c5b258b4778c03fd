"""The model config: it round-trips, names the wrong key, and refuses what could not run."""

import dataclasses
import json
import typing

import pytest

from kvad.config import encoder_attention_specs
from kvad.config import layers as cfg
from kvad.config.model import AttentionSpec, ModelConfig, attention_specs
from kvad.config.serialization import from_dict, override, to_dict
from kvad.errors import ConfigError
from tests.support.covering_array import pairwise
from tests.support.random_models import HEADS, NORMS, POSITIONS, model_config

LONGROPE = cfg.LongRopeScalingConfig((1.0, 1.5), (2.0, 3.0), 16, factor=4.0)


def full_config():
    """Return a config with every field changed from its default."""
    position = cfg.RopeConfig(500.0, 0.5, True, LONGROPE)
    flags = {"causal": False, "qkv_bias": True, "out_bias": True, "sink_logits": True}
    numbers = {"window": 7, "logit_softcap": 20.0, "softmax_scale": 0.3}
    mixer = cfg.AttentionConfig(6, 3, 8, 5, position, qk_norm="full", **flags, **numbers)
    norm = cfg.NormConfig("layer", 1e-3, bias=True, unit_offset=True)
    alibi = dataclasses.replace(mixer, position=cfg.AlibiConfig(), softmax_scale="none")
    t5 = dataclasses.replace(mixer, position=cfg.T5BiasConfig(16, 50, True, False), softmax_scale="default")
    kinds = {
        "L": cfg.LayerConfig(mixer, cfg.PlainMLPConfig(40, "relu2", bias=True), norm),
        "A": cfg.LayerConfig(alibi, cfg.GatedMLPConfig(30, "gelu_tanh", bias=True), cfg.NormConfig()),
        "T": cfg.LayerConfig(t5, cfg.GatedMLPConfig(30), norm),
    }
    return ModelConfig(
        *(24, 67, 64),
        cfg.StackConfig(5, kinds, "LLAT", norm_position="sandwich", final_norm=False),
        embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(80, offset=2), 2.0, norm),
        head=cfg.LanguageHeadConfig(bias=True, logit_softcap=30.0, logit_scale=0.25),
        tie_embeddings=False,
        dropout=cfg.DropoutConfig(0.1, 0.2, 0.3, 0.4),
    )


def small_config(**changes):
    """A small valid config as JSON values, with dotted keys set."""
    attention = {"num_heads": 6, "head_dim": 8, "position": {"kind": "rope"}}
    layer = {"attention": attention, "mlp": {"kind": "gated", "intermediate_size": 40}, "norm": {}}
    decoder = {"num_layers": 2, "layer_types": {"L": layer}, "layer_pattern": "L"}
    data = {"hidden_size": 24, "vocab_size": 67, "max_seq_len": 64, "embedding": {}, "decoder": decoder, "head": {}}
    return override(data, changes)


L = "decoder.layer_types.L"
A = f"{L}.attention"
P = f"{A}.position"
E = "embedding.position"


def error_of(data):
    """Return the error of a config that must be refused."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    return caught.value


def parent_of(data, key):
    """Return the object that holds the value of a dotted key, and the last name of the key."""
    *parents, last = key.split(".")
    for name in parents:
        data = data[name]
    return data, last


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("case", pairwise({"position": POSITIONS, "norm": NORMS, "heads": HEADS}))
def test_configs_survive_json(case):
    config = model_config(**case)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_every_field_survives_json():
    config = full_config()
    data = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(data) == config
    longrope = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "original_max_seq_len": 16, "factor": 4.0}
    layer = data["decoder"]["layer_types"]["L"]
    assert layer["attention"]["position"]["scaling"] == {"kind": "longrope", **longrope, "attention_factor": None}
    default = ModelConfig.from_dict(small_config())
    for field in dataclasses.fields(ModelConfig):
        if field.name not in ("hidden_size", "vocab_size", "max_seq_len", "encoder", "encoder_input"):
            assert getattr(config, field.name) != getattr(default, field.name)


@pytest.mark.parametrize("cls", typing.get_args(cfg.RopeScalingConfig), ids=lambda cls: cls.__name__)
def test_scalings_are_selected_by_their_kind(cls):
    given = {"factor": 2.0, "original_max_seq_len": 32, "short_factor": (1.0, 1.0), "long_factor": (2.0, 2.0)}
    given["fraction"] = 0.5
    scaling = cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})
    rope = cfg.RopeConfig(scaling=scaling)
    assert from_dict(cfg.RopeConfig, to_dict(rope)) == rope


def test_omitted_fields_have_their_defaults():
    config = ModelConfig.from_dict(small_config())
    layer = cfg.LayerConfig(cfg.AttentionConfig(6, head_dim=8), cfg.GatedMLPConfig(40))
    assert config.decoder.layer_types["L"] == layer
    assert (config.tie_embeddings, config.head, config.embedding.scale) == (True, cfg.LanguageHeadConfig(), 1.0)


def test_integers_are_accepted_for_floats_but_not_the_reverse():
    scale = ModelConfig.from_dict(small_config(**{"embedding.scale": 2})).embedding.scale
    assert scale == 2.0 and type(scale) is float
    config = ModelConfig.from_dict(small_config(**{f"{A}.softmax_scale": 1}))
    assert config.decoder.layer_types["L"].attention.softmax_scale == 1.0
    with pytest.raises(ConfigError, match=r"hidden_size: must be int, got 24\.0"):
        ModelConfig.from_dict(small_config(hidden_size=24.0))


# ---------------------------------------------------------------- files


def test_load_reads_a_config_and_that_of_a_checkpoint(tmp_path):
    decoder_config, inside = tmp_path / "a.json", tmp_path / "b.json"
    decoder_config.write_text(json.dumps(full_config().to_dict()))
    inside.write_text(json.dumps({"format": 1, "model": full_config().to_dict()}))
    assert ModelConfig.load(decoder_config) == ModelConfig.load(inside) == full_config()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file: .*config.json"),
        (b"{hidden_size", "config.json is not JSON"),
        (b"\xff\xfe\x00", "config.json is not JSON"),
        (b"[1, 2]", "must be an object of keys, got list"),
        (b"{}", "config.json: missing key hidden_size"),
        (b'{"model": 3}', "ModelConfig: must be an object, got 3"),
    ],
)
def test_load_names_the_problem_of_a_file(content, message, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.load(path)


# ---------------------------------------------------------------- keys and types

WRONG_KEYS = [  # changes, message, hint
    ({"hiden_size": 3}, "unknown key hiden_size", "did you mean 'hidden_size'?"),
    ({"decoder.layer": 3}, "unknown key decoder.layer", "did you mean 'num_layers'?"),
    ({f"{A}.kvheads": 3}, f"unknown key {L}.attention.kvheads", "did you mean 'num_kv_heads'?"),
    ({f"{L}.mlp.kind": "gatde"}, f"{L}.mlp.kind: unknown kind 'gatde'", "did you mean 'gated'?"),
    ({f"{P}.kind": "ropes"}, f"{P}.kind: unknown kind 'ropes'", "did you mean 'rope'?"),
    ({f"{L}.mlp": {"intermediate_size": 3}}, f"missing key {L}.mlp.kind", "known: gated, moe, plain"),
    ({E: {"num_positions": 3}}, "missing key embedding.position.kind", "known: learned, sinusoidal"),
    (
        {P: {"num_buckets": 3}},
        f"unknown key {P}.num_buckets",
        "known: interleaved, kind, partial_rotary_factor, scaling, theta",
    ),
    ({f"{P}": {"kind": 3}}, f"{P}.kind: unknown kind 3", "known: alibi, custom, disentangled, rope, t5"),
    ({f"{P}.scaling": {"kind": "yarm"}}, f"{P}.scaling.kind: unknown kind 'yarm'", "did you mean 'yarn'?"),
    ({f"{P}.scaling": {"kind": "yarn", "factor": 2.0}}, f"missing key {P}.scaling.original_max_seq_len", ""),
    ({"decoder.layer_pattern": "LG"}, "decoder.layer_pattern: unknown layer type 'G'", "known: L"),
    (
        {"decoder.layer_types.G": {"attention": {"num_heads": 6}, "mlp": {"kind": "gated", "intermediate_size": 40}}},
        "decoder.layer_types.G: is not used by layer_pattern 'L'",
        "omit it",
    ),
    ({E: {"kind": "learned"}}, "missing key embedding.position.num_positions", ""),
]


@pytest.mark.parametrize(("changes", "message", "hint"), WRONG_KEYS)
def test_unknown_keys_are_named_with_the_nearest_known_one(changes, message, hint):
    error = error_of(small_config(**changes))
    assert (error.message, error.hint) == (message, hint)


WRONG_TYPES = [
    ("hidden_size", "24", "hidden_size: must be int, got '24'"),
    ("hidden_size", True, "hidden_size: must be int, got True"),
    ("hidden_size", None, "hidden_size: must be int, got None"),
    ("tie_embeddings", 1, "tie_embeddings: must be bool, got 1"),
    ("embedding.scale", float("nan"), "embedding.scale: must be a finite number, got nan"),
    ("embedding.scale", float("inf"), "embedding.scale: must be a finite number, got inf"),
    ("embedding.scale", True, "embedding.scale: must be float, got True"),
    ("decoder", 3, "decoder: must be an object or null, got 3"),
    ("decoder.layer_types", [1], "decoder.layer_types: must be an object, got [1]"),
    ("decoder.layer_types", {"L": 5}, "decoder.layer_types.L: must be an object, got 5"),
    (f"{L}.mlp", 5, f"{L}.mlp: must be an object, got 5"),
    (f"{L}.mlp", None, f"{L}.mlp: must be an object, got None"),
    (f"{A}.window", "wide", f"{A}.window: must be int, got 'wide'"),
    (f"{A}.softmax_scale", "nono", f"{A}.softmax_scale: must be one of 'default', 'none'"),
    (f"{L}.mlp.activation", "swish", f"{L}.mlp.activation: must be one of 'gelu', "),
    (f"{P}", 4, f"{P}: must be an object or null, got 4"),
    (
        f"{P}.scaling",
        {"kind": "longrope", "short_factor": 1.0, "long_factor": [], "original_max_seq_len": 4},
        f"{P}.scaling.short_factor: must be a list, got 1.0",
    ),
    (
        f"{P}.scaling",
        {"kind": "longrope", "short_factor": [1.0, "x"], "long_factor": [], "original_max_seq_len": 4},
        f"{P}.scaling.short_factor[1]: must be float, got 'x'",
    ),
    ("decoder.norm_position", "middle", "decoder.norm_position: must be one of 'pre', 'post', "),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG_TYPES)
def test_wrong_types_are_named_with_the_value(key, value, message):
    data = small_config()
    parent, name = parent_of(data, key)
    parent[name] = value
    assert error_of(data).message.startswith(message)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "max_seq_len", "decoder.num_layers", A, f"{L}.mlp"])
def test_required_keys_must_be_present(key):
    data = small_config()
    parent, name = parent_of(data, key)
    del parent[name]
    assert error_of(data).message == f"missing key {key}"


# ---------------------------------------------------------------- overrides


def test_overrides_apply_at_any_depth_and_do_not_change_the_original():
    data = full_config().to_dict()
    unchanged = json.loads(json.dumps(data))
    changed = override(
        data, {"decoder.num_layers": 9, f"{P}.theta": 7.0, "tie_embeddings": True, "head": {"bias": False}}
    )
    assert data == unchanged
    config = ModelConfig.from_dict(changed)
    assert (config.decoder.num_layers, config.tie_embeddings, config.head) == (9, True, cfg.LanguageHeadConfig())
    position = config.decoder.layer_types["L"].attention.position
    assert isinstance(position, cfg.RopeConfig) and position.theta == 7.0


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("decodr.num_layers", "unknown key 'decodr'", "did you mean 'decoder'?"),
        (
            "decoder.layer_types.L.attn.num_heads",
            "unknown key 'decoder.layer_types.L.attn'",
            "did you mean 'attention'?",
        ),
        ("hidden_size.x", "unknown key 'hidden_size'", "did you mean 'hidden_size'?"),
    ],
)
def test_overrides_of_unknown_keys_are_refused(key, message, hint):
    with pytest.raises(ConfigError) as caught:
        override(small_config(), {key: 3})
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_an_override_of_an_unknown_last_key_is_refused_when_read():
    with pytest.raises(ConfigError, match=r"unknown key decoder\.num_layrs \(did you mean 'num_layers'\?\)"):
        ModelConfig.from_dict(override(small_config(), {"decoder.num_layrs": 3}))


# ---------------------------------------------------------------- invalid values


def scaling(kind, **fields):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4} if kind == "longrope" else {"factor": 2.0}
    length = {} if kind == "linear" else {"original_max_seq_len": 16}
    return {f"{P}.scaling": {"kind": kind, **factors, **length, **fields}}


def t5(**fields):
    return {P: {"kind": "t5", **fields}}


def learned(num_positions, offset=0):
    return {E: {"kind": "learned", "num_positions": num_positions, "offset": offset}}


SIZES = ["hidden_size", "vocab_size", "max_seq_len", "decoder.num_layers", f"{L}.mlp.intermediate_size"]
SIZES += [f"{A}.{name}" for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "window")]
ONE_VALUE = [  # key, value, message
    *((key, 0, "must be at least 1, got 0") for key in SIZES),
    ("decoder.layer_pattern", "", "must not be empty"),
    (f"{A}.num_kv_heads", 4, "must divide num_heads 6, got 4"),
    (f"{A}.logit_softcap", 0.0, "must be above 0, got 0.0"),
    (f"{A}.qk_norm_config", {}, "must be null with qk_norm none"),
    (f"{L}.norm.eps", -1.0, "must be at least 0, got -1.0"),
    ("head.logit_softcap", 0.0, "must be above 0, got 0.0"),
    (f"{P}.partial_rotary_factor", 0.0, "must rotate an even number of dims, got 0.0 of head_dim 8 = 0"),
    (f"{P}.partial_rotary_factor", 1.5, "must rotate an even number of dims, got 1.5 of head_dim 8 = 12"),
    (f"{P}.partial_rotary_factor", 0.4, "must rotate an even number of dims, got 0.4 of head_dim 8 = 3"),
    (f"{P}.theta", 0.0, "must be above 0, got 0.0"),
    ("decoder.num_distinct_layers", 1, "must be null in a model with a decoder"),
    (P, {"kind": "disentangled", "max_distance": 8}, "disentangled needs an encoder without a decoder"),
]
LATENT = {f"{A}.head_dim": None, f"{A}.latent": vars(cfg.LatentConfig(12, 6, 4, 5))}
SEVERAL_VALUES = [  # changes, message
    (LATENT | {f"{A}.head_dim": 8}, f"{A}.head_dim: must be null with latent attention"),
    (LATENT | {f"{A}.qk_norm": "head"}, f"{A}: latent attention has no qk_norm, clip_qkv or custom_class"),
    (LATENT | {P: None}, f"{P}: must be rope with latent attention"),
    ({f"{A}.head_dim": None, "hidden_size": 25}, f"{A}.num_heads: must divide hidden_size 25, got 6"),
    ({"embedding.norm": {"eps": -1.0}}, "embedding.norm.eps: must be at least 0, got -1.0"),
    (
        {f"{A}.qk_norm_config": {"eps": -1.0}, f"{A}.qk_norm": "head"},
        f"{A}.qk_norm_config.eps: must be at least 0, got -1.0",
    ),
    (
        {P: {"kind": "alibi", "round_to_bfloat16": True}, f"{A}.causal": False},
        f"{P}.round_to_bfloat16: must be false in a layer that is not causal",
    ),
    (
        {f"{A}.values_from_keys": True, f"{A}.value_dim": 5},
        f"{A}.values_from_keys: must be false with value_dim, qk_norm full or a custom class",
    ),
    (scaling("linear", factor=0.0), f"{P}.scaling.factor: must be above 0, got 0.0"),
    (scaling("dynamic", original_max_seq_len=0), f"{P}.scaling.original_max_seq_len: must be at least 1, got 0"),
    (
        {f"{P}.partial_rotary_factor": 0.25, **scaling("dynamic")},
        f"{P}.scaling.kind: dynamic needs more than 2 rotated dims, got 2",
    ),
    (
        scaling("llama3", high_freq_factor=1.0),
        f"{P}.scaling.high_freq_factor: must be above low_freq_factor 1.0, got 1.0",
    ),
    (scaling("yarn", beta_fast=0.5), f"{P}.scaling.beta_fast: must be at least beta_slow 1.0, got 0.5"),
    (scaling("yarn", beta_slow=0.0), f"{P}.scaling.beta_slow: must be above 0, got 0.0"),
    (scaling("yarn", attention_factor=-1.0), f"{P}.scaling.attention_factor: must be above 0, got -1.0"),
    (scaling("longrope", short_factor=[1.0] * 3), f"{P}.scaling.short_factor: must have 4 factors, got 3"),
    (scaling("longrope", long_factor=[1.0] * 5), f"{P}.scaling.long_factor: must have 4 factors, got 5"),
    (scaling("longrope", long_factor=[1.0, 0.0]), f"{P}.scaling.long_factor[1]: must be above 0, got 0.0"),
    (t5(num_buckets=1), f"{P}.num_buckets: must be at least 2, got 1"),
    (t5(num_buckets=3, bidirectional=True), f"{P}.num_buckets: must be at least 4, got 3"),
    (t5(num_buckets=32, max_distance=16), f"{P}.max_distance: must exceed the 16 exact buckets, got 16"),
    (learned(63), f"{E}.num_positions: must be at least max_seq_len 64 + offset 0, got 63"),
    (learned(65, offset=2), f"{E}.num_positions: must be at least max_seq_len 64 + offset 2, got 65"),
    (learned(65, offset=-1), f"{E}.offset: must be at least 0, got -1"),
    ({E: {"kind": "sinusoidal"}, "hidden_size": 25}, f"{E}.kind: sinusoidal needs an even hidden_size, got 25"),
    ({E: {"kind": "sinusoidal", "base": 0.0}}, f"{E}.base: must be above 0, got 0.0"),
    (
        {E: {"kind": "sinusoidal", "form": "fairseq"}, "hidden_size": 2},
        f"{E}.form: fairseq needs a hidden_size of at least 4, got 2",
    ),
]
IMPOSSIBLE = [*(({key: value}, f"{key}: {message}") for key, value, message in ONE_VALUE), *SEVERAL_VALUES]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_invalid_values_are_refused_by_name(changes, message):
    assert error_of(small_config(**changes)).message == message


@pytest.mark.parametrize(
    "changes",
    [
        {f"{A}.window": 1, f"{A}.num_kv_heads": 1},
        {f"{P}.partial_rotary_factor": 0.25, f"{P}.scaling": {"kind": "linear", "factor": 0.5}},
        learned(66, offset=2),
        {E: {"kind": "sinusoidal", "form": "fairseq"}, "hidden_size": 4},
        t5(num_buckets=2, max_distance=2),
        t5(num_buckets=4, max_distance=2, bidirectional=True),
        scaling("yarn", beta_fast=1.0),
        scaling("longrope"),
        {f"{P}.scaling": {"kind": "proportional", "fraction": 0.25}},
        {f"{A}.query_scaling": {"beta": 0.1, "original_max_seq_len": 8}},
        {f"{A}.values_from_keys": True, f"{A}.value_norm": True, f"{L}.output_scale": True},
        {f"{L}.mlp": {"kind": "plain", "intermediate_size": 8, "activation": "xielu"}},
        {f"{L}.norm.eps": 0.0, f"{A}.position": None},
    ],
)
def test_values_at_the_limits_are_accepted_and_run(changes):
    import torch

    from kvad.model.no_cache import NoCache
    from kvad.model.transformer import Transformer
    from kvad.model_input import ModelInput, SubBatch

    config = ModelConfig.from_dict(small_config(**changes))
    positions = torch.arange(64)
    step = ModelInput(positions, positions, (SubBatch(1, 64, 64),), positions, seq_lens=torch.full((64,), 64))
    model = Transformer(config)
    with torch.no_grad():
        assert bool(model.logits(model(step, NoCache(config)), step.logit_indices).isfinite().all())


def test_config_built_in_python_is_checked():
    with pytest.raises(ConfigError, match="vocab_size: must be at least 1, got 0"):
        dataclasses.replace(full_config(), vocab_size=0)


# ---------------------------------------------------------------- requirements of the cache


def test_attention_specs_of_each_layer():
    """Five layers of the pattern LLAT; a window as long as the limit is none; default dims and heads."""
    spec = AttentionSpec(False, 7, 3, 8, 5)
    assert attention_specs(full_config()) == (spec,) * 5
    wide = ModelConfig.from_dict(small_config(**{f"{A}.window": 64, f"{A}.head_dim": None}))
    assert attention_specs(wide) == (AttentionSpec(True, None, 6, 4, 4),) * 2
    narrow = ModelConfig.from_dict(small_config(**{f"{A}.window": 63}))
    assert {spec.window for spec in attention_specs(narrow)} == {63}
    mixed = model_config(heads="window-mix", layers=5)
    assert [spec.window for spec in attention_specs(mixed)] == [7, None, 7, None, 7]
    assert [mixed.decoder.layer_type(i) for i in range(5)] == list("LGLGL")


# ---------------------------------------------------------------- encoders and encoder-decoders


X = "encoder.layer_types.L"


def small_encoder_decoder(**changes):
    """A small valid encoder-decoder as JSON values, with dotted keys set."""
    data = small_config()
    kind = data["decoder"]["layer_types"]["L"]
    data["encoder"] = {
        "num_layers": 2,
        "layer_types": {"L": {**kind, "attention": {**kind["attention"], "causal": False}}},
    }
    cross = {"num_heads": 6, "head_dim": 8, "position": None, "causal": False}
    data["decoder"]["layer_types"]["L"] = {**kind, "cross_attention": cross}
    data["encoder_input"] = {"max_seq_len": 32, "embedding": {}}
    return override(data, changes)


def test_attention_specs_of_an_encoder_decoder():
    config = ModelConfig.from_dict(small_encoder_decoder())
    own, cross = AttentionSpec(True, None, 6, 8, 8), AttentionSpec(False, None, 6, 8, 8, is_cross_attention=True)
    assert config.kind == "encoder-decoder" and attention_specs(config) == (own, own, cross, cross)
    assert encoder_attention_specs(config) == (AttentionSpec(False, None, 6, 8, 8),) * 2
    decoder_config = small_encoder_decoder()
    del decoder_config["decoder"], decoder_config["encoder_input"]
    encoder = ModelConfig.from_dict(decoder_config)
    assert encoder.kind == "encoder" and attention_specs(encoder) == () and encoder.stack is encoder.encoder
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def mixture(**options):
    """A change of the encoder's MLP to a mixture of 8 experts."""
    sizes = {"intermediate_size": 8, "num_experts": 8, "num_experts_per_token": 2}
    return {f"{X}.mlp": {"kind": "moe", **sizes, **options}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": None, "decoder": None}, "a model needs a decoder, an encoder, or both"),
        ({"encoder_input": None}, "missing key encoder_input"),
        ({"encoder": None}, f"{L}.cross_attention: there is no encoder to attend to"),
        ({f"{L}.cross_attention": None}, f"missing key {L}.cross_attention"),
        ({f"{L}.cross_attention.causal": True}, f"{L}.cross_attention: must have no mask, window or positions"),
        (
            {f"{L}.cross_attention.position": {"kind": "alibi"}},
            f"{L}.cross_attention: must have no mask, window or positions",
        ),
        ({"decoder.norm_position": "parallel"}, f"{L}.cross_attention: is not supported with norm_position parallel"),
        ({"encoder_input.max_seq_len": 0}, "encoder_input.max_seq_len: must be at least 1, got 0"),
        ({"encoder_input.vocab_size": 0}, "encoder_input.vocab_size: must be at least 1, got 0"),
        ({"head": {"kind": "pooling"}}, "head.kind: must be language for a decoder, got pooling"),
        (
            {"head": {"kind": "language", "transform": {"output_size": 8}}},
            "tie_embeddings: the token table has 24 columns, the head needs 8",
        ),
        (
            {f"{X}.mlp": {"kind": "moe", "intermediate_size": 8, "num_experts": 2, "num_experts_per_token": 3}},
            f"{X}.mlp.num_experts: must be at least 3",
        ),
        (mixture(num_groups=3), f"{X}.mlp.num_groups: must divide the 8 experts, got 3"),
        (mixture(num_groups=4, num_groups_per_token=5), f"{X}.mlp.num_groups_per_token: must be at most 4, got 5"),
        (
            mixture(num_groups=4, num_groups_per_token=1, num_experts_per_token=3),
            f"{X}.mlp.num_experts_per_token: must be at most 2, the experts of 1 groups, got 3",
        ),
        (
            mixture(num_groups=8, num_groups_per_token=4, selection_bias=True),
            f"{X}.mlp.num_groups: must leave two experts per group with selection_bias, got 8",
        ),
        (mixture(sparsemixer_jitter=0.1, router="sigmoid"), f"{X}.mlp.sparsemixer_jitter: must be used with a softmax"),
        (mixture(sparsemixer_jitter=0.1, num_experts_per_token=3), f"{X}.mlp.sparsemixer_jitter: must be used with"),
        (mixture(shared_gate=True), f"{X}.mlp.shared_gate: there is no shared expert"),
        (
            {f"{X}.pre_attention_norm": False, "encoder.norm_position": "post"},
            f"{X}.pre_attention_norm: must be true with norm_position post",
        ),
    ],
)
def test_invalid_encoder_decoders_are_refused_by_name(changes, message):
    assert error_of(small_encoder_decoder(**changes)).message.startswith(message)


def test_encoder_input_is_refused_without_an_encoder():
    with pytest.raises(ConfigError, match="encoder_input: only an encoder-decoder has one"):
        ModelConfig.from_dict({**small_config(), "encoder_input": {"max_seq_len": 3}})
