"""The Transformer (Vaswani et al. 2017), decoder-only form, over flat tokens and any memory.

``hidden = model(step, memory)``; ``logits = model.logits(hidden, step.wanted)``.  The same code trains (memory =
Fresh, packed documents), prefills, decodes and judges.  Parameter names are what checkpoints store:

    embed.tokens.weight  [embed.positions.weight]  [embed.norm.*]
    decoder.layers.{i}.mixer.{q,k,v,out}.{weight,bias}  .mixer.{q,k}_norm.weight  .mixer.sink_logits  .mixer.relative
    decoder.layers.{i}.mlp.{up,gate,down}.{weight,bias}  .norm1.*  .norm2.*  [.norm1_after.*  .norm2_after.*]
    decoder.relative.{kind}  decoder.norm.*  [head.weight]  [head.bias]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad.config import ModelConfig
from kvad.model.mixers import Attention, Encoding
from kvad.model.parts import Embedding, Gated, Head, Norm, make_mlp
from kvad.model.positions import alibi_slopes, depends_on_limit, rope_factor, rope_frequencies
from kvad.step import Buckets, Memory, Rotary, Slopes, Step, View

__all__ = ["Layer", "Stack", "Transformer"]


class Layer(nn.Module):
    """Attention and MLP around the residual stream; where the norms stand is ``norm_place``."""

    def __init__(self, config: ModelConfig, spec: cfg.Layer, norm_place: str) -> None:
        super().__init__()
        self.norm_place = norm_place
        self.mixer = Attention(config, spec.mixer, spec.norm)
        self.mlp = make_mlp(config.width, spec.mlp)
        self.norm1 = Norm(config.width, spec.norm)
        self.norm2 = None if norm_place == "parallel" else Norm(config.width, spec.norm)
        sandwich = norm_place == "sandwich"
        self.norm1_after = Norm(config.width, spec.norm) if sandwich else None
        self.norm2_after = Norm(config.width, spec.norm) if sandwich else None

    def forward(self, x: Tensor, view: View, encoding: Encoding) -> Tensor:
        """x [T, E] -> [T, E]."""
        if self.norm_place == "parallel":
            normed = self.norm1(x)
            out: Tensor = x + self.mixer(normed, view, encoding) + self.mlp(normed)
            return out
        assert self.norm2 is not None
        if self.norm_place == "post":
            x = self.norm1(x + self.mixer(x, view, encoding))
            out = self.norm2(x + self.mlp(x))
            return out
        mixed = self.mixer(self.norm1(x), view, encoding)
        x = x + (mixed if self.norm1_after is None else self.norm1_after(mixed))
        fed = self.mlp(self.norm2(x))
        out = x + (fed if self.norm2_after is None else self.norm2_after(fed))
        return out


class Stack(nn.Module):
    """Layers in the order of the pattern, what each kind shares about positions, and the final norm."""

    def __init__(self, config: ModelConfig, spec: cfg.Stack) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.layers = nn.ModuleList(Layer(config, spec.layer(i), spec.norm_place) for i in range(spec.layers))
        final = spec.layer(spec.layers - 1).norm
        self.norm = Norm(config.width, final) if spec.final_norm else None
        self.relative = nn.ParameterDict()
        for letter, kind in spec.kinds.items():
            position = kind.mixer.position
            if isinstance(position, cfg.T5Bias) and position.shared:
                self.relative[letter] = nn.Parameter(torch.zeros(position.buckets, kind.mixer.heads))
        self._constants: dict[tuple[str, torch.device], Encoding] = {}

    def forward(self, x: Tensor, step: Step, views: tuple[View, ...]) -> Tensor:
        encodings = {letter: self.encoding(letter, step) for letter in self.spec.kinds}
        for index, (layer, view) in enumerate(zip(self.layers, views, strict=True)):
            x = layer(x, view, encodings[self.spec.kind_of(index)])
        return x if self.norm is None else self.norm(x)

    def encoding(self, letter: str, step: Step) -> Encoding:
        """What layers of this kind share: rotary tables, slopes or a bias table.

        Constants are kept in float32 whatever the model's dtype: a rounded frequency would be another model.
        """
        position = self.spec.kinds[letter].mixer.position
        if isinstance(position, cfg.T5Bias):
            table = self.relative[letter] if position.shared else None
            return None if table is None else Buckets(table, position.max_distance, position.bidirectional)
        device = step.tokens.device
        if isinstance(position, cfg.Rope) and depends_on_limit(position) and step.limits is not None:
            return self._rotary_of(letter, position, step.limits)
        if (letter, device) not in self._constants:
            self._constants[letter, device] = self._constant(letter, position, device)
        return self._constants[letter, device]

    def constants(self) -> list[Tensor]:
        """What positions need beside parameters, as far as it has been made."""
        kept = self._constants.values()
        return [e.inv_freq if isinstance(e, Rotary) else e.slopes for e in kept if isinstance(e, (Rotary, Slopes))]

    def _constant(self, letter: str, position: cfg.Rope | cfg.Alibi | None, device: torch.device) -> Encoding:
        mixer = self.spec.kinds[letter].mixer
        if isinstance(position, cfg.Alibi):
            return Slopes(torch.tensor(alibi_slopes(mixer.heads), dtype=torch.float32, device=device))
        if position is None:
            return None
        limit = self.config.limit
        table = rope_frequencies(position, cfg.head_dim(self.config, mixer), limit)
        return Rotary(table.to(device), position.interleaved, rope_factor(position, limit))

    def _rotary_of(self, letter: str, position: cfg.Rope, limits: Tensor) -> Rotary:
        """One row of frequencies per token, by the limit of the token's row."""
        dim = cfg.head_dim(self.config, self.spec.kinds[letter].mixer)
        distinct, which = limits.unique(return_inverse=True)
        tables = torch.stack([rope_frequencies(position, dim, int(n)) for n in distinct.tolist()])
        return Rotary(tables.to(limits.device)[which], position.interleaved, rope_factor(position, self.config.limit))


class Transformer(nn.Module):
    """A decoder-only language model, initialised as GPT-2 is: normal(0, 0.02), residual outputs / sqrt(2 layers)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.decoder = Stack(config, config.decoder)
        self.head = Head(config)
        self._initialise()

    def forward(self, step: Step, memory: Memory) -> Tensor:
        """Hidden states [T, E] of the step's tokens; the memory's views write and read keys and values."""
        views = tuple(memory.open(step))
        hidden: Tensor = self.decoder(self.embed(step.tokens, step.positions), step, views)
        return hidden

    def logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """hidden [T, E], at [N] (indices in T) -> [N, V]."""
        out: Tensor = self.head(hidden.index_select(0, at), self.embed.tokens.weight)
        return out

    def leaves(self) -> list[Tensor]:
        """Every tensor that a step reads: parameters, and the constants that positions need (after the first step)."""
        return [*self.parameters(), *self.decoder.constants()]

    def pack(self) -> None:
        """Join the weights that share an input (q, k, v; gate, up), for speed; what the model says and stores stays."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.qkv.pack(module.q, module.k, module.v)
            elif isinstance(module, Gated):
                module.gate_up.pack(module.gate, module.up)

    def _initialise(self) -> None:
        residual = 0.02 / math.sqrt(2 * self.config.decoder.layers)
        for name, parameter in self.named_parameters():
            if parameter.is_meta or parameter.dim() < 2:
                continue
            nn.init.normal_(parameter, std=residual if name.endswith(("mixer.out.weight", "mlp.down.weight")) else 0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias") and parameter.dim() == 1 and not parameter.is_meta:
                nn.init.zeros_(parameter)
