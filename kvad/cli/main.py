"""Entry point of ``kvad``: the table of commands, error reporting and exit codes.

The module of a command is imported when the command runs, completes or shows its help, never for ``kvad --help``:
the list is printed at once, and a command that cannot be imported does not affect the others. No torch.

A signal gives 128 plus its number, as in a shell; ``EXIT_CODES`` lists the others.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from kvad import __version__
from kvad.config import register
from kvad.errors import KvadError, SaveError, UsageError, suggest

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


GROUPS: dict[str, dict[str, tuple[str, str]]] = {  # title -> name -> ("file of commands/:attribute", one line of help)
    "Run": {
        "demo": ("demo:demo_command", "Train a small model on this machine, generate from it and verify its cache."),
        "generate": ("generate:generate_command", "Continue prompts."),
        "chat": ("chat:chat_command", "Chat with a model."),
        "serve": ("serve:serve_command", "Serve a model over HTTP, with OpenAI's API and a web page."),
        "translate": ("batch:translate_command", "Translate lines of text."),
        "embed": ("batch:embed_command", "Compute a vector for each line."),
        "classify": ("batch:classify_command", "Assign a label to each line."),
        "tag": ("batch:tag_command", "Assign a label to each word."),
        "fill-mask": ("batch:fill_mask_command", "Predict masked tokens."),
    },
    "Train": {
        "train": ("train:train_command", "Train a model."),
        "data": ("data:data_group", "Create, prepare and check training data."),
        "eval": ("eval:eval_command", "Evaluate a model on text, pairs or labels."),
        "compare": ("runs:compare_command", "Compare training runs."),
        "plot": ("runs:plot_command", "Plot JSON lines."),
    },
    "Cache": {
        "plan": ("plan:plan_command", "Estimate memory without loading a model."),
        "verify": ("verify:verify_command", "Compare every cache configuration with the uncached model."),
        "bench": ("bench:bench_group", "Measure the speed and the quality of the cache."),
        "session": ("session:session_group", "Save and restore the cache of a text."),
        "prefix": ("session:prefix_group", "Pin prefixes in the prefix cache."),
    },
    "Models": {
        "import": ("convert:import_command", "Convert a Hugging Face model to kvad's layout."),
        "export": ("convert:export_command", "Convert a checkpoint to Hugging Face's layout."),
        "quantize": ("convert:quantize_command", "Store the weights as int8 or int4."),
        "merge": ("convert:merge_command", "Merge an adapter into its base model."),
    },
    "Inspect": {
        "inspect": ("inspect:inspect_command", "Show the contents, the architecture or the attention of a model."),
        "tokenize": ("tokenize:tokenize_command", "Show the tokens of a text."),
        "chat-template": ("tokenize:chat_template_command", "Show the prompt that a chat template renders."),
        "doctor": ("doctor:doctor_command", "Check a checkpoint or a cache directory for damage."),
    },
}
_COMPLETION_HELP = "Print the completion script of a shell."
EXIT_CODES = {
    0: "success",
    1: "failure while running (full disk, no network, out of memory), or a failed check",
    2: "invalid input; nothing was changed",
    130: "Ctrl-C",
    141: "the reader of the output closed the pipe",
    143: "SIGTERM",
}
COMMANDS: dict[str, tuple[str, str]] = {
    **{name: (f"kvad.cli.commands.{home}", text) for group in GROUPS.values() for name, (home, text) in group.items()},
    "completion": ("kvad.cli.main:completion", _COMPLETION_HELP),
}

# Commands of other tools, with the kvad command that does the same.
FOREIGN_COMMANDS = {
    "help": "use kvad --help, or kvad COMMAND --help",
    "run": "use kvad generate MODEL PROMPT, or kvad chat MODEL",
    "pull": "name the hub model in any command, or use kvad import NAME to convert it",
    "list": "use kvad inspect MODEL, or kvad plan --list-models",
    "show": "use kvad inspect MODEL",
    "finetune": "use kvad train DATA --init MODEL --lora-rank RANK --out FOLDER",
}

# Options of other tools, with the option of the same meaning.
FOREIGN_OPTIONS = {
    "--learning-rate": "--lr", "--epochs": "--steps", "--n-predict": "--max-tokens", "--context": "--max-seq-len",
    "--ctx-size": "--max-seq-len", "--max-model-len": "--max-seq-len", "--gpu-memory-utilization": "--memory",
    "--kv-cache-dtype": "--cache-dtype", "--eviction": "--policy", "--served-model-name": "--model-name",
    "--api-key": "--api-key-file",
}  # fmt: skip

_EXTRAS = {
    "matplotlib": "plot",
    "gguf": "gguf",
    "transformers": "oracle",
    "sacrebleu": "eval",
    "tensorboard": "tensorboard",
    **dict.fromkeys(("starlette", "uvicorn", "httptools", "pydantic", "prometheus_client"), "server"),
    "ray": "ray",
}

_OS_ERRORS = {
    errno.EACCES: "permission denied", errno.EPERM: "not permitted", errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space is left on the disk", errno.EDQUOT: "the disk quota is used up",
    errno.ENOENT: "no such file or folder", errno.ENOTDIR: "it is not a folder", errno.EISDIR: "it is a folder",
    errno.EEXIST: "it exists already", errno.ENAMETOOLONG: "the name is too long",
}  # fmt: skip
_WRONG_PATH = _OS_ERRORS.keys() - {errno.ENOSPC, errno.EDQUOT}  # another path would help: exit code 2


@dataclass
class CliState:
    """State of one invocation."""

    debug: bool = False  # show tracebacks


def _add_global_options(command: click.Command, *, hidden: bool = True) -> click.Command:
    """Add --debug and --plugin to a command: ``kvad --debug train`` equals ``kvad train --debug``."""

    def set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.ensure_object(CliState).debug |= value

    def register_plugins(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> None:
        for name, equals, target in (text.partition("=") for text in value):
            register(name, target if equals else None)

    settings: dict[str, Any] = {"is_eager": True, "expose_value": False, "hidden": hidden}
    if all(param.name != "debug" for param in command.params):
        text = "Allow configurations and files to select a class by name (docs: Extending). Repeatable."
        options = (
            click.Option(
                ["--debug"], is_flag=True, callback=set_debug, help="Show the traceback of an error.", **settings
            ),
            click.Option(
                ["--plugin"],
                metavar="[NAME=]package.module:Class",
                multiple=True,
                callback=register_plugins,
                help=text,
                **settings,
            ),
        )
        command.params.extend(options)
    if isinstance(command, click.Group):
        for child in command.commands.values():
            _add_global_options(child)
    return command


class LazyGroup(click.Group):
    """The group of ``COMMANDS``, which are imported on first use; its help page lists them under ``GROUPS``."""

    table = COMMANDS

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
        return _add_global_options(command)

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
        listed = {name for names in GROUPS.values() for name in names} | {"completion"}  # named in the epilog
        sections = {**GROUPS, "Other": [name for name in self.table if name not in listed]}
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
    name="kvad",
    help="Train and run Transformers. The KV cache can be inspected, planned in advance and verified.",
    epilog=f"\b\nStart with:  kvad demo\nkvad completion SHELL:  {_COMPLETION_HELP}\n\n\b\nExit codes:\n"
    + "\n".join(f"{code:>5}  {meaning}" for code, meaning in EXIT_CODES.items()),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_add_global_options(cli, hidden=False)
click.version_option(__version__, "-V", "--version", prog_name="kvad", message="%(prog)s %(version)s")(cli)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvad argv`` and return the exit code; only a command's own ``SystemExit`` is raised."""
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return shell_complete(cli, {}, "kvad", COMPLETE_VARIABLE, instruction)
    session = CliState()
    try:
        code = 0
        try:
            with cli.make_context("kvad", list(sys.argv[1:] if argv is None else argv), obj=session) as ctx:
                cli.invoke(ctx)
        except click.exceptions.Exit as stop:  # --help, --version, ctx.exit(1)
            code = stop.exit_code
        if sys.stdout is not None:  # closed by the caller: >&-
            sys.stdout.flush()  # a full disk or a closed pipe can still be reported here
        return code
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # discard the buffer, so that exit does not fail again (tests: no file)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


def describe_error(error: Exception) -> tuple[str, str, int]:
    """Return the message, the hint (or "") and the exit code for an error."""
    match error:
        case SaveError(__cause__=OSError(errno=code)) if code in _WRONG_PATH:
            return error.message, error.hint, 2
        case KvadError():
            return error.message, error.hint, error.exit_code
        case click.NoSuchOption():
            known = [flag for param in error.ctx.command.params for flag in param.opts] if error.ctx else []
            close = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=0.7)
            close = [flag for flag in known if flag == FOREIGN_OPTIONS.get(error.option_name)] or close
            nearest = f"; did you mean {close[0]!r}?" if close else ""
            hint = f"see {error.ctx.command_path} --help" if error.ctx else ""
            return f"No such option {error.option_name!r}{nearest}", hint, 2
        case click.UsageError():
            hint = f"see {error.ctx.command_path} --help" if error.ctx else ""
            return error.format_message(), hint, 2
        case click.ClickException():
            return error.format_message(), "", error.exit_code
        case OSError(errno=int(code)) if code in _OS_ERRORS:
            path = f"{error.filename}: " if error.filename else ""
            return f"{path}{_OS_ERRORS[code]}", "", 2 if code in _WRONG_PATH else 1
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] in _EXTRAS:
            package = name.partition(".")[0]
            hint = f"pip install {package}, or the extra {_EXTRAS[package]!r} of kvad"
            return f"this needs {package}, which is not installed", hint, 2
        case MemoryError():
            return "out of memory", "kvad plan estimates what would fit", 1
    return f"this is a bug in kvad: {type(error).__name__}: {error}", "--debug shows the traceback", 1
