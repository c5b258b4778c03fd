"""Checks of a request before it is queued, with RequestErrors that name the reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvad import config as cfg
from kvad.cache import CacheGroup, sizing
from kvad.config import ModelConfig
from kvad.engine.scheduling import SamplingParams
from kvad.errors import ConfigError, RequestError
from kvad.model import Summarizer


def supported_tasks(config: ModelConfig) -> str:
    """Return the hint of an error about a task that the model cannot do."""
    head = config.head
    if config.kind != "encoder":
        return "It can generate, score and return logits."
    if isinstance(head, cfg.LanguageHeadConfig):
        return "It can fill masks, embed and return logits."
    if isinstance(head, cfg.ClassificationHeadConfig):
        return f"It can {'tag' if head.level == 'token' else 'classify'}, embed and return logits."
    return "It can embed."


def check_topology(config: ModelConfig, encoder_tokens: Sequence[int] | None) -> None:
    """Check that encoder input is given exactly if the model is an encoder-decoder."""
    if config.kind == "encoder":
        raise RequestError("this model is an encoder and cannot continue a text", supported_tasks(config))
    if config.kind == "decoder" and encoder_tokens is not None:
        raise RequestError("encoder input: this model has no encoder", "Give a prompt.")
    if config.kind == "encoder-decoder":
        if encoder_tokens is None:
            raise RequestError("encoder input: required by this model", "Give the text to translate.")
        check_source(config, encoder_tokens)


def check_source(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Check length and token ids of the encoder input."""
    source = config.encoder_input
    vocab_size = config.vocab_size if source is None or source.vocab_size is None else source.vocab_size
    check_ids("encoder input", tokens, vocab_size, config.max_seq_len if source is None else source.max_seq_len)


def check_token_ids(
    config: ModelConfig, tokens: Sequence[int], sampling_params: SamplingParams, encoder_tokens: Sequence[int] | None
) -> None:
    """Check that all token ids of a request are in the vocabulary."""
    if not tokens:
        label = "prompt" if encoder_tokens is None else "target"
        raise RequestError(f"{label}: must have at least 1 token, got 0")
    check_ids("prompt", tokens, config.vocab_size)
    check_ids("logit_bias", sampling_params.logit_bias, config.vocab_size)
    check_ids("stop_token_ids", sampling_params.stop_token_ids, config.vocab_size)
    for word in sampling_params.bad_words_ids:
        check_ids("bad_words_ids", word, config.vocab_size)
    for label in ("forced_bos_token_id", "forced_eos_token_id"):
        token = getattr(sampling_params, label)
        check_ids(label, [] if token is None else [token], config.vocab_size)


def check_ids(label: str, tokens: Collection[int], vocab_size: int, max_len: int | None = None) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{label}: token id must be below {vocab_size}, got {token}")
    if max_len is not None and len(tokens) > max_len:
        raise RequestError(f"{label}: must have at most {max_len} tokens, got {len(tokens)}", "Shorten it.")


def check_summarizer_groups(summarizer: Summarizer, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if the summarizer was not trained for these cache groups."""
    sizing.check_summarizer(summarizer.ratio, groups)
    layers = summarizer.by_layer()
    for group in (group for group in groups if group.lower_level is not None and group.lower_level.ratio > 1):
        sizes = group.spec.num_kv_heads, group.spec.head_dim, group.spec.value_dim
        for layer in group.layers:
            if layer not in layers or layers[layer].sizes != sizes:
                raise ConfigError(f"summarizer: it does not match layer {layer} of this model")
