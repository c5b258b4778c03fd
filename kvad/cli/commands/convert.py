"""``kvad import`` and ``kvad export``: from a Hugging Face folder to kvad's own, and back.

What is written appears whole or not at all (``checkpoint/atomic.py``), also after Ctrl-C.  No torch until it begins.

``kvad merge``: an adapter into its base, as a checkpoint in the base's own layout.

What is written appears whole or not at all (``checkpoint/atomic.py``).  No torch until it begins.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvad.cli.line_batches import model_capabilities
from kvad.cli.model_options import DTYPES
from kvad.cli.options import console, emit_json, format_bytes, json_option, model_argument
from kvad.errors import UsageError, format_count, with_article

if TYPE_CHECKING:
    from kvad import checkpoint

TOKENS = 1000  # whose cache the plan tells


@click.command("import")
@click.argument("source", metavar="HF_DIR_OR_NAME")
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(DTYPES), help="What to store [default: as it is stored].")
@click.option("--revision", help="Of the hub: a branch, a tag or a commit [default: main].")
@click.option("--offline", is_flag=True, help="Take it from the hub's cache on this machine, or not at all.")
@click.option("--token", help="Of the hub [default: HF_TOKEN, or that of hf auth login].")
@click.option("--overwrite", is_flag=True, help="Let a checkpoint that OUT holds give way.")
@json_option
def import_command(
    source: str,
    out: Path | None,
    dtype: str | None,
    revision: str | None,
    offline: bool,
    token: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make kvad's own checkpoint of a Hugging Face model: a folder, or a name on the hub.

    OUT is ./NAME of a model on the hub; of a folder without OUT, what would be written is said and nothing is.  Every
    command also takes the model as it is; an import is a folder of your own, in your dtype, with sha256 sums.

    \b
    kvad import HuggingFaceTB/SmolLM2-135M
    kvad import Helsinki-NLP/opus-mt-de-en runs/opus --dtype bfloat16
    kvad import ~/models/llama-3.2-1b
    """
    from kvad import checkpoint
    from kvad.checkpoint import open_checkpoint

    out = _default_out(source) if out is None else out
    if out is not None:
        check_output(out, None, overwrite)
    folder = checkpoint.hub.resolve_model_path(
        source, revision=revision, token=token, offline=True if offline else None
    )
    opened = open_checkpoint(folder)
    if not isinstance(opened, checkpoint.hf_layout.HFCheckpoint):
        raise UsageError(f"{source} is kvad's own checkpoint already", "every command takes it as it is")
    if out is not None:
        check_output(out, folder, overwrite)
    plan = _plan(opened, dtype)
    if not as_json:
        click.echo("\n".join(_page(source, plan)))
    if out is not None:
        with _bar(format_count(plan.tensors, "tensor"), plan.bytes) as progress:
            checkpoint.export.import_hf(
                opened, out, dtype=None if dtype is None else checkpoint.native.DTYPES[dtype], progress=progress
            )
    if as_json:
        emit_json({"source": source, "out": out, **dataclasses.asdict(plan)})
    elif out is not None:
        click.echo(f"written: {out}\nnext:  kvad doctor {out}")
    else:
        name = Path(source).expanduser().resolve().name
        click.echo(f"nothing is written yet: name a folder for it, as in  kvad import {source} runs/{name}")


@click.command("export")
@model_argument
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["hf"]), default="hf", show_default=True, help="Hugging Face's.")
@click.option("--family", metavar="TYPE", help="Its model_type, as llama [default: where it came from, or the first].")
@click.option("--dtype", type=click.Choice(DTYPES), help="What to store [default: as it is stored].")
@click.option("--overwrite", is_flag=True, help="Let a checkpoint that OUT holds give way.")
@json_option
def export_command(
    model: Path, out: Path, form: str, family: str | None, dtype: str | None, overwrite: bool, as_json: bool
) -> None:
    """Make a Hugging Face folder of a checkpoint, that transformers and what builds on it can load.

    The class that reads it is printed.  A model that no class of theirs can express is refused by what it has.

    \b
    kvad export runs/demo demo-hf --format hf
    kvad export runs/demo demo-hf --family llama --dtype bfloat16 --overwrite
    """
    from kvad import checkpoint
    from kvad.checkpoint import open_checkpoint

    check_output(out, None, overwrite)
    opened = open_checkpoint(model)
    check_output(out, opened.path, overwrite)
    reader = checkpoint.export.export_hf(
        opened, out, family=family, dtype=None if dtype is None else checkpoint.native.DTYPES[dtype]
    )
    if as_json:
        emit_json({"model": model, "out": out, "format": form, "class": reader})
    else:
        click.echo(f"written: {out}\nread by: transformers.{reader}.from_pretrained({str(out)!r})")


def _default_out(source: str) -> Path | None:
    """./NAME of a name on the hub; None of what is, or looks like, a path."""
    if source.startswith((".", "/", "~")) or Path(source).is_dir():
        return None
    return Path(source.removeprefix("hf://").partition("@")[0].rpartition("/")[2])


def check_output(out: Path, source: Path | None, overwrite: bool) -> None:
    """What stands at ``out`` gives way only if it was asked to, and is a checkpoint, and not the source."""
    if out.name in ("", "..") or out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is no name for a new folder", "name one that is not there yet")
    if source is not None and source.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out} holds the model that would be read", "name another folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / "config.json").is_file():
        raise UsageError(f"{out} exists and is no checkpoint", "name another folder: this one is not overwritten")
    if not overwrite:
        raise UsageError(f"{out} exists", "--overwrite lets it give way, when the new one is whole")


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class _Plan:
    """``bytes``: of the tensors as they will be stored; ``cache``: of ``cache_tokens`` tokens of one row, in what it
    would compute in (of an encoder-decoder: of as many tokens of its target, ``source_cache`` of its source)."""

    architecture: str
    origin: str
    kind: str
    parameters: int
    tensors: int
    stored: str
    dtype: str
    bytes: int
    cache_dtype: str
    cache_tokens: int
    cache: int
    source_tokens: int
    source_cache: int
    tokenizer: str | None


def _plan(opened: checkpoint.hf_layout.HFCheckpoint, dtype: str | None) -> _Plan:
    from kvad import config as config_lib
    from kvad.cache import CacheConfig
    from kvad.cache.sizing import plan_memory

    config, stored = opened.config, str(opened.stored_dtype).removeprefix("torch.")
    chosen = dtype or stored
    if chosen not in DTYPES:
        raise UsageError(f"its weights are stored as {chosen}, which kvad does not compute in", "say --dtype bfloat16")
    computed = "float32" if chosen == "float16" else chosen
    source, tokenizer = config.encoder_input, opened.tokenizer
    tokens = min(TOKENS, config.max_seq_len)
    sourced = 0 if source is None else min(TOKENS, source.max_seq_len)
    cache = CacheConfig(max_num_seqs=1, max_seq_len=tokens, block_size=1, dtype=computed, max_source_len=sourced)
    groups = plan_memory(config, cache, weights_dtype=computed).groups
    sizes = [(group.group.spec.is_cross_attention, group.seq_payload + group.seq_metadata) for group in groups]
    return _Plan(
        architecture=opened.fields.architecture,
        origin=opened.origin,
        kind=config.kind,
        parameters=config_lib.parameter_shapes.num_parameters(config),
        tensors=len(config_lib.parameter_shapes.weight_shapes(config)),
        stored=stored,
        dtype=chosen,
        bytes=config_lib.parameter_shapes.weight_bytes(config, chosen),
        cache_dtype=computed,
        cache_tokens=tokens,
        cache=sum(size for cross, size in sizes if not cross),
        source_tokens=sourced,
        source_cache=sum(size for cross, size in sizes if cross),
        tokenizer=None if tokenizer is None else f"{tokenizer.kind}, {format_count(tokenizer.vocab_size, 'id')}",
    )


def _page(source: str, plan: _Plan) -> list[str]:
    name = plan.architecture or "no class named"
    kept = plan.dtype if plan.dtype == plan.stored else f"{plan.dtype}, from {plan.stored}"
    cache = [f"{format_bytes(plan.cache)} per {format_count(plan.cache_tokens, 'token')}"] if plan.cache else []
    if plan.source_cache:
        cache.append(f"{format_bytes(plan.source_cache)} per {format_count(plan.source_tokens, 'token')} of the source")
    told = f"{' and '.join(cache)}, in {plan.cache_dtype}" if cache else "none: it reads each text whole"
    return [
        f"model       {source}: {name} ({plan.origin}), {with_article(plan.kind)}",
        f"parameters  {plan.parameters:,} in {format_count(plan.tensors, 'tensor')}",
        f"weights     {format_bytes(plan.bytes)} in {kept}",
        f"cache       {told}",
        f"tokenizer   {plan.tokenizer or 'none: prompts can only be token ids'}",
    ]


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[str, int], None] | None]:
    """A function of a tensor's name and bytes that moves a bar on stderr; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=24), DownloadColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console(), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)

        def told(name: str, num_bytes: int) -> None:
            bar.update(task, advance=num_bytes, description=name)
            if bar.tasks[0].completed >= total:  # every tensor is there: what is left is the disk's
                bar.update(task, total=None, description=f"writing {format_bytes(total)}")

        yield told


@click.command("merge")
@click.argument("base", metavar="BASE", type=click.Path(path_type=Path))
@click.argument("adapter", metavar="ADAPTER", type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="The merged model.")
@click.option("--dtype", type=click.Choice(DTYPES), help="What to store [default: as BASE is stored].")
@click.option("--overwrite", is_flag=True, help="Let a checkpoint that --out holds give way.")
@json_option
def merge_command(base: Path, adapter: Path, out: Path, dtype: str | None, overwrite: bool, as_json: bool) -> None:
    """Add a LoRA adapter, kvad's or PEFT's, to the weights that it stands beside.

    ADAPTER is a folder, or the run of kvad train --lora.  BASE keeps its layout, its tokenizer and every other file; a
    base that is not the one that the adapter was trained on is refused, where the adapter says which that was.

    \b
    kvad merge runs/demo runs/adapter --out runs/merged
    kvad merge ./SmolLM2-135M ./its-adapter --out merged --dtype bfloat16
    """
    from kvad import checkpoint
    from kvad.checkpoint import open_checkpoint

    check_output(out, None, overwrite)
    opened = checkpoint.adapter.merge_adapter(open_checkpoint(base), adapter)
    for source in (opened.base.path, opened.path):
        check_output(out, source, overwrite)
    if not opened.factors:
        raise UsageError(f"{adapter} adds nothing: it holds no matrices")
    checkpoint.adapter.write_merged(opened, out, None if dtype is None else checkpoint.native.DTYPES[dtype])
    if as_json:
        emit_json({"base": base, "adapter": adapter, "out": out, "parts": sorted(opened.factors)})
    else:
        serves = model_capabilities(opened.config)[1][0]
        click.echo(f"written: {out}, {format_count(len(opened.factors), 'part')} merged\nnext:  kvad {serves} {out}")
