"""Commands whose parameters are generated from the fields of a dataclass.

::

    class DemoOptions(JsonOption):
        model: Path = argument("MODEL")
        minutes: float = option("Minutes of training", 2.0)
        stop: tuple[str, ...] = option("Stop before TEXT", (), metavar="TEXT")

    @command("demo", DemoOptions)
    def demo_command(options: DemoOptions) -> None: ...

A subclass of ``Options`` is a frozen dataclass. The flag is the field's name, its type the field's annotation:
``X | None`` may be left out, a tuple is repeatable, a ``bool`` is a switch, a ``Literal`` a choice. The help page gets
the default, and sections by the class that declares a field: ``--help`` shows the command's own options and common
ones, ``--help-all`` all of them. No torch.

Help pages name values in one form: a size is SIZE, a count N, another number X, a folder FOLDER, a file FILE. Counts of
tokens may be written as 8k or 1M.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import click

from kvad._log import show_log
from kvad.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OptionsT = TypeVar("OptionsT", bound="Options")
_HELP_ALL = "kvad.help_all"  # key of Context.meta
_METAVARS = {int: "N", float: "X", Path: "FOLDER"}
_COUNT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[km])\s*", re.IGNORECASE)
TOKEN_COUNTS = ("tokens", "seq_len", "source_len", "chunk_size", "vocab_size")  # parts of the names of such options


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """Additions of the command line to a field."""

    help: str = ""
    short: str = ""
    flag: str = ""
    metavar: str | None = None
    kind: Any = None
    of: type[DataclassInstance] | None = None
    common: bool = False
    envvar: str | None = None
    is_count: bool = False
    is_argument: bool = False
    required: bool = False


def option(help: str, default: Any = None, **settings: Any) -> Any:
    """Declare a field as an option.

    Args:
        help: A sentence without its period. The default is added, unless the text names one.
        default: Default of the field; None is False for a ``bool``, () for a repeatable option; MISSING if required.
        **settings: ``short`` (``"-o"``), ``flag`` (instead of the field's name), ``metavar``, ``kind`` (a click type),
            ``of`` (the dataclass whose field of this name has the default), ``common`` (shown by ``--help`` in a shared
            section), ``envvar``, ``is_count`` (the value is how often the flag is given).
    """
    return dataclasses.field(default=default, metadata={"cli": _Parameter(help=help, **settings)})


def argument(metavar: str, **settings: Any) -> Any:
    """Declare a field as a positional argument; unless ``required``, a tuple or ``X | None`` may be left out."""
    return dataclasses.field(metadata={"cli": _Parameter(metavar=metavar, is_argument=True, **settings)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, argument))
class Options:
    """Base of all options: a subclass is a frozen dataclass with keyword-only fields."""

    section: ClassVar[str] = ""  # title of its options on help pages
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


def command(
    name: str, options: type[OptionsT], group: click.Group | None = None
) -> Callable[[Callable[[OptionsT], None]], click.Command]:
    """Turn a function of options into a command, and add it to ``group``."""

    def decorate(function: Callable[[OptionsT], None]) -> click.Command:
        def callback(**values: Any) -> None:
            show_log(values.get("verbose") or 0)
            function(options(**values))

        built = SectionedCommand(name, callback=callback, params=_parameters(options), help=function.__doc__)
        if group is not None:
            group.add_command(built)
        return built

    return decorate


def is_given(value: object) -> bool:
    """Return True for the value of an option that was given; 0 and "" are given."""
    return value is not None and value is not False and value != () and value is not dataclasses.MISSING


def given_fields(options: Options, target: type[DataclassInstance]) -> dict[str, Any]:
    """Return the given options that are fields of ``target``."""
    names = {field.name for field in dataclasses.fields(target)} & {field.name for field in dataclasses.fields(options)}
    return {name: value for name in sorted(names) if is_given(value := getattr(options, name))}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameters(options: type[Options]) -> list[click.Parameter]:
    """Build the parameters: arguments of bases first, options of the class itself first."""
    hints, fields = typing.get_type_hints(options), {field.name: field for field in dataclasses.fields(options)}
    parameters: dict[str, click.Parameter] = {}
    for owner in options.__mro__:
        for name in vars(owner).get("__annotations__", {}):
            if name in fields and name not in parameters:
                section = "" if owner is options else vars(owner).get("section", "")
                parameters[name] = _parameter(fields[name], hints[name], section)
    arguments = [name for name in fields if isinstance(parameters[name], click.Argument)]
    return [*(parameters.pop(name) for name in arguments), *parameters.values()]


def _parameter(field: dataclasses.Field[Any], hint: Any, section: str) -> click.Parameter:
    setting: _Parameter = field.metadata["cli"]
    is_optional = get_origin(hint) in (Union, UnionType)
    if is_optional:
        hint = next(part for part in get_args(hint) if part is not NoneType)
    is_multiple = get_args(hint)[1:] == (Ellipsis,) and not getattr(setting.kind, "is_list", False)
    hint = get_args(hint)[0] if is_multiple else hint
    kind = setting.kind or _click_type(hint)
    if setting.is_argument:
        nargs = -1 if is_multiple else 1
        required = setting.required or not (is_optional or is_multiple)
        return click.Argument([field.name], metavar=setting.metavar, type=kind, nargs=nargs, required=required)
    flags = setting.flag or flag_of(field.name)
    if field.default is True:
        flags += f"/--no-{field.name.replace('_', '-')}"
    default = {"default": False if hint is bool and field.default is None else field.default}
    has_standard_type = setting.kind is None or isinstance(setting.kind, click.IntRange)
    built = SectionedOption(
        [*filter(None, [setting.short]), flags, field.name],
        type=None if hint is bool or setting.is_count else kind,
        is_flag=hint is bool,
        count=setting.is_count,
        multiple=is_multiple,
        metavar=setting.metavar or (_METAVARS.get(hint) if has_standard_type and not setting.is_count else None),
        envvar=setting.envvar,
        help=_help(field, setting, is_multiple),
        **({"required": True} if field.default is dataclasses.MISSING else default),
    )
    built.section, built.is_common = section, setting.common or not section
    built.counts_tokens = hint is int and any(part in field.name for part in TOKEN_COUNTS)
    return built


def parse_count(text: str) -> int | None:
    """Parse ``8k`` or ``1M`` (powers of 1024, as of sizes); return None for other texts."""
    match = _COUNT.fullmatch(text)
    return None if match is None else int(float(match["number"]) * 1024 ** (1 + "km".index(match["unit"].lower())))


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if get_origin(hint) is tuple:  # several values of one option
        return tuple(_click_type(part) for part in get_args(hint))
    return click.Path(path_type=Path) if hint is Path else hint


def _help(field: dataclasses.Field[Any], setting: _Parameter, is_multiple: bool) -> str:
    """Complete a help text, as in ``Tokens per block [default: 16].``."""
    if "\n" in setting.help:
        return setting.help
    default = field.default
    if setting.of is not None:
        default = next(each.default for each in dataclasses.fields(setting.of) if each.name == field.name)
    if default is True:
        default = flag_of(field.name)
    elif isinstance(default, tuple):
        default = ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in default)
    elif isinstance(default, float):
        default = f"{default:g}"
    has_default = is_given(default) and default != "" and "[default" not in setting.help
    shown = f" [default: {default}]" if has_default else ""
    return f"{setting.help}{shown}.{' Repeatable.' if is_multiple else ''}"


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # A generic class since click 8.4 only.


class Parsed(_ParamType):
    """A type of values read by a function, whose UsageError gets the flag.

    Args:
        name: Metavar.
        parse: Text -> value.
        is_list: The value is a tuple, such as ``0.5,0.75``: the option is not repeatable.
    """

    def __init__(self, name: str, parse: Callable[[str], Any], *, is_list: bool = False) -> None:
        self.name, self._parse, self.is_list = name, parse, is_list

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except UsageError as error:
            flag = param.opts[-1] if param is not None else self.name
            raise UsageError(f"{flag}: {error.message}", error.hint) from None


class SectionedOption(click.Option):
    """An option with the title of its section on help pages."""

    section = ""
    is_common = True  # shown by --help
    counts_tokens = False  # 8k is 8,192

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        count = parse_count(value) if self.counts_tokens and isinstance(value, str) else None
        return super().type_cast_value(ctx, value if count is None else str(count))


class SectionedCommand(click.Command):
    """A command whose ``--help`` shows common options, and ``--help-all`` all of them, in sections."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        num_hidden = sum(isinstance(param, SectionedOption) and not param.is_common for param in params)
        if not num_hidden:
            return params
        return [*params, click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
            help=f"Show {num_hidden} more options.",
        )]  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"": []}
        show_all = ctx.meta.get(_HELP_ALL)
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):
                continue
            section = param.section if isinstance(param, SectionedOption) else ""
            is_shown = show_all or not isinstance(param, SectionedOption) or param.is_common
            if is_shown and (record := param.get_help_record(ctx)):
                flags, text = record
                title, table = text.partition("\n")[::2]  # a table of names is shown by --help-all
                text = f"{title.strip().rstrip(':')}; --help-all lists them." if table and not show_all else text
                sections.setdefault(section, []).append((flags, text))
        for title, records in sections.items():
            with formatter.section(title or "Options"):
                formatter.write_dl(records, col_max=30)


class CommandGroup(click.Group):
    """A group whose help shows the whole first sentence of each command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=200)) for name, each in self.commands.items()])


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
