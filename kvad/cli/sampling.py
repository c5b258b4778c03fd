"""The sampling options of the command line: one flag per field of :class:`kvad.engine.request.Sampling`.

Ranges are checked before anything is loaded; what needs a tokenizer (bad words) is added afterwards.  No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad.cli.common import explicit_options
from kvad.errors import RequestError

if TYPE_CHECKING:
    from kvad.engine.request import SamplingParams
    from kvad.llm import LLM
    from kvad.text.tokenizer import Tokenizer

__all__ = ["check_sampling_ranges", "resolve_sampling_options", "parse_sampling_options", "sampling_options"]

MAX_TOKENS = 128  # where neither the caller nor the checkpoint says

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

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
    ("--no-repeat-ngram", int, "No sequence of N tokens comes twice [default: 0, off]."),
    ("--beams", int, "Search with so many beams instead of sampling [default: 1]."),
    ("--length-penalty", float, "Beams: scores are divided by length ** A [default: 1]."),
    ("--seed", int, "The same seed gives the same text, whoever else is in the batch [default: 0]."),
)
_FIELDS = tuple(flag.removeprefix("--").replace("-", "_") for flag, _, _ in _NUMBERS)


def sampling_options(command: CommandT) -> CommandT:
    """All of them but ``--n`` and the log-probabilities, which only ``kvad generate`` has."""
    options = [
        click.option("--max-tokens", type=int, help="New tokens, at most [default: 128; --endless: no end]."),
        *(click.option(flag, type=kind, help=text) for flag, kind, text in _NUMBERS),
        click.option("--logit-bias", multiple=True, metavar="ID=V", help="Add V to the logit of token ID. Repeatable."),
        click.option("--bad-word", multiple=True, metavar="TEXT", help="Never complete TEXT, or it after a space."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on past the token that ends a document."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def parse_sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, by the names of :class:`Sampling`; the rest is the checkpoint's to say.

    RequestError for a value out of range.
    """
    names = (*_FIELDS, "max_tokens", "n", "logprobs", "prompt_logprobs")
    several = {"logit_bias": _biases(options["logit_bias"]), "stop": tuple(options["stop"])}
    several["ignore_eos"] = options["ignore_eos"]
    asked = {**explicit_options(options, names), **{name: value for name, value in several.items() if value}}
    check_sampling_ranges({"max_tokens": MAX_TOKENS, **asked})
    return asked


def check_sampling_ranges(asked: Mapping[str, Any]) -> None:
    """RequestError for a value out of range, before anything is opened.  What is said of a search without --beams may
    be for the checkpoint's own search: whether it has one is found when it is opened."""
    from kvad.engine.request import BEAM_ONLY_FIELDS, SamplingParams

    of_beams = {} if "beams" in asked else explicit_options(asked, BEAM_ONLY_FIELDS)
    SamplingParams.from_options(beams=2, **of_beams)
    SamplingParams.from_options(**{name: value for name, value in asked.items() if name not in of_beams})


def resolve_sampling_options(
    llm: LLM, asked: Mapping[str, Any], words: Sequence[str], *, endless: bool = False
) -> SamplingParams:
    """The options over the checkpoint's own defaults, with the bad words as this tokenizer spells them.  ``endless``:
    what is not said of the length is no length."""
    chosen = llm.sampling_params(**asked)
    if endless and "max_tokens" not in asked:
        chosen = replace(chosen, max_tokens=None)
    elif chosen.max_tokens is None:
        chosen = replace(chosen, max_tokens=MAX_TOKENS)
    return _with_bad_words(chosen, words, llm.tokenizer)


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias: {pair!r} is not ID=V", "write it like 42=-5.5") from None
    return biases


def _with_bad_words(sampling: SamplingParams, words: Sequence[str], tokenizer: Tokenizer | None) -> SamplingParams:
    """Each text as it is spelled, and as it is spelled after a space: to a tokenizer those are different tokens."""
    if not words:
        return sampling
    if tokenizer is None:
        raise RequestError("--bad-word needs a tokenizer, and this model came without one", "use --logit-bias ID=-1000")
    if "" in words:
        raise RequestError("--bad-word: an empty text would ban nothing or everything")
    spelled = {tuple(tokenizer.encode(text)) for word in words for text in (word, f" {word}")}
    return replace(sampling, bad_words_ids=(*sampling.bad_words_ids, *sorted(spelled)))
