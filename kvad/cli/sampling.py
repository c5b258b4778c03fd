"""The sampling options of the command line: one flag per field of :class:`kvad.engine.request.Sampling`.

Ranges are checked before anything is loaded; what needs a tokenizer (bad words) is added afterwards.  No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad.errors import RequestError

if TYPE_CHECKING:
    from kvad.engine.request import Sampling
    from kvad.text.tokenizer import Tokenizer

__all__ = ["read_sampling", "sampling_options", "with_bad_words"]

Command = TypeVar("Command", bound=Callable[..., Any])

_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("--temperature", float, "0 is greedy [default: 1]."),
    ("--top-k", int, "Keep the K likeliest tokens [default: 0, all]."),
    ("--top-p", float, "Keep the fewest tokens whose probabilities reach P [default: 1]."),
    ("--min-p", float, "Keep tokens of at least P times the likeliest one's probability [default: 0]."),
    ("--typical-p", float, "Keep the tokens of the most typical surprise, up to mass P [default: 1]."),
    ("--repetition-penalty", float, "Above 1: tokens of prompt and output are less likely [default: 1]."),
    ("--presence-penalty", float, "Subtracted from the logits of tokens of the output, once [default: 0]."),
    ("--frequency-penalty", float, "The same, once per occurrence [default: 0]."),
    ("--min-tokens", int, "No end before so many tokens [default: 0]."),
    ("--seed", int, "The same seed gives the same text, whoever else is in the batch [default: 0]."),
)
_FIELDS = tuple(flag.removeprefix("--").replace("-", "_") for flag, _, _ in _NUMBERS)


def sampling_options(command: Command) -> Command:
    """All of them but ``--n`` and the log-probabilities, which only ``kvad generate`` has."""
    options = [
        click.option("--max-tokens", type=int, default=128, show_default=True, help="New tokens, at most."),
        *(click.option(flag, type=kind, help=text) for flag, kind, text in _NUMBERS),
        click.option("--logit-bias", multiple=True, metavar="ID=V", help="Add V to the logit of token ID. Repeatable."),
        click.option("--bad-word", multiple=True, metavar="TEXT", help="Never complete TEXT, or it after a space."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on past the token that ends a document."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def read_sampling(options: Mapping[str, Any]) -> Sampling:
    """Everything that needs no tokenizer.  RequestError for a value out of range."""
    from kvad.engine.request import Sampling

    given = {name: options[name] for name in _FIELDS if options[name] is not None}
    for name in ("n", "logprobs", "prompt_logprobs"):
        if options.get(name) is not None:
            given[name] = options[name]
    return Sampling.of(
        max_tokens=options["max_tokens"],
        logit_bias=_biases(options["logit_bias"]),
        stop=tuple(options["stop"]),
        ignore_eos=options["ignore_eos"],
        **given,
    )


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias: {pair!r} is not ID=V", "write it like 42=-5.5") from None
    return biases


def with_bad_words(sampling: Sampling, words: Sequence[str], tokenizer: Tokenizer | None) -> Sampling:
    """Each text as it is spelled, and as it is spelled after a space: to a tokenizer those are different tokens."""
    if not words:
        return sampling
    if tokenizer is None:
        raise RequestError("--bad-word needs a tokenizer, and this model came without one", "use --logit-bias ID=-1000")
    if "" in words:
        raise RequestError("--bad-word: an empty text would ban nothing or everything")
    spelled = {tuple(tokenizer.encode(text)) for word in words for text in (word, f" {word}")}
    return replace(sampling, bad_words=tuple(sorted(spelled)))
