"""``kvad completion SHELL``: prints the script that lets a shell complete kvad's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["COMPLETE_VARIABLE", "completion"]

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
