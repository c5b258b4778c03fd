"""``kvad tokenize`` shows the tokens of a text, ``kvad chat-template`` the prompt of a chat. No torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from kvad import storage
from kvad import text as text_lib
from kvad.cli import parameters
from kvad.cli.fields import argument, command, option
from kvad.cli.output import emit_json, format_table, print_result
from kvad.errors import ChatTemplateError, DataError, UsageError, format_count


class _TokenizeOptions(parameters.JsonOption):
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
    if options.ids and options.decode:
        raise click.UsageError("--ids and --decode exclude each other.")
    tokenizer = parameters.load_tokenizer_of(options.source)
    text = parameters.read_text_or_stdin("-" if options.text is None else options.text)
    tokens = parameters.parse_token_ids(text, "--decode") if options.decode else tokenizer.encode(text)
    decoded = tokenizer.decode(tokens, skip_specials=False) if options.decode else text
    if not options.as_json and (options.decode or options.ids):
        click.echo(decoded if options.decode else " ".join(map(str, tokens)))
        return
    size, pieces = len(decoded.encode("utf-8")), [tokenizer.token_text(token) for token in tokens]
    per_token, bytes_of = size / len(tokens) if tokens else None, [tokenizer.token_bytes(token) for token in tokens]
    record = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "text": decoded, "ids": tokens}
    record |= {"pieces": pieces, "bytes": list(map(list, bytes_of)), "num_tokens": len(tokens)}
    record |= {"num_characters": len(decoded), "num_bytes": size, "bytes_per_token": per_token}
    rows = [("index", "id", "piece", "bytes")]
    for index, (token, piece, raw) in enumerate(zip(tokens, pieces, bytes_of, strict=True)):
        rows.append((str(index), str(token), piece, raw.hex(" ")))
    each = "" if per_token is None else f", {per_token:.2f} bytes per token"
    total = f"{len(tokens)} tokens, {len(set(tokens))} different; {len(decoded)} characters, {size} bytes{each}"
    print_result(options.as_json, record, [*format_table(rows, left=(2, 3)), total])


class _TemplateOptions(parameters.ModelArgument, parameters.JsonOption):
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
    folder = parameters.tokenizer_folder(options.model)
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
    name = template.choose(tools=tools is not None)
    record: dict[str, Any] = {"template": name, "text": rendered.text, "spans": rendered.generation_marks}
    if options.tokens:
        tokenizer = text_lib.load_tokenizer(folder)
        ids, names = tokenizer.encode(rendered.text, specials=True), tokenizer.special_tokens.names()
        special = {token: name for name, token in names.items()}  # special tokens are shown by name
        pieces = [special[token] if token in special else tokenizer.token_text(token) for token in ids]
        rows = [("index", "id", " piece")]
        for index, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
            rows.append((str(index), str(token), f"{'*' if token in special else ' '}{piece}"))
        total = f"{format_count(len(ids), 'token')}, {sum(token in special for token in ids)} of them special (*)"
        record |= {"ids": ids, "pieces": pieces, "num_tokens": len(ids)}
        print_result(options.as_json, record, [*format_table(rows, left=(2,)), total])
    elif options.as_json:
        emit_json(record)
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
        return name, storage.strict_json.loads(value)
    except ValueError:
        return name, value


def _read(path: Path, flag: str) -> str:
    try:
        return parameters.read_text(path)
    except DataError as error:
        raise DataError(f"{flag}: {error.message}") from None


def _parse(text: str, file: Path, line: int = 0) -> Any:
    try:
        return storage.strict_json.loads("\n" * (line - 1) + text)  # the empty lines make the position the file's
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from None


def _conversation(file: Path) -> tuple[list[Any], Any]:
    """Read messages and tools from a JSON list, an object with both, or JSON lines of messages."""
    text = _read(file, "--file")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        are_objects = len(lines) > 1 and isinstance(storage.strict_json.loads(lines[0][1]), dict)
    except ValueError:
        are_objects = False
    content: Any = [_parse(line, file, number) for number, line in lines] if are_objects else _parse(text, file)
    tools = None
    if isinstance(content, dict):
        content, tools = (content["messages"], content.get("tools")) if "messages" in content else ([content], None)
    if not isinstance(content, list):
        raise DataError(f"{file} contains no messages", 'write a JSON list of {"role": ..., "content": ...}')
    if content and all(isinstance(item, dict) and "messages" in item for item in content):
        conversations = format_count(len(content), "conversation")
        raise DataError(f"{file} contains {conversations}", "kvad chat-template renders one at a time")
    return content, tools
