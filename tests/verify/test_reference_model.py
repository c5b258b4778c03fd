"""The reference: the same function as the model, from weights and kernels that no engine uses."""

import copy

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cli.main import main
from kvad.config.layers import AttentionConfig, LayerConfig, MoEConfig, StackConfig
from kvad.config.model import ModelConfig, attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.model.no_cache import NoCache
from kvad.model.summarizer import Summarizer
from kvad.ops import attention, linear
from kvad.ops.linear import PackedLinear
from kvad.verify import scenario
from kvad.verify.reference_model import WholeSequence, reference_model
from kvad.verify.run import verify
from tests.support.random_models import build, model_config, pair_config
from tests.support.uncached import run_uncached
from tests.support.verify_models import FLAGS, OPTIONS, random_model, run_verify, tiny_model

ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
MIXTURE = MoEConfig(16, 4, 2, router="sigmoid", selection_bias=True, shared_size=12, shared_gate=True)
EXPERTS = LayerConfig(AttentionConfig(4, 2), MIXTURE)


def experts():
    decoder = StackConfig(num_layers=2, layer_types={"L": EXPERTS})
    return random_model(ModelConfig(hidden_size=32, vocab_size=64, max_seq_len=96, decoder=decoder))


MODELS = {name: lambda name=name: build(model_config(name)) for name in ENCODINGS}
MODELS |= {f"pair-{name}": lambda name=name: build(pair_config(name)) for name in ENCODINGS}
MODELS["experts"] = experts


def whole_logits(model, dtype=torch.float64):
    reference = reference_model(model, dtype)
    cache = NoCache(model.config, kernel="reference")
    return reference.whole_logits(sequences(model), cache)


def sequences(model):
    sources = ((5, 2, 7), (1,)) if model.config.encoder_input is not None else (None, None)
    return [WholeSequence(tokens, source) for tokens, source in zip(((1, 2, 3, 4, 9, 9), (7,)), sources, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_reference_is_the_uncached_model_in_float64(name):
    model = MODELS[name]().float()
    double = copy.deepcopy(model).double()
    for sequence, logits in zip(sequences(model), whole_logits(model), strict=True):
        expected = run_uncached(double, sequence.tokens, None, sequence.source)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["rope", "pair-t5", "experts"])
def test_orders_of_sums_differ_by_rounding_only(name):
    model = MODELS[name]().float()
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        reference, cache = reference_model(model, dtype), NoCache(model.config, kernel="reference")
        passes = [reference.whole_logits(sequences(model), cache, sum_order=order) for order in (0, 1, 2, 1, 0)]
        first, second, third, second_again, first_again = (torch.cat(each) for each in passes)
        assert torch.equal(first, first_again) and torch.equal(second, second_again)
        assert 0 < (first - second).abs().max() < limit and 0 < (second - third).abs().max() < limit


@pytest.mark.parametrize("name", ["rope", "pair-t5", "experts"])
def test_reference_shares_no_kernel_with_an_engine(name, monkeypatch):
    model = MODELS[name]().float()
    expected = whole_logits(model)
    model.fuse_projections()

    def fail(*_, **__):
        pytest.fail("a kernel of the engine is used")

    monkeypatch.setattr(attention, "_fused", fail)
    monkeypatch.setattr(linear, "tiled_matmul", fail)
    monkeypatch.setattr(torch, "bmm", fail)
    monkeypatch.setattr(torch, "split", fail)
    for have, true in zip(whole_logits(model), expected, strict=True):
        assert torch.equal(have, true)


def test_reference_keeps_its_weights_when_an_engine_packs_wrongly(monkeypatch):
    model = tiny_model()
    reference, expected = reference_model(model, torch.float64), whole_logits(model)
    plant_wrong_weights(monkeypatch)
    Engine(model, CacheConfig(max_seq_len=32)).close()
    have = reference.whole_logits(sequences(model), NoCache(model.config, kernel="reference"))
    assert all(torch.equal(*pair) for pair in zip(have, expected, strict=True))
    assert not torch.allclose(whole_logits(model)[0], expected[0])


def test_weights_are_converted_one_at_a_time():
    model = tiny_model().bfloat16()
    reference = reference_model(model, torch.float64)
    stored = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in reference.parameters()} == stored


# ---------------------------------------------------------------- planted errors


def plant_wrong_weights(monkeypatch):
    pack = PackedLinear.pack

    def wrong(self, *layers):
        pack(self, *layers)
        self._weight.mul_(1.05)  # the layers' weights are views of it

    monkeypatch.setattr(PackedLinear, "pack", wrong)


def plant_wrong_product(monkeypatch):
    call = PackedLinear.__call__

    def wrong(self, x, *layers):
        return [1.05 * product for product in call(self, x, *layers)]

    monkeypatch.setattr(PackedLinear, "__call__", wrong)


def plant_wrong_gate(monkeypatch):
    call = PackedLinear.__call__

    def wrong(self, x, *layers):
        products = list(call(self, x, *layers))
        return [1.05 * products[0], products[1]] if len(layers) == 2 else products

    monkeypatch.setattr(PackedLinear, "__call__", wrong)


@pytest.mark.parametrize(
    ("plant", "product"),
    [
        (plant_wrong_weights, "decoder.layers.0.attention (q, k, v)"),
        (plant_wrong_product, "decoder.layers.0.attention (q, k, v)"),
        (plant_wrong_gate, "decoder.layers.0.mlp (gate, up)"),
    ],
)
def test_wrong_joined_product_is_named_and_exits_1(plant, product, checkpoint, capsys, monkeypatch):
    plant(monkeypatch)
    assert main(["verify", checkpoint, *FLAGS, "--cache-dtype", "float32", "--layout", "paged"]) == 1
    out = capsys.readouterr().out
    assert "packed weights differ" in out and f"the joined product of {product} is off by 0." in out
    assert out.splitlines()[-1] == "verdict: broken (paged float32)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_joined_product_is_named_without_a_float64_engine(dtype, monkeypatch):
    """As on a model too large for a float64 copy: the derived tolerance shows it."""
    options = {"structure": False, "dtypes": (str(dtype).removeprefix("torch."),), "layouts": ("paged",)}
    (intact,) = run_verify(tiny_model().to(dtype), **options).cases
    assert intact.verdict == "within tolerance" and intact.structure is None
    plant_wrong_weights(monkeypatch)
    (broken,) = run_verify(tiny_model().to(dtype), **options).cases
    assert broken.verdict == "broken" and broken.finding.fault == "packed", broken.finding


# ---------------------------------------------------------------- the engine as configured


def test_options_reach_the_engine(checkpoint, capsys, monkeypatch):
    seen = []
    build_engine = Engine.__init__

    def record(self, model, cache, config=None, **options):
        seen.append((str(model.token_embedding.dtype), config.deterministic, config.max_num_batched_tokens))
        build_engine(self, model, cache, config, **options)

    monkeypatch.setattr(Engine, "__init__", record)
    options = ["--dtype", "bfloat16", "--deterministic", "--max-num-batched-tokens", "9", "--layout", "paged"]
    assert main(["verify", checkpoint, *FLAGS, *options]) == 0
    assert ("torch.bfloat16", True, 9) in seen and {mode for _, mode, _ in seen} == {True}
    assert "paged bfloat16" in capsys.readouterr().out


def test_beams_are_compared(checkpoint, capsys, monkeypatch):
    command = ["verify", checkpoint, *FLAGS, "--layout", "paged", "--cache-dtype", "float32", "--num-beams", "3"]
    assert main(command) == 0
    assert "3 beams" in capsys.readouterr().out
    fork = scenario.Engine.__init__.__globals__["KVCacheManager"].fork
    monkeypatch.setattr(
        scenario.Engine.__init__.__globals__["KVCacheManager"],
        "fork",
        lambda self, index, child, length: fork(self, (index + 1) % 2 if length > 12 else index, child, length),
    )
    assert main(command) in (1, 2)


def test_summarizer_of_the_engine_is_verified():
    model = tiny_model()
    torch.manual_seed(0)
    summarizer = Summarizer(attention_specs(model.config), 2, hidden=4)
    with torch.no_grad():
        for parameter in summarizer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    options = {"policies": ("tiered(8, quantized=8, interval=8, summaries=8, ratio=2)",), "layouts": ("paged",)}
    changed = scenario.replace(OPTIONS, **options)
    prompts = scenario.build_prompts(model.config, changed, None)
    config = EngineConfig(summarizer=summarizer)
    (case,) = verify(model, prompts, changed, config=config).cases
    assert case.verdict == "lossy by design"
    (case,) = verify(model, prompts, changed, config=config, fault="summary").cases
    assert case.verdict == "broken" and case.finding.fault == "summary"
