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

from kvad.cache.formats import FORMATS
from kvad.cache.full import with_endless
from kvad.cache.planning import available_bytes, plan_memory, require
from kvad.cache.sessions import default_folder, named, sweep
from kvad.cache.sizing import CacheConfig
from kvad.checkpoint.adapter import Adapted, with_adapter
from kvad.checkpoint.compressor import load_compressor
from kvad.checkpoint.compressor_folder import read_summaries
from kvad.checkpoint.generation import Generation
from kvad.checkpoint.native import DTYPES
from kvad.checkpoint.open import Opened, model_of, open_checkpoint
from kvad.config import Classes, Head, ModelConfig, Pooled
from kvad.engine.answers import fill_masks, label_row, label_tokens
from kvad.engine.completion import Completion, TextScore
from kvad.engine.desk import Desk, Ticket
from kvad.engine.engine import Engine, Piece
from kvad.engine.request import SAMPLED, SEARCHED, SINGLE, Sampling, TokenScore
from kvad.engine.session import Session
from kvad.engine.texts import Prompt, Texts, one_or_many
from kvad.engine.trace import Trace, trace
from kvad.errors import ConfigError, RequestError, UsageError, nearest
from kvad.model.compress import Compressor
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.step import Lane, Step
from kvad.text.chat import template_fingerprint
from kvad.text.tokenizer import Tokenizer

__all__ = ["LLM"]

T = TypeVar("T")


class LLM:
    """A model, its tokenizer and one engine.  Build it with :meth:`load`, or from parts (tests, research)."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        cache: CacheConfig,
        *,
        generation: Generation | None = None,
        budget: int = 2048,
        deterministic: bool = False,
        compressor: Compressor | None = None,
        park_dir: str | Path | None = None,
        name: str = "",
        template: str = "",
        adapter: str = "",
    ) -> None:
        self.name, self.template = name, template  # what sessions say of it; the chat template's fingerprint
        self.model, self.tokenizer, self.cache = model.eval(), tokenizer, cache
        self.generation = Generation() if generation is None else generation
        ends = frozenset(self.generation.stops)
        self.engine = Engine(
            self.model,
            cache,
            tokenizer=tokenizer,
            budget=budget,
            deterministic=deterministic,
            compressor=compressor,
            stop_tokens=ends,
            park_dir=park_dir,
            adapter=adapter,
        )
        self.texts = Texts(model.config, tokenizer, self.generation, endless=self.engine.cache.endless)
        self._desk = Desk(self.engine)

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
        dtype, cache_dtype = _dtype_name("dtype", dtype), _dtype_name("cache.dtype", cache_dtype, FORMATS)
        for side, asked in (("keys", cache_keys), ("values", cache_values)):
            if asked is not None:
                cache[side] = _dtype_name(f"cache.{side}", asked, FORMATS)
        where = _device(device)
        if memory is not None and (cache or cache_dtype is not None):
            raise RequestError(
                f"memory= and {next(iter(cache), 'cache_dtype')}= both given", "put it in the CacheConfig"
            )
        opened = open_checkpoint(path, revision=revision)
        if adapter is not None:
            opened = with_adapter(opened, Path(adapter))
        computed = _computed_dtype(opened, dtype, where)
        config = memory if memory is not None else default_cache(opened.config, cache_dtype or computed, **cache)
        stored = None if compressor is None else read_summaries(Path(compressor))
        if where.type == "cpu":
            planned = plan_memory(
                opened.config, config, weights_dtype=computed, learned=stored, deterministic=deterministic
            )
            require(planned, available_bytes())
        for name in opened.generation.unheard:
            warnings.warn(f"{opened.path}: generation_config.json: {name} is not applied", stacklevel=2)
        learned = None if compressor is None else load_compressor(Path(compressor), opened)
        model = model_of(opened, dtype, where)
        return LLM(
            model,
            opened.tokenizer,
            config,
            generation=opened.generation,
            deterministic=deterministic,
            compressor=learned,
            park_dir=park_dir,
            name=str(path),
            template=template_fingerprint(opened.words),
            adapter=opened.adapter_fingerprint if isinstance(opened, Adapted) else "",
        )

    # ------------------------------------------------------------ text out

    @overload
    def generate(self, prompts: str, sampling: Sampling | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[int], sampling: Sampling | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: Sampling | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Any,
        sampling: Sampling | None = None,
        *,
        prefix: Prompt | None = None,
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
        chosen = self._sampling(sampling, options, language, prefix)
        submit = self._submitter(chosen, prefix, source_language)
        done: Completion | list[Completion] = self._each(prompts, submit, Ticket.finish)
        return done

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        prefix: Prompt | None = None,
        language: str | None = None,
        source_language: str | None = None,
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """Pieces of one prompt's samples as they come; closing the iterator cancels what is left."""
        chosen = self._sampling(sampling, options, language, prefix)
        ticket = self._submitter(chosen, prefix, source_language)(prompt)
        try:
            yield from ticket.pieces()
        finally:
            self._desk.drop([ticket])

    def session(self, name: str | Path | None = None, folder: str | Path | None = None) -> Session:
        """A text that goes on from turn to turn, and from process to process (``engine/session.py``).

        ``name``: of a session in ``folder`` (default: ``KVAD_SESSIONS``, else the user's data folder), or a file as a
        Path; where there is one it is loaded, and what dead writers left there is removed.  None: of this process only.
        UsageError for what is no name; EntryError for a file that is damaged or belongs to another model or cache.
        """
        self._desk.alive()
        path = None
        if isinstance(name, Path):
            path = name
        elif name is not None:
            path = named(name, Path(folder) if folder is not None else default_folder())
            sweep(path.parent)
        said = name if isinstance(name, str) else "" if path is None else path.stem
        session = Session(
            self._desk, self.texts, self._chosen, path=path, name=said, model=self.name, template=self.template
        )
        if path is not None and path.exists():
            session.load()
        return session

    def _chosen(self, sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
        return _chosen(sampling, options, self.generation)

    # ------------------------------------------------------------ numbers out

    @overload
    def score(  # type: ignore[overload-overlap]
        self, texts: str, *, top: int = 0, source: Prompt | None = None, source_language: str | None = None
    ) -> TextScore: ...
    @overload
    def score(
        self, texts: Sequence[int], *, top: int = 0, source: Prompt | None = None, source_language: str | None = None
    ) -> TextScore: ...
    @overload
    def score(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        *,
        top: int = 0,
        source: Prompt | None = None,
        source_language: str | None = None,
    ) -> list[TextScore]: ...
    def score(
        self, texts: Any, *, top: int = 0, source: Prompt | None = None, source_language: str | None = None
    ) -> TextScore | list[TextScore]:
        """Log-probability of every token given those before it, through the cache; ``top`` alternatives beside each.

        Of an encoder-decoder ``texts`` are targets of ``source``.
        """
        sampling = Sampling(max_tokens=0, prompt_logprobs=top)
        crossed = self._crossed()
        if crossed != (source is not None):
            what = "source=: this model scores targets of a source" if crossed else "this model has no source"
            raise RequestError(what, "give the text that the targets answer" if crossed else "leave source= out")
        read = None if source is None else self.texts.source(source, source_language)
        known: dict[int, list[int]] = {}

        def submit(text: Prompt) -> Ticket:
            tokens = self.texts.prompt(text) if read is None else self.texts.target(text)
            ticket = self._submit(tokens, sampling, read)
            known[ticket.request] = tokens
            return ticket

        def told(ticket: Ticket) -> TextScore:
            return _text_score(known[ticket.request], ticket.finish().prompt_logprobs)

        done: TextScore | list[TextScore] = self._each(texts, submit, told)
        return done

    @torch.inference_mode()
    def logits(self, tokens: Prompt, source: Prompt | None = None) -> Tensor:
        """[T, V] without any cache: what the model says, and what every cache is held against.

        Of an encoder-decoder, ``tokens`` are the target's; of an encoder, what its head says: [T, V], [T, labels],
        or [labels] or [E] where it speaks of the whole row.
        """
        self._desk.alive()
        if source is not None and not self._crossed():
            raise RequestError("this model has no source", "leave source= out")
        if self._kind == "encoder":
            ids = self.texts.source(tokens)
        else:
            ids = self.texts.target(tokens) if self._crossed() else self.texts.prompt(tokens, whole=True)
        step = self._step(ids)
        if self._crossed():
            if source is None:
                raise RequestError("source=: this model answers a source", "give the text to translate")
            step = step._replace(source=self._step(self.texts.source(source)))
        hidden = self.model(step, Fresh(self.model.config, kernel=self.model.kernel))
        if self.model.config.per_row:
            return self.model.rows(hidden, step)[0]
        return self.model.logits(hidden, step.wanted)

    def embed(self, texts: Any, *, pool: Literal["mean", "first", "head"] | None = None) -> Tensor:
        """[N, E]: one vector per text (of one text, N = 1).

        ``pool``: the mean of the hidden states, the first of them, or what a pooling head makes of it; None: as the
        checkpoint says (a sentence-transformers folder does, and then of length one if it says so), else the mean.
        Raises RequestError for a model without an encoder.
        """
        if pool not in (None, "mean", "first", "head"):
            raise RequestError(f"pool: {pool!r}", nearest(str(pool), ("mean", "first", "head")))
        if pool == "head" and not isinstance(self.model.config.head, Pooled):
            raise RequestError("pool='head': this model's head does not pool", "mean or first")
        rows = torch.stack(self._encoded(texts, pool or self.generation.pool or "mean"))
        return F.normalize(rows, dim=-1) if pool is None and self.generation.unit else rows

    def tag(self, texts: Any) -> Any:
        """The words of a text (or of many) with their labels, from a head that labels tokens."""
        self._needs("token", "label tokens")
        head = self.model.config.head
        assert isinstance(head, Classes)
        tokenizer = self._tokenizer()
        return self._answered(texts, lambda ids, out: label_tokens(tokenizer, ids, out, head.labels))

    def classify(self, texts: Any) -> Any:
        """The labels of a text (or of many), the likeliest first, from a head that labels whole texts."""
        self._needs("row", "label whole texts")
        head = self.model.config.head
        assert isinstance(head, Classes)
        return self._answered(texts, lambda ids, out: label_row(out, head.labels))

    def fill(self, texts: Any, *, top: int = 5) -> Any:
        """For each mask of a text (or of many), its ``top`` likeliest tokens, from a masked language model."""
        if self._kind != "encoder" or not isinstance(self.model.config.head, Head):
            raise RequestError("this model fills no masks", self._can())
        tokenizer = self._tokenizer()
        return self._answered(texts, lambda ids, out: fill_masks(tokenizer, ids, out, top), specials=True)

    def trace(
        self,
        prompt: Prompt,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        *,
        cached: bool = False,
    ) -> Trace:
        """Named q, k, v, scores, weights, head outputs and hidden states of the layers and heads asked for.

        ``cached``: through a paged memory made for this call, in the model's dtype.  Others' requests wait meanwhile.
        """
        self._desk.alive()
        if self._kind != "decoder":
            raise RequestError(f"an {self._kind} cannot be traced yet", "trace a decoder")
        tokens = self.texts.prompt(prompt, whole=True)
        pieces = [str(t) if self.tokenizer is None else self.tokenizer.token_text(t) for t in tokens]
        every = range(self.model.config.stack.layers)
        chosen = list(every if layers is None else layers)
        for layer in chosen:
            if layer not in every:
                raise RequestError(f"layer {layer} is not one of 0..{every[-1]}")
            count = self.model.config.stack.layer(layer).mixer.heads
            for head in heads or ():
                if not 0 <= head < count:
                    raise RequestError(f"head {head} is not one of 0..{count - 1} of layer {layer}")
        with self._desk.lock:  # the trace watches the model itself
            return trace(self.model, tokens, pieces, layers=chosen, heads=heads, cached=cached)

    # ------------------------------------------------------------ text <-> ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (of a source, where the model has an encoder), as the model is given them."""
        return self.texts.prompt(prompt) if self._kind == "decoder" else self.texts.source(prompt)

    def sampling(self, **options: Any) -> Sampling:
        """These options over the checkpoint's own defaults.  RequestError for a name or a value that cannot be."""
        return sampling_of(options, self.generation)

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

    def _step(self, ids: Sequence[int]) -> Step:
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.engine.device)
        every = torch.arange(len(ids), device=tokens.device)
        lane = Lane(1, len(ids), len(ids))
        return Step(tokens, every, (lane,), every, limits=torch.full_like(every, len(ids)))

    def _sampling(
        self, sampling: Sampling | None, options: dict[str, Any], language: str | None, prefix: Prompt | None
    ) -> Sampling:
        chosen = _chosen(sampling, options, self.generation)
        if language is not None:
            if options.get("forced_first") is not None:
                raise RequestError("language= and forced_first= both given", "a language is a forced first token")
            if not isinstance(prefix, str | None):
                raise RequestError("language= and prefix= as ids both given", "ids are the whole start of the target")
            return dataclasses.replace(chosen, forced_first=self.texts.language(language))
        return chosen

    def _submitter(
        self, sampling: Sampling, prefix: Prompt | None, source_language: str | None
    ) -> Callable[[Prompt], Ticket]:
        if self._kind == "encoder":
            raise RequestError("this model is an encoder: it cannot continue a text", self._can())
        if not self._crossed():
            if prefix is not None or source_language is not None:
                raise RequestError("prefix= and source_language= are for encoder-decoders", "put it in the prompt")
            return lambda prompt: self._submit(self.texts.prompt(prompt), sampling, None)
        prefix = None if prefix == "" else prefix
        start = self.texts.target(prefix, sampling.forced_first)
        chosen = sampling if prefix is None else dataclasses.replace(sampling, forced_first=None)
        return lambda text: self._submit(start, chosen, self.texts.source(text, source_language))

    def _submit(self, tokens: list[int], sampling: Sampling, source: list[int] | None) -> Ticket:
        def queue(engine: Engine) -> int:
            return engine.submit(tokens, sampling, source=source)

        return self._desk.submit(queue, sampling, len(tokens if source is None else source))

    def _each(self, prompts: Any, submit: Callable[[Any], Ticket], take: Callable[[Ticket], T]) -> Any:
        """Submit one or many, then take what came of each; on an exception all of them are dropped."""
        one, many = one_or_many(prompts)
        tickets: list[Ticket] = []
        try:
            for prompt in many:
                tickets.append(submit(prompt))
            done = [take(ticket) for ticket in tickets]
        except BaseException:
            self._desk.drop(tickets)
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

        def submit(text: Prompt) -> Ticket:
            ids = self.texts.source(text, specials=specials)
            ticket = self._desk.submit(lambda engine: engine.submit_source(ids, want), Sampling(), len(ids))
            known[ticket.request] = ids
            return ticket

        return self._each(texts, submit, lambda ticket: take(known[ticket.request], ticket.answer()))

    def _needs(self, per: str, what: str) -> None:
        head = self.model.config.head
        if not isinstance(head, Classes) or head.per != per:
            raise RequestError(f"this model does not {what}", self._can())

    def _can(self) -> str:
        head = self.model.config.head
        if self._kind != "encoder":
            return "it can generate, score and give logits"
        if isinstance(head, Head):
            return "it can fill masks, embed and give logits"
        if isinstance(head, Classes):
            return f"it can {'tag' if head.per == 'token' else 'classify'}, embed and give logits"
        return "it can embed"


def _dtype_name(where: str, dtype: Any, known: Iterable[str] = DTYPES) -> str | None:
    """``torch.float32`` and ``"float32"`` are "float32".  ConfigError for what is not ``known``."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    own = isinstance(name, str) and ":" in name and known is FORMATS  # the cache's configuration finds it
    if name is None or own or (isinstance(name, str) and name in known):
        return name
    raise ConfigError(f"{where}: unknown dtype {name!r}", nearest(str(name), known))


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


def _computed_dtype(opened: Opened, dtype: str | None, device: torch.device) -> str:
    """What the model will compute in: as asked, else as stored (float16 is widened on a CPU)."""
    if dtype is not None:
        return dtype
    stored = str(opened.stored).removeprefix("torch.")
    return "float32" if stored == "float16" and device.type == "cpu" else stored


def default_cache(model: ModelConfig, dtype: str, **fields: Any) -> CacheConfig:
    """Paged, in the dtype that the model computes in, eight rows of the model's limit."""
    known = [f.name for f in dataclasses.fields(CacheConfig)]
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown option {name!r} of the cache", nearest(name, known))
    chosen: dict[str, Any] = {"capacity": model.limit, "dtype": dtype, **with_endless(fields)}
    if model.source is not None:
        chosen = {"source_capacity": model.source.limit, **chosen}
    if isinstance(chosen["capacity"], int) and chosen["capacity"] > model.limit:
        raise RequestError(f"a context of {chosen['capacity']} tokens exceeds the model's limit of {model.limit}")
    return CacheConfig(**chosen)


def _chosen(sampling: Sampling | None, options: dict[str, Any], generation: Generation) -> Sampling:
    if sampling is None:
        return sampling_of(options, generation)
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling: expected a Sampling, found {sampling!r}", "give its fields as keywords")
    if options:
        raise RequestError(f"sampling= and {next(iter(options))}= both given", "put it in the Sampling")
    return sampling


def sampling_of(options: Mapping[str, Any], generation: Generation) -> Sampling:
    """What is asked for, over the checkpoint's defaults.

    Asking to sample, or for more than a search would give, leaves the checkpoint's search out, beams and greedy; asking
    for a beam search leaves its sampling out.  RequestError for a name or a value that cannot be.
    """
    defaults: dict[str, Any] = dict(generation.sampling or {})
    words = (*((token,) for token in generation.banned), *generation.bad_words)
    if words:
        defaults["bad_words"] = words
    for name in ("forced_first", "forced_last"):
        if getattr(generation, name) is not None:
            defaults[name] = getattr(generation, name)
    more = options.get("n", 1) > defaults.get("beams", 1)
    if more or ({*SAMPLED, *SINGLE} & options.keys() and not options.keys() & set(SEARCHED)):
        defaults = {name: value for name, value in defaults.items() if name not in SEARCHED}
    if options.get("beams", 1) != 1:
        defaults = {name: value for name, value in defaults.items() if name not in (*SAMPLED, *SINGLE)}
        defaults["temperature"] = 0.0
    if isinstance(options.get("max_tokens"), int) and "min_tokens" in defaults:
        defaults["min_tokens"] = min(defaults["min_tokens"], options["max_tokens"])
    if options.get("beams", defaults.get("beams", 1)) == 1:  # a file's words on a search that is not made
        defaults = {name: value for name, value in defaults.items() if name not in SEARCHED}
        if defaults.get("temperature") == 0 and (more or options.keys() & set(SAMPLED)):
            del defaults["temperature"]
    return Sampling.of(**{**defaults, **options})


def _text_score(tokens: Sequence[int], scores: Sequence[TokenScore]) -> TextScore:
    return TextScore(tuple(tokens), (None, *(s.logprob for s in scores)), ((), *(s.top for s in scores)))
