"""``kvad inspect MODEL``: what is in a checkpoint, from its headers; ``--tree`` draws its architecture, ``--attention``
any layer and head while it reads a text, ``--cache`` what becomes of every token in the cache (``microscope.py``).

``kvad inspect MODEL --cache``: what becomes of every token in the cache, and why (``lab/microscope.py``).

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

from kvad.cache import sessions
from kvad.cli.commands.session import read_session_header, sessions_option, with_saved_options
from kvad.cli.model_options import add_cache_options, open_llm, read_stdin
from kvad.cli.options import (
    SectionedCommand,
    emit_json,
    explicit_options,
    format_bytes,
    json_line,
    json_option,
    model_argument,
    token_ids,
)
from kvad.errors import DataError, RequestError, UsageError, format_count

if TYPE_CHECKING:
    from kvad import inspection
    from kvad.checkpoint import CheckpointHandle
    from kvad.inspection import TraceReport
    from kvad.llm import LLM

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
        from kvad.inspection import trace_to_html

        options["html"].write_text(trace_to_html(slide), encoding="utf-8")
        click.echo(f"kvad: {options['html']}: open it in a browser", err=True)
    from kvad.inspection import trace_to_json as json_of
    from kvad.inspection import trace_to_text

    if as_json and out is None:
        emit_json(json_of(slide))
        return
    width = 100 if out is not None else shutil.get_terminal_size((100, 24)).columns
    if out is not None and (as_json or out.suffix == ".json"):
        from kvad.cli.options import json_line

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
    from kvad.checkpoint import open_checkpoint
    from kvad.inspection import trace_requests as watch

    session, path, before = options["session"], None, list[int]()
    if session is not None:
        path, header = read_session_header(session, options)
        options, before = (
            with_saved_options(options, header),
            sessions.directory.read_tokens(path, header.metadata["history"]),
        )
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
    from kvad.engine import PromptEncoder

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


DRAWINGS = {  # what is drawn -> its formats, the default first
    "attention": ("terminal", "svg", "png", "json"),
    "tree": ("text", "svg", "mermaid", "json"),
}
ENDINGS = {".svg": "svg", ".png": "png", ".json": "json", ".mmd": "mermaid"}
FORMATS = tuple(dict.fromkeys(form for forms in DRAWINGS.values() for form in forms))


@click.command(cls=SectionedCommand)
@model_argument
@click.option("--tensors", is_flag=True, help="List every tensor: dtype, shape, bytes.")
@click.option("--check", is_flag=True, help="Read every file and compare its sha256 with the manifest's.")
@click.option("--tree", is_flag=True, help="Draw the architecture, of a config or a known shape, too.")
@click.option("--attention", metavar="TEXT", help="Draw who looks at whom while reading TEXT (loads the model).")
@click.option(
    "--target",
    metavar="TEXT",
    help="Of the maps of an encoder-decoder: what it says to TEXT [default: its own answer].",
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="I",
    help="Of the maps; repeatable, or 'all' [default: 0; --cache: all].",
)
@click.option("--head", "heads", multiple=True, metavar="J", help="The same.")
@click.option("--cached", is_flag=True, help="Of the maps: read through the KV cache.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Of a drawing [default: text, or terminal].")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Of a drawing.")
@trace_options
@json_option
def inspect_command(
    model: Path,
    tensors: bool,
    check: bool,
    tree: bool,
    attention: str | None,
    target: str | None,
    layers: tuple[str, ...],
    heads: tuple[str, ...],
    cached: bool,
    form: str | None,
    out: Path | None,
    cache: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """What is in a checkpoint or a Hugging Face model: config, parameters, tensors, memory, tokenizer, training.

    Only headers are read, unless --check reads it all.  Exit code 1 when kvad's own has no manifest, or when files or
    tensors are missing or do not fit manifest and config; 2 when --check finds another file than was saved.

    \b
    kvad inspect runs/demo --tensors
    kvad inspect google/gemma-2-2b --tree
    kvad inspect runs/demo --tree --out tree.svg
    kvad inspect runs/demo --attention "def add(a, b):" --layer 2 --head all
    kvad inspect runs/de-en --attention "ein haus" --head all --out heads.png
    kvad inspect runs/demo --cache --prompt "def add(a, b):" --policy "heavy-hitters(32)" --html cache.html
    """
    if cache:
        others = {"tensors": tensors, "check": check, "tree": tree, "attention": attention is not None}
        _reject_options(others, "and --cache are two questions: ask one of them.")
        _reject_options(
            {"cached": cached, "target": target, "format": form},
            "belongs to other drawings: --cache gives text, --json or --html.",
        )
        wanted = _numbers("layer", layers, []), _numbers("head", heads, [])
        trace_cache(model, options, layers=wanted[0] or None, heads=wanted[1] or None, out=out, as_json=as_json)
        return
    source = click.get_current_context().get_parameter_source
    said = {name: value for name, value in options.items() if source(name) is ParameterSource.COMMANDLINE}
    _reject_options(said, "belongs to the microscope: give --cache too.")
    maps = {"layer": layers, "head": heads, "target": target, "cached": cached}
    drawn = "tree" if tree else None if attention is None else "attention"
    if tree and attention is not None:
        raise click.UsageError("--tree and --attention are two drawings: ask for one of them.")
    _reject_options(
        maps if drawn != "attention" else {}, "belongs to a drawing of attention: give --attention TEXT too."
    )
    if drawn is None:
        _reject_options({"format": form, "out": out}, "belongs to a drawing: give --tree or --attention TEXT too.")
        _show(model, tensors, check, as_json)
        return
    _reject_options({"tensors": tensors, "check": check}, f"and --{drawn} are two questions: ask one of them.")
    chosen = _format(drawn, form, out, as_json)
    if attention is None:
        drawing = _tree(model, chosen)
    else:
        drawing = _draw(model, attention, target, layers, heads, cached, chosen, out)
    if chosen == "png":
        return
    if out is None:
        click.echo(drawing, nl=not drawing.endswith("\n"))
    else:
        out.write_text(drawing.rstrip("\n") + "\n", encoding="utf-8")


def _reject_options(said: Mapping[str, object], why: str) -> None:
    for name, value in said.items():
        if value not in (None, ()) and value is not False:  # 0 was said, too
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def _format(drawn: str, form: str | None, out: Path | None, as_json: bool) -> str:
    """As asked, else by the file's ending, else the first that this drawing has."""
    known = DRAWINGS[drawn]
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} both given.")
    if as_json:
        return "json"
    if form is not None:
        if form not in known:
            raise click.UsageError(f"--{drawn} has no format {form}: {', '.join(known)}.")
        return form
    if out is None or out.suffix == ".txt":
        return known[0]
    found = ENDINGS.get(out.suffix, "")
    if found not in known:
        endings = [ending for ending, name in ENDINGS.items() if name in known]
        raise UsageError(
            f"{out}: its ending names no format", f"name it {', '.join(endings)} or .txt, or give --format"
        )
    return found


def _tree(model: Path, form: str) -> str:
    from kvad import inspection
    from kvad.planning import read_target

    target = read_target(str(model))
    stored = "float32" if target.stored_dtype == "float16" else target.stored_dtype
    root = inspection.model_tree.build_model_tree(
        target.config, Path(target.name).name or target.name, dtype=stored or "float32"
    )
    if form == "json":
        return json_line(inspection.model_tree.tree_to_json(root))
    return {
        "text": inspection.model_tree.tree_to_text,
        "svg": inspection.model_tree.tree_to_svg,
        "mermaid": inspection.model_tree.tree_to_mermaid,
    }[form](root)


def _show(model: Path, tensors: bool, check: bool, as_json: bool) -> None:
    from kvad import inspection

    summary = inspection.checkpoint.summarize_checkpoint(model, check=check)
    if as_json:
        emit_json(inspection.checkpoint.summary_to_json(summary))
    else:
        click.echo("\n".join(_page(summary, tensors)))
    if summary.problems:
        click.get_current_context().exit(1)


def _page(summary: inspection.checkpoint.CheckpointSummary, tensors: bool) -> list[str]:
    from kvad import inspection
    from kvad.cli.commands.plan import memory_lines, request_lines

    dtypes = sorted({tensor.dtype for tensor in summary.tensors})
    size = sum(tensor.bytes for tensor in summary.tensors)
    count = f"{format_count(summary.num_parameters, 'parameter')} in {format_count(len(summary.tensors), 'tensor')}"
    origin = "" if summary.origin is None else f"Hugging Face's {summary.origin}, "
    lines = [
        f"{summary.path}: {origin}{count}, {', '.join(dtypes)}, {format_bytes(size)}",
        *(f"problem: {problem}" for problem in summary.problems),
        "",
        "config",
        *(f"  {line}" for line in inspection.checkpoint.outline_values(summary.config.to_dict())),
        "",
        "parameters",
        *(
            f"  {part:<12}{count:>16,}  {count / max(summary.num_parameters, 1):>6.1%}"
            for part, count in _parts(summary)
        ),
        "",
        f"memory of {request_lines(summary.plan)} (kvad plan answers for others)",
        *(f"  {line}".rstrip() for line in memory_lines(summary.plan)),
        "",
        _manifest_line(summary),
        _tokenizer_line(summary),
        *_training_lines(summary),
    ]
    return lines + (["", "tensors", *_tensor_lines(summary)] if tensors else [])


def _parts(summary: inspection.checkpoint.CheckpointSummary) -> list[tuple[str, int]]:
    return [(part, count) for part, count in summary.parameters.items() if count]


def _manifest_line(summary: inspection.checkpoint.CheckpointSummary) -> str:
    if summary.files is None and summary.origin is not None:
        return "manifest: a Hugging Face folder has none; kvad doctor reads it all"
    if summary.files is None:
        return "manifest: none; the files cannot be compared with what was saved"
    checked = "every sha256 agrees" if summary.checked else "--check compares their sha256"
    return f"manifest: {format_count(summary.files, 'file')}; {checked}"


def _tokenizer_line(summary: inspection.checkpoint.CheckpointSummary) -> str:
    found = summary.tokenizer
    if found is None:
        return "tokenizer: none; prompts can only be token ids"
    specials = ", ".join(f"{name} = {number}" for name, number in found.specials.items()) or "no specials"
    return f"tokenizer: {found.kind}, {format_count(found.vocab, 'token')}; {specials}"


def _training_lines(summary: inspection.checkpoint.CheckpointSummary) -> list[str]:
    from kvad import inspection

    if summary.training is None:
        return ["training: the checkpoint says nothing of it"]
    return ["training", *(f"  {line}" for line in inspection.checkpoint.outline_values(summary.training))]


def _tensor_lines(summary: inspection.checkpoint.CheckpointSummary) -> list[str]:
    longest = max((len(tensor.name) for tensor in summary.tensors), default=0)
    return [
        f"  {tensor.name:<{longest}}  {tensor.dtype:<9}{tensor.shape!s:>18}{tensor.bytes:>16,}"
        for tensor in summary.tensors
    ]


def _draw(
    model: Path,
    text: str,
    target: str | None,
    layers: tuple[str, ...],
    heads: tuple[str, ...],
    cached: bool,
    form: str,
    out: Path | None,
) -> str:
    """What is to be printed or written; a PNG is written here."""
    import json

    from kvad import inspection

    if form == "png" and out is None:
        raise UsageError("a PNG needs a file", "name it: --out heads.png")
    more = {} if target is None else {"target": target}
    wanted = _numbers("layer", layers, [0]), _numbers("head", heads, [0])
    seen = inspection.checkpoint.attention_maps(model, text, layers=wanted[0], heads=wanted[1], cached=cached, **more)
    if form == "png":
        from kvad import inspection

        assert out is not None
        inspection.plot.draw_attention(seen.pieces, seen.maps, [out])
        return ""
    if form == "json":
        return json.dumps(
            inspection.attention_plot.attention_to_json(seen.tokens, seen.pieces, seen.maps), ensure_ascii=False
        )
    if form == "svg":
        return inspection.attention_plot.attention_to_svg(seen.pieces, seen.maps)
    width = 100 if out is not None else shutil.get_terminal_size().columns
    return "\n\n".join(inspection.attention_plot.attention_to_text(seen.pieces, one, width) for one in seen.maps)


def _numbers(name: str, said: tuple[str, ...], default: list[int]) -> list[int] | None:
    """None for all.  Whether the model has them is for the model to say."""
    if "all" in said:
        return None
    if bad := next((text for text in said if not text.isdecimal()), None):
        raise UsageError(f"--{name} {bad}: not a number", f"count from 0, or say --{name} all")
    return [int(text) for text in dict.fromkeys(said)] or default
