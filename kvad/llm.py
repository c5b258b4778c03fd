"""LLM: load a model and generate text in three lines.

    from kvad import LLM
    llm = LLM.load("runs/demo")
    print(llm.generate("def __init__(self", max_tokens=64, temperature=0).text)

Every method takes text or token ids, one prompt or many, from any thread: all requests share one engine and one batch.
As a context manager it frees its pool. The prompt of an encoder-decoder is its encoder input: ``generate("Ein Haus.",
language="eng_Latn")``. An encoder embeds, tags, classifies or fills masks, depending on its head.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from kvad import checkpoint, ops
from kvad import engine as engine_lib
from kvad import text as text_lib
from kvad.cache import CacheConfig, sessions
from kvad.cache.sizing import MemoryBudget, MemoryPlan
from kvad.checkpoint import CheckpointHandle, GenerationConfig, open_checkpoint
from kvad.engine import Completion, Engine, EngineConfig, ForwardTrace, PromptEncoder, Session, StreamChunk
from kvad.engine.scheduling import SamplingOptions, SamplingParams, SpeculativeConfig
from kvad.errors import RequestError
from kvad.model import NoCache, Transformer, whole_sequences
from kvad.model_input import ModelInput
from kvad.text import Tokenizer

options, requests = engine_lib.options, engine_lib.requests
output = engine_lib.output
PromptInput = requests.PromptInput
RequestHandle = engine_lib.client.RequestHandle
GenerateOptions = requests.GenerateOptions
ScoreOptions = requests.ScoreOptions
Prompts = Sequence[str] | Sequence[Sequence[int]]
EmbedPooling = engine_lib.encoder_tasks.EmbedPooling
ProgressFn = Callable[[int, int], object]
ENGINE_FIELDS = (
    "deterministic",
    "compile",
    "max_num_batched_tokens",
    "max_inter_token",
    "max_slowdown",
)  # LoadOptions that are fields of EngineConfig


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
        self.model, self.tokenizer, self.cache_config = model.eval(), tokenizer, cache_config
        self.generation = GenerationConfig() if generation is None else generation
        engine_config = EngineConfig() if engine_config is None else engine_config
        folders = {name: adapter.path for name, adapter in engine_config.adapters.items()}
        folders[""] = tokenizer_folder
        self.chat_templates = text_lib.chat_template.ChatTemplates(
            {name: folder for name, folder in folders.items() if folder is not None}
        )
        stop_tokens = frozenset(self.generation.eos_token_ids) or engine_config.stop_tokens
        engine_config = dataclasses.replace(engine_config, stop_tokens=stop_tokens)
        self.engine = Engine(self.model, cache_config, engine_config, tokenizer=tokenizer)
        endless, max_len = self.engine.cache.endless, self.engine.limits.max_len
        self.texts = PromptEncoder(model.config, tokenizer, self.generation, endless=endless, max_len=max_len)
        self.client = engine_lib.client.EngineClient(self.engine)
        self._kind = model.config.kind
        self._requests = engine_lib.submission.RequestSubmitter(self.client, self.texts)
        self._tasks = engine_lib.encoder_tasks.EncoderTasks(self.client, self.texts)

    @staticmethod
    def load(
        path: str | Path | CheckpointHandle,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        memory: Literal["auto"] | int | float | MemoryBudget = "auto",
        cache_config: CacheConfig | None = None,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        rope_scaling: str | Mapping[str, Any] | None = None,
        activation_bits: int | None = None,
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
            adapters: LoRA adapters by name, which requests choose (``generate(adapter=name)``); the base stays.
            rope_scaling: Another RoPE scaling (``checkpoint.loader.scale_rope``), which extends the model's limit.
            activation_bits: 8 rounds the inputs of int8 and int4 weights to 8 bits, for speed (None: not rounded).
            revision: Revision on the hub.
            **settings: ``kvad.engine.options.LoadOptions``; ``endless=True`` alone means ``overflow="sinks"``.

        Raises:
            CheckpointError: If the checkpoint is incomplete, or summarizer or adapter belong to another model.
            UsageError: If the device does not exist.
            ConfigError: If a dtype or the cache configuration is invalid, ``deterministic`` is unavailable, or the
                draft model has another tokenizer.
            MemoryPlanError: If given sizes, or a single block, would not fit, before anything is allocated.
        """
        fields: dict[str, Any] = dict(settings)
        summarizer, swap_dir = fields.pop("summarizer", None), fields.pop("swap_dir", None)
        engine_fields = {name: fields.pop(name) for name in ENGINE_FIELDS if name in fields}
        engine_fields["speculative"] = SpeculativeConfig.from_options(fields.pop("speculative", None))
        given = [name for name, value in fields.items() if name not in options.CACHE_DTYPE_FIELDS or value is not None]
        if cache_config is not None and given:
            raise RequestError(f"cache_config= and {given[0]}= are both given", "Set it in the CacheConfig.")
        dtype, torch_device = options.dtype_name("dtype", dtype, checkpoint.native.DTYPES), options.find_device(device)
        handle = path if isinstance(path, CheckpointHandle) else open_checkpoint(path, revision=revision)
        if adapter is not None:
            handle = checkpoint.adapter.merge_adapter(handle, Path(adapter))
        if rope_scaling is not None:
            checkpoint.loader.scale_rope(handle, rope_scaling)
        engine_fields["adapters"] = engine_lib.loading.load_adapters(handle, adapters or {})
        plan = engine_lib.loading.plan_checkpoint(
            handle, cache_config, fields, memory, torch_device, dtype, summarizer, engine_fields
        )
        engine_config = EngineConfig(swap_dir=swap_dir, **engine_fields)
        engine_config = engine_lib.loading.with_draft_model(engine_config, handle, plan.weights_dtype, torch_device)
        engine_lib.loading.warn_unused(handle)
        llm = LLM(
            checkpoint.loader.load_weights(handle, dtype, torch_device, activation_bits),
            handle.tokenizer,
            plan.cache,
            generation=handle.generation,
            engine_config=engine_lib.loading.with_adapters(engine_config, handle, summarizer),
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
        submit = self._requests.submitter(self._requests.generation(sampling_params, settings))
        results: Completion | list[Completion] = self.client.run_each(prompts, submit, RequestHandle.result, progress)
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
        template = self.chat_templates.find(settings.get("adapter", ""))
        tokens = self.texts.encode_chat(
            template, messages, tools=tools, generation_prompt=not continue_final, continue_final=continue_final
        )
        return self.generate(tokens, sampling_params, **settings)

    def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **settings: Unpack[GenerateOptions]
    ) -> Generator[StreamChunk, None, None]:
        """Yield chunks of one prompt's samples; closing the iterator aborts the rest."""
        handle = self._requests.submitter(self._requests.generation(sampling_params, settings))(prompt)
        try:
            yield from handle.chunks()
        finally:
            self.client.cancel([handle])

    def session(
        self,
        name: str | Path | None = None,
        folder: str | Path | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str = "",
    ) -> Session:
        """Open a text that continues over turns and processes (``engine/session.py``).

        Args:
            name: Name of a session in ``folder``, or a file as a Path. An existing one is loaded, and leftovers of
                crashed writers are removed. None: a session of this process only.
            folder: Folder of sessions (default: ``KVAD_SESSION_DIR``, else the user's data folder).
            cache_salt: Cached blocks are shared only with requests of the same salt. None: the salt in the file.
            adapter: Name of the adapter that computes all turns; "": the base. A file of another one is refused.

        Raises:
            UsageError: If the name is invalid.
            StorageError: If the file is damaged or belongs to another model or cache.
        """
        self.client.check_open()
        self.engine.adapters.number(adapter)
        path = name if isinstance(name, Path) else None
        if isinstance(name, str):
            directory = sessions.directory.default_session_dir() if folder is None else Path(folder)
            path = sessions.directory.session_path(name, directory)
            sessions.directory.remove_session_leftovers(path.parent)
        session_name = name if isinstance(name, str) else "" if path is None else path.stem
        session = Session(
            self.client,
            self.texts,
            self._requests.resolve_sampling,
            path=path,
            name=session_name,
            model=self.name,
            template=self.chat_template_fingerprint,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        if path is not None and path.exists():
            session.load()
        return session

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
        adapter: str = "",
    ) -> output.TextScore | list[output.TextScore]:
        """Return each token's log-probability given the tokens before it, computed with the cache.

        Args:
            texts: Texts or token ids; for an encoder-decoder, targets of ``encoder_input``.
            top_logprobs: Number of alternatives per token.
            encoder_input: Input of the encoder.
            source_language: Language of the encoder input.
            cache_salt: Cached blocks are shared only with requests of the same salt.
            adapter: Name of the adapter; "": the base.
        """
        shared: Any = {"cache_salt": cache_salt, "adapter": adapter}
        build = self._requests.scoring(encoder_input, source_language, top_logprobs=top_logprobs, **shared)
        submit = self._requests.submitter(build, scores=True)
        results: output.TextScore | list[output.TextScore] = self.client.run_each(
            texts, submit, engine_lib.submission.read_score
        )
        return results

    @torch.inference_mode()
    def logits(self, tokens: PromptInput, encoder_input: PromptInput | None = None, *, adapter: str = "") -> Tensor:
        """Return logits [T, V] without a cache, with plain kernels: no joined products and no fused attention.

        With ``deterministic``, attention has the engine's tiles, which give a token the same bits at every length.
        ``kvad verify`` compares engines with a reference that shares nothing.

        For an encoder-decoder, ``tokens`` are the target's; for an encoder, the head's output is returned: [T, V], [T,
        labels], or [labels] or [E] if the head pools the text.
        """
        self.client.check_open()
        self._requests.check_encoder_input(encoder_input)
        if self._kind == "decoder":
            model_input = self._model_input(self.texts.encode_prompt(tokens, whole=True), adapter)
        elif self._kind == "encoder":
            model_input = self._model_input(self.texts.encode_source(tokens), adapter)
        else:
            if encoder_input is None:
                raise RequestError("encoder_input: required by this model", "Give the text to translate.")
            model_input = self._model_input(self.texts.encode_target(tokens), adapter)
            source = self._model_input(self.texts.encode_source(encoder_input), adapter)
            model_input = model_input._replace(encoder_input=source)
        model = copy.copy(self.model)  # the engine's model keeps its kernel
        if not isinstance(model.kernel, ops.attention.TileSizes):
            model.kernel = "reference"
        with torch.enable_grad():  # layers join products for inference only; inference mode records no gradients
            hidden = model(model_input, NoCache(model.config, kernel=model.kernel))
            if model.config.pools_sequence:
                return model.pooled_outputs(hidden, model_input)[0]
            return model.logits(hidden, model_input.logit_indices)

    def embed(
        self,
        texts: PromptInput | Prompts,
        *,
        pool: EmbedPooling | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        adapter: str = "",
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
            adapter: Name of the adapter, for a decoder; "": the base.

        Raises:
            RequestError: If a text is too long, the prompt is unknown, or the head does not pool.
        """
        return self._tasks.embed(texts, pool, prompt_name, truncate=truncate, adapter=adapter)

    @overload
    def tag(self, texts: PromptInput) -> tuple[output.TokenLabel, ...]: ...  # type: ignore[overload-overlap]
    @overload
    def tag(self, texts: Prompts) -> list[tuple[output.TokenLabel, ...]]: ...
    def tag(self, texts: PromptInput | Prompts) -> Any:
        """Return the words of one or many texts with their labels, from a head that labels tokens."""
        return self._tasks.tag(texts)

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
        return self._tasks.classify(texts, text_pairs)

    @overload
    def fill_mask(  # type: ignore[overload-overlap]
        self, texts: PromptInput, *, top: int = 5
    ) -> tuple[tuple[output.MaskPrediction, ...], ...]: ...
    @overload
    def fill_mask(self, texts: Prompts, *, top: int = 5) -> list[tuple[tuple[output.MaskPrediction, ...], ...]]: ...
    def fill_mask(self, texts: PromptInput | Prompts, *, top: int = 5) -> Any:
        """Return the ``top`` most probable tokens for each mask of one or many texts."""
        return self._tasks.fill_mask(texts, top)

    def trace(
        self,
        prompt: PromptInput,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        *,
        cached: bool = False,
    ) -> ForwardTrace:
        """Return tensors of layers and heads; ``cached``: from a paged cache of this call. Other requests wait."""
        self.client.check_open()
        if self._kind != "decoder":
            raise RequestError(f"tracing an {self._kind} is not supported", "Trace a decoder.")
        tokens = self.texts.encode_prompt(prompt, whole=True)
        pieces = [str(t) if self.tokenizer is None else self.tokenizer.token_text(t) for t in tokens]
        with self.client.lock:  # the trace hooks the model itself
            return engine_lib.trace_forward(self.model, tokens, pieces, layers=layers, heads=heads, cached=cached)

    # ------------------------------------------------------------ tokens and options

    def encode(self, prompt: PromptInput) -> list[int]:
        """Return the token ids of a prompt (or encoder input) as the model receives them."""
        return self.texts.encode_prompt(prompt) if self._kind == "decoder" else self.texts.encode_source(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.texts.require_tokenizer().decode(tokens)

    def sampling_params(self, **settings: Unpack[SamplingOptions]) -> SamplingParams:
        """Return these options over the checkpoint's defaults; raise RequestError for invalid ones."""
        return requests.resolve_sampling(settings, self.generation)

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Free the pool. Later calls raise EngineError; closing twice is allowed."""
        self.client.close()

    def __repr__(self) -> str:
        parameters, cache = sum(parameter.numel() for parameter in self.model.parameters()), self.engine.cache
        dtype = self.model.dtype_name
        size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"
        room = f"{cache.max_num_seqs} sequences of {cache.max_seq_len} tokens"
        return f"LLM({self.name!r}, {self._kind}, {size} parameters in {dtype} on {self.engine.device}, {room})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------ internals

    def _model_input(self, ids: Sequence[int], adapter: str) -> ModelInput:
        adapters = self.engine.adapters
        model_input = whole_sequences([ids], self.engine.device)
        return model_input._replace(adapters=adapters.select([(adapters.number(adapter), len(ids))]))
