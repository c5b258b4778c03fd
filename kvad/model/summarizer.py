"""Learned summaries: one key, value and weight for every ``ratio`` tokens, from a small module per layer.

The mean of keys and values is exact if all keys are equal. Two parts, per kv head, restore some of its loss:

* Attention pooling: tokens are weighted by softmax(u . [k; v] + position_bias) over the chunk, with learned u for keys
  and for values.
* A low-rank correction of key, value and weight from a hidden layer over the tokens. The weight matters most: mean
  exp(q . k) is at least exp(q . mean(k)), the more so the more the keys differ, so a mean gets too little attention.

The learned parts begin at zero: an untrained summarizer computes exactly the mean. This module does not depend on
the cache, which receives one callable per layer (``Summarizer.by_layer``).
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
    """Summarizer of one layer: K kv heads, dims D and Dv, ``ratio`` tokens per summary, ``hidden`` units."""

    def __init__(self, kv_heads: int, head_dim: int, value_dim: int, ratio: int, hidden: int) -> None:
        super().__init__()
        self.sizes = kv_heads, head_dim, value_dim
        both = head_dim + value_dim
        self.query = nn.Parameter(torch.zeros(kv_heads, 2, both))  # weights of tokens, for key and value
        self.position_bias = nn.Parameter(torch.zeros(kv_heads, 2, ratio))  # weights by position in the chunk
        self.hidden_weight = nn.Parameter(torch.randn(kv_heads, both, hidden) * both**-0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(kv_heads, hidden))
        self.output_weight = nn.Parameter(torch.zeros(kv_heads, hidden, both + 1))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Summarize chunks of keys [n, K, ratio, D], not rotated, and values [n, K, ratio, Dv] in the keys' dtype.

        Returns:
            Keys [n, K, D], values [n, K, Dv], and logits [n, K] that are added to log(ratio).
        """
        query, position_bias, hidden_weight, bias, output_weight = (
            x.to(keys.dtype)
            for x in (self.query, self.position_bias, self.hidden_weight, self.hidden_bias, self.output_weight)
        )
        tokens = torch.cat((keys, values), dim=-1)  # [n, K, ratio, D + Dv]
        seen = torch.einsum("nkrd,ksd->nksr", tokens, query) + position_bias
        share = seen.softmax(-1) - torch.zeros_like(seen).softmax(-1)  # relative to the mean
        of_key, of_value = share.unsqueeze(-1).unbind(2)
        hidden = F.silu(torch.einsum("nkrd,kdh->nkrh", tokens, hidden_weight) + bias.unsqueeze(1)).mean(2)
        more_key, more_value, weight = torch.einsum("nkh,kho->nko", hidden, output_weight).split(
            (*self.sizes[1:], 1), dim=-1
        )
        key = keys.mean(2) + ((of_key * keys).sum(2) + more_key)
        value = values.mean(2) + ((of_value * values).sum(2) + more_value)
        return key, value, weight.squeeze(-1)


class Summarizer(nn.Module):
    """Summarizer of a model: a ``LayerSummarizer`` for each causal layer without a window, by layer index.

    Raises:
        ConfigError: If no layer can be summarized.
    """

    def __init__(self, specs: Sequence[AttentionSpec], ratio: int, hidden: int = 16) -> None:
        super().__init__()
        self.ratio, self.hidden = ratio, hidden
        self.layers = nn.ModuleDict()
        for index, spec in enumerate(specs):
            if spec.is_summarizable:
                sizes = spec.num_kv_heads, spec.head_dim, spec.value_dim
                self.layers[str(index)] = LayerSummarizer(*sizes, ratio, hidden)
        if not self.layers:
            raise ConfigError("summarizer: the model must have a causal layer without a window or latent attention")

    def by_layer(self) -> dict[int, LayerSummarizer]:
        """Return the layers' summarizers by layer index, as KVCache takes them."""
        return {int(name): layer for name, layer in self.layers.items()}  # type: ignore[misc]

    def fingerprint(self) -> str:
        """Return a hash of the ratio and all parameters."""
        digest = hashlib.blake2b(f"{self.ratio}".encode(), digest_size=16)
        for name, tensor in self.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()
