"""Help pages: one way of writing what an option takes, and long lists of options in sections.

A size is a SIZE, a count N, another number X, a folder FOLDER, a file FILE, a format FORMAT.  No torch.
"""

from __future__ import annotations

import click

__all__ = ["SectionedCommand", "normalize_metavars"]

_WORDS = {"INTEGER": "N", "FLOAT": "X"}
OVERFLOW_OPTIONS = ("on_full", "watermark", "park_ram", "park_dir", "spill_ram", "spill_dir")
PREFIX_CACHE_OPTIONS = ("tier", "tier_bytes", "tier_ram", "tier_replacement")
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Length and end", ("max_tokens", "min_tokens", "stop", "ignore_eos", "endless")),
    ("Sampling", ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "n", "logit_bias", "bad_word")),
    ("Repetition", ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram")),
    ("Search", ("beams", "length_penalty", "n_best")),
    ("Cache: size and format", ("rows", "context", "source_context", "layout", "block_size", "blocks")),
    ("", ("dtype", "cache_dtype", "cache_keys", "cache_values", "weights_dtype", "deterministic")),
    ("Cache: what stays of a row", ("policy", "rotate", "compressor")),
    ("Cache: when it is full", OVERFLOW_OPTIONS),
    ("Cache: beyond the request and the process", (*PREFIX_CACHE_OPTIONS, "session", "sessions")),
)


class SectionedCommand(click.Command):
    """A command with many options: its own first, then those that commands share, by what they are about."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        records = {each.name: found for each in options if (found := each.get_help_record(ctx))}
        placed: list[tuple[str, list[tuple[str, str]]]] = []
        for title, names in SECTIONS:
            rows = [records.pop(name) for name in names if name in records]
            if title:
                placed.append((title, rows))
            else:  # the last one's, goes on
                placed[-1][1].extend(rows)
        for title, rows in (("Options", list(records.values())), *placed):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=30)


def normalize_metavars(command: click.Command) -> click.Command:
    """Say what its options take as this page's first lines do; in the commands of a group, too."""
    for param in command.params:
        word = _WORDS.get(param.type.name.upper().partition(" ")[0])  # of a range, too
        if isinstance(param, click.Option) and param.metavar is None and word and not (param.is_flag or param.count):
            param.metavar = word
    if isinstance(command, click.Group):
        for child in command.commands.values():
            normalize_metavars(child)
    return command
