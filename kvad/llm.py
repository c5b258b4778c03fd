"""LLM: load a model and generate text in three lines.

    from kvad import LLM
    llm = LLM.load("runs/demo")
    print(llm.generate("def __init__(self", max_tokens=64, temperature=0).text)

Every method takes text or token ids, one prompt or many, from any thread: all requests share one engine and one batch.
As a context manager it frees its pool. The prompt of an encoder-decoder is its encoder input: ``generate("Ein Haus.",
language="eng_Latn")``. An encoder embeds, tags, classifies or fills masks, depending on its head.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import checkpoint
from kvad import config as cfg
from kvad import engine as engine_lib
from kvad import model as model_lib
from kvad import text as text_lib
from kvad.cache import CacheConfig, sessions
from kvad.cache.sizing import MemoryBudget, MemoryPlan, available_bytes, describe_room, plan_memory, require_memory
from kvad.checkpoint import CheckpointHandle, GenerationConfig, open_checkpoint
from kvad.engine import Completion, Engine, EngineConfig, ForwardTrace, PromptEncoder, Session, StreamChunk
from kvad.engine.scheduling import SamplingOptions, SamplingParams
from kvad.errors import RequestError, suggest
from kvad.model import NoCache, Transformer
from kvad.model_input import ModelInput, SubBatch
from kvad.text import Tokenizer

options = engine_lib.options
output = engine_lib.output
T = TypeVar("T")
PromptInput = options.PromptInput
RequestHandle = engine_lib.client.RequestHandle
GenerateOptions = options.GenerateOptions
ScoreOptions = options.ScoreOptions
Prompts = Sequence[str] | Sequence[Sequence[int]]
EmbedPooling = Literal["mean", "first", "last", "max", "head"]
ProgressFn = Callable[[int, int], object]
ENGINE_FIELDS = ("deterministic", "max_num_batched_tokens")  # LoadOptions that are fields of EngineConfig
LOG = logging.getLogger(__name__)


class LLM:
    """A model, its tokenizer and one engine, built with ``load`` or from parts."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        cache_config: CacheConfig,
        *,
        generation: GenerationConfig | None = None,
        engine_config: EngineConfig | None = None,
        name: str = "",
        chat_template_fingerprint: str = "",
        tokenizer_folder: Path | None = None,
    ) -> None:
        self.memory_plan: MemoryPlan | None = None  # set by ``load``
        self.name = name  # stored in session files, like the chat template's fingerprint
        self.chat_template_fingerprint = chat_template_fingerprint
        self._tokenizer_folder = tokenizer_folder  # has the chat template
        self.model, self.tokenizer, self.cache_config = model.eval(), tokenizer, cache_config
        self.generation = GenerationConfig() if generation is None else generation
        engine_config = EngineConfig() if engine_config is None else engine_config
        stop_tokens = frozenset(self.generation.eos_token_ids) or engine_config.stop_tokens
        engine_config = dataclasses.replace(engine_config, stop_tokens=stop_tokens)
        self.engine = Engine(self.model, cache_config, engine_config, tokenizer=tokenizer)
        self.texts = PromptEncoder(model.config, tokenizer, self.generation, endless=self.engine.cache.endless)
        self._client = engine_lib.client.EngineClient(self.engine)
        self._kind = model.config.kind
        self._is_encoder_decoder = self._kind == "encoder-decoder"
        self._supported = options.supported_tasks(model.config)  # hint of errors about other tasks

    @staticmethod
    def load(
        path: str | Path | CheckpointHandle,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        memory: Literal["auto"] | int | float | MemoryBudget = "auto",
        cache_config: CacheConfig | None = None,
        adapter: str | Path | None = None,
        rope_scaling: str | Mapping[str, Any] | None = None,
        revision: str | None = None,
        **settings: Unpack[options.LoadOptions],
    ) -> LLM:
        """Load a checkpoint: a kvad folder or run, a Hugging Face folder, or a name on the hub.

        Args:
            path: The checkpoint, opened or not. If it is a LoRA adapter, its base is the model that it names.
            dtype: Dtype of the computation (default: the stored dtype). Dtypes are names or torch dtypes.
            device: Device of model and cache; "auto" is the first GPU, if any, else the CPU.
            memory: Memory of the device for model and cache, in bytes (int), or as a fraction of the free memory
                ("auto": 0.9). It determines ``max_num_seqs``, the blocks of the pool and, if the model's limit does
                not fit, ``max_seq_len``, unless they are given.
            cache_config: Configuration of the cache; alternatively its fields as keywords (``max_num_seqs=4``).
            adapter: LoRA adapter (kvad's or PEFT's) that is merged into the weights.
            rope_scaling: Another RoPE scaling (``checkpoint.loader.scale_rope``), which extends the model's limit.
            revision: Revision on the hub.
            **settings: ``kvad.engine.options.LoadOptions``; ``endless=True`` alone means ``overflow="sinks"``.

        Raises:
            CheckpointError: If the checkpoint is incomplete, or summarizer or adapter belong to another model.
            UsageError: If the device does not exist.
            ConfigError: If a dtype or the cache configuration is invalid, or ``deterministic`` is unavailable.
            MemoryPlanError: If given sizes, or a single block, would not fit, before anything is allocated.
        """
        fields: dict[str, Any] = dict(settings)
        summarizer, swap_dir = fields.pop("summarizer", None), fields.pop("swap_dir", None)
        engine_fields = {name: fields.pop(name) for name in ENGINE_FIELDS if name in fields}
        given = [name for name, value in fields.items() if name not in options.CACHE_DTYPE_FIELDS or value is not None]
        if cache_config is not None and given:
            raise RequestError(f"cache_config= and {given[0]}= are both given", "Set it in the CacheConfig.")
        dtype, torch_device = options.dtype_name("dtype", dtype, checkpoint.native.DTYPES), options.find_device(device)
        handle = path if isinstance(path, CheckpointHandle) else open_checkpoint(path, revision=revision)
        if adapter is not None:
            handle = checkpoint.adapter.merge_adapter(handle, Path(adapter))
        if rope_scaling is not None:
            checkpoint.loader.scale_rope(handle, rope_scaling)
        compute_dtype = dtype or str(handle.stored_dtype).removeprefix("torch.")
        if dtype is None and compute_dtype == "float16" and torch_device.type == "cpu":
            compute_dtype = "float32"  # float16 on a CPU is storage only
        plan = _plan_memory(
            handle, cache_config, fields, memory, torch_device, compute_dtype, summarizer, engine_fields
        )
        engine_config = EngineConfig(swap_dir=swap_dir, **engine_fields)
        if handle.unused_keys:
            warnings.warn(f"{handle.path}: config.json: not used: {', '.join(handle.unused_keys)}", stacklevel=2)
        for name in handle.generation.ignored_fields:
            warnings.warn(f"{handle.path}: generation_config.json: {name} is not applied", stacklevel=2)
        llm = LLM(
            checkpoint.loader.load_weights(handle, dtype, torch_device),
            handle.tokenizer,
            plan.cache,
            generation=handle.generation,
            engine_config=with_adapters(engine_config, handle, summarizer),
            name=str(handle.path if isinstance(path, CheckpointHandle) else path),
            chat_template_fingerprint=text_lib.chat_template.template_fingerprint(handle.tokenizer_folder),
            tokenizer_folder=handle.tokenizer_folder,
        )
        llm.memory_plan = plan
        return llm

    # ------------------------------------------------------------ text

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        progress: ProgressFn | None = None,
        **settings: Unpack[GenerateOptions],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        progress: ProgressFn | None = None,
        **settings: Unpack[GenerateOptions],
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: PromptInput | Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        progress: ProgressFn | None = None,
        **settings: Unpack[GenerateOptions],
    ) -> Completion | list[Completion]:
        """Continue one or many prompts; for an encoder-decoder, decode one or many encoder inputs.

        Args:
            prompts: Texts or token ids.
            sampling_params: Options; alternatively their fields as keywords, with the checkpoint's defaults.
            progress: Called with (finished prompts, all prompts) after every prompt, in their order.
            **settings: Fields of ``SamplingParams``, and the other ``GenerateOptions``. A sampled output is a function
                of the prompt and ``seed`` (None: random, see ``Completion.seed``); equal prompts of a call differ.

        Raises:
            RequestError: If a prompt or an option cannot be served.
            NumericalError: If logits are NaN or infinite.
        """
        submit = self._submitter(sampling_params, settings)
        results: Completion | list[Completion] = self._client.run_each(prompts, submit, RequestHandle.result, progress)
        return results

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **settings: Unpack[GenerateOptions],
    ) -> Completion:
        """Answer a conversation in the model's chat template.

        Args:
            messages: Objects with ``role`` and ``content``.
            sampling_params: Options; alternatively their fields as keywords, with the checkpoint's defaults.
            tools: JSON schemas of the tools that the template names.
            continue_final: Continue the last message instead of answering it.
            **settings: As for ``generate``.

        Raises:
            RequestError: If the model has no chat template, or the conversation cannot be served.
            ChatTemplateError: If the template refuses the messages.
        """
        template = self._chat_template
        if template is None:
            raise RequestError("this model has no chat template", "Use generate() with a text.")
        rendered = template.render(
            messages, tools=tools, generation_prompt=not continue_final, continue_final=continue_final
        )
        tokens = self._tokenizer().encode(rendered.text, specials=True)
        return self.generate(tokens, sampling_params, **settings)

    @cached_property
    def _chat_template(self) -> text_lib.chat_template.ChatTemplate | None:
        folder = self._tokenizer_folder
        return None if folder is None else text_lib.chat_template.ChatTemplate.load(folder)

    def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **settings: Unpack[GenerateOptions]
    ) -> Generator[StreamChunk, None, None]:
        """Yield chunks of one prompt's samples; closing the iterator aborts the rest."""
        handle = self._submitter(sampling_params, settings)(prompt)
        try:
            yield from handle.chunks()
        finally:
            self._client.cancel([handle])

    def session(
        self, name: str | Path | None = None, folder: str | Path | None = None, *, cache_salt: str | None = None
    ) -> Session:
        """Open a text that continues over turns and processes (``engine/session.py``).

        Args:
            name: Name of a session in ``folder``, or a file as a Path. An existing one is loaded, and leftovers of
                crashed writers are removed. None: a session of this process only.
            folder: Folder of sessions (default: ``KVAD_SESSION_DIR``, else the user's data folder).
            cache_salt: Cached blocks are shared only with requests of the same salt. None: the salt in the file.

        Raises:
            UsageError: If the name is invalid.
            StorageError: If the file is damaged or belongs to another model or cache.
        """
        self._client.check_open()
        path = name if isinstance(name, Path) else None
        if isinstance(name, str):
            directory = sessions.directory.default_session_dir() if folder is None else Path(folder)
            path = sessions.directory.session_path(name, directory)
            sessions.directory.remove_session_leftovers(path.parent)
        session_name = name if isinstance(name, str) else "" if path is None else path.stem
        session = Session(
            self._client,
            self.texts,
            self._resolve_sampling,
            path=path,
            name=session_name,
            model=self.name,
            template=self.chat_template_fingerprint,
            cache_salt=cache_salt,
        )
        if path is not None and path.exists():
            session.load()
        return session

    def _resolve_sampling(self, sampling_params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
        if sampling_params is None:
            return options.resolve_sampling(fields, self.generation)
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(
                f"sampling_params: must be SamplingParams, got {sampling_params!r}", "Pass its fields as keywords."
            )
        if fields:
            name = next(iter(fields))
            raise RequestError(f"sampling_params= and {name}= are both given", "Set it in the SamplingParams.")
        return sampling_params

    # ------------------------------------------------------------ tensors and scores

    @overload
    def score(  # type: ignore[overload-overlap]
        self, texts: PromptInput, **settings: Unpack[ScoreOptions]
    ) -> output.TextScore: ...
    @overload
    def score(self, texts: Prompts, **settings: Unpack[ScoreOptions]) -> list[output.TextScore]: ...
    def score(
        self,
        texts: PromptInput | Prompts,
        *,
        top_logprobs: int = 0,
        encoder_input: PromptInput | None = None,
        source_language: str | None = None,
        cache_salt: str = "",
    ) -> output.TextScore | list[output.TextScore]:
        """Return each token's log-probability given the tokens before it, computed with the cache.

        Args:
            texts: Texts or token ids; for an encoder-decoder, targets of ``encoder_input``.
            top_logprobs: Number of alternatives per token.
            encoder_input: Input of the encoder.
            source_language: Language of the encoder input.
            cache_salt: Cached blocks are shared only with requests of the same salt.
        """
        if self._is_encoder_decoder and encoder_input is None:
            message = "encoder_input: this model scores targets of an encoder input"
            raise RequestError(message, "Give the text that the targets answer.")
        self._check_encoder_input(encoder_input)
        source = None if encoder_input is None else self.texts.encode_source(encoder_input, source_language)
        sampling_params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs)

        def submit(text: PromptInput) -> RequestHandle:
            tokens = self.texts.encode_prompt(text) if source is None else self.texts.encode_target(text)
            queue = partial(self.engine.add_request, tokens, sampling_params, cache_salt=cache_salt)
            return self._client.submit(partial(queue, encoder_token_ids=source), sampling_params, tokens)

        def read_score(handle: RequestHandle) -> output.TextScore:
            scores = handle.result().prompt_logprobs
            logprobs, alternatives = [score.logprob for score in scores], [score.top_logprobs for score in scores]
            return output.TextScore(tuple(handle.token_ids), (None, *logprobs), ((), *alternatives))

        results: output.TextScore | list[output.TextScore] = self._client.run_each(texts, submit, read_score)
        return results

    @torch.inference_mode()
    def logits(self, tokens: PromptInput, encoder_input: PromptInput | None = None) -> Tensor:
        """Return logits [T, V] without a cache, by the engine's weights and kernels.

        ``kvad verify`` compares engines with a reference that shares neither.

        For an encoder-decoder, ``tokens`` are the target's; for an encoder, the head's output is returned: [T, V], [T,
        labels], or [labels] or [E] if the head pools the text.
        """
        self._client.check_open()
        self._check_encoder_input(encoder_input)
        if self._kind == "decoder":
            model_input = self._model_input(self.texts.encode_prompt(tokens, whole=True))
        elif self._kind == "encoder":
            model_input = self._model_input(self.texts.encode_source(tokens))
        else:
            if encoder_input is None:
                raise RequestError("encoder_input: required by this model", "Give the text to translate.")
            model_input = self._model_input(self.texts.encode_target(tokens))
            model_input = model_input._replace(encoder_input=self._model_input(self.texts.encode_source(encoder_input)))
        hidden = self.model(model_input, NoCache(self.model.config, kernel=self.model.kernel))
        if self.model.config.pools_sequence:
            return self.model.pooled_outputs(hidden, model_input)[0]
        return self.model.logits(hidden, model_input.logit_indices)

    def embed(
        self,
        texts: PromptInput | Prompts,
        *,
        pool: EmbedPooling | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> Tensor:
        """Return one vector per text, [N, E] (N = 1 for one text).

        Args:
            texts: Texts or token ids.
            pool: First or last of the hidden states, their mean or maximum, or the pooling head's output. None: the
                checkpoint's setting, which may include normalization, else the last one of a decoder and the mean of
                an encoder.
            prompt_name: Prompt of the checkpoint that precedes the texts (default: the checkpoint's, if any).
            truncate: Truncate texts that are too long. A sentence-transformers folder with ``max_seq_length`` always
                truncates.

        Raises:
            RequestError: If a text is too long, the prompt is unknown, or the head does not pool.
        """
        if pool is not None and pool not in get_args(EmbedPooling):
            raise RequestError(f"pool: unknown mode {pool!r}", suggest(str(pool), get_args(EmbedPooling)))
        if pool == "head" and not isinstance(self.model.config.head, cfg.PoolingHeadConfig):
            raise RequestError("pool: this model's head does not pool", "Use mean or first.")
        _, items = engine_lib.client.normalize_prompts(texts)
        inputs = [self.texts.encode_embedding(text, prompt_name, truncate=truncate) for text in items]
        if not inputs:
            return torch.empty(0, self.model.config.hidden_size)
        if self._kind == "decoder":
            stacked = self._embed_with_decoder(inputs, pool or self.generation.pooling or "last")
        else:
            pooling = pool or self.generation.pooling or "mean"
            stacked = torch.stack(self._encode_each(inputs, lambda ids, out: out, pooling))
        return F.normalize(stacked, dim=-1) if pool is None and self.generation.normalize else stacked

    @torch.inference_mode()
    def _embed_with_decoder(self, inputs: Sequence[Sequence[int]], pool: EmbedPooling) -> Tensor:
        """Return the pooled hidden states [N, E] of a decoder, computed without a cache, text by text."""
        assert pool != "head", "a decoder's head does not pool"
        self._client.check_open()
        vectors = []
        for ids in inputs:
            model_input = self._model_input(ids)
            hidden = self.model(model_input, NoCache(self.model.config, kernel=self.model.kernel))
            vectors.append(model_lib.heads.pool_hidden(hidden, model_input.sub_batches, pool)[0].cpu())
        return torch.stack(vectors)

    @overload
    def tag(self, texts: PromptInput) -> tuple[output.TokenLabel, ...]: ...  # type: ignore[overload-overlap]
    @overload
    def tag(self, texts: Prompts) -> list[tuple[output.TokenLabel, ...]]: ...
    def tag(self, texts: PromptInput | Prompts) -> Any:
        """Return the words of one or many texts with their labels, from a head that labels tokens."""
        head, tokenizer = self._classification_head("token", "label tokens"), self._tokenizer()
        return self._encode_each(texts, lambda ids, out: output.label_tokens(tokenizer, ids, out, head))

    @overload
    def classify(  # type: ignore[overload-overlap]
        self, texts: PromptInput, text_pairs: str | None = None
    ) -> tuple[output.Label, ...]: ...
    @overload
    def classify(self, texts: Prompts, text_pairs: Sequence[str] | None = None) -> list[tuple[output.Label, ...]]: ...
    def classify(self, texts: Any, text_pairs: Any = None) -> Any:
        """Return the labels of one or many texts, or pairs of texts, most probable first, from a text head.

        Args:
            texts: Texts or token ids.
            text_pairs: The second text of each (cross-encoders, natural language inference), which requires texts.

        Raises:
            RequestError: If the model does not classify texts, or takes two texts where one is given, or the reverse.
        """
        head = self._classification_head("row", "label whole texts")
        if text_pairs is not None:
            texts = self._pair(texts, text_pairs)
        elif self.generation.takes_pairs and not _has_only_ids(texts):
            raise RequestError("text_pairs: this model compares two texts, got one", "Give text_pairs=.")
        return self._encode_each(texts, lambda ids, out: output.rank_labels(out, head))

    @overload
    def fill_mask(  # type: ignore[overload-overlap]
        self, texts: PromptInput, *, top: int = 5
    ) -> tuple[tuple[output.MaskPrediction, ...], ...]: ...
    @overload
    def fill_mask(self, texts: Prompts, *, top: int = 5) -> list[tuple[tuple[output.MaskPrediction, ...], ...]]: ...
    def fill_mask(self, texts: PromptInput | Prompts, *, top: int = 5) -> Any:
        """Return the ``top`` most probable tokens for each mask of one or many texts."""
        if self._kind != "encoder" or not isinstance(self.model.config.head, cfg.LanguageHeadConfig):
            raise RequestError("this model does not fill masks", self._supported)
        tokenizer = self._tokenizer()
        return self._encode_each(texts, lambda ids, out: output.fill_masks(tokenizer, ids, out, top), specials=True)

    def trace(
        self,
        prompt: PromptInput,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        *,
        cached: bool = False,
    ) -> ForwardTrace:
        """Return tensors of layers and heads; ``cached``: from a paged cache of this call. Other requests wait."""
        self._client.check_open()
        if self._kind != "decoder":
            raise RequestError(f"tracing an {self._kind} is not supported", "Trace a decoder.")
        tokens = self.texts.encode_prompt(prompt, whole=True)
        pieces = [str(t) if self.tokenizer is None else self.tokenizer.token_text(t) for t in tokens]
        with self._client.lock:  # the trace hooks the model itself
            return engine_lib.trace_forward(self.model, tokens, pieces, layers=layers, heads=heads, cached=cached)

    # ------------------------------------------------------------ tokens and options

    def encode(self, prompt: PromptInput) -> list[int]:
        """Return the token ids of a prompt (or encoder input) as the model receives them."""
        return self.texts.encode_prompt(prompt) if self._kind == "decoder" else self.texts.encode_source(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._tokenizer().decode(tokens)

    def sampling_params(self, **settings: Unpack[SamplingOptions]) -> SamplingParams:
        """Return these options over the checkpoint's defaults; raise RequestError for invalid ones."""
        return options.resolve_sampling(settings, self.generation)

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Free the pool. Later calls raise EngineError; closing twice is allowed."""
        self._client.close()

    def __repr__(self) -> str:
        parameters, cache = sum(parameter.numel() for parameter in self.model.parameters()), self.engine.cache
        dtype = str(self.model.token_embedding.dtype).removeprefix("torch.")
        size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"
        room = f"{cache.max_num_seqs} sequences of {cache.max_seq_len} tokens"
        return f"LLM({self.name!r}, {self._kind}, {size} parameters in {dtype} on {self.engine.device}, {room})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------ internals

    def _check_encoder_input(self, encoder_input: PromptInput | None) -> None:
        if encoder_input is not None and not self._is_encoder_decoder:
            raise RequestError("encoder_input: this model has no encoder input", "Omit encoder_input=.")

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", "Pass token ids to logits().")
        return self.tokenizer

    def _model_input(self, ids: Sequence[int]) -> ModelInput:
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.engine.device)
        positions = torch.arange(len(ids), device=tokens.device)
        sub_batch = SubBatch(1, len(ids), len(ids))
        return ModelInput(tokens, positions, (sub_batch,), positions, max_seq_lens=torch.full_like(positions, len(ids)))

    def _submitter(
        self, sampling_params: SamplingParams | None, settings: GenerateOptions
    ) -> Callable[[PromptInput], RequestHandle]:
        """Return the function that submits one prompt with these settings."""
        fields: dict[str, Any] = dict(settings)
        target_prefix, language = fields.pop("target_prefix", None), fields.pop("language", None)
        source_language, cache_salt = fields.pop("source_language", None), fields.pop("cache_salt", "")
        draw_salt = fields.pop("draw_salt", None)
        params = self._resolve_sampling(sampling_params, fields).with_seed()
        if language is not None:
            if fields.get("forced_bos_token_id") is not None:
                message = "language= and forced_bos_token_id= are both given"
                raise RequestError(message, "A language is a forced first token.")
            if not isinstance(target_prefix, str | None):
                message = "language= and target_prefix= as ids are both given"
                raise RequestError(message, "Ids are the whole start of the target.")
            params = dataclasses.replace(params, forced_bos_token_id=self.texts.language_token(language))
        if self._kind == "encoder":
            raise RequestError("this model is an encoder and cannot continue a text", self._supported)
        start: list[int] = []
        if self._is_encoder_decoder:
            target_prefix = None if target_prefix == "" else target_prefix
            start = self.texts.encode_target(target_prefix, params.forced_bos_token_id)
            if target_prefix is not None:
                params = dataclasses.replace(params, forced_bos_token_id=None)
        elif target_prefix is not None or source_language is not None:
            message = "target_prefix= and source_language= require an encoder-decoder"
            raise RequestError(message, "Put the text into the prompt.")

        num_equal = Counter[tuple[int, ...]]()

        def submit(prompt: PromptInput) -> RequestHandle:
            source = self.texts.encode_source(prompt, source_language) if self._is_encoder_decoder else None
            tokens = self.texts.encode_prompt(prompt) if source is None else source  # counted as the prompt
            salt = num_equal[tuple(tokens)] if draw_salt is None else draw_salt
            num_equal[tuple(tokens)] += 1
            queue = partial(self.engine.add_request, tokens if source is None else start, encoder_token_ids=source)
            queue = partial(queue, sampling_params=params, cache_salt=cache_salt, draw_salt=salt)
            return self._client.submit(queue, params, tokens)

        return submit

    def _encode_each(
        self,
        texts: Any,
        convert: Callable[[list[int], Tensor], T],
        encoder_output: EmbedPooling = "head",
        *,
        specials: bool = False,
    ) -> Any:
        """Return the converted encoder output of one or many texts."""
        if self.model.encoder is None:
            raise RequestError("this model has no encoder", "It continues prompts.")

        def submit(text: PromptInput) -> RequestHandle:
            ids = self.texts.encode_source(text, specials=specials)
            token_types = text.token_types if isinstance(text, engine_lib.client.EncodedPair) else None
            queue = partial(self.engine.add_encoder_request, ids, encoder_output, token_types)
            return self._client.submit(queue, SamplingParams(), ids)

        return self._client.run_each(texts, submit, lambda handle: convert(handle.token_ids, handle.encoder_output()))

    def _pair(self, texts: Any, text_pairs: Any) -> Any:
        """Return one encoded pair, or a list of them."""
        if isinstance(texts, str) and isinstance(text_pairs, str):
            return self.texts.encode_pair(texts, text_pairs)
        first, second = ([] if isinstance(each, str) else list(each) for each in (texts, text_pairs))
        if len(first) != len(second) or not all(isinstance(text, str) for text in (*first, *second)):
            raise RequestError("text_pairs: must have one text for each text of texts", "Give two texts, or two lists.")
        return [self.texts.encode_pair(*pair) for pair in zip(first, second, strict=True)]

    def _classification_head(self, level: str, task: str) -> cfg.ClassificationHeadConfig:
        head = self.model.config.head
        if not isinstance(head, cfg.ClassificationHeadConfig) or head.level != level:
            raise RequestError(f"this model does not {task}", self._supported)
        return head


def _has_only_ids(texts: Any) -> bool:
    """Return True for token ids of one or many texts, whose pairs are encoded already."""
    return not isinstance(texts, str) and not any(isinstance(text, str) for text in texts)


def with_adapters(config: EngineConfig, handle: CheckpointHandle, summarizer: str | Path | None) -> EngineConfig:
    """Load the summarizer, if any, and add the fingerprint of a merged adapter."""
    if summarizer is not None:
        config = dataclasses.replace(config, summarizer=checkpoint.summarizer.load_summarizer(Path(summarizer), handle))
    if isinstance(handle, checkpoint.adapter.AdaptedCheckpoint):
        config = dataclasses.replace(config, adapter_fingerprint=handle.adapter_fingerprint)
    return config


def _plan_memory(
    handle: CheckpointHandle,
    cache: CacheConfig | None,
    fields: Mapping[str, Any],
    memory: Literal["auto"] | int | float | MemoryBudget,
    device: torch.device,
    dtype: str,
    summarizer: str | Path | None,
    engine_fields: Mapping[str, Any],
) -> MemoryPlan:
    """Plan the given cache, or one that fits into the free memory of the device, and log its size."""
    budget = memory if isinstance(memory, MemoryBudget) else MemoryBudget(memory)
    is_host = device.type == "cpu"
    free = available_bytes() if is_host else options.free_device_bytes(device)
    settings: options.PlanSettings = {**engine_fields}  # type: ignore[typeddict-item]
    if summarizer is not None:
        settings["summarizer_shape"] = checkpoint.folder.read_summarizer_shape(Path(summarizer))
    if cache is not None:
        plan = plan_memory(handle.config, cache, weights_dtype=dtype, **settings)
        require_memory(plan, free if is_host or free is None else free + plan.host_bytes)
        return plan
    plan = options.plan_cache(handle.config, fields, budget, free, is_host=is_host, weights_dtype=dtype, **settings)
    longest, requested = plan.cache.max_seq_len, fields.get("max_seq_len", budget.max_seq_len)
    LOG.info("%s: %s", handle.path, describe_room(plan))
    if longest < min(handle.config.max_seq_len, requested or handle.config.max_seq_len):
        LOG.warning(
            "memory: sequences end at %s tokens, since more do not fit; the model's limit is %s. "
            "A smaller --cache-dtype, a --policy or more --memory allows longer ones.",
            f"{longest:,}",
            f"{handle.config.max_seq_len:,}",
        )
    return plan
