"""What stands at the end of a model: logits over the vocabulary, scores of labels, or one vector per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.config import ModelConfig
from kvad.model.layers import ACTIVATIONS, Norm
from kvad.model_input import SubBatch


class HeadTransform(nn.Module):
    """See :class:`kvad.config.model.Transform`."""

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


class LanguageHead(nn.Module):
    """Hidden states to logits; a tied head (Press & Wolf 2017) reads the embedding's matrix and owns none."""

    tiles: ops.batch_invariant.TileSizes | None = None

    def __init__(self, config: ModelConfig, spec: cfg.LanguageHeadConfig) -> None:
        super().__init__()
        self.spec = spec
        self.transform = None if spec.transform is None else HeadTransform(config.hidden_size, spec.transform)
        self.weight = (
            None if config.tie_embeddings else nn.Parameter(torch.empty(config.vocab_size, cfg.head_input_size(config)))
        )
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if spec.bias else None

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """hidden [N, E], table [V, E] -> [N, V]."""
        hidden = self.pre_logits(hidden)
        logits = ops.linear.linear(hidden, table if self.weight is None else self.weight, self.bias, self.tiles)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits

    def pre_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, E] -> what is multiplied with the matrix [N, E or the table's width]."""
        return hidden if self.transform is None else self.transform(hidden)


class ClassificationHead(nn.Module):
    """Hidden states (of tokens, or a row's pooled one) to a score for each label."""

    tiles: ops.batch_invariant.TileSizes | None = None

    def __init__(self, config: ModelConfig, spec: cfg.ClassificationHeadConfig) -> None:
        super().__init__()
        self.spec = spec
        self.transform = None if spec.transform is None else HeadTransform(config.hidden_size, spec.transform)
        self.weight = nn.Parameter(torch.empty(len(spec.labels), cfg.head_input_size(config)))
        self.bias = nn.Parameter(torch.zeros(len(spec.labels))) if spec.bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, labels]."""
        hidden = hidden if self.transform is None else self.transform(hidden)
        return ops.linear.linear(hidden, self.weight, self.bias, self.tiles)


class PoolingHead(nn.Module):
    """A row's pooled hidden state to its embedding."""

    def __init__(self, config: ModelConfig, spec: cfg.PoolingHeadConfig) -> None:
        super().__init__()
        self.spec = spec
        self.transform = None if spec.transform is None else HeadTransform(config.hidden_size, spec.transform)

    def forward(self, pooled: Tensor) -> Tensor:
        """[B, E] -> [B, E], or the transform's width."""
        out = pooled if self.transform is None else self.transform(pooled)
        return F.normalize(out, dim=-1) if self.spec.normalize else out


def build_head(config: ModelConfig) -> LanguageHead | ClassificationHead | PoolingHead:
    if isinstance(config.head, cfg.LanguageHeadConfig):
        return LanguageHead(config, config.head)
    return (
        ClassificationHead(config, config.head)
        if isinstance(config.head, cfg.ClassificationHeadConfig)
        else PoolingHead(config, config.head)
    )


def pool_hidden(hidden: Tensor, lanes: Sequence[SubBatch], how: cfg.Pooling) -> Tensor:
    """hidden [T, E] -> [B, E], a vector per row in the lanes' order: its first token's, or the mean (in float32)."""
    rows = []
    for lane, (low, high) in zip(lanes, ops.sub_batch.sub_batch_spans(lanes), strict=True):
        each = hidden[low:high].view(lane.num_seqs, lane.num_new_tokens, -1)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows.append(each[:, 0] if how == "first" else each.mean(dim=1, dtype=wide).to(hidden.dtype))
    return torch.cat(rows)
