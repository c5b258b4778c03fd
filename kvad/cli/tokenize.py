"""``kvad tokenize MODEL_OR_TOKENIZER [TEXT|-]``: which tokens a text becomes, and what they cost.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvad.cli.common import emit_json, json_option, token_ids, tokenizer_folder
from kvad.cli.running import read_stdin

if TYPE_CHECKING:
    from kvad.text.tokenizer import Tokenizer

__all__ = ["tokenize_command"]


@click.command()
@click.argument("source", metavar="MODEL_OR_TOKENIZER", type=click.Path(path_type=Path))
@click.argument("text", required=False, metavar="[TEXT|-]")
@click.option("--ids", is_flag=True, help="Print the ids only, on one line.")
@click.option("--decode", is_flag=True, help="TEXT is a list of ids: print the text that they spell.")
@json_option
def tokenize_command(source: Path, text: str | None, ids: bool, decode: bool, as_json: bool) -> None:
    """Show the tokens of TEXT; `-`, or nothing, reads standard input.

    \b
    kvad tokenize runs/demo "def main():"
    kvad tokenize runs/demo --ids < file.py
    kvad tokenize runs/demo --decode "12 7 99"
    """
    from kvad.text.tokenizer import load_tokenizer

    if ids and decode:
        raise click.UsageError("--ids and --decode exclude each other: one prints ids, the other reads them.")
    tokenizer = load_tokenizer(source if source.is_file() else tokenizer_folder(source))
    text = read_stdin() if text is None or text == "-" else text
    tokens = token_ids(text, "--decode") if decode else tokenizer.encode(text)
    spelled = tokenizer.decode(tokens, skip_specials=False) if decode else text
    if as_json:
        emit_json(_token_json(tokenizer, spelled, tokens))
    elif decode:
        click.echo(spelled)
    elif ids:
        click.echo(" ".join(map(str, tokens)))
    else:
        _token_table(tokenizer, spelled, tokens)


def _token_table(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> None:
    pieces = [tokenizer.token_text(token) for token in tokens]
    width = max(map(len, pieces), default=5)
    click.echo(f"{'place':>6} {'id':>7}  {'piece':<{width}}  bytes")
    for place, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
        click.echo(f"{place:>6} {token:>7}  {piece:<{width}}  {tokenizer.token_bytes(token).hex(' ')}")
    size = len(text.encode("utf-8"))
    each = f", {size / len(tokens):.2f} bytes per token" if tokens else ""
    click.echo(f"{len(tokens)} tokens, {len(set(tokens))} different; {len(text)} characters, {size} bytes{each}")


def _token_json(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> object:
    size = len(text.encode("utf-8"))
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "text": text,
        "ids": list(tokens),
        "pieces": [tokenizer.token_text(token) for token in tokens],
        "bytes": [list(tokenizer.token_bytes(token)) for token in tokens],
        "num_tokens": len(tokens),
        "num_characters": len(text),
        "num_bytes": size,
        "bytes_per_token": size / len(tokens) if tokens else None,
    }
