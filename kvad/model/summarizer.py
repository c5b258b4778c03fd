"""Learned summaries: one key, one value and a weight for every ``ratio`` tokens, by a small module per layer.

A mean of keys and values says what a chunk's tokens would say if their keys were equal.  What it loses, two parts give
back, for each kv head apart:

* *Which tokens count.*  Those that queries look at more: softmax(u . [k; v] + place) over the chunk, u learned, of keys
  and of values apart (attention pooling).
* *A correction* of key, value and weight, of low rank, from a hidden layer over the tokens.  The weight above all: mean
  exp(q . k) is at least exp(q . mean(k)), and more the more the keys differ, so a mean is looked at too little.

All that is learned begins at zero: an untrained compressor is the mean, to the bit.  Nothing here knows of a cache:
:class:`Compressor` is handed to one, layer by layer, as a callable (``Compressor.by_layer``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad.config import AttentionSpec
from kvad.errors import ConfigError


class LayerSummarizer(nn.Module):
    """Of one layer: K kv heads, keys of D and values of Dv numbers, ``ratio`` tokens a summary, ``hidden`` units."""

    def __init__(self, kv_heads: int, head_dim: int, value_dim: int, ratio: int, hidden: int) -> None:
        super().__init__()
        self.sizes = kv_heads, head_dim, value_dim
        both = head_dim + value_dim
        self.query = nn.Parameter(torch.zeros(kv_heads, 2, both))  # which tokens count, for the key and for the value
        self.position_bias = nn.Parameter(torch.zeros(kv_heads, 2, ratio))  # the same, by their place
        self.hidden_weight = nn.Parameter(torch.randn(kv_heads, both, hidden) * both**-0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(kv_heads, hidden))
        self.output_weight = nn.Parameter(torch.zeros(kv_heads, hidden, both + 1))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """keys [n, K, ratio, D] not rotated, values [n, K, ratio, Dv] -> those of the summaries, [n, K, D] and
        [n, K, Dv], and what is to be added to log(ratio) [n, K].  In the dtype of the keys."""
        look, place, inner, bias, outer = (
            x.to(keys.dtype)
            for x in (self.query, self.position_bias, self.hidden_weight, self.hidden_bias, self.output_weight)
        )
        tokens = torch.cat((keys, values), dim=-1)  # [n, K, ratio, D + Dv]
        seen = torch.einsum("nkrd,ksd->nksr", tokens, look) + place
        share = seen.softmax(-1) - torch.zeros_like(seen).softmax(-1)  # beyond that of the mean
        of_key, of_value = share.unsqueeze(-1).unbind(2)
        hidden = F.silu(torch.einsum("nkrd,kdh->nkrh", tokens, inner) + bias.unsqueeze(1)).mean(2)
        more_key, more_value, weight = torch.einsum("nkh,kho->nko", hidden, outer).split((*self.sizes[1:], 1), dim=-1)
        key = keys.mean(2) + ((of_key * keys).sum(2) + more_key)
        value = values.mean(2) + ((of_value * values).sum(2) + more_value)
        return key, value, weight.squeeze(-1)


class Summarizer(nn.Module):
    """Of a model: a :class:`LayerCompressor` for each layer that keeps all its tokens, by the layer's number.

    ``mixers``: as ``config.mixers`` gives them.  ConfigError where no layer's tokens could be summarised.
    """

    def __init__(self, mixers: Sequence[AttentionSpec], ratio: int, hidden: int = 16) -> None:
        super().__init__()
        self.ratio, self.hidden = ratio, hidden
        self.layers = nn.ModuleDict()
        for number, mixer in enumerate(mixers):
            if mixer.causal and not mixer.is_cross_attention and mixer.window is None:
                sizes = mixer.num_kv_heads, mixer.head_dim, mixer.value_dim
                self.layers[str(number)] = LayerSummarizer(*sizes, ratio, hidden)
        if not self.layers:
            raise ConfigError("no layer of this model keeps all its tokens: there is nothing to summarise")

    def by_layer(self) -> dict[int, LayerSummarizer]:
        """As a cache takes them."""
        return {int(name): layer for name, layer in self.layers.items()}  # type: ignore[misc]

    def fingerprint(self) -> str:
        """Names what it says: its ratio and every number that it has learned."""
        digest = hashlib.blake2b(f"{self.ratio}".encode(), digest_size=16)
        for name, tensor in self.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()
