"""The summarizer: it starts as the mean, is small, and every part of it learns."""

import pytest
import torch

from kvad.cache.device.eviction import mean_summary
from kvad.config.model import attention_specs
from kvad.errors import ConfigError
from kvad.model.summarizer import LayerSummarizer, Summarizer
from kvad.model.transformer import Transformer
from kvad.train.config.presets import MODEL_PRESETS
from tests.support.random_models import model_config


def randomized(summarizer, seed=0, size=0.3):
    """Return the same summarizer with random weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in summarizer.parameters():
        with torch.no_grad():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return summarizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 8, 8, 2), (3, 8, 6, 3), (2, 5, 7, 8), (4, 32, 32, 16)])
def test_untrained_summarizer_is_the_mean(sizes, dtype):
    heads, dim, value_dim, ratio = sizes
    keys, values = torch.randn(5, heads, ratio, dim, dtype=dtype), torch.randn(5, heads, ratio, value_dim, dtype=dtype)
    built = LayerSummarizer(heads, dim, value_dim, ratio, hidden=4)(keys, values)
    for got, right in zip(built, mean_summary(keys, values), strict=True):
        assert got.dtype == right.dtype == dtype and torch.equal(got, right)


def test_trained_summarizer_is_not_the_mean():
    keys, values = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4, 6)
    built = randomized(LayerSummarizer(2, 8, 6, 4, hidden=4))(keys, values)
    assert all(not torch.allclose(got, right) for got, right in zip(built, mean_summary(keys, values), strict=True))
    assert [tuple(x.shape) for x in built] == [(5, 2, 8), (5, 2, 6), (5, 2)]


def test_heads_are_independent():
    layer = randomized(LayerSummarizer(2, 8, 6, 4, hidden=4))
    keys, values = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4, 6)
    other = [x.clone() for x in (keys, values)]
    other[0][:, 1], other[1][:, 1] = 0, 0
    for got, right in zip(layer(*other), layer(keys, values), strict=True):
        assert torch.equal(got[:, 0], right[:, 0]) and not torch.equal(got[:, 1], right[:, 1])


def test_every_parameter_has_a_gradient():
    layer = randomized(LayerSummarizer(2, 8, 6, 4, hidden=4))
    sum(x.square().sum() for x in layer(torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4, 6))).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("preset", ["tiny", "small", "demo", "medium"])
def test_summarizer_is_small(preset):
    config = MODEL_PRESETS[preset](4096, 256)
    with torch.device("meta"):
        model, summarizer = Transformer(config), Summarizer(attention_specs(config), ratio=8)
    own, layers = (sum(p.numel() for p in module.parameters()) for module in (summarizer, model.decoder.layers))
    assert 0 < own / layers < 0.04


def test_window_layers_have_no_summarizer():
    assert list(Summarizer(attention_specs(model_config("rope", "pre", "window-mix")), 4).by_layer()) == [1]
    with pytest.raises(ConfigError, match=r"^summarizer: the model must have a causal layer without a window"):
        Summarizer(attention_specs(model_config("rope", "pre", "window")), 4)
    with pytest.raises(ConfigError, match=r"without a window or latent attention$"):
        Summarizer(attention_specs(model_config(heads="latent")), 4)


def test_fingerprint_depends_on_the_weights():
    specs = attention_specs(model_config())
    torch.manual_seed(0)
    one = Summarizer(specs, 4)
    torch.manual_seed(0)
    same, other = Summarizer(specs, 4), Summarizer(specs, 8)
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    with torch.no_grad():
        same.layers["1"].output_weight[0, 0, 0] += 1e-6
    assert one.fingerprint() != same.fingerprint()
