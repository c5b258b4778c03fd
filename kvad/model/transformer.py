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
from kvad import config as config_lib
from kvad import ops
from kvad.config import ModelConfig
from kvad.model.activation_checkpointing import checkpointed_layer
from kvad.model.attention import Attention, CrossAttention, PositionEncoding, build_attention
from kvad.model.heads import ClassificationHead, LanguageHead, PoolingHead, build_head, pool_hidden
from kvad.model.layers import Embedding, GatedMLP, Norm, apply_dropout, build_mlp
from kvad.model.no_cache import EncoderNoCache
from kvad.model.positions import alibi_slopes, depends_on_length, rope_attention_factor, rope_frequencies
from kvad.model_input import AlibiSlopes, CacheProtocol, CacheView, ModelInput, RelativeBuckets, Rotary


class TransformerLayer(nn.Module):
    """Attention, attention to a source, and MLP around the residual stream; where norms stand is ``norm_place``."""

    def __init__(self, config: ModelConfig, stack: cfg.StackConfig, spec: cfg.LayerConfig, width: int) -> None:
        super().__init__()
        place = self.norm_position = stack.norm_position
        self.residual, self.dropout = stack.residual_scale, config.dropout.residual
        self.attention = build_attention(config, spec.attention, spec.norm, width)
        self.cross_attention = (
            CrossAttention(config, spec.cross_attention, spec.norm, width) if spec.cross_attention else None
        )
        self.mlp = build_mlp(width, spec.mlp, config.dropout.hidden)

        def norm(wanted: bool) -> Norm | None:
            return Norm(width, spec.norm) if wanted else None

        sandwich = place == "sandwich"
        self.norm1 = norm(spec.pre_attention_norm)
        self.norm_cross = norm(spec.cross_attention is not None)
        self.norm2 = norm(place != "parallel")
        self.norm1_after = norm(sandwich)
        self.norm_cross_after = norm(sandwich and spec.cross_attention is not None)
        self.norm2_after = norm(sandwich)

    def forward(self, x: Tensor, view: CacheView, cross: CacheView | None, encoding: PositionEncoding) -> Tensor:
        """x [T, E] -> [T, E]."""
        if self.norm_position in ("parallel", "parallel_pair"):
            normed = _norm(self.norm1, x)
            fed = self._dropped(self.mlp(normed if self.norm2 is None else self.norm2(x)))
            return self._add(x, self._dropped(self.attention(normed, view, encoding)) + fed)
        x = self._branch(x, lambda h: self.attention(h, view, encoding), self.norm1, self.norm1_after)
        if self.cross_attention is not None:
            assert cross is not None, "this layer attends to a source"
            attend, seen = self.cross_attention, cross
            x = self._branch(x, lambda h: attend(h, seen), self.norm_cross, self.norm_cross_after)
        return self._branch(x, self.mlp, self.norm2, self.norm2_after)

    def _branch(self, x: Tensor, f: Callable[[Tensor], Tensor], norm: Norm | None, after: Norm | None) -> Tensor:
        if self.norm_position == "post":
            return _norm(norm, self._add(x, self._dropped(f(x))))
        if self.norm_position == "after":
            return self._add(x, self._dropped(_norm(norm, f(x))))
        normed = _norm(norm, x)
        stream = normed if self.norm_position == "normed" else x
        return self._add(stream, self._dropped(_norm(after, f(normed))))

    def _dropped(self, branch: Tensor) -> Tensor:
        return apply_dropout(branch, self.dropout, self)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + (branch if self.residual == 1.0 else self.residual * branch)


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out


class LayerStack(nn.Module):
    """Layers in the order of the pattern, what each kind shares about positions, and the final norm."""

    def __init__(self, config: ModelConfig, spec: cfg.StackConfig, limit: int, width: int) -> None:
        super().__init__()
        self.config, self.spec, self.limit = config, spec, limit
        self.checkpoint_activations = False  # in training: keep no activations, compute them again
        self.layers = nn.ModuleList(
            TransformerLayer(config, spec, spec.layer_config(i), width) for i in range(spec.num_layers)
        )
        final = spec.layer_config(spec.num_layers - 1).norm
        self.norm = Norm(width, final) if spec.final_norm else None
        self.relative_bias = nn.ParameterDict()
        for letter, kind in spec.layer_types.items():
            position = kind.attention.position
            if isinstance(position, cfg.T5BiasConfig) and position.shared:
                self.relative_bias[letter] = nn.Parameter(torch.zeros(position.num_buckets, kind.attention.num_heads))
        self.positions = nn.ModuleDict()
        for letter, kind in spec.layer_types.items():
            if isinstance(kind.attention.position, cfg.CustomPositionsConfig):
                self.positions[letter] = _own_positions(config, kind.attention, kind.attention.position)
        self._constants: dict[tuple[str, torch.device], PositionEncoding] = {}

    def forward(
        self, x: Tensor, step: ModelInput, views: Sequence[CacheView], cross: Sequence[CacheView] = ()
    ) -> Tensor:
        """x [T, E] -> [T, E]; one view per layer, and one per layer's cross-attention where there is any."""
        encodings = {letter: self.position_encoding(letter, step) for letter in self.spec.layer_types}
        sources: Sequence[CacheView | None] = cross or [None] * len(self.layers)
        again = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for index, (layer, view, source) in enumerate(zip(self.layers, views, sources, strict=True)):
            encoding = encodings[self.spec.layer_type(index)]
            x = checkpointed_layer(layer, x, view, source, encoding) if again else layer(x, view, source, encoding)
        return x if self.norm is None else self.norm(x)

    def position_encoding(self, letter: str, step: ModelInput) -> PositionEncoding:
        """What layers of this kind share: rotary tables, slopes or a bias table.

        Constants are kept in float32 whatever the model's dtype: a rounded frequency would be another model.
        """
        position = self.spec.layer_types[letter].attention.position
        if isinstance(position, cfg.CustomPositionsConfig):
            own: PositionEncoding = self.positions[letter](step)
            return own
        if isinstance(position, cfg.T5BiasConfig):
            table = self.relative_bias[letter] if position.shared else None
            return None if table is None else RelativeBuckets(table, position.max_distance, position.bidirectional)
        device = step.token_ids.device
        if isinstance(position, cfg.RopeConfig) and depends_on_length(position) and step.max_seq_lens is not None:
            return self._rotary_for(letter, position, step.max_seq_lens)
        if (letter, device) not in self._constants:
            self._constants[letter, device] = self._constant(letter, position, device)
        return self._constants[letter, device]

    def constants(self) -> list[Tensor]:
        """What positions need beside parameters, as far as it has been made."""
        kept = self._constants.values()
        return [e.inv_freq if isinstance(e, Rotary) else e.slopes for e in kept if isinstance(e, (Rotary, AlibiSlopes))]

    def _constant(
        self, letter: str, position: cfg.RopeConfig | cfg.AlibiConfig | None, device: torch.device
    ) -> PositionEncoding:
        mixer = self.spec.layer_types[letter].attention
        if isinstance(position, cfg.AlibiConfig):
            slopes = torch.tensor(alibi_slopes(mixer.num_heads), dtype=torch.float32, device=device)
            return AlibiSlopes(
                slopes.bfloat16().float() if position.round_to_bfloat16 else slopes,
                position.factor,
                position.round_to_bfloat16,
            )
        if position is None:
            return None
        limit = self.limit
        table = rope_frequencies(position, cfg.head_dim(self.config, mixer), limit)
        return Rotary(table.to(device), position.interleaved, rope_attention_factor(position, limit))

    def _rotary_for(self, letter: str, position: cfg.RopeConfig, limits: Tensor) -> Rotary:
        """One row of frequencies per token, by the limit of the token's row."""
        dim = cfg.head_dim(self.config, self.spec.layer_types[letter].attention)
        distinct, which = limits.unique(return_inverse=True)
        tables = torch.stack([rope_frequencies(position, dim, int(n)) for n in distinct.tolist()])
        return Rotary(
            tables.to(limits.device)[which], position.interleaved, rope_attention_factor(position, self.limit)
        )


def _own_positions(config: ModelConfig, mixer: cfg.AttentionConfig, position: cfg.CustomPositionsConfig) -> nn.Module:
    """A module: ``__init__(mixer, head_dim, **options)``, and from a step a Rotary, Slopes, Buckets or Bias."""
    made = config_lib.plugins.load_plugin(position.name, "position.name")
    module: nn.Module = made(mixer, cfg.head_dim(config, mixer), **position.options)
    return module


class Transformer(nn.Module):
    """A model as its config says, initialised as GPT-2 is: normal(0, 0.02), residual outputs / sqrt(2 layers)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.kernel: ops.attention.Kernel = "auto"  # of attention, where this model opens the memory: its encoder
        self.embedding = Embedding(config.hidden_size, config.vocab_size, config.embedding)
        source = config.encoder_input
        width = cfg.encoder_hidden_size(config)
        self.encoder_embedding = None if source is None else Embedding(width, source.vocab_size, source.embedding)
        limit = config.max_seq_len if source is None else source.max_seq_len
        self.encoder = None if config.encoder is None else LayerStack(config, config.encoder, limit, width)
        self.decoder = (
            None
            if config.decoder is None
            else LayerStack(config, config.decoder, config.max_seq_len, config.hidden_size)
        )
        self.head = build_head(config)
        self._init_weights()

    @property
    def stack(self) -> LayerStack:
        """The one whose output the head reads."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None
        return stack

    def forward(self, step: ModelInput, memory: CacheProtocol) -> Tensor:
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
        if step.encoder_input is not None:
            source = self.encode(step.encoder_input)
            for layer, view in zip(self.decoder.layers, cross, strict=True):
                assert isinstance(layer, TransformerLayer) and layer.cross_attention is not None
                layer.cross_attention.write_encoder_output(source, view)
        if not step.sub_batches:
            assert source is not None, "a step without tokens"
            return source
        hidden = apply_dropout(self.embedding(step.token_ids, step.positions), self.config.dropout.embedding, self)
        out: Tensor = self.decoder(hidden, step, own, cross)
        return apply_dropout(out, self.config.dropout.output, self)

    def encode(self, step: ModelInput, probe: ops.sub_batch.AttentionHook | None = None) -> Tensor:
        """The encoder's output [T, E] for a step of sources (or of an encoder's rows).  Nothing is kept."""
        assert self.encoder is not None, "this model has no encoder"
        if self.encoder_embedding is None:
            x = self.embedding(step.token_ids, step.positions, segments=step.token_type_ids)
        else:
            x = self.encoder_embedding(
                step.token_ids, step.positions, None if self.encoder_embedding.tokens else self.token_embedding
            )
        x = apply_dropout(x, self.config.dropout.embedding, self)
        memory = EncoderNoCache(self.config, kernel=self.kernel, attention_hook=probe)
        out: Tensor = self.encoder(x, step, memory.open(step))
        return apply_dropout(out, self.config.dropout.output, self)

    @property
    def token_embedding(self) -> Tensor:
        """The matrix of token vectors [V, E]."""
        assert self.embedding.tokens is not None
        return self.embedding.tokens.weight

    def logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """hidden [T, E], at [N] (indices in T) -> [N, V], or [N, labels] where the head scores labels of tokens."""
        chosen = hidden.index_select(0, at)
        if isinstance(self.head, LanguageHead):
            out: Tensor = self.head(chosen, self.token_embedding)
            return out
        assert isinstance(self.head, ClassificationHead), "this model's answer is its hidden states"
        scores: Tensor = self.head(chosen)
        return scores

    def pooled_outputs(self, hidden: Tensor, step: ModelInput) -> Tensor:
        """hidden [T, E] -> [B, labels] or [B, E]: the answer for whole rows, of a head that pools them."""
        spec = self.config.head
        assert not isinstance(spec, cfg.LanguageHeadConfig), "this head answers for tokens"
        assert isinstance(self.head, (ClassificationHead, PoolingHead))
        out: Tensor = self.head(pool_hidden(hidden, step.sub_batches, spec.pool))
        return out

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads: parameters, and the constants that positions need (after the first step)."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        return [*self.parameters(), *(constant for stack in stacks for constant in stack.constants())]

    def fuse_projections(self) -> None:
        """Join the weights that share an input (q, k, v; gate, up), for speed; what the model says and stores stays."""
        for module in self.modules():
            if isinstance(module, CrossAttention):
                module.kv.pack(module.k, module.v)
            elif isinstance(module, Attention):
                module.qkv.pack(module.q, module.k, module.v)
            elif isinstance(module, GatedMLP):
                module.gate_up.pack(module.gate, module.up)

    def _init_weights(self) -> None:
        depth = max(len(stack.layers) for stack in (self.encoder, self.decoder) if stack is not None)
        residual = 0.02 / math.sqrt(2 * depth)
        last = ("attention.out.weight", "cross_attention.out.weight", "mlp.down.weight", "mlp.down")
        for name, parameter in self.named_parameters():
            if parameter.is_meta or parameter.dim() < 2 or "norm" in name:
                continue
            nn.init.normal_(parameter, std=residual if name.endswith(last) else 0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias") and parameter.dim() == 1 and not parameter.is_meta:
                nn.init.zeros_(parameter)
