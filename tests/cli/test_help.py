"""Help pages of all commands: every option, one form of texts, and examples that parse."""

import importlib.util
import re
import shlex
import sys

import click
import pytest

from kvad.cli import fields
from kvad.cli.main import COMMANDS, cli


def pages():
    """Yield (name, command) of every command and of the commands of groups."""
    context = click.Context(cli)
    for name in COMMANDS:
        yield from tree(name, cli.get_command(context, name))


def tree(name, command):
    yield name, command
    if isinstance(command, click.Group):
        for child, each in command.commands.items():
            yield from tree(f"{name} {child}", each)


PAGES = dict(pages())


def page_context(name):
    """Context of a command with the settings of ``kvad``; click caches the help option made from them per command."""
    context = click.Context(cli, info_name="kvad", **cli.context_settings)
    for word in name.split():
        context = click.Context(PAGES[name], parent=context, info_name=word)
    return context


def page(name, *, all_options=True):
    context = page_context(name)
    context.meta["kvad.help_all"] = all_options
    return PAGES[name].get_help(context)


def flags_of(text):
    options = text.partition("\nOptions:\n")[2]
    return [line.split()[0].rstrip(",") for line in options.splitlines() if line.startswith("  -")]


@pytest.mark.parametrize("name", PAGES)
def test_every_option_is_listed_once_with_a_standard_metavar(name):
    text = page(name)
    flags = flags_of(text)
    shown = [each for each in PAGES[name].params if isinstance(each, click.Option) and not each.hidden]
    others = {"-h", "--help-all"} & set(flags)
    assert len(flags) == len(set(flags)) == len(shown) + len(others)
    for param in shown:
        assert set(flags) & set(param.opts), param.opts
    metavars = {line.split()[1] for line in text.splitlines() if line.startswith("  --") and len(line.split()) > 1}
    assert not metavars & {"INTEGER", "FLOAT", "DIR", "PATH", "DIRECTORY", "FILENAME"}, metavars


def test_short_help_lists_common_options():
    short, full = flags_of(page("generate", all_options=False)), flags_of(page("generate"))
    assert {"-n", "-t", "-c", "-s", "--policy", "--cache-dtype", "--json", "--help-all"} < set(short) < set(full)
    assert f"Show {len(full) - len(short)} more options." in page("generate", all_options=False)
    assert "--help-all" not in flags_of(page("tokenize"))


def test_tables_of_names_are_in_the_full_help():
    short, full = page("generate", all_options=False), page("generate")
    assert "[default: full]; --help-" in short and "snapkv(B)" not in short and "snapkv(B)" in full
    assert "offload    the same" not in short and "offload    the same" in full


@pytest.mark.parametrize("name", ["data", "data create", "session", "prefix", "bench"])
def test_groups_list_whole_sentences(name):
    text = "".join(page(name).partition("Commands:")[2].split())
    for child in PAGES[name].commands.values():
        assert "".join(child.help.partition(". ")[0].partition("\n\n")[0].split()).rstrip(".") in text
    assert "..." not in text


@pytest.mark.parametrize("name", PAGES)
def test_a_folder_in_an_example_is_not_taken_for_a_command(name):
    folders = re.findall(r"--prefix-cache-dir (\S+)", " ".join(page(name).partition("Options:")[0].split()))
    assert all(folder.startswith("./") for folder in folders), folders


@pytest.mark.parametrize(("text", "value"), [("8k", 8192), ("1M", 2**20), ("1.5K", 1536), ("300", 300)])
def test_counts_of_tokens_have_units(text, value):
    options = {param.name: param for param in PAGES["generate"].params}
    for name in ("max_tokens", "max_seq_len", "prefill_chunk_size"):
        assert options[name].type_cast_value(click.Context(cli), text) == value
    lengths = next(param for param in PAGES["plan"].params if param.name == "max_seq_len")
    assert lengths.type.convert(f"{text},64", lengths, None) == (value, 64)


@pytest.mark.parametrize(("command", "name", "text"), [("train", "steps", "10k"), ("generate", "max_tokens", "8x")])
def test_other_numbers_have_no_units(command, name, text):
    param = next(param for param in PAGES[command].params if param.name == name)
    with pytest.raises(click.BadParameter, match="is not a valid int"):
        param.type_cast_value(click.Context(cli), text)


def test_cache_defaults_are_those_of_the_dataclass():
    assert "Tokens per block [default: 16]." in page("generate")
    assert "Cache layout [default: paged]." in page("generate")


@pytest.mark.parametrize("name", PAGES)
def test_help_texts_have_one_form(name):
    for option in PAGES[name].params:
        if isinstance(option, click.Option) and "\n" not in option.help:
            assert option.help[0].isupper() or option.help[0] in "-b", option.help
            assert option.help.endswith("."), option.help
            assert ". [default" not in option.help and "[default: None" not in option.help, option.help


@pytest.mark.parametrize("name", [name for name in PAGES if name != "completion"])
def test_examples_parse(name):
    """The examples are not run, because their files do not exist."""
    lines = [line.strip() for line in page(name).splitlines() if line.startswith("  ")]
    examples = [line for line in lines if "kvad " in line and not line.startswith("-") and line.split()[0] != "Usage:"]
    own = [line for line in examples if line.partition("kvad ")[2].startswith(name)]
    assert own, "no example of its own"
    for line in own:
        words = shlex.split(re.split(r" (?:[<>|]|>>) ", line.partition("kvad ")[2])[0])
        name_of_example = max((each for each in PAGES if words[: len(each.split())] == each.split()), key=len)
        rest, command = words[len(name_of_example.split()) :], PAGES[name_of_example]
        with page_context(name_of_example) as context:
            if not isinstance(command, click.Group):
                command.parse_args(context, rest)


def test_no_command_needs_generic_types_of_click(monkeypatch):
    """``click.ParamType`` cannot be subscripted before click 8.4; pyproject.toml allows 8.2."""
    monkeypatch.setattr(click, "ParamType", type("ParamType", (), {}))
    spec = importlib.util.spec_from_file_location("kvad_fields_with_old_click", fields.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert issubclass(module.Parsed, click.ParamType)
