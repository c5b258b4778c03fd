"""``kvad tokenize MODEL_OR_TOKENIZER [TEXT|-]``: which tokens a text becomes, and what they cost.  No torch.

``kvad render MODEL``: the exact prompt that a chat would send, and the tokens that it becomes.  No torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.model_options import read_stdin
from kvad.cli.options import emit_json, json_option, model_argument, token_ids, tokenizer_folder
from kvad.errors import DataError, UsageError, format_count

if TYPE_CHECKING:
    from kvad.text import Tokenizer


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
    from kvad.text import load_tokenizer

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


@click.command()
@model_argument
@click.option("-m", "--message", "given", multiple=True, metavar="ROLE=TEXT", help="A message; may be repeated.")
@click.option("-f", "--file", metavar="FILE", help="Messages, as JSON or JSON lines; `-` is standard input.")
@click.option("--tools", "tools_file", metavar="FILE", help="A JSON list of tool schemas.")
@click.option("--no-generation-prompt", is_flag=True, help="Do not open the assistant's turn at the end.")
@click.option("--continue-final", is_flag=True, help="End within the last message, for the model to go on.")
@click.option("--name", help="Which of the model's templates [default: default, or tool_use with --tools].")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A variable of the template; may be repeated."
)
@click.option("--tokens", is_flag=True, help="Show the tokens of the prompt, not its text.")
@json_option
def chat_template_command(
    model: Path,
    given: tuple[str, ...],
    file: str | None,
    tools_file: str | None,
    no_generation_prompt: bool,
    continue_final: bool,
    name: str | None,
    settings: tuple[str, ...],
    tokens: bool,
    as_json: bool,
) -> None:
    """Show the prompt that MODEL's chat template makes of messages: those of a file, then those of --message.

    \b
    kvad render MODEL -m system="Be brief." -m user=Hi
    kvad render MODEL --file messages.json --tools tools.json --tokens
    kvad render MODEL -m user=Hi --set enable_thinking=false
    kvad render MODEL -f talk.jsonl --no-generation-prompt --json | jq .spans
    """
    from kvad import text as text_lib
    from kvad.errors import ChatTemplateError
    from kvad.text import load_tokenizer

    folder = tokenizer_folder(model)
    messages, tools = _conversation(file) if file is not None else ([], None)
    messages = [*messages, *map(_message, given)]
    if not messages:
        raise click.UsageError("there is no message: give --message user=TEXT, or --file.")
    if tools_file is not None:
        tools = _parse(_read(tools_file, "--tools"), tools_file)
    template = text_lib.chat_template.ChatTemplate.load(folder, name=name)
    if template is None:
        raise ChatTemplateError(f"{folder} has no chat template", "it would be its chat_template.jinja")
    rendered = template.render(
        messages,
        tools=tools,
        generation_prompt=not no_generation_prompt and not continue_final,
        continue_final=continue_final,
        variables=dict(map(_setting, settings)),
    )
    tokenizer = load_tokenizer(folder) if tokens else None
    ids = tokenizer.encode(rendered.text, specials=True) if tokenizer is not None else []
    if as_json:
        chosen = {
            "template": template.choose(tools=tools is not None),
            "text": rendered.text,
            "spans": rendered.generation_marks,
        }
        emit_json(chosen | (_prompt_json(tokenizer, ids) if tokenizer is not None else {}))
    elif tokenizer is not None:
        _prompt_table(tokenizer, ids)
    else:
        click.echo(rendered.text, nl=sys.stdout.isatty())  # into a file or a pipe: the prompt and not a byte more


def _message(text: str) -> dict[str, Any]:
    role, equals, content = text.partition("=")
    if not equals or not role:
        raise UsageError(f"--message {text!r} is not ROLE=TEXT", "write it like user=Hi")
    return {"role": role, "content": content}


def _setting(text: str) -> tuple[str, Any]:
    """``enable_thinking=false``: JSON, or else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--set {text!r} is not NAME=VALUE", "write it like enable_thinking=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


# ---------------------------------------------------------------- files


def _read(file: str, option: str) -> str:
    if file == "-":
        return read_stdin()
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option}: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{option}: {file} is not UTF-8 at byte {error.start}") from None


def _parse(text: str, file: str, line: int = 0) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line or error.lineno}, column {error.colno}"
        raise DataError(f"{file} is not JSON: {where}: {error.msg}") from None


def _conversation(file: str) -> tuple[list[Any], Any]:
    """Messages and tools of a JSON list of messages, of an object with both, or of JSON lines, one message each."""
    text = _read(file, "--file")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) > 1 and _is_json(lines[0][1]):
        content: Any = [_parse(line, file, number) for number, line in lines]
    else:
        content = _parse(text, file)
    if isinstance(content, dict) and "messages" in content:
        content, tools = content["messages"], content.get("tools")
    else:
        content, tools = [content] if isinstance(content, dict) else content, None
    if not isinstance(content, list):
        raise DataError(f"{file} holds no messages", 'a JSON list of {"role": ..., "content": ...}')
    if content and all(isinstance(one, dict) and "messages" in one for one in content):
        raise DataError(f"{file} holds {format_count(len(content), 'conversation')}", "render takes one at a time")
    return content, tools


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


# ---------------------------------------------------------------- tokens


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Special tokens by their names."""
    names = {token: name for name, token in tokenizer.special_tokens.names().items()}
    return [names[token] if token in names else tokenizer.token_text(token) for token in ids]


def _prompt_table(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    special = set(tokenizer.special_tokens.names().values())
    click.echo(f"{'place':>6} {'id':>7}  piece")
    for place, (token, piece) in enumerate(zip(ids, _pieces(tokenizer, ids), strict=True)):
        click.echo(f"{place:>6} {token:>7} {'*' if token in special else ' '}{piece}")
    marked = sum(token in special for token in ids)
    click.echo(f"{format_count(len(ids), 'token')}, {marked} of them special (*)")


def _prompt_json(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Any]:
    return {"ids": list(ids), "pieces": _pieces(tokenizer, ids), "num_tokens": len(ids)}
