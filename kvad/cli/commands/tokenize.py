"""``kvad tokenize`` shows the tokens of a text, ``kvad chat-template`` the prompt of a chat. No torch."""

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
@click.option("--ids", is_flag=True, help="Print only the ids, on one line.")
@click.option("--decode", is_flag=True, help="Read TEXT as token ids and print the decoded text.")
@json_option
def tokenize_command(source: Path, text: str | None, ids: bool, decode: bool, as_json: bool) -> None:
    """Show the tokens of TEXT; `-` or no TEXT reads standard input.

    \b
    kvad tokenize runs/demo "def main():"
    kvad tokenize runs/demo --ids < file.py
    kvad tokenize runs/demo --decode "12 7 99"
    """
    from kvad.text import load_tokenizer

    if ids and decode:
        raise click.UsageError("--ids and --decode exclude each other.")
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
    click.echo(f"{'index':>6} {'id':>7}  {'piece':<{width}}  bytes")
    for index, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
        click.echo(f"{index:>6} {token:>7}  {piece:<{width}}  {tokenizer.token_bytes(token).hex(' ')}")
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
@click.option("-m", "--message", "given", multiple=True, metavar="ROLE=TEXT", help="Message. Repeatable.")
@click.option(
    "-f", "--file", metavar="FILE", help="File with messages, as JSON or JSON lines; `-` reads standard input."
)
@click.option("--tools", "tools_file", metavar="FILE", help="File with a JSON list of tool schemas.")
@click.option("--no-generation-prompt", is_flag=True, help="Do not start the assistant's turn at the end.")
@click.option(
    "--continue-final-message", is_flag=True, help="End inside the last message, so that the model continues it."
)
@click.option("--template-name", help="Template of the model [default: default, or tool_use with --tools].")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Variable of the template. Repeatable.")
@click.option("--tokens", is_flag=True, help="Show the tokens of the prompt instead of its text.")
@json_option
def chat_template_command(
    model: Path,
    given: tuple[str, ...],
    file: str | None,
    tools_file: str | None,
    no_generation_prompt: bool,
    continue_final_message: bool,
    template_name: str | None,
    settings: tuple[str, ...],
    tokens: bool,
    as_json: bool,
) -> None:
    """Show the prompt that MODEL's chat template renders: messages of --file, then those of --message.

    \b
    kvad chat-template MODEL -m system="Be brief." -m user=Hi
    kvad chat-template MODEL --file messages.json --tools tools.json --tokens
    kvad chat-template MODEL -m user=Hi --set enable_thinking=false
    kvad chat-template MODEL -f talk.jsonl --no-generation-prompt --json | jq .spans
    """
    from kvad import text as text_lib
    from kvad.errors import ChatTemplateError
    from kvad.text import load_tokenizer

    folder = tokenizer_folder(model)
    messages, tools = _conversation(file) if file is not None else ([], None)
    messages = [*messages, *map(_message, given)]
    if not messages:
        raise click.UsageError("no message was given: add --message user=TEXT or --file.")
    if tools_file is not None:
        tools = _parse(_read(tools_file, "--tools"), tools_file)
    template = text_lib.chat_template.ChatTemplate.load(folder, name=template_name)
    if template is None:
        raise ChatTemplateError(f"{folder} has no chat template", "add a chat_template.jinja")
    rendered = template.render(
        messages,
        tools=tools,
        generation_prompt=not no_generation_prompt and not continue_final_message,
        continue_final=continue_final_message,
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
        click.echo(rendered.text, nl=sys.stdout.isatty())  # a file or a pipe gets exactly the prompt


def _message(text: str) -> dict[str, Any]:
    role, equals, content = text.partition("=")
    if not equals or not role:
        raise UsageError(f"--message {text!r} is not ROLE=TEXT", "write it like user=Hi")
    return {"role": role, "content": content}


def _setting(text: str) -> tuple[str, Any]:
    """Parse ``enable_thinking=false``; the value is JSON or else text."""
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
    """Read messages and tools from a JSON list, an object with both, or JSON lines of messages."""
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
        raise DataError(f"{file} contains no messages", 'write a JSON list of {"role": ..., "content": ...}')
    if content and all(isinstance(item, dict) and "messages" in item for item in content):
        raise DataError(
            f"{file} contains {format_count(len(content), 'conversation')}", "kvad chat-template renders one at a time"
        )
    return content, tools


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


# ---------------------------------------------------------------- tokens


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; special tokens by name."""
    names = {token: name for name, token in tokenizer.special_tokens.names().items()}
    return [names[token] if token in names else tokenizer.token_text(token) for token in ids]


def _prompt_table(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    special = set(tokenizer.special_tokens.names().values())
    click.echo(f"{'index':>6} {'id':>7}  piece")
    for index, (token, piece) in enumerate(zip(ids, _pieces(tokenizer, ids), strict=True)):
        click.echo(f"{index:>6} {token:>7} {'*' if token in special else ' '}{piece}")
    marked = sum(token in special for token in ids)
    click.echo(f"{format_count(len(ids), 'token')}, {marked} of them special (*)")


def _prompt_json(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Any]:
    return {"ids": list(ids), "pieces": _pieces(tokenizer, ids), "num_tokens": len(ids)}
