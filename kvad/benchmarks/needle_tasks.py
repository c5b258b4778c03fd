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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol, get_args

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
    """One task of at most ``length`` tokens: the prompt, the question, token by token, and an answer."""

    kind: Kind
    length: int
    depth: float  # share of the haystack before the target
    seed: int
    prompt: tuple[int, ...]  # read before the last eviction: the context, and the question if it is given beforehand
    question: tuple[int, ...]
    expected: tuple[str, ...]  # parts of the answer
    answer_tokens: int  # at most
    needle_positions: tuple[int, ...]  # index in the prompt at which each needle begins


class HaystackLanguage(Protocol):
    """Lines of a haystack and its needles. ``opening``: tokens before every context."""

    name: str
    opening: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def lines(self, seed: int) -> Iterator[str]:
        """Yield lines of the haystack, without end."""
        ...

    def num_distractors(self, length: int) -> int:
        """Return the number of distractors of ``many``."""
        ...

    def make_question(self, kind: Kind, seed: int, others: int) -> NeedleQuestion: ...

    def answer_tokens(self, parts: Sequence[str]) -> int:
        """Return the number of tokens in which an answer with these parts fits."""
        ...

    def answer_score(self, parts: Sequence[str], answer: Sequence[int]) -> float:
        """Score an answer, 0 to 1."""
        ...


class LookupLanguage:
    """The language of ``kvad.datasets.synthetic``: questions end in the key, answers are the words that follow."""

    name = "lookup"

    def __init__(self, tokenizer: Tokenizer, opening: Sequence[int] = ()) -> None:
        self.tokenizer, self.opening = tokenizer, tuple(opening)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def lines(self, seed: int) -> Iterator[str]:
        start = random.Random(seed).randrange(len(datasets.synthetic.NOISE))
        while True:
            yield datasets.synthetic.NOISE[start % len(datasets.synthetic.NOISE)]
            start += 1

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


class EnglishLanguage:
    """RULER's needles (a magic number for a name) and its variables, in the lines of ``texts``."""

    name = "english"

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], opening: Sequence[int] = ()) -> None:
        self.tokenizer, self.opening = tokenizer, tuple(opening)
        self._lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        if not self._lines:
            raise DataError("the text for a haystack has no lines", "give another --text")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def lines(self, seed: int) -> Iterator[str]:
        start = random.Random(seed).randrange(len(self._lines))
        while True:
            yield self._lines[start % len(self._lines)] + "\n"
            start += 1

    def num_distractors(self, length: int) -> int:
        return FEWEST_OTHERS  # RULER's

    def make_question(self, kind: Kind, seed: int, others: int) -> NeedleQuestion:
        rng = random.Random(seed)
        if kind == "chain":
            names, value = _draw_distinct(rng, LINKS, _variable), _number(rng)
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


def choose_language(
    name: str, tokenizer: Tokenizer, texts: Callable[[], Sequence[str]], opening: Sequence[int] = ()
) -> HaystackLanguage:
    """Return the language; ``auto`` is Lookup if each of its words is one token, else English in ``texts()``."""
    if name not in ("auto", "lookup", "english"):
        raise UsageError(f"unknown language {name!r}", "auto, lookup or english")
    knows = _knows_lookup(tokenizer)
    if name == "lookup" and not knows:
        raise UsageError(
            "this model's tokenizer does not know the words of the lookup language",
            "train one with recipes/lookup-cpu.toml, or ask in English: --language english",
        )
    if name == "lookup" or (name == "auto" and knows):
        return LookupLanguage(tokenizer, opening)
    return EnglishLanguage(tokenizer, texts(), opening)


def _knows_lookup(tokenizer: Tokenizer) -> bool:
    seen = set[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for an unknown word
        for word in datasets.synthetic.vocabulary():
            ids = tokenizer.encode(word)
            if len(ids) != 1 or ids[0] in seen:
                return False
            seen.update(ids)
    return True


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
    task_seed = stable_seed(kind, language.name, length, round(1000 * depth), seed)
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
    lines = _haystack(language, task_seed, hay)
    depths = _needle_depths(len(needles), sample.target_index, depth, random.Random(task_seed))
    context, starts, passed = _insert_needles(lines, needles, depths)
    real = passed[sample.target_index or 0] / hay if hay else 0.0
    positions = tuple(start + len(opening) for start in starts)
    prompt = (*opening, *context, *before)
    return NeedleTask(kind, length, real, seed, prompt, tuple(question), sample.parts, room, positions)


def stable_seed(*parts: object) -> int:
    """Return a seed that is a function of the parts, on every machine."""
    return random.Random("\0".join(map(str, parts))).getrandbits(48)


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


def _haystack(language: HaystackLanguage, seed: int, size: int) -> list[list[int]]:
    """Return lines of ``size`` tokens in total; the last may be truncated."""
    lines, total = list[list[int]](), 0
    for line in language.lines(seed):
        if total >= size:
            break
        ids = language.encode(line)[: size - total]
        if ids:
            lines.append(ids)
            total += len(ids)
    return lines


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


def _variable(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))


def _draw_distinct(rng: random.Random, count: int, draw: Callable[[random.Random], str]) -> list[str]:
    """Draw ``count`` different items."""
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
