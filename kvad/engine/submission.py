"""Submission of texts to the engine: sampling options, languages and targets of a call become requests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvad.engine.client import EngineClient, PromptEncoder, RequestHandle
from kvad.engine.options import GenerateOptions, PromptInput, resolve_sampling, supported_tasks
from kvad.engine.output import TextScore
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError

Submit = Callable[[PromptInput], RequestHandle]


class RequestSubmitter:
    """Builds the functions that submit one prompt of a call."""

    def __init__(self, client: EngineClient, prompt_encoder: PromptEncoder) -> None:
        self._client, self._engine, self._prompts = client, client.engine, prompt_encoder
        self._kind = client.engine.model.config.kind

    def resolve_sampling(self, sampling_params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the given SamplingParams, or ``fields`` over the checkpoint's defaults."""
        if sampling_params is None:
            return resolve_sampling(fields, self._prompts.generation)
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(
                f"sampling_params: must be SamplingParams, got {sampling_params!r}", "Pass its fields as keywords."
            )
        if fields:
            name = next(iter(fields))
            raise RequestError(f"sampling_params= and {name}= are both given", "Set it in the SamplingParams.")
        return sampling_params

    def generation(self, sampling_params: SamplingParams | None, settings: GenerateOptions) -> Submit:
        """Return the function that submits a prompt to be continued with these settings."""
        fields: dict[str, Any] = dict(settings)
        target_prefix, language = fields.pop("target_prefix", None), fields.pop("language", None)
        source_language, cache_salt = fields.pop("source_language", None), fields.pop("cache_salt", "")
        draw_salt = fields.pop("draw_salt", None)
        params = self.resolve_sampling(sampling_params, fields).with_seed()
        if language is not None:
            params = self._with_language(params, language, fields, target_prefix)
        if self._kind == "encoder":
            message = "this model is an encoder and cannot continue a text"
            raise RequestError(message, supported_tasks(self._engine.model.config))
        is_encoder_decoder, start = self._kind == "encoder-decoder", list[int]()
        if is_encoder_decoder:
            target_prefix = None if target_prefix == "" else target_prefix
            start = self._prompts.encode_target(target_prefix, params.forced_bos_token_id)
            if target_prefix is not None:
                params = dataclasses.replace(params, forced_bos_token_id=None)
        elif target_prefix is not None or source_language is not None:
            message = "target_prefix= and source_language= require an encoder-decoder"
            raise RequestError(message, "Put the text into the prompt.")
        num_equal = Counter[tuple[int, ...]]()

        def submit(prompt: PromptInput) -> RequestHandle:
            source = self._prompts.encode_source(prompt, source_language) if is_encoder_decoder else None
            tokens = self._prompts.encode_prompt(prompt) if source is None else source  # counted as the prompt
            salt = num_equal[tuple(tokens)] if draw_salt is None else draw_salt
            num_equal[tuple(tokens)] += 1
            queue = partial(self._engine.add_request, tokens if source is None else start, encoder_token_ids=source)
            queue = partial(queue, sampling_params=params, cache_salt=cache_salt, draw_salt=salt)
            return self._client.submit(queue, params, tokens)

        return submit

    def _with_language(
        self, params: SamplingParams, language: str, fields: Mapping[str, Any], target_prefix: PromptInput | None
    ) -> SamplingParams:
        if fields.get("forced_bos_token_id") is not None:
            message = "language= and forced_bos_token_id= are both given"
            raise RequestError(message, "A language is a forced first token.")
        if not isinstance(target_prefix, str | None):
            message = "language= and target_prefix= as ids are both given"
            raise RequestError(message, "Ids are the whole start of the target.")
        return dataclasses.replace(params, forced_bos_token_id=self._prompts.language_token(language))

    def scoring(
        self, encoder_input: PromptInput | None, source_language: str | None, *, top_logprobs: int, cache_salt: str
    ) -> Submit:
        """Return the function that submits a text to be scored (``LLM.score``)."""
        if self._kind == "encoder-decoder" and encoder_input is None:
            message = "encoder_input: this model scores targets of an encoder input"
            raise RequestError(message, "Give the text that the targets answer.")
        self.check_encoder_input(encoder_input)
        source = None if encoder_input is None else self._prompts.encode_source(encoder_input, source_language)
        sampling_params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs)

        def submit(text: PromptInput) -> RequestHandle:
            tokens = self._prompts.encode_prompt(text) if source is None else self._prompts.encode_target(text)
            queue = partial(self._engine.add_request, tokens, sampling_params, cache_salt=cache_salt)
            return self._client.submit(partial(queue, encoder_token_ids=source), sampling_params, tokens)

        return submit

    def check_encoder_input(self, encoder_input: PromptInput | None) -> None:
        if encoder_input is not None and self._kind != "encoder-decoder":
            raise RequestError("encoder_input: this model has no encoder input", "Omit encoder_input=.")


def read_score(handle: RequestHandle) -> TextScore:
    """Return the scores of a text that ``RequestSubmitter.scoring`` submitted."""
    scores = handle.result().prompt_logprobs
    logprobs, alternatives = [score.logprob for score in scores], [score.top_logprobs for score in scores]
    return TextScore(tuple(handle.token_ids), (None, *logprobs), ((), *alternatives))
