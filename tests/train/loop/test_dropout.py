"""Dropout: places, none outside training, equal for one seed; activation checkpointing and compilation."""

import dataclasses
import json
from functools import partial

import pytest
import torch

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.hf_layout import choose_family
from kvad.checkpoint.native import save_checkpoint
from kvad.config.model import ModelConfig
from kvad.config.serialization import override
from kvad.errors import ConfigError
from kvad.model.layers import apply_dropout
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionParams, AttentionPattern, ModelInput, SubBatch, TokenPositions
from kvad.ops import runtime
from kvad.ops.attention import AttentionMask, dot_product_attention
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.config.run import RunConfig, TrainConfig
from kvad.train.loop.trainer import apply_acceleration
from tests.support.random_models import build, model_config, pair_config
from tests.support.training_runs import packed_input, saved_bytes, tiny_shape

EVERY = {"embedding": 0.1, "residual": 0.2, "attention": 0.3, "hidden": 0.25, "output": 0.15}


def with_dropout(config, **shares):
    return ModelConfig.from_dict({**config.to_dict(), "dropout": shares or EVERY})


packed = partial(packed_input, rows=2, length=10)


def gradients(model, step, seed=3):
    model.zero_grad()
    torch.manual_seed(seed)
    hidden = model(step, NoCache(model.config))
    model.logits(hidden, step.logit_indices).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- where, and when


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_drops_weights_and_keeps_the_expectation(kernel, heads):
    """With equal logits and values of one, an answer is (kept weights) / (1 - p): 0 or multiples of 1 / (6 x 0.75)."""
    rows, new, dim, p = 16, 6, 8, 0.25
    mark = TokenPositions(torch.arange(new).expand(rows, new))
    reading = AttentionMask(mark, mark, AttentionPattern(causal=False))
    q = torch.zeros(rows, new, heads, dim, dtype=torch.float64)
    k = torch.zeros(rows, 2, new, dim, dtype=torch.float64)
    torch.manual_seed(0)
    draws = [
        dot_product_attention(q, k, torch.ones_like(k), reading, AttentionParams(1.0, dropout=p), kernel=kernel).out[
            ..., 0
        ]
        for _ in range(200)
    ]
    found = torch.stack(draws)
    kept = found * new * (1 - p)
    assert torch.allclose(kept, kept.round(), atol=1e-9) and kept.min() >= 0 and kept.max() <= new
    assert found.mean().item() == pytest.approx(1.0, abs=4 * (p / (1 - p) / new / found.numel()) ** 0.5)
    plain = dot_product_attention(q, k, torch.ones_like(k), reading, AttentionParams(1.0), kernel=kernel).out
    assert torch.allclose(plain, torch.ones_like(plain))


def test_dropped_elements_are_zero_and_the_others_are_scaled():
    module = torch.nn.Identity().train()
    torch.manual_seed(0)
    x = apply_dropout(torch.ones(10_000), 0.2, module)
    assert set(x.tolist()) == {0.0, 1.25} and x.mean().item() == pytest.approx(1.0, abs=0.02)
    with torch.no_grad():
        assert torch.equal(apply_dropout(x, 0.2, module), x)
    assert torch.equal(apply_dropout(x, 0.2, module.eval()), x)


@pytest.mark.parametrize("share", EVERY)
@pytest.mark.parametrize("make", [model_config, pair_config])
def test_each_share_acts_in_training_and_never_outside(make, share):
    plain = build(make())
    model = build(with_dropout(make(), **{share: 0.5}))
    step = packed(model.config)
    model.train(), plain.train()
    assert not equal(gradients(model, step), gradients(plain, step))
    assert not equal(gradients(model, step, seed=1), gradients(model, step, seed=2))
    assert equal(gradients(model, step, seed=1), gradients(model, step, seed=1))
    model.eval()
    assert equal(gradients(model, step), gradients(plain, step))
    model.train()
    with torch.inference_mode():  # as in the engine
        assert torch.equal(model(step, NoCache(model.config)), plain(step, NoCache(plain.config)))


def test_every_share_is_applied_once():
    """One draw each for embedding and output, and in each of 2 layers for attention, 2 branches and the MLP."""
    counts = []
    real = torch.nn.functional.dropout

    def counting(x, p=0.5, training=True, inplace=False):
        counts.append(p)
        return real(x, p, training, inplace)

    model = build(with_dropout(model_config(norm="post"), **EVERY)).train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", counting)
        model(packed(model.config), NoCache(model.config, kernel="reference"))
    assert counts == [0.1, *([0.3, 0.2, 0.25, 0.2] * 2), 0.15]


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("family", "shares", "fields"),
    [
        ("gpt2", {"embedding": 0.1, "residual": 0.2, "attention": 0.3}, {"embd_pdrop": 0.1, "resid_pdrop": 0.2}),
        ("bert", {"embedding": 0.1, "residual": 0.1, "attention": 0.3}, {"hidden_dropout_prob": 0.1}),
        ("marian", {"embedding": 0.1, "residual": 0.1, "attention": 0.3, "hidden": 0.4}, {"activation_dropout": 0.4}),
        ("llama", {"attention": 0.3}, {"attention_dropout": 0.3}),
        ("t5", dict.fromkeys(EVERY, 0.2), {"dropout_rate": 0.2}),
    ],
)
def test_a_family_stores_the_shares_that_it_names(family, shares, fields):
    from kvad.checkpoint.families import find_family

    config = with_dropout(family_configs()[family], **shares)
    content = choose_family(config, family).content
    assert {name: content[name] for name in fields} == fields
    assert find_family(family).read(HFConfigReader(content, "config.json")).dropout == config.dropout
    other = with_dropout(config, **{**shares, "embedding": 0.45, "hidden": 0.15})
    with pytest.raises(Exception, match=r"dropout\.\w+ is 0\.\d+, would become"):
        choose_family(other, family)


def family_configs():
    """A small model of each family."""
    presets = {"gpt2": "gpt2-124m", "bert": "bert-base", "marian": "marian-tiny", "llama": "tiny", "t5": "t5-tiny"}
    models = {family: MODEL_PRESETS[preset](64, 32).to_dict() for family, preset in presets.items()}
    for family, side in (("gpt2", "decoder"), ("bert", "encoder")):
        shape = {**tiny_shape(side, layers=1, mlp=64), f"{side}.layer_types.L.attention.num_heads": 2}
        models[family] = override(models[family], shape)
    return {family: ModelConfig.from_dict(content) for family, content in models.items()}


FAMILIES = {
    "gpt2": {"embedding": 0.1, "residual": 0.2, "attention": 0.3},
    "bert": {"embedding": 0.2, "residual": 0.2, "attention": 0.3},
    "marian": {"embedding": 0.2, "residual": 0.2, "attention": 0.3, "hidden": 0.4},
    "llama": {"attention": 0.3},
    "t5": dict.fromkeys(EVERY, 0.2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_applied_where_transformers_applies_it(family, tmp_path, monkeypatch):
    """Dropout replaced by known factors, other ones for every share and column, gives equal logits in float64."""
    transformers = pytest.importorskip("transformers")

    def known(x, p=0.5, training=True, inplace=False):
        columns = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        return x * (1 + p * torch.cos(columns)) if training and p else x

    config = with_dropout(family_configs()[family], **FAMILIES[family])
    model = build(config).train()
    layout = choose_family(config, family)
    save_checkpoint(tmp_path / "m", config, model.state_dict(), None, layout=layout)
    there = json.loads((tmp_path / "m" / "config.json").read_text())["architectures"][0]
    reference = (
        getattr(transformers, there).from_pretrained(tmp_path / "m", attn_implementation="eager").double().train()
    )
    monkeypatch.setattr(torch.nn.functional, "dropout", known)
    tokens = torch.arange(3, 12) % 64
    step = ModelInput(tokens, torch.arange(9), (SubBatch(1, 9, 9),), torch.arange(9))
    step = step if config.encoder_input is None else step._replace(encoder_input=step)
    model.kernel = "reference"  # it calls that function, as transformers does
    hidden = model.double()(step, NoCache(config, kernel=model.kernel))
    inputs = {"input_ids": tokens[None]} | ({} if config.encoder_input is None else {"decoder_input_ids": tokens[None]})
    expected = reference(**inputs).logits[0]
    error = (model.logits(hidden, step.logit_indices) - expected).abs().max()
    assert error < 1e-5 * expected.abs().max()  # transformers' norms are float32
    plain = reference.eval()(**inputs).logits[0]
    assert (plain - expected).abs().max() > 1e-3, "dropout changes the logits"


def test_invalid_dropout_is_refused():
    with pytest.raises(ConfigError, match=r"dropout.residual: must be in \[0, 1\), got 1.0"):
        with_dropout(model_config(), residual=1.0)
    table = {"preset": "tiny", "set": {"dropout.residual": 0.1}}
    assert RunConfig.from_dict({"model": table}).resolve(64).dropout.residual == 0.1


# ---------------------------------------------------------------- recompute and compile


CASES = {
    "rope": model_config(),
    "t5": model_config(position="t5"),
    "sinks": model_config(heads="sinks", norm="post"),
    "parallel": ModelConfig.from_dict(override(model_config().to_dict(), {"decoder.norm_position": "parallel"})),
    "own-tables": ModelConfig.from_dict(
        override(model_config(position="t5").to_dict(), {"decoder.layer_types.L.attention.position.shared": False})
    ),
    "pairs": pair_config(),
    "pairs-t5": pair_config(position="t5"),
}


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_recomputed_gradients_are_bit_equal(name, dropout):
    config = with_dropout(CASES[name]) if dropout else CASES[name]
    model = build(config, dtype=torch.float32).train()
    step = packed(config)
    plain = gradients(model, step)
    apply_acceleration(model, TrainConfig(activation_checkpointing=True))
    found = gradients(model, step)
    for table in [name for name in plain if ".relative_bias." in name]:  # sums over layers have another order
        torch.testing.assert_close(found.pop(table), plain.pop(table))
    assert equal(found, plain)


def test_recomputing_saves_fewer_bytes():
    config = model_config(layers=6)
    model = build(config, dtype=torch.float32).train()
    step = packed(config, rows=4, length=32)

    plain = saved_bytes(model, step)
    apply_acceleration(model, TrainConfig(activation_checkpointing=True))
    assert saved_bytes(model, step) < plain / 3
    model.eval()
    assert not model.decoder.training and saved_bytes(model, step) == pytest.approx(plain, rel=0.01)


def test_a_missing_compiler_is_refused(monkeypatch):
    def missing(function):
        raise RuntimeError("No working C++ compiler found\nmore of it")

    monkeypatch.setattr(runtime.torch, "compile", missing)
    with pytest.raises(ConfigError, match=r"train.compile: torch cannot compile for cpu: No working C\+\+ "):
        apply_acceleration(Transformer(model_config()), TrainConfig(compile=True))


@pytest.mark.long(minutes=1)
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_gradients_are_near(recompute):
    if runtime.compile_error("cpu") is not None:
        pytest.skip("no compiler here")
    model = build(model_config(), dtype=torch.float32).train()
    step = packed(model.config)
    plain, hidden = gradients(model, step), model.eval()(step, NoCache(model.config))
    names = list(model.state_dict())
    apply_acceleration(model.train(), TrainConfig(compile=True, activation_checkpointing=recompute))
    for name, found in gradients(model, step).items():
        torch.testing.assert_close(found, plain[name], rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
    assert torch.equal(model.eval()(step, NoCache(model.config)), hidden), "outside training nothing is compiled"


def test_dropout_is_part_of_the_model_config():
    config = with_dropout(model_config())
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert dataclasses.asdict(config.dropout) == EVERY
