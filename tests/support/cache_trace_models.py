"""Hand-made lookup model: recall 1 at any length, without training.

Tokens are one-hot in three parts of the residual stream: ``current | previous | answer``. Layer A attends one token
back (q and k are constants, rotated by one position) and writes that token under *previous*. Layer B has no
positions: it finds the token whose *previous* is its own *current*, among keys and values, and writes that token
under *answer*, which the head reads. Both layers attend to all tokens, so a token that a cache drops is lost.
"""

import torch

from kvad.config.layers import AttentionConfig, LayerConfig, NormConfig, PlainMLPConfig, RopeConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.datasets import synthetic
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer

HEAD_DIM = 32  # dims of layer A's head


def make_looker(limit=1024):
    """(model, tokenizer)."""
    tokenizer = train_tokenizer("word", [" ".join(synthetic.vocabulary())])
    n = tokenizer.vocab_size
    back = AttentionConfig(1, head_dim=HEAD_DIM, value_dim=n, qkv_bias=True, softmax_scale=100.0, position=RopeConfig())
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
    angles = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    weights[first + "k.bias"][: HEAD_DIM // 2] = 1
    weights[first + "q.bias"][:] = torch.cat((angles.cos(), -angles.sin()))  # rotated back by one position
    weights[first + "v.weight"][:, current] = eye / (3 * n) ** 0.5
    weights[first + "out.weight"][previous] = eye
    value_ids = [tokenizer.encode(word)[0] for word in (*synthetic.KEYS, *synthetic.VALUES)]
    weights[second + "q.weight"][:n, current] = eye
    weights[second + "q.bias"][n] = 10
    weights[second + "k.weight"][:n, previous] = eye
    weights[second + "k.weight"][n, value_ids] = 1
    weights[second + "v.weight"][:, current] = eye
    weights[second + "out.weight"][answer] = eye
