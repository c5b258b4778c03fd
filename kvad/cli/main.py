"""``kvad``: the table of commands, and what every command does with errors.

A command's module is imported when that command runs, completes or is asked for its help, never for ``kvad --help``;
so the list is instant, and a broken command takes no other one down.  Nothing here imports torch.

Exit codes: 0 done; 1 failed while running, or a check that says no; 2 the input cannot be right (nothing was
changed); 130 Ctrl-C; 141 the reader of our output went away.

``kvad completion SHELL``: prints the script that lets a shell complete kvad's commands and options.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from kvad import __version__
from kvad.cli.options import normalize_metavars
from kvad.errors import KvadError, suggest

COMPLETE_VARIABLE = "_KVAD_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  eval "$(kvad completion bash)"      in ~/.bashrc
    zsh:   eval "$(kvad completion zsh)"       in ~/.zshrc
    fish:  kvad completion fish > ~/.config/fish/completions/kvad.fish
    """
    script = get_completion_class(shell)
    assert script is not None, shell
    click.echo(script(ctx.find_root().command, {}, "kvad", COMPLETE_VARIABLE).source())


COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("kvad.cli.commands.demo:demo_command", "Train a small model here and now, and prove its cache."),
    "corpus": ("kvad.cli.commands.data:create_group", "Make texts to train on that every machine can make."),
    "data": ("kvad.cli.commands.data:data_group", "Prepare texts for training; prove what packing promises."),
    "train": ("kvad.cli.commands.train:train_command", "Train a model on text files."),
    "compare": (
        "kvad.cli.commands.runs:compare_command",
        "Hold training runs against each other: curves, and a table.",
    ),
    "eval": ("kvad.cli.commands.eval:eval_command", "How well does a model do on texts, pairs or labels?"),
    "generate": ("kvad.cli.commands.generate:generate_command", "Continue a prompt."),
    "chat": ("kvad.cli.commands.chat:chat_command", "Talk with a model."),
    "session": ("kvad.cli.commands.session:session_group", "Save what the cache holds of a text; go on from it later."),
    "translate": ("kvad.cli.commands.translate:translate_command", "Translate lines."),
    "fill": ("kvad.cli.commands.encode:fill_mask_command", "Fill the masks of lines."),
    "tag": ("kvad.cli.commands.encode:tag_command", "Label the words of lines."),
    "classify": ("kvad.cli.commands.encode:classify_command", "Label lines."),
    "embed": ("kvad.cli.commands.encode:embed_command", "A vector for every line."),
    "tokenize": ("kvad.cli.commands.tokenize:tokenize_command", "Show the tokens of a text."),
    "render": ("kvad.cli.commands.tokenize:chat_template_command", "Show the exact prompt of a chat, and its tokens."),
    "import": ("kvad.cli.commands.convert:import_command", "Make kvad's own checkpoint of a Hugging Face model."),
    "export": ("kvad.cli.commands.convert:export_command", "Make a Hugging Face folder of a checkpoint."),
    "merge": ("kvad.cli.commands.convert:merge_command", "Add an adapter (LoRA) to the weights that it stands beside."),
    "plan": ("kvad.cli.commands.plan:plan_command", "How much memory will it take? Nothing is loaded."),
    "verify": ("kvad.cli.commands.verify:verify_command", "Prove that the cache changes nothing."),
    "bench": ("kvad.cli.commands.bench:bench_group", "Time a cache, and measure what one that forgets costs."),
    "prefix": ("kvad.cli.commands.session:prefix_group", "Compute once what many requests begin with, and keep it."),
    "inspect": ("kvad.cli.commands.inspect:inspect_command", "What is in a checkpoint; draw its attention."),
    "doctor": ("kvad.cli.commands.doctor:doctor_command", "Look a checkpoint, or a cache's folder, over: is it whole?"),
    "plot": ("kvad.cli.commands.runs:plot_command", "Draw figures from JSON lines."),
    "completion": ("kvad.cli.main:completion", "Print the completion script of a shell."),
}

_EXTRAS = {"matplotlib": "plot", "transformers": "oracle", "sacrebleu": "eval", "tensorboard": "tensorboard"}

_OS_ERRORS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "it is not a folder",
    errno.EISDIR: "it is a folder",
    errno.EEXIST: "it exists already",
}


@dataclass
class CliState:
    """What the whole invocation knows."""

    debug: bool = False


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    session = ctx.find_object(CliState)
    if value and session is not None:
        session.debug = True


def _debug_option(*, hidden: bool) -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        hidden=hidden,
        callback=_set_debug,
        help="Show the traceback of an error.",
    )


def _accept_debug(command: click.Command) -> click.Command:
    """``kvad --debug train`` and ``kvad train --debug`` are the same."""
    if all(param.name != "debug" for param in command.params):
        command.params.append(_debug_option(hidden=True))
    if isinstance(command, click.Group):
        for child in command.commands.values():
            _accept_debug(child)
    return command


class LazyGroup(click.Group):
    """A group whose commands are ``name -> ("package.module:attribute", one line of help)``."""

    def __init__(self, table: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self.table = dict(table)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None for an unknown name.

        Raises:
            KvadError: the name is listed, but its module is not part of this installation.
        """
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise KvadError(f"{cmd_name!r} is not part of this installation: {module} is missing") from error
        assert isinstance(command, click.Command), f"{module}:{attribute} is not a click command"
        return normalize_metavars(_accept_debug(command))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.table and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {name!r}; {suggest(name, self.table)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in self.table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=text) for name, (_, text) in self.table.items() if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete)


cli = LazyGroup(
    COMMANDS,
    name="kvad",
    help="Train and run Transformers, with a KV cache that you can see, size, and make prove itself.",
    epilog="Start with:  kvad demo",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[_debug_option(hidden=False)],
)
click.version_option(__version__, prog_name="kvad", message="%(prog)s %(version)s")(cli)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvad argv`` and return the exit code; raises nothing but a command's own ``SystemExit``."""
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return shell_complete(cli, {}, "kvad", COMPLETE_VARIABLE, instruction)
    session = CliState()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv), session)
    except BrokenPipeError:
        _detach_output(sys.stdout)
        return 141
    except (KeyboardInterrupt, click.Abort):
        return 130
    except click.exceptions.NoArgsIsHelpError as usage:
        click.echo(usage.format_message(), err=True)
        return 2
    except Exception as error:
        if session.debug:
            traceback.print_exc()
        message, hint, code = describe_error(error)
        for label, line in (("error", message), ("hint", hint)):
            if line:
                click.echo(f"kvad: {label}: " + line.replace("\n", " "), err=True)
        return code


def _run(arguments: list[str], session: CliState) -> int:
    try:
        with cli.make_context("kvad", arguments, obj=session) as ctx:
            cli.invoke(ctx)
        code = 0
    except click.exceptions.Exit as stop:  # --help, --version, ctx.exit(1)
        code = stop.exit_code
    sys.stdout.flush()  # here, where a full disk or a closed pipe can still be reported
    return code


def describe_error(error: Exception) -> tuple[str, str, int]:
    """What the user reads of ``error`` (the message, and a hint or ""), and the exit code."""
    match error:
        case KvadError():
            return error.message, error.hint, error.exit_code
        case click.UsageError():
            hint = f"see {error.ctx.command_path} --help" if error.ctx else ""
            return error.format_message(), hint, 2
        case click.ClickException():
            return error.format_message(), "", error.exit_code
        case OSError(errno=int(number)) if number in _OS_ERRORS:
            path = f"{error.filename}: " if error.filename else ""
            return f"{path}{_OS_ERRORS[number]}", "", 2
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] in _EXTRAS:
            package = name.partition(".")[0]
            return f"this needs {package}, which is not installed", f"pip install 'kvad[{_EXTRAS[package]}]'", 2
        case MemoryError():
            return "out of memory", "kvad plan says what would fit", 1
    return f"this is a bug in kvad: {type(error).__name__}: {error}", "--debug shows the traceback", 1


def _detach_output(stream: TextIO) -> None:
    """Let what is still buffered for a reader that went away go nowhere, instead of failing again at exit."""
    with suppress(OSError, ValueError):  # a test's stream has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
