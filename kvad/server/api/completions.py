"""/v1/completions: continue prompts, with echo, log-probabilities and event streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from kvad.engine import StreamChunk
from kvad.engine.scheduling import TokenLogprob
from kvad.server.api import generation, text_threads
from kvad.server.api.errors import invalid
from kvad.server.api.generation import ApiContext, EventStream, PromptInput, RequestGroup, SampleChunks
from kvad.server.api.logprobs import CompletionLogprobs
from kvad.server.api.schema import CompletionBody
from kvad.server.api.structured import structured_settings

INLINE_VALUES = 1 << 14  # of a response; one with more is written in a thread, between the events of other requests


async def create_completion(
    context: ApiContext, body: CompletionBody, key: str
) -> dict[str, Any] | bytes | EventStream:
    """Answer a request to /v1/completions."""
    adapter = context.check_model(body.model)
    limits = context.config.limits
    if body.logprobs is not None:
        generation.check_limit("logprobs", body.logprobs, limits.max_logprobs, "alternatives")
    best_of = body.n if body.best_of is None else body.best_of
    generation.check_limit("n" if body.best_of is None else "best_of", best_of, limits.max_n, "samples")
    if best_of < body.n:
        raise invalid("best_of", f"must be at least n ({body.n}), got {best_of}")
    if best_of > body.n and body.stream:
        raise invalid("best_of", "cannot be combined with stream: the best samples are known at the end")
    if body.echo and context.llm.config.kind == "encoder-decoder":
        raise invalid("echo", "is not supported by an encoder-decoder. Omit it.")
    prompts = generation.split_prompts(context, "prompt", body.prompt)
    settings: Any = generation.sampling_settings(context, body, n=best_of)
    settings |= await structured_settings(context, body)
    settings |= {"max_tokens": body.max_tokens, "cache_salt": context.salt(key, body.cache_salt), "adapter": adapter}
    if body.logprobs is not None or best_of > body.n:
        settings["logprobs"] = body.logprobs or 0
    if body.echo and body.logprobs is not None:
        settings["prompt_logprobs"] = body.logprobs
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "must be at least 1 without echo, got 0")
    submissions = await generation.build(context, context.llm.builder.generation(None, settings), prompts)
    num_echoed, num_values = 0, 1 + (body.logprobs or 0)  # of the prompts, of a token
    if "prompt_logprobs" in settings:
        num_echoed = body.n * sum(len(each.input_ids) for each in submissions) * num_values
        generation.check_limit("logprobs", num_echoed, limits.max_echo_logprobs, "values of all prompts with echo")
    session = generation.session_of(body, key, len(prompts) * best_of)
    group = RequestGroup(context, submissions, session=session, request_id=body.request_id)
    with group.cancel_on_error():
        answer = _Answer(context, body, prompts, group)
    if body.stream:
        return EventStream(generation.stream_events(group, answer.event, answer.last_events))
    chunks = await group.all_chunks()
    if num_echoed + sum(map(len, chunks)) * num_values > INLINE_VALUES:
        return await asyncio.to_thread(lambda: text_threads.encode_slowly(answer.response(chunks, best_of)))
    return answer.response(chunks, best_of)


class _Answer:
    """Builds the response or the events of one request."""

    def __init__(
        self, context: ApiContext, body: CompletionBody, prompts: Sequence[PromptInput], group: RequestGroup
    ) -> None:
        self._context, self._body, self._group, self._n = context, body, group, body.n
        self._prompts = prompts
        self._head = {
            "id": generation.new_id("cmpl", body.request_id), "object": "text_completion", "created": int(time.time()),
            "model": group.model_name,
        }  # fmt: skip
        self._prompt_texts = [self._prompt_text(prompt) for prompt in prompts] if body.echo else []
        # An event with nothing but text is put together from its parts, because most events are of this kind.
        self._is_plain = body.logprobs is None and not (body.return_token_ids or body.wants_every_usage)
        head = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._event_parts = (
            f'data: {head},"choices":[{{"index":',
            ',"text":',
            ',"logprobs":null,"finish_reason":null}]' + (',"usage":null}\n\n' if body.wants_usage else "}\n\n"),
        )
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}
        self._prompt_scores: dict[int, list[TokenLogprob]] = {}  # they come with the first sample of a prompt
        self._echoed: set[tuple[int, int]] = set()

    def _prompt_text(self, prompt: PromptInput) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._context.token_texts.decode(prompt)

    # ------------------------------------------------------------ one response

    def response(self, results: Sequence[Sequence[StreamChunk]], best_of: int) -> dict[str, Any]:
        choices = []
        for index, chunks in enumerate(results):
            samples = [
                SampleChunks(index, sample, [chunk for chunk in chunks if chunk.sample_index == sample])
                for sample in range(best_of)
            ]
            if best_of > self._n:
                samples = sorted(samples, key=_mean_logprob, reverse=True)[: self._n]
            prompt_scores = [score for chunk in chunks for score in chunk.prompt_logprobs]
            choices += [self._choice(number, sample, prompt_scores) for number, sample in enumerate(samples)]
        self._group.observe()
        for choice in choices:
            self._context.metrics.observe_finish(choice["finish_reason"])
        response = {**self._head, "choices": choices, "usage": self._group.usage()}
        return response if not self._body.timings else {**response, "timings": self._group.timings()}

    def _choice(self, number: int, sample: SampleChunks, prompt_scores: Sequence[TokenLogprob]) -> dict[str, Any]:
        index, text, tokens = sample.prompt_index, sample.text, sample.token_ids
        choice: dict[str, Any] = {
            "index": index * self._n + number,
            "text": self._prompt_texts[index] + text if self._body.echo else text,
            "logprobs": None,
            "finish_reason": sample.finish_reason,
        }
        if self._body.logprobs is not None:
            scores: list[TokenLogprob | None] = [*sample.logprobs]
            prompt_tokens = self._group.submissions[index].input_ids if self._body.echo else []
            if self._body.echo:
                scores = [None, *prompt_scores, *scores]
            choice["logprobs"] = self._collector(index).take([*prompt_tokens, *tokens], scores, len(prompt_tokens))
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._group.submissions[index].input_ids
            choice["token_ids"] = sample.token_ids
        return choice

    # ------------------------------------------------------------ events

    def event(self, sample: SampleChunks) -> bytes:
        """Return the event of the chunks; b"" if there is nothing to send yet."""
        index, text, tokens, finish = sample.prompt_index, sample.text, sample.token_ids, sample.finish_reason
        key = index, sample.sample_index
        is_first = self._body.echo and key not in self._echoed
        echo = self._prompt_texts[index] if is_first else ""
        if sample.prompt_logprobs:
            self._prompt_scores[index] = sample.prompt_logprobs
        has_scores = self._body.logprobs is not None and (is_first or bool(sample.logprobs))
        if not (text or echo or has_scores or finish or self._body.return_token_ids):
            return b""
        if self._is_plain and finish is None and not echo:
            return self._plain_event(index * self._n + sample.sample_index, text)
        choice: dict[str, Any] = {
            "index": index * self._n + sample.sample_index,
            "text": echo + text,
            "logprobs": self._event_logprobs(sample, with_prompt=is_first) if has_scores else None,
            "finish_reason": finish,
        }
        self._echoed.add(key)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        if finish is not None:
            self._context.metrics.observe_finish(finish)
        return generation.event({**self._head, "choices": [choice], **self._group.event_usage(self._body)})

    def _plain_event(self, index: int, text: str) -> bytes:
        first, second, last = self._event_parts
        return f"{first}{index}{second}{json.dumps(text)}{last}".encode()

    def _event_logprobs(self, sample: SampleChunks, *, with_prompt: bool) -> dict[str, Any]:
        index = sample.prompt_index
        if sample[:2] not in self._logprobs:
            self._logprobs[sample[:2]] = self._collector(index)
        prompt_tokens, scores = list[int](), list[TokenLogprob | None]()
        if with_prompt:
            prompt_tokens = self._group.submissions[index].input_ids
            scores += [None, *self._prompt_scores.get(index, ())]
        tokens = [*prompt_tokens, *(score.token_id for score in sample.logprobs)]
        return self._logprobs[sample[:2]].take(tokens, [*scores, *sample.logprobs], len(prompt_tokens))

    def _collector(self, index: int) -> CompletionLogprobs:
        return CompletionLogprobs(self._context.token_texts, is_text=isinstance(self._prompts[index], str))

    def last_events(self) -> bytes:
        return self._group.last_events(self._head, self._body)


def _mean_logprob(sample: SampleChunks) -> float:
    scores = sample.logprobs
    return sum(score.logprob for score in scores) / max(1, len(scores))
