"""Heads: logits over the vocabulary, label scores, or one vector per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.config import ModelConfig, head_input_size
from kvad.model.layers import ACTIVATIONS, Norm
from kvad.model_input import SubBatch


class HeadTransform(nn.Module):
    """Dense layer, activation and norm before a head's output matrix (``config.HeadTransformConfig``)."""

    def __init__(self, width: int, spec: cfg.HeadTransformConfig) -> None:
        super().__init__()
        out = width if spec.output_size is None else spec.output_size
        self.dense = ops.linear.Linear(width, out, spec.bias)
        self.activation = None if spec.activation is None else ACTIVATIONS[spec.activation]
        self.norm = Norm(out, spec.norm) if spec.norm else None

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.dense(hidden)
        if self.activation is not None:
            out = self.activation(out)
        return out if self.norm is None else self.norm(out)


def _build_transform(config: ModelConfig) -> HeadTransform | None:
    return None if config.head.transform is None else HeadTransform(config.hidden_size, config.head.transform)


class LanguageHead(nn.Module):
    """Language head; if tied (Press & Wolf 2017) or quantized (``output``), it has no weight."""

    tiles: ops.batch_invariant.TileSizes | None = None

    def __init__(self, config: ModelConfig, spec: cfg.LanguageHeadConfig) -> None:
        super().__init__()
        self.spec = spec
        self.transform = _build_transform(config)
        size = head_input_size(config)
        self.weight = None if config.tie_embeddings else nn.Parameter(torch.empty(config.vocab_size, size))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if spec.bias else None
        self.output: ops.quantized_linear.QuantizedLinear | None = None

    def use_quantized(self, matrix: ops.quantized_linear.QuantizedMatrix) -> None:
        """Multiply by a quantized matrix [V, E], for inference; a tied token table remains for the lookup."""
        self.weight, self.output = None, ops.quantized_linear.QuantizedLinear(matrix)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Compute logits [N, V] from hidden [N, E] and the token table [V, E]."""
        hidden = self.pre_logits(hidden)
        if self.output is not None:
            logits: Tensor = self.output(hidden)
            return self.scale_logits(logits if self.bias is None else logits + self.bias)
        weight = table if self.weight is None else self.weight
        return self.scale_logits(ops.linear.linear(hidden, weight, self.bias, self.tiles))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Apply the scale and the softcap to logits [N, V]."""
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits

    def pre_logits(self, hidden: Tensor) -> Tensor:
        """Return the input of the output matrix [N, E or the table's columns] from hidden [N, E]."""
        return hidden if self.transform is None else self.transform(hidden)


class ClassificationHead(nn.Module):
    """Classification head: label scores of tokens, or of pooled sequences."""

    tiles: ops.batch_invariant.TileSizes | None = None

    def __init__(self, config: ModelConfig, spec: cfg.ClassificationHeadConfig) -> None:
        super().__init__()
        self.spec = spec
        self.transform = _build_transform(config)
        self.weight = nn.Parameter(torch.empty(len(spec.labels), head_input_size(config)))
        self.bias = nn.Parameter(torch.zeros(len(spec.labels))) if spec.bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute label scores: [N, E] -> [N, labels]."""
        hidden = hidden if self.transform is None else self.transform(hidden)
        return ops.linear.linear(hidden, self.weight, self.bias, self.tiles)


class PoolingHead(nn.Module):
    """Head that turns a pooled hidden state into a sequence embedding."""

    def __init__(self, config: ModelConfig, spec: cfg.PoolingHeadConfig) -> None:
        super().__init__()
        self.spec = spec
        self.transform = _build_transform(config)

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute embeddings: [B, E] -> [B, E], or the transform's output size."""
        out = pooled if self.transform is None else self.transform(pooled)
        return F.normalize(out, dim=-1) if self.spec.normalize else out


class PooledStates:
    """Pools the hidden states of one sequence that is computed in parts, as ``pool_hidden`` those of whole ones."""

    def __init__(self, pooling: cfg.Pooling) -> None:
        self._pooling, self._count, self._vector = pooling, 0, torch.empty(0)

    def add(self, hidden: Tensor) -> None:
        """Add the hidden states [T, E] of the next tokens."""
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self._pooling == "mean":
            part = hidden.sum(dim=0)
        elif self._pooling == "max":
            part = hidden.amax(dim=0)
        else:
            part = hidden[0 if self._pooling == "first" else -1]
        if not self._count or self._pooling == "last":
            self._vector = part.clone()
        elif self._pooling == "mean":
            self._vector += part
        elif self._pooling == "max":
            self._vector = torch.maximum(self._vector, part)
        self._count += len(hidden)

    def result(self) -> Tensor:
        """Return the vector [E], in float32 or wider."""
        return self._vector / self._count if self._pooling == "mean" else self._vector


def build_head(config: ModelConfig) -> LanguageHead | ClassificationHead | PoolingHead:
    if isinstance(config.head, cfg.LanguageHeadConfig):
        return LanguageHead(config, config.head)
    if isinstance(config.head, cfg.ClassificationHeadConfig):
        return ClassificationHead(config, config.head)
    return PoolingHead(config, config.head)


def pool_hidden(hidden: Tensor, sub_batches: Sequence[SubBatch], pooling: cfg.Pooling) -> Tensor:
    """Pool hidden [T, E] to [B, E], one vector per sequence: its first or last token's, the maximum, or the mean.

    The mean is computed in float32 or wider.
    """
    pooled = []
    for sub_batch, (low, high) in zip(sub_batches, ops.sub_batch.sub_batch_spans(sub_batches), strict=True):
        states = hidden[low:high].view(sub_batch.num_seqs, sub_batch.num_new_tokens, -1)
        if pooling == "mean":
            wide = torch.promote_types(hidden.dtype, torch.float32)
            pooled.append(states.mean(dim=1, dtype=wide).to(hidden.dtype))
        else:
            pooled.append(states.amax(dim=1) if pooling == "max" else states[:, 0 if pooling == "first" else -1])
    return torch.cat(pooled)
