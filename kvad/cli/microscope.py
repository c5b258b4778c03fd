"""``kvad inspect MODEL --cache``: what becomes of every token in the cache, and why (``lab/microscope.py``).

The map goes to stdout; so does ``--json``, the same and all of it (docs/kv-cache.md has its schema).  ``--html`` is
one file that shows the run step by step and asks nothing of a network.  The cache is to order as for ``kvad generate``;
a session is read, and never written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from kvad.cache.sessions import read_tokens
from kvad.cli.common import emit_json, explicit_options, token_ids
from kvad.cli.running import add_cache_options, open_llm, read_stdin
from kvad.cli.session import read_session_header, sessions_option, with_saved_options
from kvad.errors import DataError, RequestError, UsageError, format_count

if TYPE_CHECKING:
    from kvad.checkpoint.open import CheckpointHandle
    from kvad.lab.slide import TraceReport
    from kvad.llm import LLM

__all__ = ["trace_cache", "trace_options"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
TOKENS = 32
MAX_SEQS = 8


def trace_options(command: CommandT) -> CommandT:
    """Their values are None, False or empty, unless they are given."""
    options: list[Callable[[Any], Any]] = [
        click.option("--cache", is_flag=True, help="Run prompts and show what becomes of their tokens in the cache."),
        click.option(
            "--prompt", multiple=True, metavar="TEXT", help="Of --cache: what to run; repeatable, - is stdin."
        ),
        click.option(
            "--file",
            multiple=True,
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Of --cache: a prompt, from a file.",
        ),
        click.option("--ids", is_flag=True, default=None, help="Of --cache: prompts are token ids: '12 7 99'."),
        click.option("--tokens", type=int, metavar="N", help=f"Of --cache: so many to generate [default: {TOKENS}]."),
        click.option(
            "--samples", type=int, metavar="N", help="Of --cache: of each prompt; they share it [default: 1]."
        ),
        click.option("--temperature", type=float, help="Of --cache [default: 0, greedy]."),
        click.option("--seed", type=int, help="Of --cache: of the samples [default: 0]."),
        add_cache_options,
        click.option(
            "--session", metavar="NAME", help="Of --cache: prompts go on from this session; it stays as it is."
        ),
        sessions_option,
        click.option("--token", multiple=True, type=int, metavar="I", help="Of --cache: tell this token's story."),
        click.option(
            "--html",
            metavar="FILE",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Of --cache: write a page.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def trace_cache(
    model: Path,
    options: Mapping[str, Any],
    *,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run, and show it as asked."""
    _check(options)
    slide = _run(model, options)
    for name, chosen, count in (("layer", layers, slide.layers), ("head", heads, _heads(slide))):
        if bad := [number for number in chosen or () if number >= count]:
            raise RequestError(f"--{name} {bad[0]} is not one of 0..{count - 1}")
    if options["html"] is not None:
        from kvad.lab.cachepage import trace_to_html

        options["html"].write_text(trace_to_html(slide), encoding="utf-8")
        click.echo(f"kvad: {options['html']}: open it in a browser", err=True)
    from kvad.lab.drawslide import trace_to_text
    from kvad.lab.slide import trace_to_json as json_of

    if as_json and out is None:
        emit_json(json_of(slide))
        return
    width = 100 if out is not None else shutil.get_terminal_size((100, 24)).columns
    if out is not None and (as_json or out.suffix == ".json"):
        from kvad.cli.common import json_line

        drawn = json_line(json_of(slide))
    else:
        drawn = trace_to_text(slide, width=width, layers=layers, heads=heads, tokens=options["token"])
    if out is None:
        click.echo(drawn)
    else:
        out.write_text(drawn + "\n", encoding="utf-8")


def _check(options: Mapping[str, Any]) -> None:
    if not options["prompt"] and not options["file"] and options["session"] is None:
        raise click.UsageError("--cache needs something to run: give --prompt TEXT, --file FILE or --session NAME.")
    given_here = click.get_current_context().get_parameter_source("sessions") is ParameterSource.COMMANDLINE
    if options["session"] is None and given_here:
        raise click.UsageError("--sessions says where a session is: give --session NAME too.")
    if options["deterministic"]:
        raise click.UsageError("--deterministic and --cache: weights take the kernel that shows them.")
    for name, least in (("tokens", 0), ("samples", 1), ("rows", 1)):
        if options[name] is not None and options[name] < least:
            raise UsageError(f"--{name} {options[name]}: must be at least {least}")
    if bad := [number for number in options["token"] if number < 0]:
        raise UsageError(f"--token {bad[0]}: positions count from 0")


def _heads(slide: TraceReport) -> int:
    return max(group.kv_heads for group in slide.groups)


def _run(model: Path, options: Mapping[str, Any]) -> TraceReport:
    from kvad.checkpoint.open import open_checkpoint
    from kvad.lab.microscope import trace_requests as watch

    session, path, before = options["session"], None, list[int]()
    if session is not None:
        path, header = read_session_header(session, options)
        options, before = with_saved_options(options, header), read_tokens(path, header.metadata["history"])
    opened = open_checkpoint(model)
    prompts = _prompts(opened, options, before)
    tokens = TOKENS if options["tokens"] is None else options["tokens"]
    with _open(opened, prompts, tokens, options) as llm:
        asked = {"temperature": 0.0, "max_tokens": tokens, **explicit_options(options, ("temperature", "seed"))}
        sampling = llm.sampling_params(n=options["samples"] or 1, **asked)
        tokenizer = llm.tokenizer
        piece: Callable[[int], str] = str if tokenizer is None else tokenizer.token_text
        state = None if path is None else llm.session(path).state
        return watch(llm.engine, prompts, sampling, model=str(model), piece=piece, resume=state, session=session or "")


def _open(opened: CheckpointHandle, prompts: Sequence[Sequence[int]], tokens: int, options: Mapping[str, Any]) -> LLM:
    """With a cache of just the size that the prompts ask for, where nothing else is said."""
    longest = max(map(len, prompts))
    rows = min(MAX_SEQS, len(prompts) * (options["samples"] or 1))
    context = options["context"] or min(opened.config.max_seq_len, longest + max(tokens, 1))
    return open_llm(opened.path, {**options, "context": context}, rows=rows)


def _prompts(opened: CheckpointHandle, options: Mapping[str, Any], before: Sequence[int]) -> list[list[int]]:
    """``before``: the tokens of a session, which every prompt goes on from."""
    from kvad.engine.texts import PromptEncoder

    if opened.config.kind != "decoder":
        raise RequestError(f"an {opened.config.kind} cannot be examined yet", "examine a decoder")
    texts = PromptEncoder(opened.config, opened.tokenizer, opened.generation)
    given_texts = [*(read_stdin() if text == "-" else text for text in options["prompt"])]
    given_texts += [_read(path) for path in options["file"]]
    asked = [token_ids(text, "--ids") if options["ids"] else text for text in given_texts]
    if before:
        made = [[*before, *texts.encode_continuation(each)] for each in asked or [""]]
    else:
        made = [texts.encode_prompt(each) for each in asked]
    for tokens in made:
        if len(tokens) > opened.config.max_seq_len and not options["endless"]:
            said = (
                f"the prompt has {format_count(len(tokens), 'token')}, the model's limit is {opened.config.max_seq_len}"
            )
            raise RequestError(said, "shorten it")
    return made


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
