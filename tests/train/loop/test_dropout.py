"""Dropout: what is dropped where, never outside training, the same again from one seed; recomputing and compiling."""

import dataclasses
import json

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
from kvad.ops import compile
from kvad.ops.attention import AttentionMask, dot_product_attention
from kvad.train.config.run import RunConfig, TrainConfig
from kvad.train.loop.acceleration import apply_acceleration
from tests.support.random_models import build, model_config, pair_config

EVERY = {"embedding": 0.1, "residual": 0.2, "attention": 0.3, "hidden": 0.25, "output": 0.15}


def with_dropout(config, **shares):
    return ModelConfig.from_dict({**config.to_dict(), "dropout": shares or EVERY})


def packed(config, rows=2, length=10):
    positions = torch.arange(length).repeat(rows)
    tokens = torch.arange(rows * length) % config.vocab_size
    documents = (positions >= length // 2).long()
    step = ModelInput(
        tokens, positions, (SubBatch(rows, length, length),), torch.arange(rows * length), document_ids=documents
    )
    return step if config.encoder_input is None else step._replace(encoder_input=step)


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


def test_what_is_dropped_is_zero_and_the_rest_is_larger():
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
    with torch.inference_mode():  # what an engine runs under
        assert torch.equal(model(step, NoCache(model.config)), plain(step, NoCache(plain.config)))


def test_nothing_is_dropped_twice_and_none_is_lost():
    """What is asked for is what is drawn: one share of 0.5 each for the embedding, 2 branches and 1 MLP of 2 layers."""
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


def test_the_fused_kernel_is_told():
    model = build(with_dropout(model_config(), attention=0.5)).train()
    step = packed(model.config)
    torch.manual_seed(0)
    one = model(step, NoCache(model.config))
    two = model(step, NoCache(model.config))
    assert not torch.equal(one, two)


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
def test_a_family_carries_what_it_has_a_name_for(family, shares, fields):
    from kvad.checkpoint.families import find_family

    config = with_dropout(written()[family], **shares)
    content = choose_family(config, family).content
    assert {name: content[name] for name in fields} == fields
    assert find_family(family).read(HFConfigReader(content, "config.json")).dropout == config.dropout
    said = with_dropout(config, **{**shares, "embedding": 0.45, "hidden": 0.15})
    with pytest.raises(Exception, match=r"dropout\.\w+ is 0\.\d+, would become"):
        choose_family(said, family)


def written():
    """A small model of each family."""
    from kvad.train.config.presets import MODEL_PRESETS

    known = {
        name: MODEL_PRESETS[preset](64, 32)
        for name, preset in (("marian", "marian-tiny"), ("llama", "tiny"), ("t5", "t5-tiny"))
    }
    return {"gpt2": GPT2, "bert": BERT, **known}


GPT2 = ModelConfig.from_dict(
    {
        "hidden_size": 32,
        "vocab_size": 64,
        "max_seq_len": 32,
        "embedding": {"position": {"kind": "learned", "num_positions": 32}},
        "decoder": {
            "num_layers": 1,
            "layer_types": {
                "L": {
                    "attention": {"num_heads": 2, "position": None, "qkv_bias": True, "out_bias": True},
                    "mlp": {"kind": "plain", "intermediate_size": 64, "activation": "gelu_tanh", "bias": True},
                    "norm": {"kind": "layer", "bias": True},
                }
            },
        },
    }
)
BERT = ModelConfig.from_dict(
    {
        "hidden_size": 32,
        "vocab_size": 64,
        "max_seq_len": 32,
        "embedding": {
            "position": {"kind": "learned", "num_positions": 32},
            "norm": {"kind": "layer", "bias": True, "eps": 1e-12},
            "num_token_types": 2,
        },
        "encoder": {
            "num_layers": 1,
            "norm_position": "post",
            "final_norm": False,
            "layer_types": {
                "L": {
                    "attention": {
                        "num_heads": 2,
                        "position": None,
                        "causal": False,
                        "qkv_bias": True,
                        "out_bias": True,
                    },
                    "mlp": {"kind": "plain", "intermediate_size": 64, "activation": "gelu", "bias": True},
                    "norm": {"kind": "layer", "bias": True, "eps": 1e-12},
                }
            },
        },
        "head": {
            "bias": True,
            "transform": {"activation": "gelu", "norm": {"kind": "layer", "bias": True, "eps": 1e-12}},
        },
    }
)


FAMILIES = {
    "gpt2": {"embedding": 0.1, "residual": 0.2, "attention": 0.3},
    "bert": {"embedding": 0.2, "residual": 0.2, "attention": 0.3},
    "marian": {"embedding": 0.2, "residual": 0.2, "attention": 0.3, "hidden": 0.4},
    "llama": {"attention": 0.3},
    "t5": dict.fromkeys(EVERY, 0.2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_dropped_is_dropped_where_transformers_drops_it(family, tmp_path, monkeypatch):
    """Dropout that multiplies by known numbers instead, another one for every share and column: both models say the
    same with it, float64, each from the weights and shares that kvad wrote."""
    transformers = pytest.importorskip("transformers")

    def known(x, p=0.5, training=True, inplace=False):
        columns = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        return x * (1 + p * torch.cos(columns)) if training and p else x

    config = with_dropout(written()[family], **FAMILIES[family])
    model = build(config).train()
    layout = choose_family(config, family)
    save_checkpoint(tmp_path / "m", config, model.state_dict(), None, layout=layout)
    there = json.loads((tmp_path / "m" / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, there).from_pretrained(tmp_path / "m", attn_implementation="eager").double().train()
    monkeypatch.setattr(torch.nn.functional, "dropout", known)
    tokens = torch.arange(3, 12) % 64
    step = ModelInput(tokens, torch.arange(9), (SubBatch(1, 9, 9),), torch.arange(9))
    step = step if config.encoder_input is None else step._replace(encoder_input=step)
    model.kernel = "reference"  # which drops by that function, as theirs does
    hidden = model.double()(step, NoCache(config, kernel=model.kernel))
    asked = {"input_ids": tokens[None]} | ({} if config.encoder_input is None else {"decoder_input_ids": tokens[None]})
    wanted = theirs(**asked).logits[0]
    assert (
        model.logits(hidden, step.logit_indices) - wanted
    ).abs().max() < 1e-5 * wanted.abs().max()  # they norm in float32
    plain = theirs.eval()(**asked).logits[0]
    assert (plain - wanted).abs().max() > 1e-3, "it is seen at all"


def test_a_share_that_cannot_be_is_refused():
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
def test_recomputed_gradients_are_the_same_to_the_bit(name, dropout):
    config = with_dropout(CASES[name]) if dropout else CASES[name]
    model = build(config, dtype=torch.float32).train()
    step = packed(config)
    plain = gradients(model, step)
    apply_acceleration(model, TrainConfig(activation_checkpointing=True))
    found = gradients(model, step)
    for table in [
        name for name in plain if ".relative_bias." in name
    ]:  # its layers' shares are summed in another order
        torch.testing.assert_close(found.pop(table), plain.pop(table))
    assert equal(found, plain)


def test_recomputing_keeps_less():
    config = model_config(layers=6)
    model = build(config, dtype=torch.float32).train()
    step = packed(config, rows=4, length=32)

    def kept():
        held = {}

        def hold(tensor):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            out = model(step, NoCache(config))
        assert out.requires_grad
        return sum(storage.nbytes() for storage in held.values())

    plain = kept()
    apply_acceleration(model, TrainConfig(activation_checkpointing=True))
    assert kept() < plain / 3
    model.eval()
    assert not model.decoder.training and kept() == pytest.approx(plain, rel=0.01)


def test_no_compiler_is_said_in_a_line(monkeypatch):
    def missing(function):
        raise RuntimeError("No working C++ compiler found\nmore of it")

    monkeypatch.setattr(compile.torch, "compile", missing)
    with pytest.raises(ConfigError, match=r"train.compile: torch cannot compile for cpu: No working C\+\+ "):
        apply_acceleration(Transformer(model_config()), TrainConfig(compile=True))


@pytest.mark.long(minutes=1)
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_gradients_are_near(recompute):
    if compile.compile_error("cpu") is not None:
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


def test_the_shares_are_part_of_a_models_config():
    config = with_dropout(model_config())
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert dataclasses.asdict(config.dropout) == EVERY
