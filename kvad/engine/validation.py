"""Checks of a request before it is queued, with RequestErrors that name the reason."""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache import CacheGroup, sizing
from kvad.config import ModelConfig
from kvad.engine.scheduling import SamplingParams
from kvad.errors import ConfigError, RequestError
from kvad.model import Summarizer

_ENCODER_CAN = "It can embed, tag, classify or fill masks, depending on its head."


def check_topology(config: ModelConfig, encoder_tokens: Sequence[int] | None) -> None:
    """Check that encoder input is given exactly if the model is an encoder-decoder."""
    if config.kind == "encoder":
        raise RequestError("this model is an encoder and cannot continue a text", _ENCODER_CAN)
    if config.kind == "decoder" and encoder_tokens is not None:
        raise RequestError("encoder input: this model has no encoder", "Give a prompt.")
    if config.kind == "encoder-decoder":
        if encoder_tokens is None:
            raise RequestError("encoder input: required by this model", "Give the text to translate.")
        check_source(config, encoder_tokens)


def check_source(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Check length and token ids of the encoder input."""
    max_len = config.max_seq_len if config.encoder_input is None else config.encoder_input.max_seq_len
    vocab_size = (
        config.vocab_size
        if config.encoder_input is None or config.encoder_input.vocab_size is None
        else config.encoder_input.vocab_size
    )
    if len(tokens) > max_len:
        raise RequestError(f"encoder input: must have at most {max_len} tokens, got {len(tokens)}", "Shorten it.")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"encoder input: token id must be below {vocab_size}, got {token}")


def check_token_ids(
    config: ModelConfig, tokens: Sequence[int], sampling_params: SamplingParams, encoder_tokens: Sequence[int] | None
) -> None:
    """Check that all token ids of a request are in the vocabulary."""
    if not tokens:
        label = "prompt" if encoder_tokens is None else "target"
        raise RequestError(f"{label}: must have at least 1 token, got 0")
    for label, ids in (
        ("prompt", tokens),
        ("logit_bias", sampling_params.logit_bias),
        ("stop_token_ids", sampling_params.stop_token_ids),
        ("bad_words_ids", [token for word in sampling_params.bad_words_ids for token in word]),
        (
            "forced_bos_token_id",
            [] if sampling_params.forced_bos_token_id is None else [sampling_params.forced_bos_token_id],
        ),
        (
            "forced_eos_token_id",
            [] if sampling_params.forced_eos_token_id is None else [sampling_params.forced_eos_token_id],
        ),
    ):
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise RequestError(f"{label}: token id must be below {config.vocab_size}, got {token}")


def check_summarizer_groups(summarizer: Summarizer, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if the summarizer was not trained for these cache groups."""
    sizing.memory_plan.check_summarizer(summarizer.ratio, groups)
    layers = summarizer.by_layer()
    for group in (group for group in groups if group.lower_level is not None and group.lower_level.ratio > 1):
        sizes = group.spec.num_kv_heads, group.spec.head_dim, group.spec.value_dim
        for layer in group.layers:
            if layer not in layers or layers[layer].sizes != sizes:
                raise ConfigError(f"summarizer: it does not match layer {layer} of this model")
