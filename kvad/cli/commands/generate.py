"""``kvad generate MODEL [PROMPT...]``: continue prompts and stream the text.

Continuations go to stdout, everything else to stderr. Several samples are generated in one batch and shown in order,
each under its label: the first unfinished sample is streamed, the text of later ones is buffered.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from kvad import cache, checkpoint, engine
from kvad.cache import sizing
from kvad.cli import parameters
from kvad.cli.fields import argument, command, option
from kvad.cli.output import emit_json, exit_with, note, print_error
from kvad.cli.stats import RunMeter, describe_limit, stats_lines

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.engine import StreamChunk
    from kvad.engine.scheduling import SamplingParams, TokenLogprob
    from kvad.llm import LLM

PromptArgument = str | list[int]
SampleKey = tuple[int, int]  # (prompt, sample)


class _GenerateOptions(
    parameters.ModelArgument,
    parameters.SamplingFlags,
    parameters.CacheFlags,
    parameters.SpeculativeOptions,
    parameters.JsonOption,
):
    prompt: tuple[str, ...] = argument("[PROMPT]...|-")
    n: int | None = option("Samples of each prompt, which share its cache [default: 1]")
    logprobs: int | None = option("Print log-probabilities of the output, with N alternatives")
    prompt_logprobs: int | None = option("Print log-probabilities of the prompt, with N alternatives")
    ids: bool = option("Read each PROMPT as token ids: '12 7 99'")
    echo: bool = option("Print the prompt before its continuation")
    stats: bool = option("Print speed and cache statistics on stderr")
    stream: bool = option("Print tokens as they are generated, or all at the end", True)

    raw: bool = option("Keep the final newline of standard input")

    def read_prompts(self) -> list[PromptArgument]:
        """Return the prompts; without one, what is piped into standard input, else the empty prompt."""
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        given = self.prompt or (("-",) if is_piped else ("",))
        texts = [parameters.read_text_or_stdin(text, raw=self.raw) for text in given]
        return [parameters.parse_token_ids(text, "--ids") if self.ids else text for text in texts]


@command("generate", _GenerateOptions)
def generate_command(options: _GenerateOptions) -> None:
    """Continue each PROMPT.

    Without a PROMPT, or for `-`, it is read from standard input, without its final newline unless --raw is given. An
    empty prompt starts with the token that opens every document.

    \b
    kvad generate runs/demo "def __init__(self" --max-tokens 64 --temperature 0
    kvad generate runs/demo "import os" "class Node" --n 2 --seed 7 --stats
    kvad generate runs/demo "class Node" --endless
    kvad generate runs/demo - --max-seq-len 128 --overflow offload --stats < long.txt
    kvad generate runs/demo "def __init__(self" --prefix-cache-dir ./prefix-store --stats
    kvad generate runs/demo "def __init__(self" --speculative ngram --stats
    """
    if options.echo and options.as_json:
        raise click.UsageError("--echo and --json exclude each other: the JSON contains the prompts.")
    load, given, prompts = parameters.load_fields(options), options.sampling_fields(), options.read_prompts()
    handle = checkpoint.open_checkpoint(options.model, rope_scaling=options.rope_scaling)
    sampling = options.resolve(given, handle, endless=options.endless).with_seed()
    num_samples = len(prompts) * max(sampling.n, sampling.num_beams)
    max_num_seqs = max(min(sizing.fits.MAX_DEFAULT_SEQS, num_samples), sampling.num_beams)
    longest = _longest(handle, prompts, sampling, load)
    with (
        parameters.open_llm(handle, load, max_num_seqs=max_num_seqs, max_seq_len=longest) as llm,
        parameters.InterruptFlag() as stop,
    ):
        answers = [_Answer(prompt, llm.encode(prompt), [_Sample() for _ in range(sampling.n)]) for prompt in prompts]
        for prompt in prompts:
            note_empty(llm, prompt)
        printer, meter = _Printer(llm, answers, echo=options.echo), RunMeter(llm)
        is_live = options.stream and not options.as_json
        stream = _stream_all(llm, [answer.prompt_token_ids for answer in answers], sampling, options.cache_salt or "")
        with closing(stream) as chunks, closing(printer) if is_live else nullcontext():
            for index, chunk in chunks:
                meter.add(chunk)
                answers[index].num_cached_tokens = meter.metrics[chunk.request].num_cached_tokens
                text = answers[index].add(llm, chunk)
                if is_live:
                    printer.push((index, chunk.sample_index), text, ended=chunk.finish_reason is not None)
                if stop.requested:
                    break
        stats = meter.stats() if options.stats else None
        if options.as_json:
            completions = [answer.record() for answer in answers]
            record = {"model": options.model, "seed": sampling.seed, "interrupted": stop.requested}
            emit_json({**record, "completions": completions, "stats": stats})
        else:
            if not options.stream:
                printer.print_all()
            _print_logprobs(answers)
            if stats is not None:
                print_error("\n".join(stats_lines(stats)))
        _print_limits(llm, answers)
    if sampling.uses_seed and options.seed is None and not options.as_json:
        note(f"seed: {sampling.seed}")
    if stop.requested:
        note("interrupted")
        exit_with(130)


def _longest(
    handle: CheckpointHandle, prompts: Sequence[PromptArgument], sampling: SamplingParams, load: Mapping[str, Any]
) -> int | None:
    """Return the tokens of the longest sequence; None if unknown, or if the cache's policy depends on its length."""
    continues = load.get("endless") or load.get("overflow") in cache.config.CONTINUING_MODES
    if handle.config.kind != "decoder" or continues or sampling.max_tokens is None:
        return None
    encoder = engine.PromptEncoder(handle.config, handle.tokenizer, handle.generation)
    return max(len(encoder.encode_prompt(prompt)) for prompt in prompts) + max(1, sampling.max_tokens)


def note_empty(llm: LLM, prompt: PromptArgument) -> None:
    if not prompt:
        note(f"the prompt is empty: generating from the opening token {_token_text(llm, llm.encode(prompt)[0])}")


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class _ScoredToken:
    text: str
    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    top_texts: tuple[str, ...]

    @staticmethod
    def create(llm: LLM, score: TokenLogprob) -> _ScoredToken:
        text, top = _token_text(llm, score.token_id), tuple(score.top_logprobs)
        return _ScoredToken(
            text, score.token_id, score.logprob, top, tuple(_token_text(llm, token) for token, _ in top)
        )

    def line(self) -> str:
        alternatives = zip(self.top_texts, self.top_logprobs, strict=True)
        top = "  ".join(f"{text} {logprob:.3f}" for text, (_, logprob) in alternatives)
        return f"{self.token_id:>7}  {self.text:<16} {self.logprob:9.4f}  {top}".rstrip()


@dataclass
class _Sample:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[_ScoredToken] = field(default_factory=list)
    finish_reason: str = "abort"  # until the engine reports it
    limit: cache.config.LengthLimit | None = None


@dataclass
class _Answer:
    """One prompt and its samples."""

    prompt: PromptArgument
    prompt_token_ids: list[int]
    choices: list[_Sample]
    prompt_logprobs: list[_ScoredToken] = field(default_factory=list)
    num_cached_tokens: int = 0

    def add(self, llm: LLM, chunk: StreamChunk) -> str:
        """Add a chunk and return its text (token ids if the model has no tokenizer)."""
        sample = self.choices[chunk.sample_index]
        self.prompt_logprobs.extend(_ScoredToken.create(llm, score) for score in chunk.prompt_logprobs)
        text = chunk.text
        if chunk.token_id is not None:
            sample.token_ids.append(chunk.token_id)
            text = text if llm.tokenizer is not None else f"{chunk.token_id} "
        if chunk.logprob is not None:
            sample.logprobs.append(_ScoredToken.create(llm, chunk.logprob))
        if chunk.finish_reason is not None:
            sample.finish_reason, sample.limit = chunk.finish_reason, chunk.limit
        sample.text += text
        return text

    def record(self) -> dict[str, object]:
        """Return the answer for JSON, with the field names of ``kvad.engine.Completion``."""
        num_tokens = sum(len(sample.token_ids) for sample in self.choices)
        usage = engine.output.CompletionUsage(len(self.prompt_token_ids), num_tokens, self.num_cached_tokens)
        names = ("prompt", "prompt_token_ids", "prompt_logprobs", "choices")
        return {**{name: getattr(self, name) for name in names}, "usage": usage}


def _stream_all(
    llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams, cache_salt: str
) -> Generator[tuple[int, StreamChunk], None, None]:
    """Yield (prompt index, chunk) of all prompts in turn, so that they share the steps of the engine."""
    with ExitStack() as closers:
        streams = {
            index: llm.stream(tokens, sampling, cache_salt=cache_salt, draw_salt=prompts[:index].count(tokens))
            for index, tokens in enumerate(prompts)
        }
        for stream in streams.values():
            closers.callback(stream.close)
        while streams:
            for index, stream in list(streams.items()):
                if (chunk := next(stream, None)) is None:
                    del streams[index]
                else:
                    yield index, chunk


def _token_text(llm: LLM, token: int) -> str:
    return str(token) if llm.tokenizer is None else llm.tokenizer.token_text(token)


# ---------------------------------------------------------------- output


class _Printer:
    """Prints samples in order, each under its label if there are several."""

    def __init__(self, llm: LLM, answers: Sequence[_Answer], *, echo: bool) -> None:
        self._llm, self._answers, self._echo = llm, answers, echo
        self._order = [(number, i) for number, answer in enumerate(answers) for i in range(len(answer.choices))]
        self._labeled = len(self._order) > 1
        self._buffers: defaultdict[SampleKey, str] = defaultdict(str)
        self._ended: set[SampleKey] = set()
        self._open = False

    def push(self, key: SampleKey, text: str, *, ended: bool) -> None:
        self._buffers[key] += text
        if ended:
            self._ended.add(key)
        while self._order and self._show(self._order[0]):
            self._order.pop(0)

    def print_all(self) -> None:
        for number, i in list(self._order):
            self.push((number, i), self._answers[number].choices[i].text, ended=True)

    def _show(self, key: SampleKey) -> bool:
        """Print the buffered text of the first sample; return True if the sample is complete."""
        if not self._open:
            self._print_header(key)
        if text := self._buffers.pop(key, ""):
            click.echo(text, nl=False)
        if key in self._ended:
            click.echo()
            self._open = False
        return key in self._ended

    def _print_header(self, key: SampleKey) -> None:
        self._open = True
        answer = self._answers[key[0]]
        if self._labeled:
            sample = f", sample {key[1] + 1}" if len(answer.choices) > 1 else ""
            click.echo(f"==> prompt {key[0] + 1}{sample}: {answer.prompt!r} <==")
        if self._echo:
            tokenizer, tokens = self._llm.tokenizer, answer.prompt_token_ids
            decoded = "".join(f"{token} " for token in tokens) if tokenizer is None else tokenizer.decode(tokens)
            click.echo(answer.prompt if isinstance(answer.prompt, str) else decoded, nl=False)

    def close(self) -> None:
        """Print the buffered text of unfinished samples."""
        for key in list(self._order):
            if self._open or self._buffers.get(key):
                self._ended.add(key)
                self._show(key)
        self._order = []


def _print_logprobs(answers: Sequence[_Answer]) -> None:
    for number, answer in enumerate(answers, 1):
        samples = [(f", sample {i}", sample.logprobs) for i, sample in enumerate(answer.choices, 1)]
        for label, scores in [("", answer.prompt_logprobs), *samples]:
            if scores:
                click.echo(f"\nlog-probabilities of prompt {number}{label}")
                click.echo("\n".join(score.line() for score in scores))


def _print_limits(llm: LLM, answers: Sequence[_Answer]) -> None:
    """Print a line for every text that a limit of the model or the cache ended."""
    several = len(answers) > 1 or any(len(answer.choices) > 1 for answer in answers)
    for number, answer in enumerate(answers, 1):
        for i, sample in enumerate(answer.choices, 1):
            if message := describe_limit(llm, sample.limit):
                note(f"{f'prompt {number}, sample {i}: ' if several else ''}{message}")
