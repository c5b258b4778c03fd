"""What can be said of a request before it is queued: RequestError names what this model cannot serve, and why."""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache import CacheGroup, sizing
from kvad.config import ModelConfig
from kvad.engine.scheduling import SamplingParams
from kvad.errors import ConfigError, RequestError
from kvad.model import Summarizer

_ENCODER_CAN = "it can embed, tag, classify or fill masks, as its head says"


def check_topology(config: ModelConfig, source: Sequence[int] | None) -> None:
    """Is this how such a model is asked?"""
    if config.kind == "encoder":
        raise RequestError("this model is an encoder: it cannot continue a text", _ENCODER_CAN)
    if config.kind == "decoder" and source is not None:
        raise RequestError("this model has no encoder to read a source", "give a prompt")
    if config.kind == "encoder-decoder":
        if source is None:
            raise RequestError("this model answers a source", "give the text to translate as the source")
        check_source(config, source)


def check_source(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Can the encoder read it?"""
    limit = config.max_seq_len if config.encoder_input is None else config.encoder_input.max_seq_len
    vocab = (
        config.vocab_size
        if config.encoder_input is None or config.encoder_input.vocab_size is None
        else config.encoder_input.vocab_size
    )
    if len(tokens) > limit:
        raise RequestError(f"the source has {len(tokens)} tokens, the encoder's limit is {limit}", "shorten it")
    for token in tokens:
        if not 0 <= token < vocab:
            raise RequestError(f"source: token id {token} is outside the vocabulary of {vocab}")


def check_token_ids(
    config: ModelConfig, tokens: Sequence[int], sampling: SamplingParams, source: Sequence[int] | None
) -> None:
    """Is every token that is named one of the vocabulary's?"""
    if not tokens:
        what = "prompt" if source is None else "start of the target"
        raise RequestError(f"the {what} is empty", "give at least one token")
    for where, ids in (
        ("prompt", tokens),
        ("logit_bias", sampling.logit_bias),
        ("stop_tokens", sampling.stop_token_ids),
        ("bad_words", [token for word in sampling.bad_words_ids for token in word]),
        ("forced_first", [] if sampling.forced_bos_token_id is None else [sampling.forced_bos_token_id]),
        ("forced_last", [] if sampling.forced_eos_token_id is None else [sampling.forced_eos_token_id]),
    ):
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise RequestError(f"{where}: token id {token} is outside the vocabulary of {config.vocab_size}")


def check_summarizer_groups(compressor: Summarizer, placed: Sequence[CacheGroup]) -> None:
    """ConfigError where it was not made for these groups."""
    sizing.memory_plan.check_summarizer(compressor.ratio, placed)
    layers = compressor.by_layer()
    for group in (group for group in placed if group.lower_level is not None and group.lower_level.ratio > 1):
        sizes = group.spec.num_kv_heads, group.spec.head_dim, group.spec.value_dim
        for layer in group.layers:
            if layer not in layers or layers[layer].sizes != sizes:
                raise ConfigError(f"compressor: it was not made for layer {layer} of this model")
