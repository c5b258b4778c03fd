"""The Transformer (Vaswani et al. 2017) over flat tokens and any cache: a decoder, an encoder, or both.

``hidden = model(model_input, cache)``; ``logits = model.logits(hidden, model_input.logit_indices)``. The same code
trains (NoCache, packed documents), prefills, decodes and computes the uncached reference. Names in checkpoints:

    embedding.tokens.weight  [.positions.weight]  [.token_types.weight]  [.norm.*]  [.projection.*]
    [encoder_embedding.*]                          the same for the encoder of an encoder-decoder
    decoder.layers.{i}.attention.{q,k,v,out}.{weight,bias}  .{q,k}_norm.weight  .sink_logits  .relative_bias  [.gate.*]
    decoder.layers.{i}.attention.{input,conv,out}.{weight,bias}    of a short convolution
    decoder.layers.{i}.attention.{gate,input,conv,input_gate,decay_gate,out}.{weight,bias}  .decay    of a recurrence
    decoder.layers.{i}.attention.{q,k,v,gate,beta,decay,conv,norm,out}.weight  .{decay_bias,log_rate}    of a delta rule
    decoder.layers.{i}.attention.{q_down,q_up,kv_down,kv_up,out}.{weight,bias}  .{q,kv}_norm.weight   latent attention
    decoder.layers.{i}.cross_attention.{q,k,v,out}.{weight,bias}
    decoder.layers.{i}.mlp.{up,gate,down}.{weight,bias}  .norm{1,2,_cross}.*  [.norm{1,2,_cross}_after.*]
    decoder.layers.{i}.mlp.{router,shared_gate}.*  .mlp.shared.{up,gate,down}.*  .mlp.selection_bias
    decoder.relative_bias.{type}  decoder.norm.*   the same for encoder.*
    [head.transform.{dense,norm}.*]  [head.weight]  [head.bias]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvad import config as cfg
from kvad import ops
from kvad.config import ModelConfig, encoder_attention_specs, encoder_hidden_size, head_dim, rotary_dim
from kvad.errors import ConfigError
from kvad.model.attention import Attention, CrossAttention, PositionEncoding, build_attention
from kvad.model.heads import ClassificationHead, LanguageHead, PoolingHead, build_head, pool_hidden
from kvad.model.layers import (
    Embedding,
    GatedMLP,
    MixtureOfExperts,
    Norm,
    RelativeEmbedding,
    Routing,
    apply_dropout,
    build_mlp,
)
from kvad.model.no_cache import NoCache
from kvad.model.positions import alibi_slopes, query_scale, rope_attention_factor, rope_frequencies, short_regime_len
from kvad.model.recurrent import build_recurrent
from kvad.model_input import (
    AlibiSlopes,
    AttentionParams,
    CacheProtocol,
    CacheView,
    ModelInput,
    RelativeBuckets,
    Rotary,
    TokenAdapters,
    WrappedView,
)


class TransformerLayer(nn.Module):
    """One layer: attention, cross-attention if any, and MLP, with norms placed by ``norm_position``."""

    def __init__(self, config: ModelConfig, stack: cfg.StackConfig, spec: cfg.LayerConfig, width: int) -> None:
        super().__init__()
        position = self.norm_position = stack.norm_position
        self.residual, self.dropout = stack.residual_scale, config.dropout.residual
        self.attention = (
            build_attention(config, spec.attention, spec.norm, width)
            if isinstance(spec.attention, cfg.AttentionConfig)
            else build_recurrent(spec.attention, width)
        )
        cross = spec.cross_attention
        self.cross_attention = None if cross is None else CrossAttention(config, cross, spec.norm, width)
        self.mlp = build_mlp(width, spec.mlp, config.dropout.hidden)

        def norm(present: bool) -> Norm | None:
            return Norm(width, spec.norm) if present else None

        sandwich = position == "sandwich"
        self.norm1 = norm(spec.pre_attention_norm)
        self.norm_cross = norm(spec.cross_attention is not None)
        self.norm2 = norm(position != "parallel")
        self.norm1_after = norm(sandwich)
        self.norm_cross_after = norm(sandwich and spec.cross_attention is not None)
        self.norm2_after = norm(sandwich)
        self.output_scale = nn.Parameter(torch.ones(1)) if spec.output_scale else None

    def forward(
        self,
        x: Tensor,
        view: CacheView,
        cross_view: CacheView | None,
        encoding: PositionEncoding,
        routings: list[Routing] | None = None,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]; the experts' routing is appended to ``routings``, if given."""
        mlp, cross = self._mlp(routings, adapters), self.cross_attention
        given = () if adapters is None else (adapters,)  # a custom class takes none
        if self.is_parallel:
            return self._add_parallel(x, lambda h: self.attention(h, view, encoding, *given), mlp)
        x = self._branch(x, lambda h: self.attention(h, view, encoding, *given), self.norm1, self.norm1_after)
        if cross is not None:
            assert cross_view is not None, "this layer has cross-attention"
            encoder_view = cross_view
            norm, after = self.norm_cross, self.norm_cross_after
            x = self._branch(x, lambda h: cross(h, encoder_view, adapters=adapters), norm, after)
        return self._add_mlp(x, mlp)

    @property
    def is_parallel(self) -> bool:
        """True if attention and the MLP read the same input."""
        return self.norm_position in ("parallel", "parallel_pair")

    def _mlp(self, routings: list[Routing] | None, adapters: TokenAdapters | None = None) -> Callable[[Tensor], Tensor]:
        if routings is not None and isinstance(self.mlp, MixtureOfExperts):
            return partial(self.mlp, adapters=adapters, routings=routings)
        return self.mlp if adapters is None else partial(self.mlp, adapters=adapters)

    def _add_parallel(self, x: Tensor, attend: Callable[[Tensor], Tensor], mlp: Callable[[Tensor], Tensor]) -> Tensor:
        normed = _norm(self.norm1, x)
        mlp_out = self._dropout(mlp(normed if self.norm2 is None else self.norm2(x)))
        return self._scale(self._add(x, self._dropout(attend(normed)) + mlp_out))

    def _add_mlp(self, x: Tensor, mlp: Callable[[Tensor], Tensor]) -> Tensor:
        return self._scale(self._branch(x, mlp, self.norm2, self.norm2_after))

    def _scale(self, x: Tensor) -> Tensor:
        return x if self.output_scale is None else x * self.output_scale

    def _branch(self, x: Tensor, f: Callable[[Tensor], Tensor], norm: Norm | None, after: Norm | None) -> Tensor:
        if self.norm_position == "post":
            return _norm(norm, self._add(x, self._dropout(f(x))))
        if self.norm_position == "after":
            return self._add(x, self._dropout(_norm(norm, f(x))))
        normed = _norm(norm, x)
        stream = normed if self.norm_position == "normed" else x
        return self._add(stream, self._dropout(_norm(after, f(normed))))

    def _branch_input(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return what a branch computes from x [T, E]."""
        return x if self.norm_position in ("post", "after") else _norm(norm, x)

    def _dropout(self, branch: Tensor) -> Tensor:
        return apply_dropout(branch, self.dropout, self)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + (branch if self.residual == 1.0 else self.residual * branch)


def _apply_layer(layer: TransformerLayer, *inputs: Any) -> tuple[Tensor, list[Routing]]:
    """Return the output and the routing of a layer; without side effects, because checkpointing repeats the call."""
    routings: list[Routing] = []
    return layer(*inputs, routings), routings


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out


class LayerStack(nn.Module):
    """Layers in the order of the pattern, position encodings shared by layer type, and the final norm."""

    def __init__(self, config: ModelConfig, spec: cfg.StackConfig, max_seq_len: int, width: int) -> None:
        super().__init__()
        self.config, self.spec, self.max_seq_len = config, spec, max_seq_len
        self.checkpoint_activations = False  # in training: recompute activations in the backward pass
        configs = spec.layer_configs
        distinct = configs[: spec.num_distinct_layers]
        self.layers = nn.ModuleList(TransformerLayer(config, spec, layer, width) for layer in distinct)
        self.norm = Norm(width, configs[-1].norm) if spec.final_norm else None
        self.relative_bias = nn.ParameterDict()
        self.positions = nn.ModuleDict()
        self.relative_embedding = nn.ModuleDict()
        for letter, kind in spec.layer_types.items():
            position = kind.attention.position
            if isinstance(position, cfg.T5BiasConfig) and position.shared:
                self.relative_bias[letter] = nn.Parameter(torch.zeros(position.num_buckets, kind.attention.num_heads))
            if isinstance(position, cfg.DisentangledConfig):
                self.relative_embedding[letter] = RelativeEmbedding(width, position)
            if isinstance(position, cfg.CustomPositionsConfig):
                cls = cfg.plugins.load_plugin(position.name, "position.name", nn.Module)
                self.positions[letter] = cls(kind.attention, head_dim(config, kind.attention), **position.options)
        self._constants: dict[tuple[str, torch.device], PositionEncoding] = {}

    def forward(
        self,
        x: Tensor,
        model_input: ModelInput,
        views: Sequence[CacheView],
        cross: Sequence[CacheView] = (),
        routings: list[Routing] | None = None,
    ) -> Tensor:
        """Apply all layers: x [T, E] -> [T, E], with one view per layer and one per cross-attention, if any.

        The routing of each layer with experts is appended to ``routings``, if given.
        """
        encodings = {letter: self.position_encoding(letter, model_input) for letter in self.spec.layer_types}
        layers = self.layers if self.spec.num_distinct_layers is None else self._repeated_layers()
        cross_views: Sequence[CacheView | None] = cross or [None] * len(layers)
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for index, (layer, view, cross_view) in enumerate(zip(layers, views, cross_views, strict=True)):
            encoding = encodings[self.spec.layer_type(index)]
            if (scaling := getattr(self.spec.layer_config(index).attention, "query_scaling", None)) is not None:
                view = _ScaledQueriesView(view, query_scale(scaling, model_input.positions))
            if recompute:  # in the backward pass, with the same random numbers (Chen et al. 2016, sec. 4)
                inputs = (layer, x, _RecomputedView(view), cross_view, encoding)
                x, layer_routings = checkpoint(_apply_layer, *inputs, use_reentrant=False)
                if routings is not None:
                    routings += layer_routings
            else:
                x = layer(x, view, cross_view, encoding, routings, model_input.adapters)
        return x if self.norm is None else self.norm(x)

    def _repeated_layers(self) -> list[nn.Module]:
        return [self.layers[self.spec.parameter_index(index)] for index in range(self.spec.num_layers)]

    def position_encoding(self, letter: str, model_input: ModelInput) -> PositionEncoding:
        """Return the encoding shared by layers of a type: rotary frequencies, slopes or a bias table.

        Constants are float32 whatever the model's dtype, because a rounded frequency would change the model.
        """
        position = self.spec.layer_types[letter].attention.position
        if isinstance(position, cfg.CustomPositionsConfig):
            encoding: PositionEncoding = self.positions[letter](model_input)
            return encoding
        if isinstance(position, cfg.DisentangledConfig):
            rows: Tensor = self.relative_embedding[letter]()
            return rows
        if isinstance(position, cfg.T5BiasConfig):
            table = self.relative_bias[letter] if position.shared else None
            return None if table is None else RelativeBuckets(table, position.max_distance, position.bidirectional)
        device, seq_lens = model_input.token_ids.device, model_input.seq_lens
        if (letter, device) not in self._constants:
            self._constants[letter, device] = self._constant(letter, position, device)
        encoding = self._constants[letter, device]
        if isinstance(encoding, Rotary) and encoding.inv_freq.dim() == 2:  # two regimes
            assert isinstance(position, cfg.RopeConfig)
            short_len = short_regime_len(position, self.max_seq_len)
            assert short_len is not None
            regimes = 1 if seq_lens is None else (seq_lens > short_len).to(torch.int64)
            return encoding._replace(inv_freq=encoding.inv_freq[regimes])
        return encoding

    def constants(self) -> list[Tensor]:
        """Return the position constants that have been created so far."""
        constants = [e for e in self._constants.values() if isinstance(e, (Rotary, AlibiSlopes))]
        return [e.inv_freq if isinstance(e, Rotary) else e.slopes for e in constants]

    def _constant(
        self, letter: str, position: cfg.RopeConfig | cfg.AlibiConfig | None, device: torch.device
    ) -> PositionEncoding:
        attention = self.spec.layer_types[letter].attention
        if isinstance(position, cfg.AlibiConfig):
            slopes = torch.tensor(alibi_slopes(attention.num_heads), dtype=torch.float32, device=device)
            rounded = slopes.bfloat16().float() if position.round_to_bfloat16 else slopes
            return AlibiSlopes(rounded, position.factor, position.round_to_bfloat16)
        if position is None:
            return None
        dim, short_len = rotary_dim(self.config, attention), short_regime_len(position, self.max_seq_len)
        table = rope_frequencies(position, dim, self.max_seq_len)
        if short_len is not None:  # [2, D_rot/2], one row per regime
            table = torch.stack((rope_frequencies(position, dim, short_len), table))
        return Rotary(table.to(device), position.interleaved, rope_attention_factor(position, self.max_seq_len))


class Transformer(nn.Module):
    """A Transformer built from its config, initialized as GPT-2: normal(0, 0.02), residual outputs / sqrt(2 layers)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.kernel: ops.attention.Kernel = "auto"  # of the encoder's attention
        self.activation_bits: int | None = None  # set by ``round_activations``
        self.compiler = ops.runtime.RegionCompiler()  # of ``compile_layers``, shared by all engines
        self.packed_weights = ops.native.PackedWeights()  # of the native kernels, shared by all engines
        self.embedding = Embedding(config.hidden_size, config.vocab_size, config.embedding)
        spec, width = config.encoder_input, encoder_hidden_size(config)
        self.encoder_embedding = None if spec is None else Embedding(width, spec.vocab_size, spec.embedding)
        max_len = config.max_seq_len if spec is None else spec.max_seq_len
        self.encoder = None if config.encoder is None else LayerStack(config, config.encoder, max_len, width)
        decoder, size = config.decoder, config.hidden_size
        self.decoder = None if decoder is None else LayerStack(config, decoder, config.max_seq_len, size)
        self.head = build_head(config)
        self._init_weights()

    @property
    def stack(self) -> LayerStack:
        """The stack whose output the head reads."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None
        return stack

    def forward(self, model_input: ModelInput, cache: CacheProtocol, routings: list[Routing] | None = None) -> Tensor:
        """Return hidden states [T, E]; the cache's views write and read keys and values.

        The routing of each layer with experts is appended to ``routings``, if given. If there is an ``encoder_input``,
        the encoder runs first and its keys and values are written; without decoder tokens, the
        encoder's output is returned.
        """
        if self.decoder is None:
            return self.encode(model_input, routings=routings)
        views = list(cache.open(model_input))
        layers = len(self.decoder.layers)
        self_views, cross_views = views[:layers], views[layers:]
        encoder_output: Tensor | None = None
        if model_input.encoder_input is not None:
            encoder_output = self.encode(model_input.encoder_input, routings=routings)
            for layer, view in zip(self.decoder.layers, cross_views, strict=True):
                assert isinstance(layer, TransformerLayer) and layer.cross_attention is not None
                layer.cross_attention.write_encoder_output(encoder_output, view, model_input.encoder_input.adapters)
        if not model_input.sub_batches:
            assert encoder_output is not None, "the model input has no tokens"
            return encoder_output
        embedded = self.embedding(model_input.token_ids, model_input.positions)
        hidden = apply_dropout(embedded, self.config.dropout.embedding, self)
        out: Tensor = self.decoder(hidden, model_input, self_views, cross_views, routings=routings)
        return apply_dropout(out, self.config.dropout.output, self)

    def encode(
        self,
        model_input: ModelInput,
        attention_hook: ops.sub_batch.AttentionHook | None = None,
        routings: list[Routing] | None = None,
    ) -> Tensor:
        """Return the encoder's output [T, E], without a cache; ``routings`` as in ``forward``."""
        assert self.encoder is not None, "this model has no encoder"
        token_ids, positions = model_input.token_ids, model_input.positions
        if self.encoder_embedding is None:
            x = self.embedding(token_ids, positions, token_types=model_input.token_type_ids)
        else:
            table = None if self.encoder_embedding.tokens else self.token_embedding
            x = self.encoder_embedding(token_ids, positions, table)
        x = apply_dropout(x, self.config.dropout.embedding, self)
        specs = encoder_attention_specs(self.config)
        no_cache = NoCache(self.config, specs=specs, kernel=self.kernel, attention_hook=attention_hook)
        out: Tensor = self.encoder(x, model_input, no_cache.open(model_input), routings=routings)
        return apply_dropout(out, self.config.dropout.output, self)

    @property
    def token_embedding(self) -> Tensor:
        """The token table [V, E]."""
        assert self.embedding.tokens is not None
        return self.embedding.tokens.weight

    @property
    def dtype_name(self) -> str:
        """Dtype of the token table, such as ``float32``."""
        return str(self.token_embedding.dtype).removeprefix("torch.")

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Compute logits [N, V] (or [N, labels]) from hidden [T, E] at indices [N] in T."""
        selected = hidden.index_select(0, indices)
        if isinstance(self.head, LanguageHead):
            out: Tensor = self.head(selected, self.token_embedding)
            return out
        assert isinstance(self.head, ClassificationHead), "this model has no logits"
        scores: Tensor = self.head(selected)
        return scores

    def pooled_outputs(self, hidden: Tensor, model_input: ModelInput) -> Tensor:
        """Compute [B, labels] or [B, E] from hidden [T, E] with a head that pools sequences."""
        spec = self.config.head
        assert not isinstance(spec, cfg.LanguageHeadConfig), "this head does not pool"
        assert isinstance(self.head, (ClassificationHead, PoolingHead))
        out: Tensor = self.head(pool_hidden(hidden, model_input.sub_batches, spec.pool))
        return out

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step reads: parameters, and position constants after the first step."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        return [*self.parameters(), *(constant for stack in stacks for constant in stack.constants())]

    def use_quantized(
        self, matrices: Mapping[str, ops.quantized_linear.QuantizedMatrix | ops.block_matrix.BlockMatrix]
    ) -> None:
        """Replace the weights of layers, given by name, by quantized matrices, for inference."""
        for name, matrix in matrices.items():
            if name == cfg.parameter_shapes.QUANTIZED_HEAD:
                assert isinstance(self.head, LanguageHead) and isinstance(matrix, ops.quantized_linear.QuantizedMatrix)
                self.head.use_quantized(matrix)
                continue
            parent, _, child = name.rpartition(".")
            module = self.get_submodule(parent)
            replaced, bias = getattr(module, child), None
            if isinstance(replaced, nn.Parameter):  # of a mixture of experts, which has the biases apart
                delattr(module, child)
            else:
                bias = replaced.bias
            if isinstance(matrix, ops.block_matrix.BlockMatrix):
                layer: ops.linear.Linear = ops.block_matrix.BlockLinear(matrix, bias)
            else:
                layer = ops.quantized_linear.QuantizedLinear(matrix, bias)
            setattr(module, child, layer)

    def separate_experts(self, names: Container[str]) -> None:
        """Give each expert matrices of its own if ``names`` has its tensors (``mlp.gate.3``), for inference.

        Files that have them one by one are mapped then; as one tensor they are joined in memory.
        """
        for name, module in self.named_modules():
            for part in module.PARTS if isinstance(module, MixtureOfExperts) else ():
                if f"{name}.{part}.0" in names:
                    matrices = getattr(module, part).detach().unbind()
                    delattr(module, part)
                    setattr(module, part, nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in matrices))

    def join_experts(self) -> None:
        """Undo ``separate_experts``."""
        for module in self.modules():
            for part in module.PARTS if isinstance(module, MixtureOfExperts) else ():
                if isinstance(matrices := getattr(module, part), nn.ParameterList):
                    delattr(module, part)
                    setattr(module, part, nn.Parameter(torch.stack(list(matrices)), requires_grad=False))

    def round_activations(self, bits: int) -> None:
        """Round the inputs of layers with quantized weights to ``bits`` bits (``quantized_linear.round_inputs``).

        Raises:
            ConfigError: If the model has no such layer, or bits is not 8.
        """
        if bits != 8:
            raise ConfigError(f"activation_bits: must be 8, got {bits}")
        layers = [layer for layer in self.modules() if isinstance(layer, ops.quantized_linear.QuantizedLinear)]
        if not layers:
            message = "activation_bits: the model has no int8 or int4 weights"
            raise ConfigError(message, "Quantize it with `kvad quantize`, or omit the option.")
        for layer in layers:
            layer.activation_bits = bits
        self.activation_bits = bits

    def fuse_projections(self) -> None:
        """Pack the weights that share an input, for speed; outputs and checkpoints stay equal."""
        for pack, layers in self.projections():
            pack.pack(*layers)

    def projections(self) -> Iterator[tuple[ops.linear.PackedLinear, tuple[ops.linear.Linear, ...]]]:
        """Yield the layers that share an input (q, k, v; gate, up), with what may pack them."""
        for module in self.modules():
            if isinstance(module, CrossAttention):
                yield module.kv, (module.k, module.v)
            elif isinstance(module, Attention):
                yield module.qkv, module.input_projections()
            elif isinstance(module, GatedMLP):
                yield module.gate_up, (module.gate, module.up)

    def _init_weights(self) -> None:
        depth = max(len(stack.layers) for stack in (self.encoder, self.decoder) if stack is not None)
        residual = 0.02 / math.sqrt(2 * depth)
        last = ("attention.out.weight", "mlp.down.weight", "mlp.down", "mlp.shared.down.weight")
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.dim() >= 2 and "norm" not in name:
                nn.init.normal_(parameter, std=residual if name.endswith(last) else 0.02)
            elif parameter.dim() == 1 and name.endswith(".bias"):
                nn.init.zeros_(parameter)


class _RecomputedView(WrappedView):
    """A view that computes learned biases each time.

    A bias cached by the first layer of a step would not be part of the graph when that layer is recomputed. Gradients
    are the same bit for bit, except for a bias table shared by layers, whose gradients are summed in another order.
    """

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if isinstance(params.bias, RelativeBuckets):
            params = params._replace(bias=_RecomputedBias(params.bias))
        return self.view.attend(q, k, v, params)


class _ScaledQueriesView(WrappedView):
    """A view whose queries are multiplied by a scale [T] per token, which commutes with their rotation."""

    def __init__(self, view: CacheView, scale: Tensor) -> None:
        super().__init__(view)
        self.scale = scale

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        return self.view.attend(q * self.scale.to(q.dtype)[:, None, None], k, v, params)


class _RecomputedBias(NamedTuple):
    """A relative bias that is not cached."""

    bias: RelativeBuckets

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ops.position_bias.position_bias(self.bias, queries, keys)
