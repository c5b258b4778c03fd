"""``kvad merge``: an adapter into its base, as a checkpoint in the base's own layout.

What is written appears whole or not at all (``checkpoint/atomic.py``).  No torch until it begins.
"""

from __future__ import annotations

from pathlib import Path

import click

from kvad.cli.common import emit_json, json_option
from kvad.cli.importing import check_output
from kvad.cli.lines import model_capabilities
from kvad.cli.running import DTYPES
from kvad.errors import UsageError, format_count

__all__ = ["merge_command"]


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
    from kvad.checkpoint.adapter import merge_adapter, write_merged
    from kvad.checkpoint.native import DTYPES as TORCH
    from kvad.checkpoint.open import open_checkpoint

    check_output(out, None, overwrite)
    opened = merge_adapter(open_checkpoint(base), adapter)
    for source in (opened.base.path, opened.path):
        check_output(out, source, overwrite)
    if not opened.factors:
        raise UsageError(f"{adapter} adds nothing: it holds no matrices")
    write_merged(opened, out, None if dtype is None else TORCH[dtype])
    if as_json:
        emit_json({"base": base, "adapter": adapter, "out": out, "parts": sorted(opened.factors)})
    else:
        serves = model_capabilities(opened.config)[1][0]
        click.echo(f"written: {out}, {format_count(len(opened.factors), 'part')} merged\nnext:  kvad {serves} {out}")
