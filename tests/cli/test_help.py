"""Every help page: whole, in one way of writing, with examples that the command would take."""

import re
import shlex

import click
import pytest

from kvad.cli.main import COMMANDS, cli


def pages():
    """(name, command) of every command that has a page, those of groups too."""
    context = click.Context(cli)
    for name in COMMANDS:
        yield from tree(name, cli.get_command(context, name))


def tree(name, command):
    yield name, command
    if isinstance(command, click.Group):
        for child, each in command.commands.items():
            yield from tree(f"{name} {child}", each)


PAGES = dict(pages())


def page(name):
    context = click.Context(cli, info_name="kvad")
    for word in name.split():
        context = click.Context(PAGES[name], parent=context, info_name=word)
    return PAGES[name].get_help(context)


@pytest.mark.parametrize("name", PAGES)
def test_options_stand_there_once_and_say_what_they_take(name):
    said = page(name).partition("\nOptions:\n")[2]
    flags = [line.split()[0].rstrip(",") for line in said.splitlines() if line.startswith("  -")]
    shown = [each for each in PAGES[name].params if isinstance(each, click.Option) and not each.hidden]
    assert len(flags) == len(set(flags)) == len(shown) + 1, "and --help"
    for param in shown:
        assert set(flags) & set(param.opts), param.opts
    takes = {line.split()[1] for line in said.splitlines() if line.startswith("  --") and len(line.split()) > 1}
    assert not takes & {"INTEGER", "FLOAT", "DIR", "PATH", "DIRECTORY", "FILENAME"}, takes


@pytest.mark.parametrize("name", [name for name in PAGES if name != "completion"])
def test_examples_are_commands_that_are_taken(name):
    """Parsed, not run: what the words name is not there."""
    lines = [line.strip() for line in page(name).splitlines() if line.startswith("  ")]
    examples = [line for line in lines if "kvad " in line and not line.startswith("-") and line.split()[0] != "Usage:"]
    own = [line for line in examples if line.partition("kvad ")[2].startswith(name)]
    assert own, "no example of its own"
    for line in own:
        words = shlex.split(re.split(r" (?:[<>|]|>>) ", line.partition("kvad ")[2])[0])
        found = max((each for each in PAGES if words[: len(each.split())] == each.split()), key=len)
        rest, command = words[len(found.split()) :], PAGES[found]
        with click.Context(command, info_name=found) as context:
            if not isinstance(command, click.Group):
                command.parse_args(context, rest)
