"""Looking inside changes nothing, and what the cache gives back is what was put in."""

from __future__ import annotations

import pytest
import torch

from kvad.engine.trace import LayerTrace, trace_forward
from kvad.errors import RequestError
from tests.support.driver import uncached
from tests.support.random_models import build, model_config

TOKENS = [5, 9, 2, 44, 17, 5, 3, 8, 21, 30, 2, 7]
PIECES = [str(token) for token in TOKENS]


@pytest.mark.parametrize("heads", ["mha", "gqa", "window", "sinks", "value-dim"])
@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "learned"])
def test_cached_and_uncached_traces_are_equal(position: str, heads: str) -> None:
    model = build(model_config(position, heads=heads))
    fresh = trace_forward(model, TOKENS, PIECES, layers=[0, 1])
    cached = trace_forward(model, TOKENS, PIECES, layers=[0, 1], cached=True)
    assert torch.allclose(fresh.logits, cached.logits, atol=1e-10)
    for layer in (0, 1):
        for name in LayerTrace.__dataclass_fields__:
            a, b = getattr(fresh.layers[layer], name), getattr(cached.layers[layer], name)
            assert a.shape == b.shape, name
            held = ~b.isnan()  # a window lets old keys go: there the cache has nothing to show
            assert torch.allclose(a[held], b[held], atol=1e-10), (layer, name)
            assert held.all() or (name in "kv" and heads == "window"), name


def test_layers_without_attention_are_left_out_or_refused() -> None:
    model = build(model_config("rope", heads="short-conv", layers=3))
    assert list(trace_forward(model, TOKENS, PIECES, cached=True).layers) == [1]
    with pytest.raises(RequestError, match="layer 2 has no attention"):
        trace_forward(model, TOKENS, PIECES, layers=[1, 2])


def test_the_parts_of_a_trace_are_consistent() -> None:
    """scores = scale q.k, weights = softmax(scores), head outputs = weights v, and the logits are the model's."""
    model = build(model_config("rope", heads="gqa"))
    shown = trace_forward(model, TOKENS, PIECES, layers=[1])
    layer = shown.layers[1]
    k, v = layer.k.repeat_interleave(2, dim=1), layer.v.repeat_interleave(2, dim=1)
    scores = torch.einsum("thd,shd->hts", layer.q, k) / 8**0.5
    future = torch.ones(len(TOKENS), len(TOKENS)).triu(1).bool()
    assert torch.allclose(layer.scores, scores.masked_fill(future, -torch.inf), atol=1e-10)
    assert torch.allclose(layer.weights, layer.scores.softmax(-1), atol=1e-10)
    assert torch.allclose(layer.head_outputs, torch.einsum("hts,shd->thd", layer.weights, v), atol=1e-10)
    assert torch.allclose(shown.logits, uncached(model, TOKENS), atol=1e-10)


def test_layers_and_heads_can_be_chosen() -> None:
    model = build(model_config("rope", heads="gqa"))
    every = trace_forward(model, TOKENS, PIECES, layers=[1]).layers[1]
    some = trace_forward(model, TOKENS, PIECES, layers=[1], heads=[5, 2]).layers[1]
    assert torch.equal(some.weights, every.weights[[5, 2]]) and torch.equal(some.q, every.q[:, [5, 2]])
    assert some.k.shape[1] == 2 and torch.equal(some.k, every.k[:, [1, 2]])  # heads 2 and 5 read kv heads 1 and 2


def test_a_single_token_can_be_traced_through_the_cache() -> None:
    model = build(model_config())
    shown = trace_forward(model, [3], ["3"], layers=[0], cached=True)
    assert shown.layers[0].weights.tolist() == [[[1.0]]] * 6
