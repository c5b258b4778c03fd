"""Entry point of ``kvad``: the table of commands, error reporting and exit codes.

The module of a command is imported when the command runs, completes or shows its help, never for ``kvad --help``:
the list is printed at once, and a command that cannot be imported does not affect the others. No torch.

Exit codes: 0 success; 1 failure while running, or a failed check; 2 invalid input (nothing was changed);
130 Ctrl-C; 141 the reader of the output closed the pipe.
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
from kvad.errors import KvadError, UsageError, suggest

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


GROUPS: dict[str, dict[str, tuple[str, str]]] = {  # title -> name -> ("module:attribute", one line of help)
    "Run": {
        "demo": (
            "kvad.cli.commands.demo:demo_command",
            "Train a small model on this machine, generate from it and verify its cache.",
        ),
        "generate": ("kvad.cli.commands.generate:generate_command", "Continue prompts."),
        "chat": ("kvad.cli.commands.chat:chat_command", "Chat with a model."),
        "translate": ("kvad.cli.commands.translate:translate_command", "Translate lines of text."),
        "embed": ("kvad.cli.commands.encode:embed_command", "Compute a vector for each line."),
        "classify": ("kvad.cli.commands.encode:classify_command", "Assign a label to each line."),
        "tag": ("kvad.cli.commands.encode:tag_command", "Assign a label to each word."),
        "fill-mask": ("kvad.cli.commands.encode:fill_mask_command", "Predict masked tokens."),
    },
    "Train": {
        "train": ("kvad.cli.commands.train:train_command", "Train a model."),
        "data": ("kvad.cli.commands.data:data_group", "Create, prepare and check training data."),
        "eval": ("kvad.cli.commands.eval:eval_command", "Evaluate a model on text, pairs or labels."),
        "compare": ("kvad.cli.commands.runs:compare_command", "Compare training runs."),
        "plot": ("kvad.cli.commands.runs:plot_command", "Plot JSON lines."),
    },
    "Cache": {
        "plan": ("kvad.cli.commands.plan:plan_command", "Estimate memory without loading a model."),
        "verify": (
            "kvad.cli.commands.verify:verify_command",
            "Compare every cache configuration with the uncached model.",
        ),
        "bench": ("kvad.cli.commands.bench:bench_group", "Measure the speed and the quality of the cache."),
        "session": ("kvad.cli.commands.session:session_group", "Save and restore the cache of a text."),
        "prefix": ("kvad.cli.commands.session:prefix_group", "Pin prefixes in the prefix cache."),
    },
    "Models": {
        "import": ("kvad.cli.commands.convert:import_command", "Convert a Hugging Face model to kvad's layout."),
        "export": ("kvad.cli.commands.convert:export_command", "Convert a checkpoint to Hugging Face's layout."),
        "merge": ("kvad.cli.commands.convert:merge_command", "Merge an adapter into its base model."),
    },
    "Inspect": {
        "inspect": (
            "kvad.cli.commands.inspect:inspect_command",
            "Show the contents, the architecture or the attention of a model.",
        ),
        "tokenize": ("kvad.cli.commands.tokenize:tokenize_command", "Show the tokens of a text."),
        "chat-template": (
            "kvad.cli.commands.tokenize:chat_template_command",
            "Show the prompt that a chat template renders.",
        ),
        "doctor": ("kvad.cli.commands.doctor:doctor_command", "Check a checkpoint or a cache directory for damage."),
    },
}
_COMPLETION_HELP = "Print the completion script of a shell."
COMMANDS: dict[str, tuple[str, str]] = {
    **{name: target for group in GROUPS.values() for name, target in group.items()},
    "completion": ("kvad.cli.main:completion", _COMPLETION_HELP),
}

# Commands of other tools, with the kvad command that does the same.
FOREIGN_COMMANDS = {
    "run": "use kvad generate MODEL PROMPT, or kvad chat MODEL",
    "pull": "name the hub model in any command, or use kvad import NAME to convert it",
    "list": "use kvad inspect MODEL, or kvad plan --list-models",
    "finetune": "use kvad train DATA --init MODEL --lora-rank RANK --out FOLDER",
    "serve": "serving is not available yet; use kvad generate, kvad chat, or kvad.LLM in Python",
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
    """State of one invocation."""

    debug: bool = False  # show tracebacks


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
    """Add --debug to a command: ``kvad --debug train`` equals ``kvad train --debug``."""
    if all(param.name != "debug" for param in command.params):
        command.params.append(_debug_option(hidden=True))
    if isinstance(command, click.Group):
        for child in command.commands.values():
            _accept_debug(child)
    return command


class LazyGroup(click.Group):
    """Group of commands that are imported on first use.

    Attributes:
        table: Command name to ("package.module:attribute", one line of help).
        sections: Section title to the names that the help page lists under it.
    """

    def __init__(
        self, table: Mapping[str, tuple[str, str]], sections: Mapping[str, Sequence[str]], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.table, self.sections = dict(table), dict(sections)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; return None for an unknown name.

        Raises:
            KvadError: If the name is listed, but its module is not part of this installation.
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
        return _accept_debug(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.table and not ctx.resilient_parsing:
            if name in FOREIGN_COMMANDS:
                raise UsageError(f"No such command {name!r}: {FOREIGN_COMMANDS[name]}")
            close = suggest(name, self.table)
            hint = f"; {close}" if close.startswith("did you mean") else ""
            raise click.UsageError(f"No such command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = {title: list(names) for title, names in self.sections.items()}
        listed = {name for names in sections.values() for name in names} | {"completion"}  # named in the epilog
        sections["Other"] = [name for name in self.table if name not in listed]
        width = max(map(len, self.table))
        for title, names in sections.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), self.table[name][1]) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        items = [
            CompletionItem(name, help=text) for name, (_, text) in self.table.items() if name.startswith(incomplete)
        ]
        return items or click.Command.shell_complete(self, ctx, incomplete)


cli = LazyGroup(
    COMMANDS,
    {title: tuple(group) for title, group in GROUPS.items()},
    name="kvad",
    help="Train and run Transformers. The KV cache can be inspected, planned in advance and verified.",
    epilog=f"\b\nStart with:  kvad demo\nkvad completion SHELL:  {_COMPLETION_HELP}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[_debug_option(hidden=False)],
)
click.version_option(__version__, prog_name="kvad", message="%(prog)s %(version)s")(cli)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvad argv`` and return the exit code; only a command's own ``SystemExit`` is raised."""
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
    sys.stdout.flush()  # a full disk or a closed pipe can still be reported here
    return code


def describe_error(error: Exception) -> tuple[str, str, int]:
    """Return the message, the hint (or "") and the exit code for an error."""
    match error:
        case KvadError():
            return error.message, error.hint, error.exit_code
        case click.UsageError():
            hint = f"see {error.ctx.command_path} --help" if error.ctx else ""
            return error.format_message(), hint, 2
        case click.ClickException():
            return error.format_message(), "", error.exit_code
        case OSError(errno=int(code)) if code in _OS_ERRORS:
            path = f"{error.filename}: " if error.filename else ""
            return f"{path}{_OS_ERRORS[code]}", "", 2
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] in _EXTRAS:
            package = name.partition(".")[0]
            return f"this needs {package}, which is not installed", f"pip install 'kvad[{_EXTRAS[package]}]'", 2
        case MemoryError():
            return "out of memory", "kvad plan estimates what would fit", 1
    return f"this is a bug in kvad: {type(error).__name__}: {error}", "--debug shows the traceback", 1


def _detach_output(stream: TextIO) -> None:
    """Discard the buffered output of a closed pipe, so that exit does not fail again."""
    with suppress(OSError, ValueError):  # the stream of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
