"""Attention maps of encoders and encoder-decoders: within the source, within the target, and between them.

The source is encoded as the engine does, with its special tokens; the target follows the token that opens it. Without a
target, the model's greedy answer is used. (For a decoder: ``LLM.trace``.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import ops
from kvad.config import attention_specs
from kvad.errors import RequestError
from kvad.inspection.attention_plot import AttentionMap
from kvad.llm import LLM
from kvad.model import NoCache
from kvad.model_input import ModelInput, SubBatch
from kvad.text import Tokenizer
from kvad.train.monitoring import greedy_decode


@torch.inference_mode()
def encoder_decoder_maps(
    llm: LLM, text: str, target: str | None, *, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[str, ...], tuple[AttentionMap, ...]]:
    """Return (tokens and pieces of the source, maps): encoder, decoder, then decoder to encoder.

    ``layers``, ``heads``: those to return (None: all). RequestError if none has one of them.
    """
    model, config = llm.model, llm.model.config
    assert config.encoder is not None
    source = llm.encode(text)
    device = model.token_embedding.device
    read = _step(source, device)
    words = None if llm.tokenizer is None else llm.tokenizer.source_tokenizer or llm.tokenizer
    pieces = _pieces(source, words)
    seen: dict[str, dict[int, Tensor]] = {"encoder": {}, "decoder": {}, "cross": {}}
    model.encode(read, _attention_hook(lambda layer: ("encoder", layer), seen))
    target_pieces: tuple[str, ...] = ()
    if config.decoder is not None:
        ids = llm.texts.encode_target(target) if target is not None else _answer(llm, source)
        target_pieces = _pieces(ids, llm.tokenizer)
        own = sum(not spec.is_cross_attention for spec in attention_specs(config))
        probe = _attention_hook(lambda layer: ("decoder", layer) if layer < own else ("cross", layer - own), seen)
        model(_step(ids, device)._replace(encoder_input=read), NoCache(config, attention_hook=probe))
    elif target is not None:
        raise RequestError("an encoder reads no target", "leave --target out")
    _check(layers, heads, [stack for stack in (config.encoder, config.decoder) if stack is not None])
    ends = {"encoder": (pieces, pieces), "decoder": (target_pieces, target_pieces), "cross": (target_pieces, pieces)}
    maps = []
    for side, found in seen.items():
        for layer in found if layers is None else [layer for layer in layers if layer in found]:
            weights = found[layer]
            for head in range(len(weights)) if heads is None else [h for h in heads if h < len(weights)]:
                maps.append(AttentionMap(layer, head, weights[head].tolist(), side, *ends[side]))
    return tuple(source), pieces, tuple(maps)


def _attention_hook(
    place: Callable[[int], tuple[str, int]], seen: dict[str, dict[int, Tensor]]
) -> ops.sub_batch.AttentionHook:
    def keep(one: ops.sub_batch.AttentionTrace) -> None:
        side, layer = place(one.layer)
        seen[side][layer] = one.weights[0].float()  # of the only row: [H, L, S]

    return keep


def _step(ids: Sequence[int], device: torch.device) -> ModelInput:
    every = torch.arange(len(ids), device=device)
    sub_batch = SubBatch(1, len(ids), len(ids))
    return ModelInput(
        torch.tensor(ids, device=device), every, (sub_batch,), every, max_seq_lens=torch.full_like(every, len(ids))
    )


def _pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    return tuple(str(one) if tokenizer is None else tokenizer.token_text(one) for one in ids)


def _answer(llm: LLM, source: Sequence[int]) -> list[int]:
    """Return the tokens that open a target, and the model's answer."""
    opening = llm.texts.encode_target(None)
    most = min(llm.model.config.max_seq_len - 1, 8 + 2 * len(source))
    return (
        opening
        + greedy_decode(llm.model, [source], replace(llm.generation, decoder_start_token_id=opening[0]), most)[0]
    )


def _check(layers: Sequence[int] | None, heads: Sequence[int] | None, stacks: Sequence[cfg.StackConfig]) -> None:
    deepest = max(stack.num_layers for stack in stacks)
    widest = max(stack.layer_config(index).attention.num_heads for stack in stacks for index in range(stack.num_layers))
    for name, wanted, count in (("layer", layers, deepest), ("head", heads, widest)):
        for number in wanted or ():
            if number >= count:
                raise RequestError(f"{name} {number} is not one of 0..{count - 1}")
