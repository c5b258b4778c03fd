"""Submission of texts to the engine: sampling options, languages and targets of a call become requests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvad.engine.output import Completion, TextScore
from kvad.engine.requests import GenerateOptions, PromptEncoder, PromptInput, resolve_sampling, supported_tasks
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError

if TYPE_CHECKING:  # the server builds submissions without torch
    from kvad.engine.client import EngineClient, RequestHandle

Submit = Callable[[PromptInput], "RequestHandle"]
Build = Callable[[PromptInput], "Submission"]


class Submission(NamedTuple):
    """Arguments of ``Engine.add_request`` for one prompt; plain values, also for another process."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    encoder_token_ids: list[int] | None = None
    cache_salt: str = ""
    draw_salt: int = 0
    adapter: str = ""

    @property
    def input_ids(self) -> list[int]:
        """The tokens that are counted as the prompt: those of the encoder input, if there is one."""
        return self.prompt_token_ids if self.encoder_token_ids is None else self.encoder_token_ids

    @property
    def num_sequences(self) -> int:
        """Number of samples or beams."""
        return max(self.sampling_params.n, self.sampling_params.num_beams)


class SubmissionBuilder:
    """Builds the functions that turn one prompt of a call into a ``Submission``; nothing is queued."""

    def __init__(self, prompt_encoder: PromptEncoder) -> None:
        self._prompts, self._config = prompt_encoder, prompt_encoder.config
        self._kind = prompt_encoder.config.kind

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

    def generation(self, sampling_params: SamplingParams | None, settings: GenerateOptions) -> Build:
        """Return the function that builds the submission of a prompt to be continued with these settings."""
        fields: dict[str, Any] = dict(settings)
        target_prefix, language = fields.pop("target_prefix", None), fields.pop("language", None)
        source_language, cache_salt = fields.pop("source_language", None), fields.pop("cache_salt", "")
        draw_salt, adapter = fields.pop("draw_salt", None), fields.pop("adapter", "")
        params = self.resolve_sampling(sampling_params, fields).with_seed()
        if language is not None:
            params = self._with_language(params, language, fields, target_prefix)
        if self._kind == "encoder":
            message = "this model is an encoder and cannot continue a text"
            raise RequestError(message, supported_tasks(self._config))
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

        def build(prompt: PromptInput) -> Submission:
            source = self._prompts.encode_source(prompt, source_language) if is_encoder_decoder else None
            tokens = self._prompts.encode_prompt(prompt) if source is None else source
            salt = num_equal[tuple(tokens)] if draw_salt is None else draw_salt
            num_equal[tuple(tokens)] += 1
            return Submission(tokens if source is None else start, params, source, cache_salt, salt, adapter)

        return build

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
        self,
        encoder_input: PromptInput | None,
        source_language: str | None,
        *,
        top_logprobs: int,
        cache_salt: str,
        adapter: str = "",
    ) -> Build:
        """Return the function that builds the submission of a text to be scored (``LLM.score``)."""
        if self._kind == "encoder-decoder" and encoder_input is None:
            message = "encoder_input: this model scores targets of an encoder input"
            raise RequestError(message, "Give the text that the targets answer.")
        self.check_encoder_input(encoder_input)
        source = None if encoder_input is None else self._prompts.encode_source(encoder_input, source_language)
        sampling_params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs)

        def build(text: PromptInput) -> Submission:
            tokens = self._prompts.encode_prompt(text) if source is None else self._prompts.encode_target(text)
            return Submission(tokens, sampling_params, source, cache_salt, adapter=adapter)

        return build

    def check_encoder_input(self, encoder_input: PromptInput | None) -> None:
        if encoder_input is not None and self._kind != "encoder-decoder":
            raise RequestError("encoder_input: this model has no encoder input", "Omit encoder_input=.")


class RequestSubmitter(SubmissionBuilder):
    """Submits what the builder builds to an engine in this process."""

    def __init__(self, client: EngineClient, prompt_encoder: PromptEncoder) -> None:
        super().__init__(prompt_encoder)
        self._client = client

    def submitter(self, build: Build, *, scores: bool = False) -> Submit:
        """Return the function that builds and submits a prompt; ``scores``: a target's tokens are its tokens."""

        def submit(prompt: PromptInput) -> RequestHandle:
            submission = build(prompt)
            params = submission.sampling_params
            if params.structured_output is not None:  # cached now: no step can run while a request is added
                self._client.engine.grammars.compile(params.structured_output, params.visible_special_tokens)
            tokens = submission.prompt_token_ids if scores else submission.input_ids
            queue = partial(self._client.engine.add_request, **submission._asdict())
            return self._client.submit(queue, submission.sampling_params, tokens)

        return submit


def read_score(handle: RequestHandle) -> TextScore:
    """Return the scores of a text that ``SubmissionBuilder.scoring`` built."""
    return text_score(handle.token_ids, handle.result())


def text_score(token_ids: Sequence[int], completion: Completion) -> TextScore:
    """Return the scores of a text's tokens from the completion of its request."""
    scores = completion.prompt_logprobs
    logprobs, alternatives = [score.logprob for score in scores], [score.top_logprobs for score in scores]
    return TextScore(tuple(token_ids), (None, *logprobs), ((), *alternatives))
