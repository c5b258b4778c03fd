"""A model that looks keys up, made by hand: no training, and recall 1 at any length.

One-hot tokens in three blocks of the residual stream: ``current | previous | answer``.  Layer A attends one token back
(its q and k are constants, turned against one another by one position) and writes what stood there under *previous*.
Layer B has no positions: it looks for the place whose *previous* is its own *current* and that is a key or a value, and
writes what stands there under *answer*, which is what the head reads.  Both layers attend to everything, so what a
cache drops is gone.
"""

import torch

from kvad.config.layers import AttentionConfig, LayerConfig, NormConfig, PlainMLPConfig, RopeConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.datasets import synthetic
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer

TURNED = 32  # dims of layer A's head


def make_looker(limit=1024):
    """(model, tokenizer)."""
    tokenizer = train_tokenizer("word", [" ".join(synthetic.vocabulary())])
    n = tokenizer.vocab_size
    back = AttentionConfig(1, head_dim=TURNED, value_dim=n, qkv_bias=True, softmax_scale=100.0, position=RopeConfig())
    match = AttentionConfig(1, head_dim=n + 1, value_dim=n, qkv_bias=True, softmax_scale=1.0, position=None)
    kinds = {
        "A": LayerConfig(back, PlainMLPConfig(1), NormConfig(eps=0.0)),
        "B": LayerConfig(match, PlainMLPConfig(1), NormConfig(eps=0.0)),
    }
    config = ModelConfig(
        hidden_size=3 * n, vocab_size=n, max_seq_len=limit, decoder=StackConfig(2, kinds, "AB"), tie_embeddings=False
    )
    model = Transformer(config)
    with torch.no_grad():
        _fill(dict(model.named_parameters()), tokenizer)
    return model.eval(), tokenizer


def _fill(weights, tokenizer):
    n = tokenizer.vocab_size
    current, previous, answer, eye = slice(0, n), slice(n, 2 * n), slice(2 * n, 3 * n), torch.eye(n)
    for name, weight in weights.items():
        if "norm" not in name:
            weight.zero_()
    weights["embedding.tokens.weight"][:, current] = eye
    weights["head.weight"][:, answer] = 50 * eye
    first, second = "decoder.layers.0.attention.", "decoder.layers.1.attention."
    angles = 10000.0 ** (-torch.arange(0, TURNED, 2) / TURNED)
    weights[first + "k.bias"][: TURNED // 2] = 1
    weights[first + "q.bias"][:] = torch.cat((angles.cos(), -angles.sin()))  # turned back by one position
    weights[first + "v.weight"][:, current] = eye / (3 * n) ** 0.5
    weights[first + "out.weight"][previous] = eye
    known = [tokenizer.encode(word)[0] for word in (*synthetic.KEYS, *synthetic.VALUES)]
    weights[second + "q.weight"][:n, current] = eye
    weights[second + "q.bias"][n] = 10
    weights[second + "k.weight"][:n, previous] = eye
    weights[second + "k.weight"][n, known] = 1
    weights[second + "v.weight"][:, current] = eye
    weights[second + "out.weight"][answer] = eye
