"""Requests: prompts become token ids, options become sampling parameters, and both are checked; no torch.

Every check raises a RequestError that names the reason, before the request is queued.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from kvad import config as cfg
from kvad import text as text_lib
from kvad.checkpoint import GenerationConfig
from kvad.config import ModelConfig
from kvad.engine import scheduling
from kvad.engine.scheduling import SamplingOptions, SamplingParams
from kvad.errors import RequestError, format_count, suggest
from kvad.text import Tokenizer

PromptInput = str | Sequence[int]  # text or token ids


class GenerateOptions(SamplingOptions, total=False):
    """Keywords of ``LLM.generate`` and ``LLM.stream``."""

    target_prefix: PromptInput | None  # start of an encoder-decoder's target (ids: the whole start)
    language: str | None  # target language, for models with language tokens
    source_language: str | None  # language of the encoder input
    cache_salt: str  # cached blocks are shared only with requests of the same salt
    adapter: str  # name of one of ``LLM.load(adapters=)``; "": the base
    # Requests with equal seeds and prompts draw other numbers if it differs. None: the number of equal prompts before
    # this one in the call.
    draw_salt: int | None


class ScoreOptions(TypedDict, total=False):
    """Keywords of ``LLM.score``."""

    top_logprobs: int  # alternatives per token
    encoder_input: PromptInput | None  # of which the texts are targets
    source_language: str | None
    cache_salt: str
    adapter: str


def resolve_sampling(options: Mapping[str, Any], generation: GenerationConfig) -> SamplingParams:
    """Combine the given options with the checkpoint's defaults.

    Options for sampling, or more samples than beams, drop the checkpoint's beam search and greedy mode; ``num_beams``
    drops its sampling options. Raises RequestError for an unknown name or an invalid value.
    """
    defaults: dict[str, Any] = dict(generation.sampling or {})
    bad_words = (*((token,) for token in generation.suppress_tokens), *generation.bad_words_ids)
    if bad_words:
        defaults["bad_words_ids"] = bad_words
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if getattr(generation, name) is not None:
            defaults[name] = getattr(generation, name)
    request = scheduling.request
    beam_fields, sampling_fields = set(request.BEAM_ONLY_FIELDS), set(request.SAMPLING_ONLY_FIELDS)
    wants_more_samples = options.get("n", 1) > defaults.get("num_beams", 1)
    if options.get("structured_output") is not None:
        defaults = _without(defaults, beam_fields)
    if wants_more_samples or (sampling_fields & options.keys() and not beam_fields & options.keys()):
        defaults = _without(defaults, beam_fields)
    if options.get("num_beams", 1) != 1:
        defaults = {**_without(defaults, sampling_fields), "temperature": 0.0}
    if isinstance(options.get("max_tokens"), int) and "min_tokens" in defaults:
        defaults["min_tokens"] = min(defaults["min_tokens"], options["max_tokens"])
    if options.get("num_beams", defaults.get("num_beams", 1)) == 1:  # drop a file's beam options if no beam search runs
        defaults = _without(defaults, beam_fields)
        if defaults.get("temperature") == 0 and (wants_more_samples or options.keys() & sampling_fields):
            del defaults["temperature"]
    return SamplingParams.from_options(**{**defaults, **options})


def _without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


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


def check_request(
    config: ModelConfig, tokens: Sequence[int], sampling_params: SamplingParams, encoder_tokens: Sequence[int] | None
) -> None:
    """Check that encoder input is given exactly if the model is an encoder-decoder, and that all ids are known."""
    if config.kind == "encoder":
        raise RequestError("this model is an encoder and cannot continue a text", supported_tasks(config))
    if config.kind == "decoder" and encoder_tokens is not None:
        raise RequestError("encoder input: this model has no encoder", "Give a prompt.")
    if config.kind == "encoder-decoder":
        if encoder_tokens is None:
            raise RequestError("encoder input: required by this model", "Give the text to translate.")
        check_source(config, encoder_tokens)
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


def check_source(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Check length and token ids of the encoder input."""
    source = config.encoder_input
    vocab_size = config.vocab_size if source is None or source.vocab_size is None else source.vocab_size
    check_ids("encoder input", tokens, vocab_size, config.max_seq_len if source is None else source.max_seq_len)


def check_ids(label: str, tokens: Collection[int], vocab_size: int, max_len: int | None = None) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{label}: token id must be below {vocab_size}, got {token}")
    if max_len is not None and len(tokens) > max_len:
        raise RequestError(f"{label}: must have at most {max_len} tokens, got {len(tokens)}", "Shorten it.")


class EncodedPair(list[int]):
    """Token ids of two texts with special tokens.

    Attributes:
        token_types: Type of each token; None for a model without types.
    """

    def __init__(self, ids: Sequence[int], token_types: Sequence[int] | None) -> None:
        super().__init__(ids)
        self.token_types = token_types


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts, encoder inputs and targets; without a tokenizer, token ids only.

    It combines the tokenizer's special tokens (``[CLS] x [SEP]``, ``<s> x``) with the checkpoint's start of targets,
    and checks lengths and ids before anything is queued.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    generation: GenerationConfig
    endless: bool = False
    max_len: int | None = None  # of the engine's sequences, which a decoder's embedding is one of

    def encode_prompt(self, prompt: PromptInput, *, whole: bool = False) -> list[int]:
        """Return a decoder's prompt; an empty text becomes the opening token.

        It may be as long as a sequence, or, with ``whole``, as one forward pass.
        """
        tokens = self._ids(prompt, self.tokenizer, None)
        if not tokens:
            opening_token = self.opening_token()
            if opening_token is None:
                raise RequestError("prompt: must have at least 1 token, because this model has no opening token")
            return [opening_token]
        max_len = len(tokens) if self.endless and not whole else self.config.max_seq_len
        check_ids("prompt", tokens, self.config.vocab_size, max_len)
        return tokens

    def encode_chat(
        self,
        template: text_lib.chat_template.ChatTemplate | None,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation in a chat template (``ChatTemplate.render``).

        Raises:
            RequestError: If there is no template.
            ChatTemplateError: If the template refuses the messages.
        """
        if template is None:
            raise RequestError("this model has no chat template", "Use generate() with a text, or /v1/completions.")
        rendered = template.render(
            messages,
            tools=tools,
            generation_prompt=generation_prompt,
            continue_final=continue_final,
            variables=variables,
        )
        return self.require_tokenizer().encode(rendered.text, specials=True)

    def encode_continuation(self, text: PromptInput) -> list[int]:
        """Return the token ids of text appended to a prompt, without opening tokens."""
        if text and isinstance(text, str):
            tokens = self.require_tokenizer().encode(text)
        else:
            tokens = _integers(text or ())
        check_ids("text", tokens, self.config.vocab_size)
        return tokens

    def encode_source(self, text: PromptInput, language: str | None = None, *, specials: bool = False) -> list[int]:
        """Return an encoder's input with its special tokens; token ids are used unchanged.

        ``specials``: parse special tokens in the text, such as ``[MASK]``.
        """
        tokenizer = self.tokenizer
        if tokenizer is not None and tokenizer.source_tokenizer is not None:
            tokenizer = tokenizer.source_tokenizer
        if language is not None and not isinstance(text, str):
            raise RequestError(f"language {language!r}: requires text, got token ids", "Give a text.")
        tokens = self._ids(text, tokenizer, language, specials)
        if isinstance(text, str):
            tokens = self.generation.with_source_eos(tokens)
        if not tokens:
            raise RequestError("encoder input: must have at least 1 token, got 0")
        check_source(self.config, tokens)
        return tokens

    def encode_embedding(
        self, text: PromptInput, prompt_name: str | None = None, *, truncate: bool = False
    ) -> list[int]:
        """Return the input of an embedding: the prompt, if any, and the text, with special tokens.

        A text longer than the checkpoint's limit for embeddings is truncated, as in sentence-transformers, which is
        printed on stderr; another one that is too long only with ``truncate``. Token ids are used unchanged.

        Raises:
            RequestError: If the text is too long or has no tokens, or the prompt is unknown.
        """
        if not isinstance(text, str):
            return self.encode_source(text) if self.config.encoder is not None else self.encode_prompt(text, whole=True)
        prompts, name = self.generation.prompts, prompt_name or self.generation.prompt_name
        if name is not None and name not in prompts:
            hint = suggest(name, prompts) if prompts else "This model has none."
            raise RequestError(f"unknown prompt {name!r}", hint)
        tokenizer = self.require_tokenizer()
        tokenizer = tokenizer.source_tokenizer or tokenizer
        text = text if name is None else prompts[name] + text
        ids = tokenizer.encode(text.lower() if self.generation.lowercase else text)
        tokens = self.generation.with_source_eos(tokenizer.add_special_tokens(ids))
        source, max_embed_tokens = self.config.encoder_input, self.generation.max_embed_tokens
        longest = self.config.max_seq_len if source is None else source.max_seq_len
        if self.config.kind == "decoder" and self.max_len is not None:
            longest = min(longest, self.max_len)
        limit = min(longest, max_embed_tokens or len(tokens))
        if len(tokens) > limit and (truncate or max_embed_tokens is not None):
            print(f"kvad: {len(tokens):,} tokens were truncated to {limit:,}", file=sys.stderr)
            ids = ids[: max(0, limit - (len(tokens) - len(ids)))]
            tokens = self.generation.with_source_eos(tokenizer.add_special_tokens(ids))
        check_ids("text", tokens, self.config.vocab_size, limit)
        if not tokens:
            raise RequestError("text: must have at least 1 token, got 0")
        return tokens

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return an encoder's input of two texts, as the tokenizer's template joins them.

        Raises:
            RequestError: If the tokenizer or the model does not take two texts, or they are too long.
        """
        tokenizer, num_types = self.require_tokenizer(), self.config.embedding.num_token_types
        ids, token_types = tokenizer.add_pair_tokens(tokenizer.encode(first), tokenizer.encode(second))
        if num_types and max(token_types) >= num_types:
            message = f"this model has {format_count(num_types, 'token type')}, two texts need {max(token_types) + 1}"
            raise RequestError(message, "Give one text.")
        check_source(self.config, ids)
        return EncodedPair(ids, token_types if num_types else None)

    def encode_target(self, prefix: PromptInput | None, first: int | None = None) -> list[int]:
        """Return the start of a target: the start token, the token ``first``, and a forced prefix.

        ``first`` is a language token, for example. Token ids in ``prefix`` are the whole start.
        """
        if prefix is not None and not isinstance(prefix, str):
            tokens = _integers(prefix)
        else:
            start_token = self.generation.decoder_start_token_id
            if start_token is None:
                bos = self.generation.bos_token_id
                start_token = self.opening_token() if bos is None else bos
            if start_token is None:
                raise RequestError(
                    "this checkpoint has no start token for targets", "Pass target_prefix= as token ids."
                )
            tokens = [start_token]
            if prefix:
                tokens += [] if first is None else [first]
                tokens += self.require_tokenizer().encode(prefix)
        check_ids("target", tokens, self.config.vocab_size, self.config.max_seq_len)
        return tokens

    def language_token(self, code: str) -> int:
        """Return the token id that targets in this language begin with."""
        language_ids = {} if self.tokenizer is None else self.tokenizer.languages
        if code not in language_ids:
            raise RequestError(
                f"unknown language {code!r}", suggest(code, language_ids) if language_ids else "This model has none."
            )
        return language_ids[code]

    def opening_token(self) -> int | None:
        """Return the token that opens a text: the separator of documents, else BOS, else None."""
        specials = None if self.tokenizer is None else self.tokenizer.special_tokens
        if specials is not None and specials.separator is not None:
            return specials.separator
        if self.generation.bos_token_id is not None:
            return self.generation.bos_token_id
        return None if specials is None else specials.bos

    def _ids(
        self, text: PromptInput, tokenizer: Tokenizer | None, language: str | None, specials: bool = False
    ) -> list[int]:
        if not isinstance(text, str):
            return _integers(text)
        tokenizer = self.require_tokenizer() if tokenizer is None else tokenizer
        ids = tokenizer.encode(text, specials=specials)
        return tokenizer.add_special_tokens(ids, language=language) if ids else []

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; RequestError without one."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", "Give token ids.")
        return self.tokenizer


def normalize_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Return (is a single prompt, prompts) for a text, ids, an array of ids, or a list.

    An empty list has no prompts.
    """
    if isinstance(prompts, str):
        return True, [prompts]
    items = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(items, Iterable):
        raise RequestError(f"prompt: must be text or token ids, got {prompts!r}", "Give 'text', [1, 2] or a list.")
    items = items if isinstance(items, EncodedPair) else list(items)
    is_single = bool(items) and not isinstance(items[0], (str, Sequence)) and not hasattr(items[0], "tolist")
    return is_single, [items] if is_single else items


def _integers(prompt: Any) -> list[int]:
    """Return token ids as plain integers; raise RequestError for other values."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError as error:
        raise RequestError(f"prompt: must be text or token ids: {error}") from None
