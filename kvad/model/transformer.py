"""The Transformer (Vaswani et al. 2017) over flat tokens and any memory: a decoder, an encoder, or both.

``hidden = model(step, memory)``; ``logits = model.logits(hidden, step.wanted)``.  The same code trains (memory =
Fresh, packed documents), prefills, decodes and judges.  Parameter names are what checkpoints store:

    embed.tokens.weight  [embed.positions.weight]  [embed.segments.weight]  [embed.norm.*]  [embed.project.*]
    [source.*]                                     likewise, of the encoder's side of an encoder-decoder
    decoder.layers.{i}.mixer.{q,k,v,out}.{weight,bias}  .mixer.{q,k}_norm.weight  .mixer.sink_logits  .mixer.relative
    decoder.layers.{i}.cross.{q,k,v,out}.{weight,bias}
    decoder.layers.{i}.mlp.{up,gate,down}.{weight,bias}  .mlp.router.*  .norm{1,2,_cross}.*  [.norm{1,2,_cross}_after.*]
    decoder.relative.{kind}  decoder.norm.*        encoder.* likewise
    [head.transform.{dense,norm}.*]  [head.weight]  [head.bias]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad.config import ModelConfig
from kvad.model.fresh import FreshEncoder
from kvad.model.heads import Classes, Language, Pooled, make_head, pool
from kvad.model.mixers import Attention, CrossAttention, Encoding, make_mixer
from kvad.model.parts import Embedding, Gated, Norm, dropped, make_mlp
from kvad.model.positions import alibi_slopes, depends_on_limit, rope_factor, rope_frequencies
from kvad.model.recompute import recomputed
from kvad.ops.attend import Kernel
from kvad.ops.lanes import Probe
from kvad.own import load_own
from kvad.step import Buckets, Memory, Rotary, Slopes, Step, View

__all__ = ["Layer", "Stack", "Transformer"]


class Layer(nn.Module):
    """Attention, attention to a source, and MLP around the residual stream; where norms stand is ``norm_place``."""

    def __init__(self, config: ModelConfig, stack: cfg.Stack, spec: cfg.Layer, width: int) -> None:
        super().__init__()
        place = self.norm_place = stack.norm_place
        self.residual, self.dropout = stack.residual, config.dropout.residual
        self.mixer = make_mixer(config, spec.mixer, spec.norm, width)
        self.cross = CrossAttention(config, spec.cross, spec.norm, width) if spec.cross else None
        self.mlp = make_mlp(width, spec.mlp, config.dropout.hidden)

        def norm(wanted: bool) -> Norm | None:
            return Norm(width, spec.norm) if wanted else None

        sandwich = place == "sandwich"
        self.norm1 = norm(spec.first_norm)
        self.norm_cross = norm(spec.cross is not None)
        self.norm2 = norm(place != "parallel")
        self.norm1_after = norm(sandwich)
        self.norm_cross_after = norm(sandwich and spec.cross is not None)
        self.norm2_after = norm(sandwich)

    def forward(self, x: Tensor, view: View, cross: View | None, encoding: Encoding) -> Tensor:
        """x [T, E] -> [T, E]."""
        if self.norm_place in ("parallel", "parallel_pair"):
            normed = _norm(self.norm1, x)
            fed = self._dropped(self.mlp(normed if self.norm2 is None else self.norm2(x)))
            return self._add(x, self._dropped(self.mixer(normed, view, encoding)) + fed)
        x = self._branch(x, lambda h: self.mixer(h, view, encoding), self.norm1, self.norm1_after)
        if self.cross is not None:
            assert cross is not None, "this layer attends to a source"
            attend, seen = self.cross, cross
            x = self._branch(x, lambda h: attend(h, seen), self.norm_cross, self.norm_cross_after)
        return self._branch(x, self.mlp, self.norm2, self.norm2_after)

    def _branch(self, x: Tensor, f: Callable[[Tensor], Tensor], norm: Norm | None, after: Norm | None) -> Tensor:
        if self.norm_place == "post":
            return _norm(norm, self._add(x, self._dropped(f(x))))
        if self.norm_place == "after":
            return self._add(x, self._dropped(_norm(norm, f(x))))
        normed = _norm(norm, x)
        stream = normed if self.norm_place == "normed" else x
        return self._add(stream, self._dropped(_norm(after, f(normed))))

    def _dropped(self, branch: Tensor) -> Tensor:
        return dropped(branch, self.dropout, self)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + (branch if self.residual == 1.0 else self.residual * branch)


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out


class Stack(nn.Module):
    """Layers in the order of the pattern, what each kind shares about positions, and the final norm."""

    def __init__(self, config: ModelConfig, spec: cfg.Stack, limit: int, width: int) -> None:
        super().__init__()
        self.config, self.spec, self.limit = config, spec, limit
        self.recompute = False  # in training: keep no activations, compute them again
        self.layers = nn.ModuleList(Layer(config, spec, spec.layer(i), width) for i in range(spec.layers))
        final = spec.layer(spec.layers - 1).norm
        self.norm = Norm(width, final) if spec.final_norm else None
        self.relative = nn.ParameterDict()
        for letter, kind in spec.kinds.items():
            position = kind.mixer.position
            if isinstance(position, cfg.T5Bias) and position.shared:
                self.relative[letter] = nn.Parameter(torch.zeros(position.buckets, kind.mixer.heads))
        self.positions = nn.ModuleDict()
        for letter, kind in spec.kinds.items():
            if isinstance(kind.mixer.position, cfg.OwnPositions):
                self.positions[letter] = _own_positions(config, kind.mixer, kind.mixer.position)
        self._constants: dict[tuple[str, torch.device], Encoding] = {}

    def forward(self, x: Tensor, step: Step, views: Sequence[View], cross: Sequence[View] = ()) -> Tensor:
        """x [T, E] -> [T, E]; one view per layer, and one per layer's cross-attention where there is any."""
        encodings = {letter: self.encoding(letter, step) for letter in self.spec.kinds}
        sources: Sequence[View | None] = cross or [None] * len(self.layers)
        again = self.recompute and self.training and torch.is_grad_enabled()
        for index, (layer, view, source) in enumerate(zip(self.layers, views, sources, strict=True)):
            encoding = encodings[self.spec.kind_of(index)]
            x = recomputed(layer, x, view, source, encoding) if again else layer(x, view, source, encoding)
        return x if self.norm is None else self.norm(x)

    def encoding(self, letter: str, step: Step) -> Encoding:
        """What layers of this kind share: rotary tables, slopes or a bias table.

        Constants are kept in float32 whatever the model's dtype: a rounded frequency would be another model.
        """
        position = self.spec.kinds[letter].mixer.position
        if isinstance(position, cfg.OwnPositions):
            own: Encoding = self.positions[letter](step)
            return own
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
            slopes = torch.tensor(alibi_slopes(mixer.heads), dtype=torch.float32, device=device)
            return Slopes(slopes.bfloat16().float() if position.rounded else slopes, position.factor, position.rounded)
        if position is None:
            return None
        limit = self.limit
        table = rope_frequencies(position, cfg.head_dim(self.config, mixer), limit)
        return Rotary(table.to(device), position.interleaved, rope_factor(position, limit))

    def _rotary_of(self, letter: str, position: cfg.Rope, limits: Tensor) -> Rotary:
        """One row of frequencies per token, by the limit of the token's row."""
        dim = cfg.head_dim(self.config, self.spec.kinds[letter].mixer)
        distinct, which = limits.unique(return_inverse=True)
        tables = torch.stack([rope_frequencies(position, dim, int(n)) for n in distinct.tolist()])
        return Rotary(tables.to(limits.device)[which], position.interleaved, rope_factor(position, self.limit))


def _own_positions(config: ModelConfig, mixer: cfg.Attention, position: cfg.OwnPositions) -> nn.Module:
    """A module: ``__init__(mixer, head_dim, **options)``, and from a step a Rotary, Slopes, Buckets or Bias."""
    made = load_own(position.name, "position.name")
    module: nn.Module = made(mixer, cfg.head_dim(config, mixer), **position.options)
    return module


class Transformer(nn.Module):
    """A model as its config says, initialised as GPT-2 is: normal(0, 0.02), residual outputs / sqrt(2 layers)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.kernel: Kernel = "auto"  # of attention, where this model opens the memory: its encoder
        self.embed = Embedding(config.width, config.vocab, config.embed)
        source = config.source
        width = cfg.source_width(config)
        self.source = None if source is None else Embedding(width, source.vocab, source.embed)
        limit = config.limit if source is None else source.limit
        self.encoder = None if config.encoder is None else Stack(config, config.encoder, limit, width)
        self.decoder = None if config.decoder is None else Stack(config, config.decoder, config.limit, config.width)
        self.head = make_head(config)
        self._initialise()

    @property
    def stack(self) -> Stack:
        """The one whose output the head reads."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None
        return stack

    def forward(self, step: Step, memory: Memory) -> Tensor:
        """Hidden states [T, E] of the step's tokens; the memory's views write and read keys and values.

        With a ``step.source`` the encoder runs first, and what cross-attention will read is written; in a step without
        other tokens the encoder's output is what comes back.
        """
        if self.decoder is None:
            return self.encode(step)
        views = list(memory.open(step))
        layers = len(self.decoder.layers)
        own, cross = views[:layers], views[layers:]
        source: Tensor | None = None
        if step.source is not None:
            source = self.encode(step.source)
            for layer, view in zip(self.decoder.layers, cross, strict=True):
                assert isinstance(layer, Layer) and layer.cross is not None
                layer.cross.encode(source, view)
        if not step.lanes:
            assert source is not None, "a step without tokens"
            return source
        hidden = dropped(self.embed(step.tokens, step.positions), self.config.dropout.embedding, self)
        out: Tensor = self.decoder(hidden, step, own, cross)
        return dropped(out, self.config.dropout.output, self)

    def encode(self, step: Step, probe: Probe | None = None) -> Tensor:
        """The encoder's output [T, E] for a step of sources (or of an encoder's rows).  Nothing is kept."""
        assert self.encoder is not None, "this model has no encoder"
        if self.source is None:
            x = self.embed(step.tokens, step.positions, segments=step.segments)
        else:
            x = self.source(step.tokens, step.positions, None if self.source.tokens else self.table)
        x = dropped(x, self.config.dropout.embedding, self)
        memory = FreshEncoder(self.config, kernel=self.kernel, probe=probe)
        out: Tensor = self.encoder(x, step, memory.open(step))
        return dropped(out, self.config.dropout.output, self)

    @property
    def table(self) -> Tensor:
        """The matrix of token vectors [V, E]."""
        assert self.embed.tokens is not None
        return self.embed.tokens.weight

    def logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """hidden [T, E], at [N] (indices in T) -> [N, V], or [N, labels] where the head scores labels of tokens."""
        chosen = hidden.index_select(0, at)
        if isinstance(self.head, Language):
            out: Tensor = self.head(chosen, self.table)
            return out
        assert isinstance(self.head, Classes), "this model's answer is its hidden states"
        scores: Tensor = self.head(chosen)
        return scores

    def rows(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, E] -> [B, labels] or [B, E]: the answer for whole rows, of a head that pools them."""
        spec = self.config.head
        assert not isinstance(spec, cfg.Head), "this head answers for tokens"
        assert isinstance(self.head, (Classes, Pooled))
        out: Tensor = self.head(pool(hidden, step.lanes, spec.pool))
        return out

    def leaves(self) -> list[Tensor]:
        """Every tensor that a step reads: parameters, and the constants that positions need (after the first step)."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        return [*self.parameters(), *(constant for stack in stacks for constant in stack.constants())]

    def pack(self) -> None:
        """Join the weights that share an input (q, k, v; gate, up), for speed; what the model says and stores stays."""
        for module in self.modules():
            if isinstance(module, CrossAttention):
                module.kv.pack(module.k, module.v)
            elif isinstance(module, Attention):
                module.qkv.pack(module.q, module.k, module.v)
            elif isinstance(module, Gated):
                module.gate_up.pack(module.gate, module.up)

    def _initialise(self) -> None:
        depth = max(len(stack.layers) for stack in (self.encoder, self.decoder) if stack is not None)
        residual = 0.02 / math.sqrt(2 * depth)
        last = ("mixer.out.weight", "cross.out.weight", "mlp.down.weight", "mlp.down")
        for name, parameter in self.named_parameters():
            if parameter.is_meta or parameter.dim() < 2 or "norm" in name:
                continue
            nn.init.normal_(parameter, std=residual if name.endswith(last) else 0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias") and parameter.dim() == 1 and not parameter.is_meta:
                nn.init.zeros_(parameter)
