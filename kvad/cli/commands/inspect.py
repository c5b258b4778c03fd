"""``kvad inspect MODEL``: contents of a checkpoint from its headers; ``--tree`` draws the architecture.

``--attention`` draws the attention of any layer and head for a text. ``--cache`` runs prompts and shows the state of
every token in the cache, as text, as ``--json`` (schema in docs/kv-cache.md) or as one ``--html`` page. Its cache
options are those of ``kvad generate``; a session is read and never written.
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
MAX_TOKENS = 32
MAX_SEQS = 8


def trace_options(command: CommandT) -> CommandT:
    """Add the options of --cache; their values are None, False or empty unless given."""
    options: list[Callable[[Any], Any]] = [
        click.option("--cache", is_flag=True, help="Run prompts and show the state of their tokens in the cache."),
        click.option(
            "--prompt", multiple=True, metavar="TEXT", help="With --cache: prompt; - reads standard input. Repeatable."
        ),
        click.option(
            "--file",
            multiple=True,
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="With --cache: file with a prompt. Repeatable.",
        ),
        click.option("--ids", is_flag=True, default=None, help="With --cache: read prompts as token ids: '12 7 99'."),
        click.option(
            "-n",
            "--max-tokens",
            type=int,
            metavar="N",
            help=f"With --cache: number of tokens to generate [default: {MAX_TOKENS}].",
        ),
        click.option("--n", type=int, metavar="N", help="With --cache: samples of each prompt [default: 1]."),
        click.option(
            "-t", "--temperature", type=float, help="With --cache: sampling temperature; 0 is greedy [default: 0]."
        ),
        click.option("-s", "--seed", type=int, help="With --cache: seed of the samples [default: 0]."),
        add_cache_options,
        click.option(
            "--session", metavar="NAME", help="With --cache: session that the prompts continue; it is not changed."
        ),
        sessions_option,
        click.option(
            "--trace-token",
            multiple=True,
            type=int,
            metavar="I",
            help="With --cache: print the events of this token. Repeatable.",
        ),
        click.option(
            "--html",
            metavar="FILE",
            type=click.Path(path_type=Path, dir_okay=False),
            help="With --cache: write an HTML page to FILE.",
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
    """Run the prompts and print or write the trace."""
    _check(options)
    report = _run(model, options)
    for name, chosen, count in (("layer", layers, report.layers), ("head", heads, _heads(report))):
        if bad := [index for index in chosen or () if index >= count]:
            raise RequestError(f"--{name} {bad[0]} is not one of 0..{count - 1}")
    if options["html"] is not None:
        from kvad.inspection import trace_to_html

        options["html"].write_text(trace_to_html(report), encoding="utf-8")
        click.echo(f"kvad: {options['html']}: open it in a browser", err=True)
    from kvad.inspection import trace_to_json, trace_to_text

    if as_json and out is None:
        emit_json(trace_to_json(report))
        return
    width = 100 if out is not None else shutil.get_terminal_size((100, 24)).columns
    if out is not None and (as_json or out.suffix == ".json"):
        from kvad.cli.options import json_line

        text = json_line(trace_to_json(report))
    else:
        text = trace_to_text(report, width=width, layers=layers, heads=heads, tokens=options["trace_token"])
    if out is None:
        click.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


def _check(options: Mapping[str, Any]) -> None:
    if not options["prompt"] and not options["file"] and options["session"] is None:
        raise click.UsageError("--cache needs something to run: give --prompt TEXT, --file FILE or --session NAME.")
    given_here = click.get_current_context().get_parameter_source("session_dir") is ParameterSource.COMMANDLINE
    if options["session"] is None and given_here:
        raise click.UsageError("--session-dir needs --session NAME.")
    if options["deterministic"]:
        raise click.UsageError("--deterministic and --cache exclude each other: the trace uses its own kernel.")
    for name, minimum in (("max_tokens", 0), ("n", 1), ("max_num_seqs", 1)):
        if options[name] is not None and options[name] < minimum:
            raise UsageError(f"--{name.replace('_', '-')} {options[name]}: must be at least {minimum}")
    if bad := [index for index in options["trace_token"] if index < 0]:
        raise UsageError(f"--trace-token {bad[0]}: must be at least 0")


def _heads(report: TraceReport) -> int:
    return max(group.kv_heads for group in report.groups)


def _run(model: Path, options: Mapping[str, Any]) -> TraceReport:
    from kvad.checkpoint import open_checkpoint
    from kvad.inspection import trace_requests

    session, path, history = options["session"], None, list[int]()
    if session is not None:
        path, header = read_session_header(session, options)
        options, history = (
            with_saved_options(options, header),
            sessions.directory.read_tokens(path, header.metadata["history"]),
        )
    opened = open_checkpoint(model)
    prompts = _prompts(opened, options, history)
    tokens = MAX_TOKENS if options["max_tokens"] is None else options["max_tokens"]
    with _open(opened, prompts, tokens, options) as llm:
        fields = {"temperature": 0.0, "max_tokens": tokens, **explicit_options(options, ("temperature", "seed"))}
        sampling = llm.sampling_params(n=options["n"] or 1, **fields)
        tokenizer = llm.tokenizer
        piece: Callable[[int], str] = str if tokenizer is None else tokenizer.token_text
        state = None if path is None else llm.session(path).state
        return trace_requests(
            llm.engine, prompts, sampling, model=str(model), piece=piece, resume=state, session=session or ""
        )


def _open(opened: CheckpointHandle, prompts: Sequence[Sequence[int]], tokens: int, options: Mapping[str, Any]) -> LLM:
    """Load the model with a cache of the size that the prompts need, unless options set it."""
    longest = max(map(len, prompts))
    rows = min(MAX_SEQS, len(prompts) * (options["n"] or 1))
    context = options["max_seq_len"] or min(opened.config.max_seq_len, longest + max(tokens, 1))
    return open_llm(opened.path, {**options, "max_seq_len": context}, max_num_seqs=rows)


def _prompts(opened: CheckpointHandle, options: Mapping[str, Any], history: Sequence[int]) -> list[list[int]]:
    """Encode the prompts; ``history`` is the tokens of the session that they continue."""
    from kvad.engine import PromptEncoder

    if opened.config.kind != "decoder":
        raise RequestError(f"--cache needs a decoder, got an {opened.config.kind}", "use a decoder")
    texts = PromptEncoder(opened.config, opened.tokenizer, opened.generation)
    given_texts = [*(read_stdin() if text == "-" else text for text in options["prompt"])]
    given_texts += [_read(path) for path in options["file"]]
    prompts = [token_ids(text, "--ids") if options["ids"] else text for text in given_texts]
    if history:
        encoded = [[*history, *texts.encode_continuation(prompt)] for prompt in prompts or [""]]
    else:
        encoded = [texts.encode_prompt(prompt) for prompt in prompts]
    for tokens in encoded:
        if len(tokens) > opened.config.max_seq_len and not options["endless"]:
            message = (
                f"the prompt has {format_count(len(tokens), 'token')}, the model's limit is {opened.config.max_seq_len}"
            )
            raise RequestError(message, "shorten it")
    return encoded


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


DRAWINGS = {  # drawing -> its formats, the default first
    "attention": ("terminal", "svg", "png", "json"),
    "tree": ("text", "svg", "mermaid", "json"),
}
ENDINGS = {".svg": "svg", ".png": "png", ".json": "json", ".mmd": "mermaid"}
FORMATS = tuple(dict.fromkeys(form for forms in DRAWINGS.values() for form in forms))


@click.command(cls=SectionedCommand)
@model_argument
@click.option("--tensors", is_flag=True, help="List every tensor: dtype, shape, bytes.")
@click.option("--check", is_flag=True, help="Read every file and compare its sha256 with the manifest.")
@click.option("--tree", is_flag=True, help="Draw the architecture, also of a config or a known model.")
@click.option("--attention", metavar="TEXT", help="Draw the attention for TEXT (loads the model).")
@click.option(
    "--target",
    metavar="TEXT",
    help="With --attention and an encoder-decoder: the target of TEXT [default: the model's output].",
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="I",
    help="Layer to draw, or 'all'. Repeatable [default: 0; with --cache: all].",
)
@click.option(
    "--head",
    "heads",
    multiple=True,
    metavar="J",
    help="Head to draw, or 'all'. Repeatable [default: 0; with --cache: all].",
)
@click.option("--use-cache", is_flag=True, help="With --attention: compute through the KV cache.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Format of the drawing [default: text or terminal].")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File of the drawing [default: stdout].",
)
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
    use_cache: bool,
    form: str | None,
    out: Path | None,
    cache: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the config, parameters, tensors, memory, tokenizer and training of a checkpoint or a Hugging Face model.

    Only headers are read, unless --check is given. Exit code 1 if a kvad checkpoint has no manifest, or if files or
    tensors are missing or do not match manifest and config; 2 if --check finds a changed file.

    \b
    kvad inspect google/gemma-2-2b --tree
    kvad inspect runs/demo --attention "def add(a, b):" --layer 2 --head all --out heads.png
    kvad inspect runs/demo --cache --prompt "def add(a, b):" --policy "heavy-hitters(32)" --html cache.html
    """
    if cache:
        others = {"tensors": tensors, "check": check, "tree": tree, "attention": attention is not None}
        _reject_options(others, "and --cache exclude each other.")
        _reject_options(
            {"use_cache": use_cache, "target": target, "format": form},
            "does not apply to --cache, which writes text, --json or --html.",
        )
        wanted = _numbers("layer", layers, []), _numbers("head", heads, [])
        trace_cache(model, options, layers=wanted[0] or None, heads=wanted[1] or None, out=out, as_json=as_json)
        return
    source = click.get_current_context().get_parameter_source
    explicit = {name: value for name, value in options.items() if source(name) is ParameterSource.COMMANDLINE}
    _reject_options(explicit, "needs --cache.")
    maps = {"layer": layers, "head": heads, "target": target, "use_cache": use_cache}
    drawn = "tree" if tree else None if attention is None else "attention"
    if tree and attention is not None:
        raise click.UsageError("--tree and --attention exclude each other.")
    _reject_options(maps if drawn != "attention" else {}, "needs --attention TEXT.")
    if drawn is None:
        _reject_options({"format": form, "out": out}, "needs --tree or --attention TEXT.")
        _show(model, tensors, check, as_json)
        return
    _reject_options({"tensors": tensors, "check": check}, f"and --{drawn} exclude each other.")
    chosen = _format(drawn, form, out, as_json)
    if attention is None:
        drawing = _tree(model, chosen)
    else:
        drawing = _draw(model, attention, target, layers, heads, use_cache, chosen, out)
    if chosen == "png":
        return
    if out is None:
        click.echo(drawing, nl=not drawing.endswith("\n"))
    else:
        out.write_text(drawing.rstrip("\n") + "\n", encoding="utf-8")


def _reject_options(options: Mapping[str, object], reason: str) -> None:
    for name, value in options.items():
        if value not in (None, ()) and value is not False:  # 0 is an explicit value
            raise click.UsageError(f"--{name.replace('_', '-')} {reason}")


def _format(drawn: str, form: str | None, out: Path | None, as_json: bool) -> str:
    """Choose the format by --format, else by the suffix of --out, else the default of the drawing."""
    known = DRAWINGS[drawn]
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} exclude each other.")
    if as_json:
        return "json"
    if form is not None:
        if form not in known:
            raise click.UsageError(f"--{drawn} has no format {form}: {', '.join(known)}.")
        return form
    if out is None or out.suffix == ".txt":
        return known[0]
    suffix_format = ENDINGS.get(out.suffix, "")
    if suffix_format not in known:
        endings = [ending for ending, name in ENDINGS.items() if name in known]
        raise UsageError(
            f"{out}: the suffix is not a known format", f"name it {', '.join(endings)} or .txt, or give --format"
        )
    return suffix_format


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
        f"memory of {request_lines(summary.plan)} (kvad plan estimates other sizes)",
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
        return "manifest: a Hugging Face folder has none; kvad doctor reads every file"
    if summary.files is None:
        return "manifest: none; the files cannot be compared with what was saved"
    checked = "every sha256 agrees" if summary.checked else "--check compares their sha256"
    return f"manifest: {format_count(summary.files, 'file')}; {checked}"


def _tokenizer_line(summary: inspection.checkpoint.CheckpointSummary) -> str:
    info = summary.tokenizer
    if info is None:
        return "tokenizer: none; prompts can only be token ids"
    specials = ", ".join(f"{name} = {number}" for name, number in info.specials.items()) or "no specials"
    return f"tokenizer: {info.kind}, {format_count(info.vocab, 'token')}; {specials}"


def _training_lines(summary: inspection.checkpoint.CheckpointSummary) -> list[str]:
    from kvad import inspection

    if summary.training is None:
        return ["training: not recorded in the checkpoint"]
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
    """Draw the attention and return the text; a PNG is written here."""
    import json

    from kvad import inspection

    if form == "png" and out is None:
        raise UsageError("a PNG needs a file", "name it: --out heads.png")
    more = {} if target is None else {"target": target}
    wanted = _numbers("layer", layers, [0]), _numbers("head", heads, [0])
    summary = inspection.checkpoint.attention_maps(
        model, text, layers=wanted[0], heads=wanted[1], cached=cached, **more
    )
    if form == "png":
        from kvad import inspection

        assert out is not None
        inspection.plot.draw_attention(summary.pieces, summary.maps, [out])
        return ""
    if form == "json":
        return json.dumps(
            inspection.attention_plot.attention_to_json(summary.tokens, summary.pieces, summary.maps),
            ensure_ascii=False,
        )
    if form == "svg":
        return inspection.attention_plot.attention_to_svg(summary.pieces, summary.maps)
    width = 100 if out is not None else shutil.get_terminal_size().columns
    return "\n\n".join(inspection.attention_plot.attention_to_text(summary.pieces, one, width) for one in summary.maps)


def _numbers(name: str, values: tuple[str, ...], default: list[int]) -> list[int] | None:
    """Parse layer or head indices; None is all. The model checks the range."""
    if "all" in values:
        return None
    if bad := next((text for text in values if not text.isdecimal()), None):
        raise UsageError(f"--{name} {bad}: not a number", f"give an index from 0, or --{name} all")
    return [int(text) for text in dict.fromkeys(values)] or default
