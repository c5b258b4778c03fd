"""Needle tasks for caches: needles in a haystack, one among many keys, chains of variables.

In the manner of RULER (Hsieh et al. 2024): a haystack of whole lines, needles between two of them, a question.
``single`` hides one needle, ``many`` the same one among others like it, ``chain`` a variable that is reached over
several links. A ``NeedleTask`` is a pure function of (kind, language with its tokenizer, length, depth, seed).

Two languages: ``LookupLanguage``, for the models of ``recipes/lookup-cpu.toml``, and ``EnglishLanguage``,
RULER's sentences in real text (``kvad.datasets.stdlib_sources``), for any checkpoint with a tokenizer. No torch.
"""

from __future__ import annotations

import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from string import ascii_uppercase
from typing import ClassVar, Literal, NamedTuple, get_args

from kvad import datasets
from kvad.errors import DataError, UsageError
from kvad.text import Tokenizer

Kind = Literal["single", "many", "chain"]
TASK_KINDS: tuple[Kind, ...] = get_args(Kind)
LINKS = datasets.synthetic.LINKS  # names of a chain
MIN_DISTANCE = 24  # tokens to each needle of many
FEWEST_OTHERS, MAX_DISTRACTORS = 3, 40
SLACK = 8  # tokens of an English answer beyond its parts


class NeedleQuestion(NamedTuple):
    """Needles and a question."""

    needles: tuple[str, ...]  # in their order
    target_index: int | None  # the needle whose position is the depth; None: all are needed
    prompt_question: str  # the question within the prompt
    answer_prefix: str  # the text that then leads to the answer
    question: str  # both in one, without a question in the prompt
    parts: tuple[str, ...]  # of the answer


@dataclass(frozen=True)
class NeedleTask:
    """One task: the prompt, the question, token by token, and an answer."""

    depth: float  # share of the haystack before the target
    prompt: tuple[int, ...]  # read before the last eviction: the context, and the question if it is given beforehand
    question: tuple[int, ...]
    expected: tuple[str, ...]  # parts of the answer
    answer_tokens: int  # at most
    needle_positions: tuple[int, ...]  # index in the prompt at which each needle begins


class HaystackLanguage(ABC):
    """Needles, and the lines of a haystack, repeated without end; ``opening``: tokens before every context."""

    name: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, haystack: Sequence[str], opening: Sequence[int]) -> None:
        self.tokenizer, self.opening, self.haystack = tokenizer, tuple(opening), haystack

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def hay(self, seed: int, size: int) -> list[list[int]]:
        """Return lines of ``size`` tokens in total, from a random one on; the last may be truncated."""
        start, lines = random.Random(seed).randrange(len(self.haystack)), list[list[int]]()
        source = islice(cycle(self.haystack), start, None)
        while size > 0:
            ids = self.encode(next(source))[:size]
            lines += [ids] if ids else []
            size -= len(ids)
        return lines

    @abstractmethod
    def num_distractors(self, length: int) -> int:
        """Return the number of distractors of ``many``."""

    @abstractmethod
    def make_question(self, kind: Kind, seed: int, others: int) -> NeedleQuestion: ...

    @abstractmethod
    def answer_tokens(self, parts: Sequence[str]) -> int:
        """Return the number of tokens in which an answer with these parts fits."""

    @abstractmethod
    def answer_score(self, parts: Sequence[str], answer: Sequence[int]) -> float:
        """Score an answer, 0 to 1."""


class LookupLanguage(HaystackLanguage):
    """The language of ``kvad.datasets.synthetic``: questions end in the key, answers are the words that follow."""

    name = "lookup"

    def __init__(self, tokenizer: Tokenizer, opening: Sequence[int] = ()) -> None:
        super().__init__(tokenizer, datasets.synthetic.NOISE, opening)

    def num_distractors(self, length: int) -> int:
        return min(MAX_DISTRACTORS, max(FEWEST_OTHERS, length // MIN_DISTANCE))

    def make_question(self, kind: Kind, seed: int, others: int) -> NeedleQuestion:
        rng = random.Random(seed)
        keys, value = rng.sample(datasets.synthetic.KEYS, others + LINKS + 1), rng.choice(datasets.synthetic.VALUES)
        target: int | None = None
        if kind == "chain":
            names = keys[:LINKS]
            needles = tuple(f"{key} {to}" for key, to in zip(names, [value, *names], strict=False))
            question, parts = f"? {names[-1]}", (*reversed(names[:-1]), value)
        else:
            needles = tuple(f"{key} {rng.choice(datasets.synthetic.VALUES)}" for key in keys[1 : others + 1])
            target = rng.randrange(others + 1)
            needles = (*needles[:target], f"{keys[0]} {value}", *needles[target:])
            question, parts = f"? {keys[0]}", (value,)
        return NeedleQuestion(needles, target, question, question, question, parts)

    def answer_tokens(self, parts: Sequence[str]) -> int:
        return len(parts)

    def answer_score(self, parts: Sequence[str], answer: Sequence[int]) -> float:
        """Score 1 if the words that follow are exactly these, else 0."""
        return float(list(answer[: len(parts)]) == self.encode(" ".join(parts)))


class EnglishLanguage(HaystackLanguage):
    """RULER's needles (a magic number for a name) and its variables, in the lines of ``texts``."""

    name = "english"

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], opening: Sequence[int] = ()) -> None:
        lines = [f"{line.strip()}\n" for text in texts for line in text.splitlines() if line.strip()]
        if not lines:
            raise DataError("the text for a haystack has no lines", "give another --text")
        super().__init__(tokenizer, lines, opening)

    def num_distractors(self, length: int) -> int:
        return FEWEST_OTHERS  # RULER's

    def make_question(self, kind: Kind, seed: int, others: int) -> NeedleQuestion:
        rng = random.Random(seed)
        if kind == "chain":
            names = _draw_distinct(rng, LINKS, lambda rng: "".join(rng.choice(ascii_uppercase) for _ in range(5)))
            value = _number(rng)
            bound = [value, *(f"VAR {name}" for name in names)]
            needles = tuple(f"VAR {name} = {to}\n" for name, to in zip(names, bound, strict=False))
            question = f"Question: Find all variables that are assigned the value {value} in the text above."
            lead = (
                " Answer: According to the chain(s) of variable assignment in the text above, "
                f"{LINKS} variables are assigned the value {value}, they are:"
            )
            return NeedleQuestion(needles, None, question, lead, question + lead, tuple(names))
        names = _draw_distinct(rng, others + 1, lambda rng: f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}")
        numbers = _draw_distinct(rng, others + 1, _number)
        needles = tuple(
            f"One of the special magic numbers for {name} is: {number}.\n"
            for name, number in zip(names, numbers, strict=True)
        )
        target = rng.randrange(others + 1)
        what = f"special magic number for {names[target]} mentioned in the provided text"
        question, lead = f"What is the {what}?", f" The {what} is:"
        return NeedleQuestion(needles, target, question, lead, question + lead, (numbers[target],))

    def answer_tokens(self, parts: Sequence[str]) -> int:
        return len(self.encode(", ".join(parts))) + SLACK

    def answer_score(self, parts: Sequence[str], answer: Sequence[int]) -> float:
        """Score as RULER: the share of the parts that the text contains."""
        text = self.tokenizer.decode(list(answer))
        return sum(part in text for part in parts) / len(parts)


def opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the token that opens every training text of this model, if any."""
    specials = tokenizer.special_tokens
    first = specials.separator if specials.separator is not None else specials.bos
    return [] if first is None else [first]


def choose_language(
    name: str, tokenizer: Tokenizer, texts: Callable[[], Sequence[str]], opening: Sequence[int] = ()
) -> HaystackLanguage:
    """Return the language; ``auto`` is Lookup if each of its words is one token, else English in ``texts()``."""
    if name not in ("auto", "lookup", "english"):
        raise UsageError(f"unknown language {name!r}", "auto, lookup or english")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for an unknown word
        words = [tuple(tokenizer.encode(word)) for word in datasets.synthetic.vocabulary()]
    has_lookup = all(len(ids) == 1 for ids in words) and len(set(words)) == len(words)
    if name == "lookup" and not has_lookup:
        raise UsageError(
            "this model's tokenizer does not know the words of the lookup language",
            "train one with recipes/lookup-cpu.toml, or ask in English: --language english",
        )
    if name != "english" and has_lookup:
        return LookupLanguage(tokenizer, opening)
    return EnglishLanguage(tokenizer, texts(), opening)


def make_task(
    kind: Kind,
    language: HaystackLanguage,
    length: int,
    depth: float,
    seed: int,
    *,
    align: int = 1,
    question_in_prompt: bool = False,
) -> NeedleTask:
    """Make a task of at most ``length`` tokens, answer included; UsageError if needles and question do not fit.

    Args:
        align: The length of a prompt of at least ``align`` tokens is a multiple of it, so a cache that evicts at this
            interval does so right after the prompt.
        question_in_prompt: The prompt ends in the question.
    """
    seed_parts = (kind, language.name, length, round(1000 * depth), seed)
    task_seed = random.Random("\0".join(map(str, seed_parts))).getrandbits(48)  # the same on every machine
    sample = language.make_question(kind, task_seed, language.num_distractors(length) if kind == "many" else 0)
    needles = [language.encode(needle) for needle in sample.needles]
    before = language.encode(sample.prompt_question) if question_in_prompt else []
    question = language.encode(sample.answer_prefix if question_in_prompt else sample.question)
    room, opening = language.answer_tokens(sample.parts), language.opening
    fixed = len(opening) + sum(map(len, needles)) + len(before)
    most = length - room - len(question)
    hay = (most // align * align or most) - fixed
    if hay < 0:
        raise UsageError(
            f"a {kind} task does not fit in {length} tokens: needles, question and answer take "
            f"{fixed + len(question) + room}",
            "ask for longer ones with --lengths",
        )
    depths = _needle_depths(len(needles), sample.target_index, depth, random.Random(task_seed))
    context, starts, passed = _insert_needles(language.hay(task_seed, hay), needles, depths)
    real = passed[sample.target_index or 0] / hay if hay else 0.0
    positions = tuple(start + len(opening) for start in starts)
    return NeedleTask(real, (*opening, *context, *before), tuple(question), sample.parts, room, positions)


def _insert_needles(
    lines: Sequence[Sequence[int]], needles: Sequence[Sequence[int]], cuts: Sequence[float]
) -> tuple[list[int], list[int], list[int]]:
    """Insert needles; return (lines, index at which each needle begins, hay before it), nearest to its depth.

    lines of 5, 5 and 4 tokens, one needle of 2 at depth 0.5:  edges 0 5 10 14, nearest to 7 is 5:  5 hay, needle, 9 hay
    """
    hay = [token for line in lines for token in line]
    edges = [0, *accumulate(map(len, lines))]
    context, at, before = list[int](), list[int](), list[int]()
    for needle, cut in zip(needles, cuts, strict=True):
        edge = min(edges, key=lambda edge: abs(edge - cut * len(hay)))
        context += hay[before[-1] if before else 0 : edge]
        at.append(len(context))
        before.append(edge)
        context += needle
    return context + hay[before[-1] :], at, before


def _needle_depths(count: int, target: int | None, depth: float, rng: random.Random) -> list[float]:
    """Return the depth of each needle, 0 to 1, in order.

    The target is at ``depth``, those of a chain from there to the end, the others anywhere on their side of it.
    """
    if target is None:
        return [depth + (1 - depth) * link / count for link in range(count)]
    before = sorted(rng.uniform(0, depth) for _ in range(target))
    after = sorted(rng.uniform(depth, 1) for _ in range(count - target - 1))
    return [*before, depth, *after]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _draw_distinct(rng: random.Random, count: int, draw: Callable[[random.Random], str]) -> list[str]:
    items: dict[str, None] = {}
    while len(items) < count:
        items[draw(rng)] = None
    return list(items)


# Names of needles: common words without a meaning together.
# fmt: off
_ADJECTIVES = (
    "amber", "ancient", "bitter", "brave", "bright", "calm", "clever", "cold", "curious", "damp", "eager", "early",
    "faint", "fresh", "gentle", "golden", "green", "happy", "heavy", "hidden", "hollow", "humble", "late", "lively",
    "lonely", "loud", "mellow", "narrow", "noisy", "odd", "pale", "patient", "plain", "proud", "quick", "quiet",
    "rapid", "rough", "scarlet", "sharp", "silent", "silver", "slow", "soft", "steep", "strange", "sturdy", "tall",
    "tender", "warm", "wild",
)
_NOUNS = (
    "anchor", "apple", "arrow", "badger", "basket", "beacon", "bottle", "branch", "bridge", "button", "candle",
    "carpet", "castle", "cellar", "copper", "corner", "cradle", "desert", "drum", "engine", "feather", "fiddle",
    "forest", "garden", "glacier", "hammer", "harbor", "island", "jacket", "kettle", "ladder", "lantern", "lemon",
    "marble", "meadow", "mirror", "needle", "ocean", "orchard", "pebble", "pillow", "pocket", "river", "saddle",
    "shadow", "spoon", "stable", "thunder", "timber", "tunnel", "valley", "velvet", "violin", "walnut", "window",
)
# fmt: on
