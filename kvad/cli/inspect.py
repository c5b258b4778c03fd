"""``kvad inspect MODEL``: what is in a checkpoint, from its headers; ``--tree`` draws its architecture, ``--attention``
any layer and head while it reads a text, ``--cache`` what becomes of every token in the cache (``microscope.py``)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvad.cli.common import emit_json, format_bytes, json_line, json_option, model_argument
from kvad.cli.helping import SectionedCommand
from kvad.cli.microscope import trace_cache, trace_options
from kvad.errors import UsageError, format_count

if TYPE_CHECKING:
    from kvad.lab.inspect import CheckpointSummary

__all__ = ["inspect_command"]

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
    from kvad.lab import drawtree
    from kvad.lab.plan import read_target
    from kvad.lab.tree import build_model_tree

    target = read_target(str(model))
    stored = "float32" if target.stored_dtype == "float16" else target.stored_dtype
    root = build_model_tree(target.config, Path(target.name).name or target.name, dtype=stored or "float32")
    if form == "json":
        return json_line(drawtree.tree_to_json(root))
    return {"text": drawtree.tree_to_text, "svg": drawtree.tree_to_svg, "mermaid": drawtree.tree_to_mermaid}[form](root)


def _show(model: Path, tensors: bool, check: bool, as_json: bool) -> None:
    from kvad.lab.inspect import summarize_checkpoint, summary_to_json

    summary = summarize_checkpoint(model, check=check)
    if as_json:
        emit_json(summary_to_json(summary))
    else:
        click.echo("\n".join(_page(summary, tensors)))
    if summary.problems:
        click.get_current_context().exit(1)


def _page(summary: CheckpointSummary, tensors: bool) -> list[str]:
    from kvad.cli.plan_page import memory_lines, request_lines
    from kvad.lab.inspect import outline_values

    dtypes = sorted({tensor.dtype for tensor in summary.tensors})
    size = sum(tensor.bytes for tensor in summary.tensors)
    count = f"{format_count(summary.num_parameters, 'parameter')} in {format_count(len(summary.tensors), 'tensor')}"
    origin = "" if summary.origin is None else f"Hugging Face's {summary.origin}, "
    lines = [
        f"{summary.path}: {origin}{count}, {', '.join(dtypes)}, {format_bytes(size)}",
        *(f"problem: {problem}" for problem in summary.problems),
        "",
        "config",
        *(f"  {line}" for line in outline_values(summary.config.to_dict())),
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


def _parts(summary: CheckpointSummary) -> list[tuple[str, int]]:
    return [(part, count) for part, count in summary.parameters.items() if count]


def _manifest_line(summary: CheckpointSummary) -> str:
    if summary.files is None and summary.origin is not None:
        return "manifest: a Hugging Face folder has none; kvad doctor reads it all"
    if summary.files is None:
        return "manifest: none; the files cannot be compared with what was saved"
    checked = "every sha256 agrees" if summary.checked else "--check compares their sha256"
    return f"manifest: {format_count(summary.files, 'file')}; {checked}"


def _tokenizer_line(summary: CheckpointSummary) -> str:
    found = summary.tokenizer
    if found is None:
        return "tokenizer: none; prompts can only be token ids"
    specials = ", ".join(f"{name} = {number}" for name, number in found.specials.items()) or "no specials"
    return f"tokenizer: {found.kind}, {format_count(found.vocab, 'token')}; {specials}"


def _training_lines(summary: CheckpointSummary) -> list[str]:
    from kvad.lab.inspect import outline_values

    if summary.training is None:
        return ["training: the checkpoint says nothing of it"]
    return ["training", *(f"  {line}" for line in outline_values(summary.training))]


def _tensor_lines(summary: CheckpointSummary) -> list[str]:
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

    from kvad.lab import draw
    from kvad.lab.inspect import attention_maps

    if form == "png" and out is None:
        raise UsageError("a PNG needs a file", "name it: --out heads.png")
    more = {} if target is None else {"target": target}
    wanted = _numbers("layer", layers, [0]), _numbers("head", heads, [0])
    seen = attention_maps(model, text, layers=wanted[0], heads=wanted[1], cached=cached, **more)
    if form == "png":
        from kvad.lab.plot import draw_attention

        assert out is not None
        draw_attention(seen.pieces, seen.maps, [out])
        return ""
    if form == "json":
        return json.dumps(draw.attention_to_json(seen.tokens, seen.pieces, seen.maps), ensure_ascii=False)
    if form == "svg":
        return draw.attention_to_svg(seen.pieces, seen.maps)
    width = 100 if out is not None else shutil.get_terminal_size().columns
    return "\n\n".join(draw.attention_to_text(seen.pieces, one, width) for one in seen.maps)


def _numbers(name: str, said: tuple[str, ...], default: list[int]) -> list[int] | None:
    """None for all.  Whether the model has them is for the model to say."""
    if "all" in said:
        return None
    if bad := next((text for text in said if not text.isdecimal()), None):
        raise UsageError(f"--{name} {bad}: not a number", f"count from 0, or say --{name} all")
    return [int(text) for text in dict.fromkeys(said)] or default
