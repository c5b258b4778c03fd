"""Attention maps of encoders and encoder-decoders: within the source, within the target, and between them.

The source is encoded as the engine does, with its special tokens; the target follows the token that opens it. Without a
target, the model's greedy answer is used. (For a decoder: ``LLM.trace``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvad.config import attention_specs
from kvad.engine import AttentionMap
from kvad.errors import RequestError
from kvad.llm import LLM
from kvad.model import NoCache, whole_sequences
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
    read = whole_sequences([source], device)
    words = None if llm.tokenizer is None else llm.tokenizer.source_tokenizer or llm.tokenizer
    pieces = _pieces(source, words)
    encoder: dict[int, Tensor] = {}  # layer -> [H, L, S]
    decoder: dict[int, Tensor] = {}  # self-attention of all layers, then cross-attention
    model.encode(read, lambda trace: encoder.update({trace.layer: trace.weights[0].float()}))
    target_pieces: tuple[str, ...] = ()
    num_self = sum(not spec.is_cross_attention for spec in attention_specs(config))
    if config.decoder is not None:
        ids = llm.texts.encode_target(target) if target is not None else _answer(llm, source)
        target_pieces = _pieces(ids, llm.tokenizer)
        cache = NoCache(config, attention_hook=lambda trace: decoder.update({trace.layer: trace.weights[0].float()}))
        model(whole_sequences([ids], device)._replace(encoder_input=read), cache)
    elif target is not None:
        raise RequestError("an encoder reads no target", "leave --target out")
    sides = {
        "encoder": (encoder, pieces, pieces),
        "decoder": ({n: found for n, found in decoder.items() if n < num_self}, target_pieces, target_pieces),
        "cross": ({n - num_self: found for n, found in decoder.items() if n >= num_self}, target_pieces, pieces),
    }
    num_heads = max(len(found) for weights, _, _ in sides.values() for found in weights.values())
    for name, indices, count in (("layer", layers, max(len(encoder), num_self)), ("head", heads, num_heads)):
        for index in indices or ():
            if index >= count:
                raise RequestError(f"{name} {index} is not one of 0..{count - 1}")
    maps = tuple(
        AttentionMap(layer, head, weights[layer][head].tolist(), side, *tokens)
        for side, (weights, *tokens) in sides.items()
        for layer in (weights if layers is None else layers)
        if layer in weights
        for head in (range(len(weights[layer])) if heads is None else heads)
        if head < len(weights[layer])
    )
    return tuple(source), pieces, maps


def _pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    return tuple(str(one) if tokenizer is None else tokenizer.token_text(one) for one in ids)


def _answer(llm: LLM, source: Sequence[int]) -> list[int]:
    """Return the tokens that open a target, and the model's answer."""
    opening = llm.texts.encode_target(None)
    most = min(llm.model.config.max_seq_len - 1, 8 + 2 * len(source))
    generation = replace(llm.generation, decoder_start_token_id=opening[0])
    return opening + greedy_decode(llm.model, [source], generation, most)[0]
