"""``kvad generate MODEL [PROMPT...]``: continue prompts, while you watch.

The continuation goes to stdout, everything else to stderr.  Several samples are generated side by side and shown one
after another, each under its label: the first that is not finished appears as it comes, the others wait for their turn.
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
@click.option("--n", type=int, help="Samples of each prompt; they share its cache [default: 1].")
@click.option("--logprobs", type=int, metavar="N", help="Log-probabilities of the output, with N alternatives.")
@click.option("--prompt-logprobs", type=int, metavar="N", help="The same for the prompt.")
@click.option("--ids", is_flag=True, help="Each PROMPT is a list of token ids: '12 7 99'.")
@click.option("--echo", is_flag=True, help="Print the prompt before its continuation.")
@add_cache_options
@click.option("--stats", is_flag=True, help="Speed, and what the cache did, on stderr.")
@click.option("--stream/--no-stream", default=True, help="Print tokens as they come [default], or all at the end.")
@json_option
def generate_command(model: Path, prompt: tuple[str, ...], **options: Any) -> None:
    """Continue each PROMPT.  `-` reads one from standard input, exactly as it is, its last newline too; an empty one
    begins with the token that opens every document.

    \b
    kvad generate runs/demo "def " --max-tokens 64 --temperature 0
    kvad generate runs/demo "import " "class " --n 2 --seed 7 --stats
    kvad generate runs/demo "class " --endless
    kvad generate runs/demo - --context 128 --on-full spill --stats < long.txt
    kvad generate runs/demo "def " --tier cache --stats
    """
    if options["echo"] and options["as_json"]:
        raise click.UsageError("--echo and --json both given: the JSON has every prompt.")
    given = parse_sampling_options(options)
    parse_policy_options(options)
    prompts = [_read(text, options["ids"]) for text in prompt] or [""]
    from kvad.checkpoint import open_checkpoint
    from kvad.llm import resolve_sampling

    opened = open_checkpoint(model)
    asked = resolve_sampling(given, opened.generation)
    rows = max(min(8, len(prompts) * max(asked.n, asked.num_beams)), asked.num_beams)
    with open_llm(opened.path, options, rows=rows) as llm, InterruptFlag() as stop:
        sampling = resolve_sampling_options(llm, given, options["bad_word"], endless=options["endless"])
        answers = [_Answer.of(llm, each, sampling.n) for each in prompts]
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
    """Say on stderr what an empty prompt becomes."""
    if not prompt:
        assert llm.tokenizer is not None
        opening = llm.tokenizer.token_text(llm.encode(prompt)[0])
        click.echo(f"kvad: the prompt is empty: generating from the opening token {opening}", err=True)


# ---------------------------------------------------------------- what comes out


@dataclass
class _Sample:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    finish: str = "cancelled"  # until the engine says otherwise
    limit: cache.config.LengthLimit | None = None


@dataclass
class _Answer:
    """One prompt and what became of it."""

    prompt: PromptArgument
    tokens: list[int]
    samples: list[_Sample]
    scores: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0

    @staticmethod
    def of(llm: LLM, prompt: PromptArgument, n: int) -> _Answer:
        tokens = llm.encode(prompt)
        note_empty(llm, prompt)
        return _Answer(prompt, tokens, [_Sample() for _ in range(n)])

    def add(self, llm: LLM, piece: StreamChunk) -> str:
        """Take a piece in; returns its text (a model without a tokenizer speaks in ids)."""
        sample = self.samples[piece.sample_index]
        self.scores.extend(piece.prompt_logprobs)
        text = piece.text
        if piece.token_id is not None:
            sample.tokens.append(piece.token_id)
            text = text if llm.tokenizer is not None else f"{piece.token_id} "
        if piece.logprob is not None:
            sample.scores.append(piece.logprob)
        if piece.finish_reason is not None:
            sample.finish, sample.limit = piece.finish_reason, piece.limit
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
    with closing(_pieces(llm, [answer.tokens for answer in answers], sampling)) as pieces:
        for number, piece in pieces:
            meter.add(piece)
            answers[number].cached = meter.usage(piece.request).num_cached_tokens
            text = answers[number].add(llm, piece)
            if printer is not None:
                printer.push((number, piece.sample_index), text, ended=piece.finish_reason is not None)
            if stop.requested:
                return


def _pieces(
    llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams
) -> Generator[tuple[int, StreamChunk], None, None]:
    """(prompt's number, piece) of all prompts in turn, so that they share the engine's steps."""
    live = {number: llm.stream(tokens, sampling) for number, tokens in enumerate(prompts)}
    try:
        while live:
            for number, stream in list(live.items()):
                piece = next(stream, None)
                if piece is None:
                    del live[number]
                else:
                    yield number, piece
    finally:
        for stream in live.values():
            stream.close()


SampleKey = tuple[int, int]  # (prompt, sample)


class _Printer:
    """Shows samples in order, each whole, under its label where there are several."""

    def __init__(self, llm: LLM, answers: Sequence[_Answer], *, echo: bool) -> None:
        self._llm, self._answers, self._echo = llm, answers, echo
        self._order = [(number, i) for number, answer in enumerate(answers) for i in range(len(answer.samples))]
        self._labeled = len(self._order) > 1
        self._held: dict[SampleKey, str] = dict.fromkeys(self._order, "")
        self._ended: set[SampleKey] = set()
        self._open = False

    def push(self, key: SampleKey, text: str, *, ended: bool) -> None:
        self._held[key] += text
        if ended:
            self._ended.add(key)
        while self._order and self._show(self._order[0]):
            self._order.pop(0)

    def _show(self, key: SampleKey) -> bool:
        """Print what is held of the sample at the front; whether it is done."""
        if not self._open:
            self._begin(key)
        if self._held[key]:
            click.echo(self._held[key], nl=False)
            self._held[key] = ""
        if key in self._ended:
            click.echo()
            self._open = False
        return key in self._ended

    def _begin(self, key: SampleKey) -> None:
        self._open = True
        if self._labeled:
            click.echo(_label(self._answers, key))
        if self._echo:
            answer = self._answers[key[0]]
            text = answer.prompt if isinstance(answer.prompt, str) else _text(self._llm, answer.tokens)
            click.echo(text, nl=False)

    def close(self) -> None:
        """Show what was generated before it was interrupted."""
        for key in list(self._order):
            if self._open or self._held[key]:
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
    """What is printed after the texts, and before them the texts that were not streamed."""
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
    """A line for every text that a limit of the model or of the cache ended."""
    several = len(answers) > 1 or any(len(answer.samples) > 1 for answer in answers)
    for number, answer in enumerate(answers, 1):
        for i, sample in enumerate(answer.samples, 1):
            said = describe_limit(llm, sample.limit)
            if said:
                click.echo(f"kvad: {f'prompt {number}, sample {i}: ' if several else ''}{said}", err=True)


def _table(llm: LLM, scores: Sequence[TokenLogprob]) -> None:
    for score in scores:
        top = "  ".join(f"{_piece(llm, token)} {logprob:.3f}" for token, logprob in score.top_logprobs)
        click.echo(f"{score.token_id:>7}  {_piece(llm, score.token_id):<16} {score.logprob:9.4f}  {top}".rstrip())


def _piece(llm: LLM, token: int) -> str:
    return str(token) if llm.tokenizer is None else llm.tokenizer.token_text(token)


def _as_json(llm: LLM, model: Path, answers: Sequence[_Answer], stats: RunStats | None, interrupted: bool) -> object:
    def scores(found: Sequence[TokenLogprob]) -> list[object]:
        return [
            {
                "token": s.token_id,
                "text": _piece(llm, s.token_id),
                "logprob": s.logprob,
                "top": [list(pair) for pair in s.top_logprobs],
            }
            for s in found
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
