"""LLM: load a model and generate text in three lines.

    from kvad import LLM
    llm = LLM.load("runs/demo")
    print(llm.generate("def ", max_tokens=64, temperature=0).text)

Every method takes text or token ids, one prompt or many. It may be called from several threads: their requests share
one engine and one batch, which the thread that holds the lock runs. As a context manager it frees its pool.

The prompt of an encoder-decoder is its encoder input: ``generate("Ein Haus.", language="eng_Latn")``. An encoder
embeds, tags, classifies or fills masks, depending on its head.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import cache as cache_lib
from kvad import checkpoint
from kvad import engine as engine_lib
from kvad import text as text_lib
from kvad.cache import CacheConfig, sessions
from kvad.cache.sizing import available_bytes, plan_memory, require_memory
from kvad.checkpoint import CheckpointHandle, GenerationConfig, open_checkpoint
from kvad.config import ClassificationHeadConfig, LanguageHeadConfig, ModelConfig, PoolingHeadConfig
from kvad.engine import Completion, Engine, ForwardTrace, PromptEncoder, Session, StreamChunk, scheduling, trace_forward
from kvad.engine.scheduling import SamplingParams, TokenLogprob
from kvad.errors import ConfigError, RequestError, UsageError, suggest
from kvad.model import NoCache, Summarizer, Transformer
from kvad.model_input import ModelInput, SubBatch
from kvad.text import Tokenizer

T = TypeVar("T")


class LLM:
    """A model, its tokenizer and one engine, built with :meth:`load` or from parts."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        cache_config: CacheConfig,
        *,
        generation: GenerationConfig | None = None,
        max_num_batched_tokens: int = 2048,
        deterministic: bool = False,
        summarizer: Summarizer | None = None,
        swap_dir: str | Path | None = None,
        name: str = "",
        chat_template_fingerprint: str = "",
        adapter_fingerprint: str = "",
    ) -> None:
        self.name = name  # stored in session files, like the chat template's fingerprint
        self.chat_template_fingerprint = chat_template_fingerprint
        self.model, self.tokenizer, self.cache_config = model.eval(), tokenizer, cache_config
        self.generation = GenerationConfig() if generation is None else generation
        eos_token_ids = frozenset(self.generation.eos_token_ids)
        self.engine = Engine(
            self.model,
            cache_config,
            tokenizer=tokenizer,
            max_num_batched_tokens=max_num_batched_tokens,
            deterministic=deterministic,
            summarizer=summarizer,
            stop_tokens=eos_token_ids,
            swap_dir=swap_dir,
            adapter_fingerprint=adapter_fingerprint,
        )
        self.texts = PromptEncoder(model.config, tokenizer, self.generation, endless=self.engine.cache.endless)
        self._client = engine_lib.client.EngineClient(self.engine)

    @staticmethod
    def load(
        path: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        cache_config: CacheConfig | None = None,
        cache_dtype: str | torch.dtype | None = None,
        cache_key_dtype: str | torch.dtype | None = None,
        cache_value_dtype: str | torch.dtype | None = None,
        summarizer: str | Path | None = None,
        adapter: str | Path | None = None,
        revision: str | None = None,
        deterministic: bool = False,
        swap_dir: str | Path | None = None,
        **cache: Any,
    ) -> LLM:
        """Load a checkpoint: a kvad folder or run, a Hugging Face folder, or a name on the hub.

        Args:
            path: The checkpoint. If it is a LoRA adapter, its base is the model that it names.
            dtype: Dtype of the computation (default: the stored dtype). Dtypes are names or torch dtypes.
            device: Device of model and cache.
            cache_config: Configuration of the cache; alternatively its fields as keywords (``max_num_seqs=4``).
            cache_dtype: Format of stored keys and values, see ``kvad/cache/quantization.py`` (default: the model's
                dtype).
            cache_key_dtype: Format of stored keys.
            cache_value_dtype: Format of stored values.
            summarizer: Folder or run of ``kvad train --objective summarizer``, for ``policy="tiered(...)"`` with
                summaries.
            adapter: LoRA adapter (kvad's or PEFT's) that is merged into the weights.
            revision: Revision on the hub.
            deterministic: Make results independent of the batch, bit for bit (CPU only, slower: docs/performance.md).
            swap_dir: Folder for preempted sequences that exceed the swap space in RAM.
            **cache: Fields of ``CacheConfig``, for example ``policy``, ``overflow``, ``prefix_cache_dir``.
                ``endless=True`` alone means ``overflow="sinks"``.

        Raises:
            CheckpointError: If the checkpoint is incomplete, or summarizer or adapter belong to another model.
            UsageError: If the device does not exist.
            ConfigError: If a dtype or the cache configuration is invalid, or ``deterministic`` is unavailable.
            MemoryPlanError: If the cache would not fit, before it is allocated.
        """
        dtype, cache_dtype = (
            _dtype_name("dtype", dtype),
            _dtype_name("cache.dtype", cache_dtype, cache_lib.quantization.FORMATS),
        )
        for field_name, dtype_option in (("key_dtype", cache_key_dtype), ("value_dtype", cache_value_dtype)):
            if dtype_option is not None:
                cache[field_name] = _dtype_name(f"cache.{field_name}", dtype_option, cache_lib.quantization.FORMATS)
        torch_device = _device(device)
        if cache_config is not None and (cache or cache_dtype is not None):
            raise RequestError(
                f"cache_config= and {next(iter(cache), 'cache_dtype')}= are both given", "Set it in the CacheConfig."
            )
        checkpoint_handle = open_checkpoint(path, revision=revision)
        if adapter is not None:
            checkpoint_handle = checkpoint.adapter.merge_adapter(checkpoint_handle, Path(adapter))
        compute_dtype = _compute_dtype(checkpoint_handle, dtype, torch_device)
        resolved_config = (
            cache_config
            if cache_config is not None
            else default_cache_config(checkpoint_handle.config, cache_dtype or compute_dtype, **cache)
        )
        summarizer_shape = None if summarizer is None else checkpoint.folder.read_summarizer_shape(Path(summarizer))
        if torch_device.type == "cpu":
            memory_plan = plan_memory(
                checkpoint_handle.config,
                resolved_config,
                weights_dtype=compute_dtype,
                summarizer_shape=summarizer_shape,
                deterministic=deterministic,
            )
            require_memory(memory_plan, available_bytes())
        for name in checkpoint_handle.generation.ignored_fields:
            warnings.warn(f"{checkpoint_handle.path}: generation_config.json: {name} is not applied", stacklevel=2)
        loaded_summarizer = (
            None if summarizer is None else checkpoint.summarizer.load_summarizer(Path(summarizer), checkpoint_handle)
        )
        model = checkpoint.loader.load_weights(checkpoint_handle, dtype, torch_device)
        return LLM(
            model,
            checkpoint_handle.tokenizer,
            resolved_config,
            generation=checkpoint_handle.generation,
            deterministic=deterministic,
            summarizer=loaded_summarizer,
            swap_dir=swap_dir,
            name=str(path),
            chat_template_fingerprint=text_lib.chat_template.template_fingerprint(checkpoint_handle.tokenizer_folder),
            adapter_fingerprint=checkpoint_handle.adapter_fingerprint
            if isinstance(checkpoint_handle, checkpoint.adapter.AdaptedCheckpoint)
            else "",
        )

    # ------------------------------------------------------------ text

    @overload
    def generate(self, prompts: str, sampling_params: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[int], sampling_params: SamplingParams | None = None, **options: Any
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | None = None,
        *,
        target_prefix: engine_lib.client.PromptInput | None = None,
        language: str | None = None,
        source_language: str | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Continue one or many prompts; for an encoder-decoder, decode one or many encoder inputs.

        Args:
            prompts: Texts or token ids.
            sampling_params: Options; alternatively their fields as keywords, with the checkpoint's defaults.
            target_prefix: Start of the target (ids: the whole start).
            language: Target language, for models with language tokens.
            source_language: Language of the encoder input.
            **options: Fields of :class:`SamplingParams`.

        Raises:
            RequestError: If a prompt or an option cannot be served.
            NumericalError: If logits are NaN or infinite.
        """
        params = self._sampling_params(sampling_params, options, language, target_prefix)
        submit = self._submitter(params, target_prefix, source_language)
        results: Completion | list[Completion] = self._run_each(prompts, submit, engine_lib.client.RequestHandle.result)
        return results

    def stream(
        self,
        prompt: engine_lib.client.PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        target_prefix: engine_lib.client.PromptInput | None = None,
        language: str | None = None,
        source_language: str | None = None,
        **options: Any,
    ) -> Generator[StreamChunk, None, None]:
        """Yield chunks of one prompt's samples; closing the iterator aborts the rest."""
        params = self._sampling_params(sampling_params, options, language, target_prefix)
        handle = self._submitter(params, target_prefix, source_language)(prompt)
        try:
            yield from handle.chunks()
        finally:
            self._client.cancel([handle])

    def session(self, name: str | Path | None = None, folder: str | Path | None = None) -> Session:
        """Open a text that continues over turns and processes (``engine/session.py``).

        Args:
            name: Name of a session in ``folder``, or a file as a Path. An existing one is loaded, and leftovers of
                crashed writers are removed. None: a session of this process only.
            folder: Folder of sessions (default: ``KVAD_SESSION_DIR``, else the user's data folder).

        Raises:
            UsageError: If the name is invalid.
            StorageError: If the file is damaged or belongs to another model or cache.
        """
        self._client.check_open()
        path = None
        if isinstance(name, Path):
            path = name
        elif name is not None:
            path = sessions.directory.session_path(
                name, Path(folder) if folder is not None else sessions.directory.default_session_dir()
            )
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
        )
        if path is not None and path.exists():
            session.load()
        return session

    def _resolve_sampling(self, sampling_params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
        return _sampling_params(sampling_params, options, self.generation)

    # ------------------------------------------------------------ tensors and scores

    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        top_logprobs: int = 0,
        encoder_input: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> engine_lib.output.TextScore: ...
    @overload
    def score(
        self,
        texts: Sequence[int],
        *,
        top_logprobs: int = 0,
        encoder_input: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> engine_lib.output.TextScore: ...
    @overload
    def score(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        *,
        top_logprobs: int = 0,
        encoder_input: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> list[engine_lib.output.TextScore]: ...
    def score(
        self,
        texts: Any,
        *,
        top_logprobs: int = 0,
        encoder_input: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> engine_lib.output.TextScore | list[engine_lib.output.TextScore]:
        """Return each token's log-probability given the tokens before it, computed with the cache.

        Args:
            texts: Texts or token ids; for an encoder-decoder, targets of ``encoder_input``.
            top_logprobs: Number of alternatives per token.
            encoder_input: Input of the encoder.
            source_language: Language of the encoder input.
        """
        sampling_params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs)
        is_encoder_decoder = self._is_encoder_decoder()
        if is_encoder_decoder != (encoder_input is not None):
            message = (
                "encoder_input: this model scores targets of an encoder input"
                if is_encoder_decoder
                else "encoder_input: this model has no encoder input"
            )
            raise RequestError(
                message, "Give the text that the targets answer." if is_encoder_decoder else "Omit encoder_input=."
            )
        encoder_tokens = None if encoder_input is None else self.texts.encode_source(encoder_input, source_language)
        token_ids: dict[int, list[int]] = {}

        def submit(text: engine_lib.client.PromptInput) -> engine_lib.client.RequestHandle:
            tokens = self.texts.encode_prompt(text) if encoder_tokens is None else self.texts.encode_target(text)
            handle = self._submit(tokens, sampling_params, encoder_tokens)
            token_ids[handle.request] = tokens
            return handle

        def read_score(handle: engine_lib.client.RequestHandle) -> engine_lib.output.TextScore:
            return _text_score(token_ids[handle.request], handle.result().prompt_logprobs)

        results: engine_lib.output.TextScore | list[engine_lib.output.TextScore] = self._run_each(
            texts, submit, read_score
        )
        return results

    @torch.inference_mode()
    def logits(
        self, tokens: engine_lib.client.PromptInput, encoder_input: engine_lib.client.PromptInput | None = None
    ) -> Tensor:
        """Return logits [T, V] without a cache: the reference for all caches.

        For an encoder-decoder, ``tokens`` are the target's; for an encoder, the head's output is returned: [T, V], [T,
        labels], or [labels] or [E] if the head pools the text.
        """
        self._client.check_open()
        if encoder_input is not None and not self._is_encoder_decoder():
            raise RequestError("encoder_input: this model has no encoder input", "Omit encoder_input=.")
        if self._kind == "encoder":
            ids = self.texts.encode_source(tokens)
        else:
            ids = (
                self.texts.encode_target(tokens)
                if self._is_encoder_decoder()
                else self.texts.encode_prompt(tokens, whole=True)
            )
        model_input = self._model_input(ids)
        if self._is_encoder_decoder():
            if encoder_input is None:
                raise RequestError("encoder_input: required by this model", "Give the text to translate.")
            model_input = model_input._replace(encoder_input=self._model_input(self.texts.encode_source(encoder_input)))
        hidden = self.model(model_input, NoCache(self.model.config, kernel=self.model.kernel))
        if self.model.config.pools_sequence:
            return self.model.pooled_outputs(hidden, model_input)[0]
        return self.model.logits(hidden, model_input.logit_indices)

    def embed(self, texts: Any, *, pool: Literal["mean", "first", "head"] | None = None) -> Tensor:
        """Return one vector per text, [N, E] (N = 1 for one text).

        Args:
            texts: Texts or token ids.
            pool: Mean or first of the hidden states, or the pooling head's output. None: the checkpoint's setting,
                which may include normalization, else the mean.

        Raises:
            RequestError: If the model has no encoder.
        """
        if pool not in (None, "mean", "first", "head"):
            raise RequestError(f"pool: unknown mode {pool!r}", suggest(str(pool), ("mean", "first", "head")))
        if pool == "head" and not isinstance(self.model.config.head, PoolingHeadConfig):
            raise RequestError("pool: this model's head does not pool", "Use mean or first.")
        rows = torch.stack(self._encoded_texts(texts, pool or self.generation.pooling or "mean"))
        return F.normalize(rows, dim=-1) if pool is None and self.generation.normalize else rows

    def tag(self, texts: Any) -> Any:
        """Return the words of one or many texts with their labels, from a head that labels tokens."""
        self._require_classifier("token", "label tokens")
        head = self.model.config.head
        assert isinstance(head, ClassificationHeadConfig)
        tokenizer = self._tokenizer()
        return self._encode_each(
            texts, lambda ids, out: engine_lib.output.label_tokens(tokenizer, ids, out, head.labels)
        )

    def classify(self, texts: Any) -> Any:
        """Return the labels of one or many texts, most probable first, from a text head."""
        self._require_classifier("row", "label whole texts")
        head = self.model.config.head
        assert isinstance(head, ClassificationHeadConfig)
        return self._encode_each(texts, lambda ids, out: engine_lib.output.rank_labels(out, head.labels))

    def fill_mask(self, texts: Any, *, top: int = 5) -> Any:
        """Return the ``top`` most probable tokens for each mask of one or many texts."""
        if self._kind != "encoder" or not isinstance(self.model.config.head, LanguageHeadConfig):
            raise RequestError("this model does not fill masks", self._supported_tasks())
        tokenizer = self._tokenizer()
        return self._encode_each(
            texts, lambda ids, out: engine_lib.output.fill_masks(tokenizer, ids, out, top), specials=True
        )

    def trace(
        self,
        prompt: engine_lib.client.PromptInput,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        *,
        cached: bool = False,
    ) -> ForwardTrace:
        """Return q, k, v, scores, weights, head outputs and hidden states of layers and heads.

        ``cached`` uses a paged cache created for this call, in the model's dtype. Other requests wait meanwhile.
        """
        self._client.check_open()
        if self._kind != "decoder":
            raise RequestError(f"tracing an {self._kind} is not supported", "Trace a decoder.")
        tokens = self.texts.encode_prompt(prompt, whole=True)
        pieces = [str(t) if self.tokenizer is None else self.tokenizer.token_text(t) for t in tokens]
        all_layers = range(self.model.config.stack.num_layers)
        layer_indices = list(all_layers if layers is None else layers)
        for layer in layer_indices:
            if layer not in all_layers:
                raise RequestError(f"layers: must be in 0..{all_layers[-1]}, got {layer}")
            count = self.model.config.stack.layer_config(layer).attention.num_heads
            for head in heads or ():
                if not 0 <= head < count:
                    raise RequestError(f"heads: must be in 0..{count - 1} for layer {layer}, got {head}")
        with self._client.lock:  # the trace hooks the model itself
            return trace_forward(self.model, tokens, pieces, layers=layer_indices, heads=heads, cached=cached)

    # ------------------------------------------------------------ tokens and options

    def encode(self, prompt: engine_lib.client.PromptInput) -> list[int]:
        """Return the token ids of a prompt (or encoder input) as the model receives them."""
        return self.texts.encode_prompt(prompt) if self._kind == "decoder" else self.texts.encode_source(prompt)

    def sampling_params(self, **options: Any) -> SamplingParams:
        """Return these options over the checkpoint's defaults; raise RequestError for invalid ones."""
        return resolve_sampling(options, self.generation)

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Free the pool. Later calls raise EngineError; closing twice is allowed."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ internals

    @property
    def _kind(self) -> str:
        return self.model.config.kind

    def _is_encoder_decoder(self) -> bool:
        return self._kind == "encoder-decoder"

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", "Pass token ids to logits().")
        return self.tokenizer

    def _model_input(self, ids: Sequence[int]) -> ModelInput:
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.engine.device)
        positions = torch.arange(len(ids), device=tokens.device)
        sub_batch = SubBatch(1, len(ids), len(ids))
        return ModelInput(tokens, positions, (sub_batch,), positions, max_seq_lens=torch.full_like(positions, len(ids)))

    def _sampling_params(
        self,
        sampling_params: SamplingParams | None,
        options: dict[str, Any],
        language: str | None,
        target_prefix: engine_lib.client.PromptInput | None,
    ) -> SamplingParams:
        params = _sampling_params(sampling_params, options, self.generation)
        if language is not None:
            if options.get("forced_bos_token_id") is not None:
                raise RequestError(
                    "language= and forced_bos_token_id= are both given", "A language is a forced first token."
                )
            if not isinstance(target_prefix, str | None):
                raise RequestError(
                    "language= and target_prefix= as ids are both given", "Ids are the whole start of the target."
                )
            return dataclasses.replace(params, forced_bos_token_id=self.texts.language_token(language))
        return params

    def _submitter(
        self,
        sampling_params: SamplingParams,
        target_prefix: engine_lib.client.PromptInput | None,
        source_language: str | None,
    ) -> Callable[[engine_lib.client.PromptInput], engine_lib.client.RequestHandle]:
        if self._kind == "encoder":
            raise RequestError("this model is an encoder and cannot continue a text", self._supported_tasks())
        if not self._is_encoder_decoder():
            if target_prefix is not None or source_language is not None:
                raise RequestError(
                    "target_prefix= and source_language= require an encoder-decoder", "Put the text into the prompt."
                )
            return lambda prompt: self._submit(self.texts.encode_prompt(prompt), sampling_params, None)
        target_prefix = None if target_prefix == "" else target_prefix
        start = self.texts.encode_target(target_prefix, sampling_params.forced_bos_token_id)
        params = (
            sampling_params if target_prefix is None else dataclasses.replace(sampling_params, forced_bos_token_id=None)
        )
        return lambda text: self._submit(start, params, self.texts.encode_source(text, source_language))

    def _submit(
        self, tokens: list[int], sampling_params: SamplingParams, encoder_input: list[int] | None
    ) -> engine_lib.client.RequestHandle:
        def queue(engine: Engine) -> int:
            return engine.add_request(tokens, sampling_params, encoder_token_ids=encoder_input)

        return self._client.submit(queue, sampling_params, len(tokens if encoder_input is None else encoder_input))

    def _run_each(
        self,
        prompts: Any,
        submit: Callable[[Any], engine_lib.client.RequestHandle],
        convert: Callable[[engine_lib.client.RequestHandle], T],
    ) -> Any:
        """Submit one or many prompts and convert their results; abort all of them on an exception."""
        is_single, prompt_list = engine_lib.client.normalize_prompts(prompts)
        handles: list[engine_lib.client.RequestHandle] = []
        try:
            for prompt in prompt_list:
                handles.append(submit(prompt))
            results = [convert(handle) for handle in handles]
        except BaseException:
            self._client.cancel(handles)
            raise
        return results[0] if is_single else results

    def _encoded_texts(self, texts: Any, encoder_output: Literal["head", "mean", "first"]) -> list[Tensor]:
        outputs = self._encode_each(texts, lambda ids, out: out, encoder_output)
        return [outputs] if isinstance(outputs, Tensor) else outputs

    def _encode_each(
        self,
        texts: Any,
        convert: Callable[[list[int], Tensor], T],
        encoder_output: Literal["head", "mean", "first"] = "head",
        *,
        specials: bool = False,
    ) -> Any:
        """Return the converted encoder output of one or many texts."""
        if self.model.encoder is None:
            raise RequestError("this model has no encoder", "It continues prompts.")
        token_ids: dict[int, list[int]] = {}

        def submit(text: engine_lib.client.PromptInput) -> engine_lib.client.RequestHandle:
            ids = self.texts.encode_source(text, specials=specials)
            handle = self._client.submit(
                lambda engine: engine.add_encoder_request(ids, encoder_output), SamplingParams(), len(ids)
            )
            token_ids[handle.request] = ids
            return handle

        return self._run_each(texts, submit, lambda handle: convert(token_ids[handle.request], handle.encoder_output()))

    def _require_classifier(self, level: str, task: str) -> None:
        head = self.model.config.head
        if not isinstance(head, ClassificationHeadConfig) or head.level != level:
            raise RequestError(f"this model does not {task}", self._supported_tasks())

    def _supported_tasks(self) -> str:
        head = self.model.config.head
        if self._kind != "encoder":
            return "It can generate, score and return logits."
        if isinstance(head, LanguageHeadConfig):
            return "It can fill masks, embed and return logits."
        if isinstance(head, ClassificationHeadConfig):
            return f"It can {'tag' if head.level == 'token' else 'classify'}, embed and return logits."
        return "It can embed."


def _dtype_name(key: str, dtype: Any, known: Iterable[str] | None = None) -> str | None:
    """Return a dtype's name (``torch.float32`` -> "float32"), or raise ConfigError."""
    known = checkpoint.native.DTYPES if known is None else known
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    is_custom_format = (
        isinstance(name, str) and ":" in name and known is cache_lib.quantization.FORMATS
    )  # resolved by the cache configuration
    if name is None or is_custom_format or (isinstance(name, str) and name in known):
        return name
    raise ConfigError(f"{key}: unknown dtype {name!r}", suggest(str(name), known))


def _device(device: Any) -> torch.device:
    """Return the device; raise UsageError if it is unknown or unavailable."""
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(f"unknown device {device!r}", "Use 'cpu', 'cuda' or 'cuda:1'.") from None
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device {str(torch_device)!r}: this torch finds no CUDA device", "Omit device= to use the CPU."
        )
    try:
        torch.zeros(1, device=torch_device).item()
    except (AssertionError, RuntimeError) as error:  # includes NotImplementedError of missing backends
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"device {str(torch_device)!r} cannot be used here: {reason}", "Omit device= to use the CPU."
        ) from None
    return torch_device


def _compute_dtype(checkpoint_handle: CheckpointHandle, dtype: str | None, device: torch.device) -> str:
    """Return the compute dtype: as given, else as stored (float16 is widened on a CPU)."""
    if dtype is not None:
        return dtype
    stored_dtype = str(checkpoint_handle.stored_dtype).removeprefix("torch.")
    return "float32" if stored_dtype == "float16" and device.type == "cpu" else stored_dtype


def default_cache_config(model: ModelConfig, dtype: str, **fields: Any) -> CacheConfig:
    """Return a paged cache in the model's dtype for sequences up to the model's limit."""
    known = [f.name for f in dataclasses.fields(CacheConfig)]
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown cache option {name!r}", suggest(name, known))
    chosen: dict[str, Any] = {
        "max_seq_len": model.max_seq_len,
        "dtype": dtype,
        **cache_lib.config.resolve_endless(fields),
    }
    if model.encoder_input is not None:
        chosen = {"max_source_len": model.encoder_input.max_seq_len, **chosen}
    if isinstance(chosen["max_seq_len"], int) and chosen["max_seq_len"] > model.max_seq_len:
        raise RequestError(f"a context of {chosen['capacity']} tokens exceeds the model's limit of {model.max_seq_len}")
    return CacheConfig(**chosen)


def _sampling_params(
    sampling_params: SamplingParams | None, options: dict[str, Any], generation: GenerationConfig
) -> SamplingParams:
    if sampling_params is None:
        return resolve_sampling(options, generation)
    if not isinstance(sampling_params, SamplingParams):
        raise RequestError(
            f"sampling_params: must be SamplingParams, got {sampling_params!r}", "Pass its fields as keywords."
        )
    if options:
        raise RequestError(
            f"sampling_params= and {next(iter(options))}= are both given", "Set it in the SamplingParams."
        )
    return sampling_params


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
    wants_more_samples = options.get("n", 1) > defaults.get("num_beams", 1)
    if wants_more_samples or (
        {*scheduling.request.SAMPLING_ONLY_FIELDS, *scheduling.request.NON_BEAM_FIELDS} & options.keys()
        and not options.keys() & set(scheduling.request.BEAM_ONLY_FIELDS)
    ):
        defaults = {name: value for name, value in defaults.items() if name not in scheduling.request.BEAM_ONLY_FIELDS}
    if options.get("num_beams", 1) != 1:
        defaults = {
            name: value
            for name, value in defaults.items()
            if name not in (*scheduling.request.SAMPLING_ONLY_FIELDS, *scheduling.request.NON_BEAM_FIELDS)
        }
        defaults["temperature"] = 0.0
    if isinstance(options.get("max_tokens"), int) and "min_tokens" in defaults:
        defaults["min_tokens"] = min(defaults["min_tokens"], options["max_tokens"])
    if options.get("num_beams", defaults.get("num_beams", 1)) == 1:  # drop a file's beam options if no beam search runs
        defaults = {name: value for name, value in defaults.items() if name not in scheduling.request.BEAM_ONLY_FIELDS}
        if defaults.get("temperature") == 0 and (
            wants_more_samples or options.keys() & set(scheduling.request.SAMPLING_ONLY_FIELDS)
        ):
            del defaults["temperature"]
    return SamplingParams.from_options(**{**defaults, **options})


def _text_score(tokens: Sequence[int], scores: Sequence[TokenLogprob]) -> engine_lib.output.TextScore:
    return engine_lib.output.TextScore(
        tuple(tokens), (None, *(s.logprob for s in scores)), ((), *(s.top_logprobs for s in scores))
    )
