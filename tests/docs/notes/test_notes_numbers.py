"""Arithmetic of notes 000, 001, 003 and 004 section 2: NumPy is the reference, kvad is tested."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvad.config import layers as cfg
from kvad.model.attention import Attention
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput
from kvad.ops.attention import AttentionOutput

Build = Callable[..., Transformer]
Attend = Callable[..., AttentionOutput]


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def set_weights(mixer: Attention, **weights: np.ndarray) -> None:
    """Set weights in row convention, as in the notes: ``x @ W`` with W [in, out]; a Linear stores the transpose."""
    for name, value in weights.items():
        linear = getattr(mixer, name)
        assert linear.weight.shape == value.T.shape
        linear.weight.data = torch.from_numpy(value.T.copy())


def layer_input(
    model: Transformer, x: np.ndarray, step_of: Callable[..., ModelInput]
) -> tuple[Attention, Tensor, ModelInput]:
    mixer = model.decoder.layers[0].attention
    assert isinstance(mixer, Attention)
    return mixer, torch.from_numpy(x), step_of(torch.zeros(len(x), dtype=torch.long))


@torch.inference_mode()
def test_embedding_lookup_of_note_003(build: Build) -> None:
    """003, Tokens & Embeddings: ids 2, 5, 1 of an 8 x 4 table."""
    model = build(vocab=8, width=4)
    model.embedding.tokens.weight.data = torch.from_numpy(np.arange(8 * 4).reshape(8, 4) / 10)
    x = model.embedding(torch.tensor([2, 5, 1]), torch.arange(3))
    expected = np.array([[0.8, 0.9, 1.0, 1.1], [2.0, 2.1, 2.2, 2.3], [0.4, 0.5, 0.6, 0.7]])
    np.testing.assert_array_equal(x.numpy(), expected)


@torch.inference_mode()
def test_one_hot_times_the_table_is_the_lookup(build: Build) -> None:
    """002, One-Hot Encoding; 003, Tokens & Embeddings."""
    model, ids = build(), torch.tensor([3, 31, 0, 3])
    table = model.embedding.tokens.weight.numpy()
    one_hot = np.eye(len(table))[ids.numpy()]
    np.testing.assert_array_equal(model.embedding(ids, torch.arange(4)).numpy(), one_hot @ table)


@torch.inference_mode()
def test_attention_of_note_003_with_seed_7(build: Build, attention: Attend, step_of: Callable[..., ModelInput]) -> None:
    """003, Scaled Dot-Product Attention: seed 7, T = 4, d_model = 6, d_k = 3 (and 000 eq. 1-2, 002's matrices)."""
    random = np.random.RandomState(7)  # np.random.seed(7) uses this generator
    x = random.randn(4, 6)
    wq, wk, wv = (random.randn(6, 3) for _ in range(3))
    q, k, v = x @ wq, x @ wk, x @ wv
    scores = (q @ k.T) / np.sqrt(3)
    weights = softmax(scores)

    model = build(layers=1, width=6, num_heads=1, num_kv_heads=1, head_dim=3, causal=False)
    mixer, inputs, step = layer_input(model, x, step_of)
    set_weights(mixer, q=wq, k=wk, v=wv)
    projected = mixer.project(inputs)
    for got, expected in zip(projected, (q, k, v), strict=True):
        np.testing.assert_allclose(got[:, 0].numpy(), expected, rtol=0, atol=1e-12)
    done = attention(*projected)
    assert done.scores is not None and done.weights is not None
    np.testing.assert_allclose(done.scores[0].numpy(), scores, rtol=0, atol=1e-12)
    np.testing.assert_allclose(done.weights[0].numpy(), weights, rtol=0, atol=1e-12)
    np.testing.assert_allclose(done.out[:, 0].numpy(), weights @ v, rtol=0, atol=1e-12)
    np.testing.assert_allclose(done.out[0, 0].numpy(), [-3.12938097, -2.39532683, -0.39386037], rtol=0, atol=1e-8)
    through_the_layer = mixer(inputs, NoCache(model.config).open(step)[0], None)
    np.testing.assert_allclose(through_the_layer.numpy(), weights @ v @ mixer.out.weight.numpy().T, rtol=0, atol=1e-12)


def test_attention_weights_are_not_symmetric(attention: Attend) -> None:
    """001, Intermediate Results, calls attention "similar as correlation", but each row is a distribution."""
    random = torch.Generator().manual_seed(7)
    q, k = (torch.randn(4, 1, 3, generator=random, dtype=torch.float64) for _ in range(2))
    weights = attention(q, k, k).weights
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, dtype=torch.float64))
    assert (weights[0] - weights[0].T).abs().max() > 0.1
    shifted = attention(q + 1, k, k).weights  # a correlation would ignore the mean of each query
    assert shifted is not None and (shifted - weights).abs().max() > 0.1


def test_values_may_be_wider_than_keys(build: Build, hidden: Callable[..., Tensor]) -> None:
    """000 eq. 1: V has d_v columns, for any d_k."""
    model = build(layers=1, head_dim=6, value_dim=10)
    mixer = model.decoder.layers[0].attention
    _, k, v = mixer.project(torch.zeros(3, 24, dtype=torch.float64))
    assert (k.shape, v.shape) == ((3, 2, 6), (3, 2, 10))
    assert hidden(model, torch.tensor([1, 2, 3])).shape == (3, 24)


def test_head_dim_is_independent_of_the_width(build: Build, hidden: Callable[..., Tensor]) -> None:
    """001, Weight Matrices, gives [d x d]; 4 query heads of 8 on 2 KV heads in a model of width 24 differ."""
    model = build(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=5, width=24)
    mixer = model.decoder.layers[0].attention
    shapes = {name: tuple(getattr(mixer, name).weight.T.shape) for name in ("q", "k", "v", "out")}
    assert shapes == {"q": (24, 32), "k": (24, 16), "v": (24, 10), "out": (20, 24)}
    assert hidden(model, torch.tensor([1, 2, 3])).shape == (3, 24)


@torch.inference_mode()
def test_concatenated_heads_times_the_output_matrix_is_a_sum_over_heads(
    build: Build, step_of: Callable[..., ModelInput]
) -> None:
    """000 eq. 3; 002, multi-head: per head Q W^{q,h}, K W^{k,h}, V W^{v,h}, and [Z_1 Z_2] W^O = sum Z_h W^O_h."""
    random, heads, dim, width = np.random.RandomState(1), 2, 5, 12
    x, w_out = random.randn(6, width), random.randn(heads * dim, width)
    first = {name: random.randn(width, width) for name in "qkv"}  # W^q, W^k, W^v
    second = {name: random.randn(heads, width, dim) for name in "qkv"}  # W^{q,h}, W^{k,h}, W^{v,h}
    total = np.zeros((6, width))
    for h in range(heads):
        q, k, v = (x @ first[name] @ second[name][h] / width for name in "qkv")
        total += softmax(np.where(np.tri(6) > 0, q @ k.T / np.sqrt(dim), -np.inf)) @ v @ w_out[h * dim : (h + 1) * dim]

    model = build(layers=1, width=width, num_heads=heads, num_kv_heads=heads, head_dim=dim)
    mixer, inputs, step = layer_input(model, x, step_of)
    fused = {name: np.concatenate(list(first[name] @ second[name]), axis=1) / width for name in "qkv"}
    set_weights(mixer, **fused, out=w_out)
    out = mixer(inputs, NoCache(model.config).open(step)[0], None)
    np.testing.assert_allclose(out.numpy(), total, rtol=0, atol=1e-12)


CAT = ([0.0900, 0.2447, 0.6652], [0.7553, 1.6652])
CAT_SCALED = ([0.140, 0.284, 0.576], [0.716, 1.576])


@pytest.mark.parametrize(
    ("columns", "scale", "weights", "context"),
    [
        pytest.param(True, "none", *CAT, id="as printed: W x, unscaled"),
        pytest.param(True, "default", *CAT_SCALED, id="W x, scaled by 1/sqrt(2)"),
        pytest.param(False, "none", [0.2447, 0.0900, 0.6652], [1.6652, 0.7553], id="x W, unscaled"),
        pytest.param(False, "default", [0.284, 0.140, 0.576], [1.576, 0.716], id="x W, scaled: the note's own 2.4"),
    ],
)
@torch.inference_mode()
def test_the_cat_sat(
    columns: bool,
    scale: str,
    weights: list[float],
    context: list[float],
    build: Build,
    attention: Attend,
    step_of: Callable[..., ModelInput],
) -> None:
    """004 section 2.6: its numbers are those of unscaled W x; by its formulas in 2.4 (x W, scaled) they differ."""
    x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # The, cat, sat
    w = {"q": np.eye(2), "k": np.array([[1.0, 1.0], [0.0, 1.0]]), "v": np.array([[1.0, 0.0], [1.0, 1.0]])}
    model = build(layers=1, width=2, num_heads=1, num_kv_heads=1, head_dim=2, softmax_scale=scale)
    mixer, inputs, step = layer_input(model, x, step_of)
    set_weights(mixer, out=np.eye(2), **{name: value.T if columns else value for name, value in w.items()})
    q, k, v = mixer.project(inputs)
    of_columns, of_rows = [[1, 0], [1, 1], [2, 1]], [[1, 1], [0, 1], [1, 2]]
    assert (k[:, 0].tolist(), v[:, 0].tolist()) == ((of_columns, of_rows) if columns else (of_rows, of_columns))
    done = attention(q[2:], k, v, scale=mixer.attention_params(None).scale)
    assert done.weights is not None and done.scores is not None
    unscaled = np.array([1, 2, 3] if columns else [2, 1, 3])
    np.testing.assert_allclose(done.scores[0, 0].numpy(), unscaled / (1 if scale == "none" else np.sqrt(2)), rtol=1e-12)
    exps = np.exp([1, 2, 3])  # the note prints 20.085 and 30.192
    assert [f"{x:.3f}" for x in (*exps, exps.sum())] == ["2.718", "7.389", "20.086", "30.193"]
    np.testing.assert_allclose(done.weights[0, 0].numpy(), weights, rtol=0, atol=5.1e-4 if scale == "default" else 5e-5)
    out = mixer(inputs, NoCache(model.config).open(step)[0], None)
    np.testing.assert_allclose(out[2].numpy(), context, rtol=0, atol=5.1e-4 if scale == "default" else 5e-5)


def test_dot_product_has_variance_d_k_and_one_after_scaling(build: Build, attention: Attend) -> None:
    """001, Mathematical Computation; 004 section 2.4: the reason to divide the scores by sqrt(d_k) of the head."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(512, 1, 64, generator=random, dtype=torch.float64) for _ in range(2))
    plain = attention(q, k, k, scale=1.0).scores
    mixer = build(layers=1, width=24, num_heads=4, head_dim=64).decoder.layers[0].attention
    scaled = attention(q, k, k, scale=mixer.attention_params(None).scale).scores
    assert plain is not None and scaled is not None
    assert float(plain.var()) == pytest.approx(64, rel=0.05)
    assert float(scaled.var()) == pytest.approx(1, rel=0.05)


@torch.inference_mode()
def test_layer_norm_of_note_003(build: Build) -> None:
    """003, Residuals & Layer Norm: gamma (x - mu) / sqrt(sigma^2 + eps) + beta over hidden dimensions."""
    norm = build(norm=cfg.NormConfig("layer", eps=0.1, bias=True)).decoder.layers[0].norm1
    x = np.random.RandomState(3).randn(5, 24) * 3 + 2
    mean, variance = x.mean(axis=-1, keepdims=True), ((x - x.mean(axis=-1, keepdims=True)) ** 2).mean(-1, keepdims=True)
    expected = norm.weight.numpy() * (x - mean) / np.sqrt(variance + 0.1) + norm.bias.numpy()
    np.testing.assert_allclose(norm(torch.from_numpy(x)).numpy(), expected, rtol=0, atol=1e-12)


@torch.inference_mode()
@pytest.mark.parametrize("tie", [True, False])
def test_logits_are_the_final_states_times_the_table(tie: bool, build: Build, hidden: Callable[..., Tensor]) -> None:
    """004 section 1.4: u_t = W h_t with W [V, d] (printed with a wrong transpose); W = E if tied."""
    model, tokens = build(tie=tie), torch.tensor([1, 2, 3, 4])
    states = hidden(model, tokens)
    w = (model.embedding.tokens.weight if tie else model.head.weight).numpy()
    logits = model.logits(states, torch.tensor([3, 0]))
    assert logits.shape == (2, 32)
    np.testing.assert_allclose(logits.numpy(), states.numpy()[[3, 0]] @ w.T, rtol=0, atol=1e-12)


def test_tying_saves_one_table(build: Build) -> None:
    """004 section 1.4: tied, the model has V d parameters fewer."""
    tied, separate = (build(tie=tie) for tie in (True, False))
    num_parameters = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, separate)]
    assert num_parameters[1] - num_parameters[0] == tied.embedding.tokens.weight.numel()
