"""MkDocs hook: generates the reference of commands and configuration keys, and links to files outside docs/.

Commands come from the click tree, keys from the dataclasses and the comments of their fields, so neither page is
stored and neither can be out of date. Loads no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvad.cache import CacheConfig
from kvad.cli.main import EXIT_CODES, cli
from kvad.config import ModelConfig
from kvad.engine.scheduling import SamplingParams
from kvad.train.config import RunConfig

ROOT = Path(__file__).parents[1]
CONFIGS = (
    (RunConfig, "A run file (`kvad train FILE.toml`) and `--set TABLE.KEY=VALUE`."),
    (CacheConfig, "`LLM.load(...)`, and the cache options of the commands."),
    (SamplingParams, "`LLM.generate(...)`, and the sampling options of the commands."),
    (ModelConfig, "`config.json` in kvad's layout, and `[model.config]` of a run file."),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, content in (("commands", commands_page()), ("configuration", configuration_page())):
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write links to files of the repository that are not pages as plain code."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = target.partition("#")[0]
        if not path or re.match(r"[a-z]+:", target):
            return match.group()
        inside = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), path))
        if inside.startswith("docs/") and not inside.endswith(".json"):
            return match.group()
        if not (ROOT / inside).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: the link to {target} is dead")
        return f"{text} (`{inside}`)"

    return re.sub(r"\[([^\]\[]*)\]\(([^)\s]+)\)", link, markdown)


def commands_page() -> str:
    """Return the page of all commands, generated from the click tree."""
    lines = [
        "# Commands",
        "",
        "Generated from the command line; `kvad COMMAND --help` or `--help-all` prints the same.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
    ]
    for path, command in _commands(cli, ("kvad",)):
        context = click.Context(command)
        arguments = " ".join(command.collect_usage_pieces(context))
        lines += [
            "",
            f"## {' '.join(path)}",
            "",
            f"    {' '.join(path)} {arguments}",
            "",
            _paragraphs(command.help or ""),
        ]
        records = [record for option in command.params if (record := _option(option, context))]
        if records:
            lines += ["", "| option | meaning |", "|---|---|", *records]
    return "\n".join(lines) + "\n"


def _commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group, info_name=path[-1])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        if command.hidden:
            continue
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


def _option(option: click.Parameter, context: click.Context) -> str | None:
    if not isinstance(option, click.Option) or option.hidden:
        return None
    record = option.get_help_record(context)
    if record is None:
        return None
    names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{names}` | {text} |"


def _paragraphs(text: str) -> str:
    """Return click's help text as Markdown: blocks after a backspace character are code."""
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text.split("\f")[0])):
        code = block.startswith("\b")
        blocks.append(textwrap.indent(block.lstrip("\b\n"), "    ") if code else block)
    return "\n\n".join(blocks)


def configuration_page() -> str:
    """Return the page of all configuration keys, generated from the dataclasses."""
    lines = ["# Configuration keys", "", "Generated from the dataclasses. Unknown keys are rejected by name."]
    seen: set[type] = set()
    for config, purpose in CONFIGS:
        lines += ["", f"## {config.__name__}", "", purpose, *_table(config)]
        for name, nested in _nested(config, seen):
            lines += ["", f"### {name}", "", inspect.getdoc(nested) or "", *_table(nested)]
    return "\n".join(lines) + "\n"


def _nested(config: type, seen: set[type]) -> Iterator[tuple[str, type]]:
    module = inspect.getmodule(config)
    for item in dataclasses.fields(config):
        for name in re.findall(r"\w+", str(item.type)):
            found = getattr(module, name, None)
            if isinstance(found, type) and dataclasses.is_dataclass(found) and found not in seen:
                seen.add(found)
                yield f"{item.name}: {name}", found
                yield from _nested(found, seen)


def _table(config: type) -> list[str]:
    comments = _comments(config)
    rows = ["", "| key | type | default | meaning |", "|---|---|---|---|"]
    for item in dataclasses.fields(config):
        value = item.default
        if item.default_factory is not dataclasses.MISSING:
            value = item.default_factory()
        if dataclasses.is_dataclass(value):
            default = "below"
        else:
            default = "required" if value is dataclasses.MISSING else f"`{value!r}`"
        kind = str(item.type).replace("validation.", "")
        rows.append(f"| `{item.name}` | `{kind}` | {default} | {comments.get(item.name, '')} |")
    return rows


def _comments(config: type) -> dict[str, str]:
    """Return the comment of each field: at the end of its line, or on the lines above it."""
    comments: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        source = textwrap.dedent(inspect.getsource(owner))
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            last: Any = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
            above = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("# "))
            comments[node.target.id] = last or " ".join(above)
    return comments
