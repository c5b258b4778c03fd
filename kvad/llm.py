"""The three-line face.

    from kvad import LLM
    llm = LLM.load("runs/demo")
    print(llm.generate("def ", max_tokens=64, temperature=0).text)

Every method takes text or token ids, one or many.  Safe to call from several threads: requests of all threads share
one engine and one batch, and whichever thread holds the lock drives it.  As a context manager it frees its pool.

An encoder-decoder's prompt is its source: ``generate("Ein Haus.", language="eng_Latn")``; an encoder embeds, tags,
classifies and fills masks, as its head says.
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
    """A model, its tokenizer and one engine.  Build it with :meth:`load`, or from parts (tests, research)."""

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
        self.name, self.chat_template_fingerprint = (
            name,
            chat_template_fingerprint,
        )  # what sessions say of it; the chat template's fingerprint
        self.model, self.tokenizer, self.cache_config = model.eval(), tokenizer, cache_config
        self.generation = GenerationConfig() if generation is None else generation
        ends = frozenset(self.generation.eos_token_ids)
        self.engine = Engine(
            self.model,
            cache_config,
            tokenizer=tokenizer,
            max_num_batched_tokens=max_num_batched_tokens,
            deterministic=deterministic,
            summarizer=summarizer,
            stop_tokens=ends,
            swap_dir=swap_dir,
            adapter_fingerprint=adapter_fingerprint,
        )
        self.texts = PromptEncoder(model.config, tokenizer, self.generation, endless=self.engine.cache.endless)
        self._desk = engine_lib.client.EngineClient(self.engine)

    @staticmethod
    def load(
        path: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        memory: CacheConfig | None = None,
        cache_dtype: str | torch.dtype | None = None,
        cache_keys: str | torch.dtype | None = None,
        cache_values: str | torch.dtype | None = None,
        compressor: str | Path | None = None,
        adapter: str | Path | None = None,
        revision: str | None = None,
        deterministic: bool = False,
        park_dir: str | Path | None = None,
        **cache: Any,
    ) -> LLM:
        """Load a checkpoint: kvad's folder or run, a Hugging Face folder, or a name on the hub (``revision``: of it).

        ``dtype``: what the model computes in (default: what the checkpoint stores).  ``memory``: the cache's
        configuration; or its fields as keywords (``rows=4, capacity=2048, layout="contiguous"``), what it stores as
        ``cache_dtype`` (default: the model's dtype), or as ``cache_keys`` and ``cache_values``, each one of
        kvad/cache/formats.py.  Dtypes go by name or as torch's own.  What stays of a row is ``policy=``, what is done
        when it or the cache is full ``on_full=``; ``endless=True`` alone is ``on_full="sinks"``; ``spill_ram=`` and
        ``spill_dir=`` say where ``on_full="spill"`` puts older tokens.  ``compressor``: a
        folder or a run of ``kvad train --objective compress``, which makes the summaries of
        ``policy="hierarchy(...)"``.  ``adapter``: a LoRA adapter's folder or run, kvad's or PEFT's, that is merged into
        the weights; where ``path`` is such a folder itself, its base is the one that it names.  ``tier=``: a folder in
        which the prefix cache outlives the pool and the process, of at most ``tier_bytes``; ``tier_ram``: bytes of host
        memory for blocks that the pool had to give up.
        ``park_dir``: a folder for rows that give way when there is no room for them in ``park_ram`` bytes of memory.
        ``deterministic``: what a request gets is the same, bit for bit, alone and in any batch (CPU only, slower:
        docs/performance.md).

        Raises CheckpointError for a folder that is not a whole checkpoint, and another model's compressor or adapter;
        UsageError for a device that is not there, ConfigError for a dtype or a cache that cannot be, or a machine on
        which ``deterministic`` does not hold, MemoryPlanError (before it is allocated) for a cache that would not fit.
        """
        dtype, cache_dtype = (
            _dtype_name("dtype", dtype),
            _dtype_name("cache.dtype", cache_dtype, cache_lib.quantization.FORMATS),
        )
        for side, asked in (("keys", cache_keys), ("values", cache_values)):
            if asked is not None:
                cache[side] = _dtype_name(f"cache.{side}", asked, cache_lib.quantization.FORMATS)
        where = _device(device)
        if memory is not None and (cache or cache_dtype is not None):
            raise RequestError(
                f"memory= and {next(iter(cache), 'cache_dtype')}= both given", "put it in the CacheConfig"
            )
        opened = open_checkpoint(path, revision=revision)
        if adapter is not None:
            opened = checkpoint.adapter.merge_adapter(opened, Path(adapter))
        computed = _computed_dtype(opened, dtype, where)
        config = memory if memory is not None else default_cache_config(opened.config, cache_dtype or computed, **cache)
        stored = None if compressor is None else checkpoint.folder.read_summarizer_shape(Path(compressor))
        if where.type == "cpu":
            planned = plan_memory(
                opened.config, config, weights_dtype=computed, learned=stored, deterministic=deterministic
            )
            require_memory(planned, available_bytes())
        for name in opened.generation.ignored_fields:
            warnings.warn(f"{opened.path}: generation_config.json: {name} is not applied", stacklevel=2)
        learned = None if compressor is None else checkpoint.summarizer.load_summarizer(Path(compressor), opened)
        model = checkpoint.loader.load_weights(opened, dtype, where)
        return LLM(
            model,
            opened.tokenizer,
            config,
            generation=opened.generation,
            deterministic=deterministic,
            summarizer=learned,
            swap_dir=park_dir,
            name=str(path),
            chat_template_fingerprint=text_lib.chat_template.template_fingerprint(opened.tokenizer_folder),
            adapter_fingerprint=opened.adapter_fingerprint
            if isinstance(opened, checkpoint.adapter.AdaptedCheckpoint)
            else "",
        )

    # ------------------------------------------------------------ text out

    @overload
    def generate(self, prompts: str, sampling: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[int], sampling: SamplingParams | None = None, **options: Any
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: SamplingParams | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | None = None,
        *,
        prefix: engine_lib.client.PromptInput | None = None,
        language: str | None = None,
        source_language: str | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Continue one prompt, or many at once; of an encoder-decoder, answer one source, or many.

        ``options`` are the fields of :class:`Sampling`; what is not given is the checkpoint's own default.  ``prefix``:
        how the target begins (text, or ids: then all of its start).  ``language`` and ``source_language``: of models
        that mark them.  Raises RequestError for a prompt or an option that cannot be served, NumericalError when the
        model's logits are NaN or infinite.
        """
        chosen = self._sampling_params(sampling, options, language, prefix)
        submit = self._submitter(chosen, prefix, source_language)
        done: Completion | list[Completion] = self._each(prompts, submit, engine_lib.client.RequestHandle.result)
        return done

    def stream(
        self,
        prompt: engine_lib.client.PromptInput,
        sampling: SamplingParams | None = None,
        *,
        prefix: engine_lib.client.PromptInput | None = None,
        language: str | None = None,
        source_language: str | None = None,
        **options: Any,
    ) -> Generator[StreamChunk, None, None]:
        """Pieces of one prompt's samples as they come; closing the iterator cancels what is left."""
        chosen = self._sampling_params(sampling, options, language, prefix)
        ticket = self._submitter(chosen, prefix, source_language)(prompt)
        try:
            yield from ticket.chunks()
        finally:
            self._desk.cancel([ticket])

    def session(self, name: str | Path | None = None, folder: str | Path | None = None) -> Session:
        """A text that goes on from turn to turn, and from process to process (``engine/session.py``).

        ``name``: of a session in ``folder`` (default: ``KVAD_SESSIONS``, else the user's data folder), or a file as a
        Path; where there is one it is loaded, and what dead writers left there is removed.  None: of this process only.
        UsageError for what is no name; EntryError for a file that is damaged or belongs to another model or cache.
        """
        self._desk.check_open()
        path = None
        if isinstance(name, Path):
            path = name
        elif name is not None:
            path = sessions.directory.session_path(
                name, Path(folder) if folder is not None else sessions.directory.default_session_dir()
            )
            sessions.directory.remove_session_leftovers(path.parent)
        said = name if isinstance(name, str) else "" if path is None else path.stem
        session = Session(
            self._desk,
            self.texts,
            self._resolve_sampling,
            path=path,
            name=said,
            model=self.name,
            template=self.chat_template_fingerprint,
        )
        if path is not None and path.exists():
            session.load()
        return session

    def _resolve_sampling(self, sampling: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
        return _sampling_params(sampling, options, self.generation)

    # ------------------------------------------------------------ numbers out

    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        top: int = 0,
        source: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> engine_lib.output.TextScore: ...
    @overload
    def score(
        self,
        texts: Sequence[int],
        *,
        top: int = 0,
        source: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> engine_lib.output.TextScore: ...
    @overload
    def score(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        *,
        top: int = 0,
        source: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> list[engine_lib.output.TextScore]: ...
    def score(
        self,
        texts: Any,
        *,
        top: int = 0,
        source: engine_lib.client.PromptInput | None = None,
        source_language: str | None = None,
    ) -> engine_lib.output.TextScore | list[engine_lib.output.TextScore]:
        """Log-probability of every token given those before it, through the cache; ``top`` alternatives beside each.

        Of an encoder-decoder ``texts`` are targets of ``source``.
        """
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=top)
        crossed = self._crossed()
        if crossed != (source is not None):
            what = "source=: this model scores targets of a source" if crossed else "this model has no source"
            raise RequestError(what, "give the text that the targets answer" if crossed else "leave source= out")
        read = None if source is None else self.texts.encode_source(source, source_language)
        known: dict[int, list[int]] = {}

        def submit(text: engine_lib.client.PromptInput) -> engine_lib.client.RequestHandle:
            tokens = self.texts.encode_prompt(text) if read is None else self.texts.encode_target(text)
            ticket = self._submit(tokens, sampling, read)
            known[ticket.request] = tokens
            return ticket

        def told(ticket: engine_lib.client.RequestHandle) -> engine_lib.output.TextScore:
            return _text_score(known[ticket.request], ticket.result().prompt_logprobs)

        done: engine_lib.output.TextScore | list[engine_lib.output.TextScore] = self._each(texts, submit, told)
        return done

    @torch.inference_mode()
    def logits(
        self, tokens: engine_lib.client.PromptInput, source: engine_lib.client.PromptInput | None = None
    ) -> Tensor:
        """[T, V] without any cache: what the model says, and what every cache is held against.

        Of an encoder-decoder, ``tokens`` are the target's; of an encoder, what its head says: [T, V], [T, labels],
        or [labels] or [E] where it speaks of the whole row.
        """
        self._desk.check_open()
        if source is not None and not self._crossed():
            raise RequestError("this model has no source", "leave source= out")
        if self._kind == "encoder":
            ids = self.texts.encode_source(tokens)
        else:
            ids = self.texts.encode_target(tokens) if self._crossed() else self.texts.encode_prompt(tokens, whole=True)
        step = self._step(ids)
        if self._crossed():
            if source is None:
                raise RequestError("source=: this model answers a source", "give the text to translate")
            step = step._replace(encoder_input=self._step(self.texts.encode_source(source)))
        hidden = self.model(step, NoCache(self.model.config, kernel=self.model.kernel))
        if self.model.config.pools_sequence:
            return self.model.pooled_outputs(hidden, step)[0]
        return self.model.logits(hidden, step.logit_indices)

    def embed(self, texts: Any, *, pool: Literal["mean", "first", "head"] | None = None) -> Tensor:
        """[N, E]: one vector per text (of one text, N = 1).

        ``pool``: the mean of the hidden states, the first of them, or what a pooling head makes of it; None: as the
        checkpoint says (a sentence-transformers folder does, and then of length one if it says so), else the mean.
        Raises RequestError for a model without an encoder.
        """
        if pool not in (None, "mean", "first", "head"):
            raise RequestError(f"pool: {pool!r}", suggest(str(pool), ("mean", "first", "head")))
        if pool == "head" and not isinstance(self.model.config.head, PoolingHeadConfig):
            raise RequestError("pool='head': this model's head does not pool", "mean or first")
        rows = torch.stack(self._encoded(texts, pool or self.generation.pooling or "mean"))
        return F.normalize(rows, dim=-1) if pool is None and self.generation.normalize else rows

    def tag(self, texts: Any) -> Any:
        """The words of a text (or of many) with their labels, from a head that labels tokens."""
        self._needs("token", "label tokens")
        head = self.model.config.head
        assert isinstance(head, ClassificationHeadConfig)
        tokenizer = self._tokenizer()
        return self._answered(texts, lambda ids, out: engine_lib.output.label_tokens(tokenizer, ids, out, head.labels))

    def classify(self, texts: Any) -> Any:
        """The labels of a text (or of many), the likeliest first, from a head that labels whole texts."""
        self._needs("row", "label whole texts")
        head = self.model.config.head
        assert isinstance(head, ClassificationHeadConfig)
        return self._answered(texts, lambda ids, out: engine_lib.output.rank_labels(out, head.labels))

    def fill_mask(self, texts: Any, *, top: int = 5) -> Any:
        """For each mask of a text (or of many), its ``top`` likeliest tokens, from a masked language model."""
        if self._kind != "encoder" or not isinstance(self.model.config.head, LanguageHeadConfig):
            raise RequestError("this model fills no masks", self._can())
        tokenizer = self._tokenizer()
        return self._answered(
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
        """Named q, k, v, scores, weights, head outputs and hidden states of the layers and heads asked for.

        ``cached``: through a paged memory made for this call, in the model's dtype.  Others' requests wait meanwhile.
        """
        self._desk.check_open()
        if self._kind != "decoder":
            raise RequestError(f"an {self._kind} cannot be traced yet", "trace a decoder")
        tokens = self.texts.encode_prompt(prompt, whole=True)
        pieces = [str(t) if self.tokenizer is None else self.tokenizer.token_text(t) for t in tokens]
        every = range(self.model.config.stack.num_layers)
        chosen = list(every if layers is None else layers)
        for layer in chosen:
            if layer not in every:
                raise RequestError(f"layer {layer} is not one of 0..{every[-1]}")
            count = self.model.config.stack.layer_config(layer).attention.num_heads
            for head in heads or ():
                if not 0 <= head < count:
                    raise RequestError(f"head {head} is not one of 0..{count - 1} of layer {layer}")
        with self._desk.lock:  # the trace watches the model itself
            return trace_forward(self.model, tokens, pieces, layers=chosen, heads=heads, cached=cached)

    # ------------------------------------------------------------ text <-> ids

    def encode(self, prompt: engine_lib.client.PromptInput) -> list[int]:
        """Token ids of a prompt (of a source, where the model has an encoder), as the model is given them."""
        return self.texts.encode_prompt(prompt) if self._kind == "decoder" else self.texts.encode_source(prompt)

    def sampling_params(self, **options: Any) -> SamplingParams:
        """These options over the checkpoint's own defaults.  RequestError for a name or a value that cannot be."""
        return resolve_sampling(options, self.generation)

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Free the pool.  Calls made afterwards raise EngineError; closing twice is fine."""
        self._desk.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    @property
    def _kind(self) -> str:
        return self.model.config.kind

    def _crossed(self) -> bool:
        return self._kind == "encoder-decoder"

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model came without a tokenizer", "logits(ids) gives the numbers")
        return self.tokenizer

    def _step(self, ids: Sequence[int]) -> ModelInput:
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.engine.device)
        every = torch.arange(len(ids), device=tokens.device)
        lane = SubBatch(1, len(ids), len(ids))
        return ModelInput(tokens, every, (lane,), every, max_seq_lens=torch.full_like(every, len(ids)))

    def _sampling_params(
        self,
        sampling: SamplingParams | None,
        options: dict[str, Any],
        language: str | None,
        prefix: engine_lib.client.PromptInput | None,
    ) -> SamplingParams:
        chosen = _sampling_params(sampling, options, self.generation)
        if language is not None:
            if options.get("forced_bos_token_id") is not None:
                raise RequestError("language= and forced_first= both given", "a language is a forced first token")
            if not isinstance(prefix, str | None):
                raise RequestError("language= and prefix= as ids both given", "ids are the whole start of the target")
            return dataclasses.replace(chosen, forced_bos_token_id=self.texts.language_token(language))
        return chosen

    def _submitter(
        self, sampling: SamplingParams, prefix: engine_lib.client.PromptInput | None, source_language: str | None
    ) -> Callable[[engine_lib.client.PromptInput], engine_lib.client.RequestHandle]:
        if self._kind == "encoder":
            raise RequestError("this model is an encoder: it cannot continue a text", self._can())
        if not self._crossed():
            if prefix is not None or source_language is not None:
                raise RequestError("prefix= and source_language= are for encoder-decoders", "put it in the prompt")
            return lambda prompt: self._submit(self.texts.encode_prompt(prompt), sampling, None)
        prefix = None if prefix == "" else prefix
        start = self.texts.encode_target(prefix, sampling.forced_bos_token_id)
        chosen = sampling if prefix is None else dataclasses.replace(sampling, forced_bos_token_id=None)
        return lambda text: self._submit(start, chosen, self.texts.encode_source(text, source_language))

    def _submit(
        self, tokens: list[int], sampling: SamplingParams, source: list[int] | None
    ) -> engine_lib.client.RequestHandle:
        def queue(engine: Engine) -> int:
            return engine.add_request(tokens, sampling, source=source)

        return self._desk.submit(queue, sampling, len(tokens if source is None else source))

    def _each(
        self,
        prompts: Any,
        submit: Callable[[Any], engine_lib.client.RequestHandle],
        take: Callable[[engine_lib.client.RequestHandle], T],
    ) -> Any:
        """Submit one or many, then take what came of each; on an exception all of them are dropped."""
        one, many = engine_lib.client.normalize_prompts(prompts)
        tickets: list[engine_lib.client.RequestHandle] = []
        try:
            for prompt in many:
                tickets.append(submit(prompt))
            done = [take(ticket) for ticket in tickets]
        except BaseException:
            self._desk.cancel(tickets)
            raise
        return done[0] if one else done

    def _encoded(self, texts: Any, want: Literal["head", "mean", "first"]) -> list[Tensor]:
        answers = self._answered(texts, lambda ids, out: out, want)
        return [answers] if isinstance(answers, Tensor) else answers

    def _answered(
        self,
        texts: Any,
        take: Callable[[list[int], Tensor], T],
        want: Literal["head", "mean", "first"] = "head",
        *,
        specials: bool = False,
    ) -> Any:
        """What the encoder says of one text or many."""
        if self.model.encoder is None:
            raise RequestError("this model has no encoder", "it continues prompts")
        known: dict[int, list[int]] = {}

        def submit(text: engine_lib.client.PromptInput) -> engine_lib.client.RequestHandle:
            ids = self.texts.encode_source(text, specials=specials)
            ticket = self._desk.submit(lambda engine: engine.add_encoder_request(ids, want), SamplingParams(), len(ids))
            known[ticket.request] = ids
            return ticket

        return self._each(texts, submit, lambda ticket: take(known[ticket.request], ticket.encoder_output()))

    def _needs(self, per: str, what: str) -> None:
        head = self.model.config.head
        if not isinstance(head, ClassificationHeadConfig) or head.level != per:
            raise RequestError(f"this model does not {what}", self._can())

    def _can(self) -> str:
        head = self.model.config.head
        if self._kind != "encoder":
            return "it can generate, score and give logits"
        if isinstance(head, LanguageHeadConfig):
            return "it can fill masks, embed and give logits"
        if isinstance(head, ClassificationHeadConfig):
            return f"it can {'tag' if head.level == 'token' else 'classify'}, embed and give logits"
        return "it can embed"


def _dtype_name(where: str, dtype: Any, known: Iterable[str] | None = None) -> str | None:
    """``torch.float32`` and ``"float32"`` are "float32".  ConfigError for what is not ``known``."""
    known = checkpoint.native.DTYPES if known is None else known
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    own = (
        isinstance(name, str) and ":" in name and known is cache_lib.quantization.FORMATS
    )  # the cache's configuration finds it
    if name is None or own or (isinstance(name, str) and name in known):
        return name
    raise ConfigError(f"{where}: unknown dtype {name!r}", suggest(str(name), known))


def _device(device: Any) -> torch.device:
    """UsageError for what is no device, or none that is there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(f"unknown device {device!r}", "write 'cpu', 'cuda' or 'cuda:1'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {str(found)!r}: this torch finds no CUDA device here", "leave device= out: the CPU")
    try:
        torch.zeros(1, device=found).item()
    except (AssertionError, RuntimeError) as error:  # NotImplementedError of a backend that is not built in, too
        reason = str(error).partition("\n")[0]
        raise UsageError(f"device {str(found)!r} cannot be used here: {reason}", "leave device= out: the CPU") from None
    return found


def _computed_dtype(opened: CheckpointHandle, dtype: str | None, device: torch.device) -> str:
    """What the model will compute in: as asked, else as stored (float16 is widened on a CPU)."""
    if dtype is not None:
        return dtype
    stored = str(opened.stored_dtype).removeprefix("torch.")
    return "float32" if stored == "float16" and device.type == "cpu" else stored


def default_cache_config(model: ModelConfig, dtype: str, **fields: Any) -> CacheConfig:
    """Paged, in the dtype that the model computes in, eight rows of the model's limit."""
    known = [f.name for f in dataclasses.fields(CacheConfig)]
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown option {name!r} of the cache", suggest(name, known))
    chosen: dict[str, Any] = {"capacity": model.max_seq_len, "dtype": dtype, **cache_lib.config.resolve_endless(fields)}
    if model.encoder_input is not None:
        chosen = {"source_capacity": model.encoder_input.max_seq_len, **chosen}
    if isinstance(chosen["capacity"], int) and chosen["capacity"] > model.max_seq_len:
        raise RequestError(f"a context of {chosen['capacity']} tokens exceeds the model's limit of {model.max_seq_len}")
    return CacheConfig(**chosen)


def _sampling_params(
    sampling: SamplingParams | None, options: dict[str, Any], generation: GenerationConfig
) -> SamplingParams:
    if sampling is None:
        return resolve_sampling(options, generation)
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling: expected a Sampling, found {sampling!r}", "give its fields as keywords")
    if options:
        raise RequestError(f"sampling= and {next(iter(options))}= both given", "put it in the Sampling")
    return sampling


def resolve_sampling(options: Mapping[str, Any], generation: GenerationConfig) -> SamplingParams:
    """What is asked for, over the checkpoint's defaults.

    Asking to sample, or for more than a search would give, leaves the checkpoint's search out, beams and greedy; asking
    for a beam search leaves its sampling out.  RequestError for a name or a value that cannot be.
    """
    defaults: dict[str, Any] = dict(generation.sampling or {})
    words = (*((token,) for token in generation.suppress_tokens), *generation.bad_words_ids)
    if words:
        defaults["bad_words_ids"] = words
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if getattr(generation, name) is not None:
            defaults[name] = getattr(generation, name)
    more = options.get("n", 1) > defaults.get("beams", 1)
    if more or (
        {*scheduling.request.SAMPLING_ONLY_FIELDS, *scheduling.request.NON_BEAM_FIELDS} & options.keys()
        and not options.keys() & set(scheduling.request.BEAM_ONLY_FIELDS)
    ):
        defaults = {name: value for name, value in defaults.items() if name not in scheduling.request.BEAM_ONLY_FIELDS}
    if options.get("beams", 1) != 1:
        defaults = {
            name: value
            for name, value in defaults.items()
            if name not in (*scheduling.request.SAMPLING_ONLY_FIELDS, *scheduling.request.NON_BEAM_FIELDS)
        }
        defaults["temperature"] = 0.0
    if isinstance(options.get("max_tokens"), int) and "min_tokens" in defaults:
        defaults["min_tokens"] = min(defaults["min_tokens"], options["max_tokens"])
    if options.get("beams", defaults.get("beams", 1)) == 1:  # a file's words on a search that is not made
        defaults = {name: value for name, value in defaults.items() if name not in scheduling.request.BEAM_ONLY_FIELDS}
        if defaults.get("temperature") == 0 and (more or options.keys() & set(scheduling.request.SAMPLING_ONLY_FIELDS)):
            del defaults["temperature"]
    return SamplingParams.from_options(**{**defaults, **options})


def _text_score(tokens: Sequence[int], scores: Sequence[TokenLogprob]) -> engine_lib.output.TextScore:
    return engine_lib.output.TextScore(
        tuple(tokens), (None, *(s.logprob for s in scores)), ((), *(s.top_logprobs for s in scores))
    )
