"""``kvad generate MODEL [PROMPT...]``: continue prompts and stream the text.

Continuations go to stdout, everything else to stderr. Several samples are generated in one batch and shown in order,
each under its label: the first unfinished sample is streamed, the text of later ones is buffered.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.cache_options import describe_limit, parse_policy_options
from kvad.cli.model_options import (
    InterruptFlag,
    add_cache_options,
    open_llm,
    parse_sampling_options,
    read_stdin,
    resolve_sampling_options,
    sampling_options,
)
from kvad.cli.options import SectionedCommand, emit_json, json_option, model_argument, token_ids
from kvad.cli.stats import RunMeter, RunStats, stats_lines

if TYPE_CHECKING:
    from kvad import cache
    from kvad.engine import StreamChunk
    from kvad.engine.scheduling import SamplingParams, TokenLogprob
    from kvad.llm import LLM

PromptArgument = str | list[int]


@click.command(cls=SectionedCommand)
@model_argument
@click.argument("prompt", nargs=-1, metavar="[PROMPT]...|-")
@sampling_options
@click.option("--n", type=int, help="Samples of each prompt, which share its cache [default: 1].")
@click.option("--logprobs", type=int, metavar="N", help="Print log-probabilities of the output, with N alternatives.")
@click.option(
    "--prompt-logprobs", type=int, metavar="N", help="Print log-probabilities of the prompt, with N alternatives."
)
@click.option("--ids", is_flag=True, help="Read each PROMPT as token ids: '12 7 99'.")
@click.option("--echo", is_flag=True, help="Print the prompt before its continuation.")
@add_cache_options
@click.option("--stats", is_flag=True, help="Print speed and cache statistics on stderr.")
@click.option(
    "--stream/--no-stream",
    default=True,
    help="Print tokens as they are generated, or all at the end [default: --stream].",
)
@json_option
def generate_command(model: Path, prompt: tuple[str, ...], **options: Any) -> None:
    """Continue each PROMPT.

    `-` reads one from standard input unchanged, including its last newline. An empty prompt starts with the token that
    opens every document.

    \b
    kvad generate runs/demo "def " --max-tokens 64 --temperature 0
    kvad generate runs/demo "import " "class " --n 2 --seed 7 --stats
    kvad generate runs/demo "class " --endless
    kvad generate runs/demo - --max-seq-len 128 --overflow offload --stats < long.txt
    kvad generate runs/demo "def " --prefix-cache-dir cache --stats
    """
    if options["echo"] and options["as_json"]:
        raise click.UsageError("--echo and --json exclude each other: the JSON contains the prompts.")
    given = parse_sampling_options(options)
    parse_policy_options(options)
    prompts = [_read(text, options["ids"]) for text in prompt] or [""]
    from kvad.checkpoint import open_checkpoint
    from kvad.llm import resolve_sampling

    handle = open_checkpoint(model)
    requested = resolve_sampling(given, handle.generation)
    num_samples = len(prompts) * max(requested.n, requested.num_beams)
    max_num_seqs = max(min(8, num_samples), requested.num_beams)
    with open_llm(handle.path, options, max_num_seqs=max_num_seqs) as llm, InterruptFlag() as stop:
        sampling = resolve_sampling_options(llm, given, options["bad_word"], endless=options["endless"])
        answers = [_Answer.create(llm, text, sampling.n) for text in prompts]
        printer = _Printer(llm, answers, echo=options["echo"]) if options["stream"] and not options["as_json"] else None
        meter = RunMeter(llm)
        try:
            _collect(llm, answers, sampling, meter, printer, stop)
        finally:
            if printer is not None:
                printer.close()
        if options["as_json"]:
            emit_json(_as_json(llm, model, answers, meter.stats() if options["stats"] else None, stop.requested))
        else:
            _print_stats(llm, answers, options, meter.stats() if options["stats"] else None)
        _print_limits(llm, answers)
    if stop.requested:
        click.echo("kvad: interrupted", err=True)
        click.get_current_context().exit(130)


def _read(text: str, ids: bool) -> PromptArgument:
    text = read_stdin() if text == "-" else text
    return token_ids(text, "--ids") if ids else text


def note_empty(llm: LLM, prompt: PromptArgument) -> None:
    """Report on stderr that an empty prompt starts with the opening token."""
    if not prompt:
        assert llm.tokenizer is not None
        opening_token = llm.tokenizer.token_text(llm.encode(prompt)[0])
        click.echo(f"kvad: the prompt is empty: generating from the opening token {opening_token}", err=True)


# ---------------------------------------------------------------- answers


@dataclass
class _Sample:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    finish: str = "abort"  # until the engine reports the finish reason
    limit: cache.config.LengthLimit | None = None


@dataclass
class _Answer:
    """One prompt and its samples."""

    prompt: PromptArgument
    tokens: list[int]
    samples: list[_Sample]
    scores: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0

    @staticmethod
    def create(llm: LLM, prompt: PromptArgument, n: int) -> _Answer:
        tokens = llm.encode(prompt)
        note_empty(llm, prompt)
        return _Answer(prompt, tokens, [_Sample() for _ in range(n)])

    def add(self, llm: LLM, chunk: StreamChunk) -> str:
        """Add a chunk and return its text (token ids if the model has no tokenizer)."""
        sample = self.samples[chunk.sample_index]
        self.scores.extend(chunk.prompt_logprobs)
        text = chunk.text
        if chunk.token_id is not None:
            sample.tokens.append(chunk.token_id)
            text = text if llm.tokenizer is not None else f"{chunk.token_id} "
        if chunk.logprob is not None:
            sample.scores.append(chunk.logprob)
        if chunk.finish_reason is not None:
            sample.finish, sample.limit = chunk.finish_reason, chunk.limit
        sample.text += text
        return text


def _collect(
    llm: LLM,
    answers: Sequence[_Answer],
    sampling: SamplingParams,
    meter: RunMeter,
    printer: _Printer | None,
    stop: InterruptFlag,
) -> None:
    with closing(_stream_all(llm, [answer.tokens for answer in answers], sampling)) as chunks:
        for index, chunk in chunks:
            meter.add(chunk)
            answers[index].cached = meter.usage(chunk.request).num_cached_tokens
            text = answers[index].add(llm, chunk)
            if printer is not None:
                printer.push((index, chunk.sample_index), text, ended=chunk.finish_reason is not None)
            if stop.requested:
                return


def _stream_all(
    llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams
) -> Generator[tuple[int, StreamChunk], None, None]:
    """Yield (prompt index, chunk) of all prompts in turn, so that they share the steps of the engine."""
    streams = {index: llm.stream(tokens, sampling) for index, tokens in enumerate(prompts)}
    try:
        while streams:
            for index, stream in list(streams.items()):
                chunk = next(stream, None)
                if chunk is None:
                    del streams[index]
                else:
                    yield index, chunk
    finally:
        for stream in streams.values():
            stream.close()


SampleKey = tuple[int, int]  # (prompt, sample)


class _Printer:
    """Prints samples in order, each under its label if there are several."""

    def __init__(self, llm: LLM, answers: Sequence[_Answer], *, echo: bool) -> None:
        self._llm, self._answers, self._echo = llm, answers, echo
        self._order = [(number, i) for number, answer in enumerate(answers) for i in range(len(answer.samples))]
        self._labeled = len(self._order) > 1
        self._buffers: dict[SampleKey, str] = dict.fromkeys(self._order, "")
        self._ended: set[SampleKey] = set()
        self._open = False

    def push(self, key: SampleKey, text: str, *, ended: bool) -> None:
        self._buffers[key] += text
        if ended:
            self._ended.add(key)
        while self._order and self._show(self._order[0]):
            self._order.pop(0)

    def _show(self, key: SampleKey) -> bool:
        """Print the buffered text of the first sample; return True if the sample is complete."""
        if not self._open:
            self._print_header(key)
        if self._buffers[key]:
            click.echo(self._buffers[key], nl=False)
            self._buffers[key] = ""
        if key in self._ended:
            click.echo()
            self._open = False
        return key in self._ended

    def _print_header(self, key: SampleKey) -> None:
        self._open = True
        if self._labeled:
            click.echo(_label(self._answers, key))
        if self._echo:
            answer = self._answers[key[0]]
            text = answer.prompt if isinstance(answer.prompt, str) else _text(self._llm, answer.tokens)
            click.echo(text, nl=False)

    def close(self) -> None:
        """Print the buffered text of unfinished samples."""
        for key in list(self._order):
            if self._open or self._buffers[key]:
                self._ended.add(key)
                self._show(key)
        self._order = []


def _label(answers: Sequence[_Answer], key: SampleKey) -> str:
    sample = f", sample {key[1] + 1}" if len(answers[key[0]].samples) > 1 else ""
    prompt = answers[key[0]].prompt
    return f"==> prompt {key[0] + 1}{sample}: {prompt!r} <=="


def _text(llm: LLM, tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens) if llm.tokenizer is None else llm.tokenizer.decode(tokens)


def _print_stats(llm: LLM, answers: Sequence[_Answer], options: dict[str, Any], stats: RunStats | None) -> None:
    """Print texts that were not streamed, log-probabilities and statistics."""
    if not options["stream"]:
        printer = _Printer(llm, answers, echo=options["echo"])
        for number, answer in enumerate(answers):
            for i, sample in enumerate(answer.samples):
                printer.push((number, i), sample.text, ended=True)
    for number, answer in enumerate(answers):
        if answer.scores:
            click.echo(f"\nlog-probabilities of prompt {number + 1}")
            _table(llm, answer.scores)
        for i, sample in enumerate(answer.samples):
            if sample.scores:
                click.echo(f"\nlog-probabilities of prompt {number + 1}, sample {i + 1}")
                _table(llm, sample.scores)
    for line in [] if stats is None else stats_lines(stats):
        click.echo(line, err=True)


def _print_limits(llm: LLM, answers: Sequence[_Answer]) -> None:
    """Print a line for every text that a limit of the model or the cache ended."""
    several = len(answers) > 1 or any(len(answer.samples) > 1 for answer in answers)
    for number, answer in enumerate(answers, 1):
        for i, sample in enumerate(answer.samples, 1):
            message = describe_limit(llm, sample.limit)
            if message:
                click.echo(f"kvad: {f'prompt {number}, sample {i}: ' if several else ''}{message}", err=True)


def _table(llm: LLM, scores: Sequence[TokenLogprob]) -> None:
    for score in scores:
        top = "  ".join(f"{_token_text(llm, token)} {logprob:.3f}" for token, logprob in score.top_logprobs)
        click.echo(f"{score.token_id:>7}  {_token_text(llm, score.token_id):<16} {score.logprob:9.4f}  {top}".rstrip())


def _token_text(llm: LLM, token: int) -> str:
    return str(token) if llm.tokenizer is None else llm.tokenizer.token_text(token)


def _as_json(llm: LLM, model: Path, answers: Sequence[_Answer], stats: RunStats | None, interrupted: bool) -> object:
    def scores(logprobs: Sequence[TokenLogprob]) -> list[object]:
        return [
            {
                "token": s.token_id,
                "text": _token_text(llm, s.token_id),
                "logprob": s.logprob,
                "top": [list(pair) for pair in s.top_logprobs],
            }
            for s in logprobs
        ]

    return {
        "model": model,
        "interrupted": interrupted,
        "completions": [
            {
                "prompt": answer.prompt,
                "prompt_tokens": answer.tokens,
                "prompt_logprobs": scores(answer.scores),
                "samples": [
                    {
                        "text": s.text,
                        "tokens": s.tokens,
                        "finish_reason": s.finish,
                        "limit": s.limit,
                        "logprobs": scores(s.scores),
                    }
                    for s in answer.samples
                ],
                "usage": {
                    "prompt": len(answer.tokens),
                    "completion": sum(len(sample.tokens) for sample in answer.samples),
                    "cached": answer.cached,
                },
            }
            for answer in answers
        ],
        "stats": stats,
    }
