"""``kvad tokenize`` shows the tokens of a text, ``kvad chat-template`` the prompt of a chat. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.fields import argument, command, option
from kvad.cli.output import emit_json
from kvad.cli.parameters import JsonOption, ModelArgument, parse_token_ids, read_stdin, read_text, tokenizer_folder
from kvad.errors import DataError, UsageError, format_count

if TYPE_CHECKING:
    from kvad.text import Tokenizer


class _TokenizeOptions(JsonOption):
    source: Path = argument("MODEL_OR_TOKENIZER")
    text: str | None = argument("[TEXT|-]")
    ids: bool = option("Print only the ids, on one line")
    decode: bool = option("Read TEXT as token ids and print the decoded text")


@command("tokenize", _TokenizeOptions)
def tokenize_command(options: _TokenizeOptions) -> None:
    """Show the tokens of TEXT; `-` or no TEXT reads standard input.

    \b
    kvad tokenize runs/demo "def main():"
    kvad tokenize runs/demo --ids < file.py
    kvad tokenize runs/demo --decode "12 7 99"
    """
    from kvad.text import load_tokenizer

    if options.ids and options.decode:
        raise click.UsageError("--ids and --decode exclude each other.")
    tokenizer = load_tokenizer(options.source if options.source.is_file() else tokenizer_folder(options.source))
    text = read_stdin() if options.text is None or options.text == "-" else options.text
    tokens = parse_token_ids(text, "--decode") if options.decode else tokenizer.encode(text)
    decoded = tokenizer.decode(tokens, skip_specials=False) if options.decode else text
    if options.as_json:
        emit_json(_token_json(tokenizer, decoded, tokens))
    elif options.decode:
        click.echo(decoded)
    elif options.ids:
        click.echo(" ".join(map(str, tokens)))
    else:
        _token_table(tokenizer, decoded, tokens)


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


class _TemplateOptions(ModelArgument, JsonOption):
    message: tuple[str, ...] = option("Message", short="-m", metavar="ROLE=TEXT")
    file: Path | None = option(
        "File with messages, as JSON or JSON lines; `-` reads standard input", short="-f", metavar="FILE"
    )
    tools: Path | None = option("File with a JSON list of tool schemas", metavar="FILE")
    no_generation_prompt: bool = option("Do not start the assistant's turn at the end")
    continue_final_message: bool = option("End inside the last message, so that the model continues it")
    template_name: str | None = option("Template of the model [default: default, or tool_use with --tools]")
    set: tuple[str, ...] = option("Variable of the template", metavar="NAME=VALUE")
    tokens: bool = option("Show the tokens of the prompt instead of its text")


@command("chat-template", _TemplateOptions)
def chat_template_command(options: _TemplateOptions) -> None:
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

    folder = tokenizer_folder(options.model)
    messages, tools = _conversation(options.file) if options.file is not None else ([], None)
    messages = [*messages, *map(_message, options.message)]
    if not messages:
        raise click.UsageError("no message was given: add --message user=TEXT or --file.")
    if options.tools is not None:
        tools = _parse(_read(options.tools, "--tools"), options.tools)
    template = text_lib.chat_template.ChatTemplate.load(folder, name=options.template_name)
    if template is None:
        raise ChatTemplateError(f"{folder} has no chat template", "add a chat_template.jinja")
    rendered = template.render(
        messages,
        tools=tools,
        generation_prompt=not options.no_generation_prompt and not options.continue_final_message,
        continue_final=options.continue_final_message,
        variables=dict(map(_setting, options.set)),
    )
    tokenizer = load_tokenizer(folder) if options.tokens else None
    ids = tokenizer.encode(rendered.text, specials=True) if tokenizer is not None else []
    if options.as_json:
        name, spans = template.choose(tools=tools is not None), rendered.generation_marks
        tokens = {} if tokenizer is None else _prompt_json(tokenizer, ids)
        emit_json({"template": name, "text": rendered.text, "spans": spans, **tokens})
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


def _read(path: Path, flag: str) -> str:
    try:
        return read_text(path)
    except DataError as error:
        raise DataError(f"{flag}: {error.message}") from None


def _parse(text: str, file: Path, line: int = 0) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line or error.lineno}, column {error.colno}"
        raise DataError(f"{file} is not JSON: {where}: {error.msg}") from None


def _conversation(file: Path) -> tuple[list[Any], Any]:
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
