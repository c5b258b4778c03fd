"""Tasks of ``kvad.LLM`` that read a text in one pass: embed, classify, tag and fill masks.

A decoder embeds a text as it reads a prompt: in chunks, through the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import config as cfg
from kvad.engine import output
from kvad.engine.client import EngineClient, RequestHandle
from kvad.engine.requests import EncodedPair, PromptEncoder, PromptInput, normalize_prompts, supported_tasks
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError, suggest

T = TypeVar("T")
EmbedPooling = Literal["mean", "first", "last", "max", "head"]


class EncoderTasks:
    """Runs the tasks of an encoder's head; ``texts`` are one text or many, as text or token ids."""

    def __init__(self, client: EngineClient, prompt_encoder: PromptEncoder) -> None:
        self._client, self._engine, self._model = client, client.engine, client.engine.model
        self._prompts, self._config = prompt_encoder, client.engine.model.config

    def embed(
        self, texts: Any, pool: EmbedPooling | None, prompt_name: str | None, *, truncate: bool, adapter: str = ""
    ) -> Tensor:
        """Return one vector per text, [N, E] (``LLM.embed``)."""
        if pool is not None and pool not in get_args(EmbedPooling):
            raise RequestError(f"pool: unknown mode {pool!r}", suggest(str(pool), get_args(EmbedPooling)))
        if pool == "head" and not isinstance(self._config.head, cfg.PoolingHeadConfig):
            raise RequestError("pool: this model's head does not pool", "Use mean or first.")
        _, items = normalize_prompts(texts)
        inputs = [self._prompts.encode_embedding(text, prompt_name, truncate=truncate) for text in items]
        if not inputs:
            return torch.empty(0, self._config.hidden_size)
        generation = self._prompts.generation
        if self._config.kind == "decoder":
            stacked = self._embed_with_decoder(inputs, pool or generation.pooling or "last", adapter)
        elif adapter:
            message = f"adapter: an {self._config.kind} embeds with its base only, got {adapter!r}"
            raise RequestError(message, "Load the adapter with adapter= instead, which merges it.")
        else:
            pooling = pool or generation.pooling or "mean"
            stacked = torch.stack(self._encode_each(inputs, lambda ids, out: out, pooling))
        return F.normalize(stacked, dim=-1) if pool is None and generation.normalize else stacked

    def _embed_with_decoder(self, inputs: Sequence[list[int]], pool: EmbedPooling, adapter: str) -> Tensor:
        """Return the pooled hidden states [N, E] of a decoder."""
        assert pool != "head", "a decoder's head does not pool"

        def submit(ids: list[int]) -> RequestHandle:
            def queue() -> int:
                return self._engine.add_embedding_request(ids, pool, adapter=adapter)

            return self._client.submit(queue, SamplingParams(), ids)

        return torch.stack(self._client.run_each(inputs, submit, RequestHandle.encoder_output))

    def tag(self, texts: Any) -> Any:
        """Return the words of each text with their labels (``LLM.tag``)."""
        head, tokenizer = self._classification_head("token", "label tokens"), self._prompts.require_tokenizer()
        return self._encode_each(texts, lambda ids, out: output.label_tokens(tokenizer, ids, out, head))

    def classify(self, texts: Any, text_pairs: Any) -> Any:
        """Return the labels of each text, most probable first (``LLM.classify``)."""
        head = self._classification_head("row", "label whole texts")
        if text_pairs is not None:
            texts = self._pair(texts, text_pairs)
        elif self._prompts.generation.takes_pairs and not _has_only_ids(texts):
            raise RequestError("text_pairs: this model compares two texts, got one", "Give text_pairs=.")
        return self._encode_each(texts, lambda ids, out: output.rank_labels(out, head))

    def fill_mask(self, texts: Any, top: int) -> Any:
        """Return the ``top`` most probable tokens for each mask of each text (``LLM.fill_mask``)."""
        if self._config.kind != "encoder" or not isinstance(self._config.head, cfg.LanguageHeadConfig):
            raise RequestError("this model does not fill masks", supported_tasks(self._config))
        tokenizer = self._prompts.require_tokenizer()
        return self._encode_each(texts, lambda ids, out: output.fill_masks(tokenizer, ids, out, top), specials=True)

    def _encode_each(
        self,
        texts: Any,
        convert: Callable[[list[int], Tensor], T],
        encoder_output: EmbedPooling = "head",
        *,
        specials: bool = False,
    ) -> Any:
        """Return the converted encoder output of one or many texts."""
        if self._model.encoder is None:
            raise RequestError("this model has no encoder", "It continues prompts.")

        def submit(text: PromptInput) -> RequestHandle:
            ids = self._prompts.encode_source(text, specials=specials)
            token_types = text.token_types if isinstance(text, EncodedPair) else None

            def queue() -> int:
                return self._engine.add_encoder_request(ids, encoder_output, token_types)

            return self._client.submit(queue, SamplingParams(), ids)

        return self._client.run_each(texts, submit, lambda handle: convert(handle.token_ids, handle.encoder_output()))

    def _pair(self, texts: Any, text_pairs: Any) -> Any:
        """Return one encoded pair, or a list of them."""
        if isinstance(texts, str) and isinstance(text_pairs, str):
            return self._prompts.encode_pair(texts, text_pairs)
        first, second = ([] if isinstance(each, str) else list(each) for each in (texts, text_pairs))
        if len(first) != len(second) or not all(isinstance(text, str) for text in (*first, *second)):
            raise RequestError("text_pairs: must have one text for each text of texts", "Give two texts, or two lists.")
        return [self._prompts.encode_pair(*pair) for pair in zip(first, second, strict=True)]

    def _classification_head(self, level: str, task: str) -> cfg.ClassificationHeadConfig:
        head = self._config.head
        if not isinstance(head, cfg.ClassificationHeadConfig) or head.level != level:
            raise RequestError(f"this model does not {task}", supported_tasks(self._config))
        return head


def _has_only_ids(texts: Any) -> bool:
    """Return True for token ids of one or many texts, whose pairs are encoded already."""
    return not isinstance(texts, str) and not any(isinstance(text, str) for text in texts)
