"""What a cache is asked to remember: needles in a haystack, one among many keys, chains of variables.

In the manner of RULER (Hsieh et al. 2024): a haystack of whole lines, needles between two of them, a question.
``single`` hides one needle, ``many`` the same one among others like it, ``chain`` a variable that is reached over
several links.  A :class:`Task` is a pure function of (kind, language, length, depth, seed), and so of the tokenizer
that the language holds; its needle stands where ``at`` says.

Two languages: :class:`Lookup`, for the models of ``runs/lookup-cpu.toml``, and :class:`English`, RULER's sentences in
real text (``kvad.datasets.stdlib_sources``), for any checkpoint with a tokenizer.  No torch.
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
LINKS = datasets.synthetic.LINKS  # of a chain: so many names
MIN_DISTANCE = 24  # tokens to each needle of many
FEWEST_OTHERS, MAX_DISTRACTORS = 3, 40
SLACK = 8  # tokens of an English answer beyond what it must hold


class NeedleQuestion(NamedTuple):
    """What is hidden and asked: ``needles`` in the order in which they must stand; ``parts``: what an answer holds.

    ``asked``: the needle whose place is the depth, None where they are all needed.  ``told``: the question where it
    stands in the prompt, and ``lead`` what then leads to the answer; ``question``: both in one, where nothing was told.
    """

    needles: tuple[str, ...]
    target_index: int | None
    prompt_question: str
    answer_prefix: str
    question: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class NeedleTask:
    """``prompt``: what is read before the cache is cut for the last time: the ``context``, and the question in it where
    it is told beforehand.  Then come the tokens of ``question``, one by one, and the answer in at most ``room`` more:
    ``length`` tokens at most in all.

    ``at``: where in the prompt each needle begins; ``depth``: the share of the haystack that stands before the asked
    one (of a chain: before the first)."""

    kind: Kind
    length: int
    depth: float
    seed: int
    prompt: tuple[int, ...]
    question: tuple[int, ...]
    expected: tuple[str, ...]
    answer_tokens: int
    needle_positions: tuple[int, ...]


class HaystackLanguage(Protocol):
    """Lines of a haystack, and what can be hidden in one.  ``opening``: tokens before every context."""

    name: str
    opening: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def lines(self, seed: int) -> Iterator[str]:
        """Of the haystack, without end."""
        ...

    def num_distractors(self, length: int) -> int:
        """How many needles stand beside the asked one of ``many``."""
        ...

    def make_question(self, kind: Kind, seed: int, others: int) -> NeedleQuestion: ...

    def answer_tokens(self, parts: Sequence[str]) -> int:
        """Tokens in which an answer with these parts is given."""
        ...

    def answer_score(self, parts: Sequence[str], answer: Sequence[int]) -> float:
        """How much of what was asked an answer gives, 0 to 1."""
        ...


class LookupLanguage:
    """The language of :mod:`kvad.datasets.synthetic`: its questions end in the key, its answers are the words that follow."""

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
        if kind == "chain":
            names = keys[:LINKS]
            bound = [value, *names]
            needles = tuple(f"{key} {to}" for key, to in zip(names, bound, strict=False))
            asked_for = f"? {names[-1]}"
            return NeedleQuestion(needles, None, asked_for, asked_for, asked_for, (*reversed(names[:-1]), value))
        needles = tuple(f"{key} {rng.choice(datasets.synthetic.VALUES)}" for key in keys[1 : others + 1])
        asked = rng.randrange(others + 1)
        needles = (*needles[:asked], f"{keys[0]} {value}", *needles[asked:])
        asked_for = f"? {keys[0]}"
        return NeedleQuestion(needles, asked, asked_for, asked_for, asked_for, (value,))

    def answer_tokens(self, parts: Sequence[str]) -> int:
        return len(parts)

    def answer_score(self, parts: Sequence[str], answer: Sequence[int]) -> float:
        """All or nothing: the words that follow are these."""
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
            names, value = _drawn(rng, LINKS, _variable), _number(rng)
            bound = [value, *(f"VAR {name}" for name in names)]
            needles = tuple(f"VAR {name} = {to}\n" for name, to in zip(names, bound, strict=False))
            told = f"Question: Find all variables that are assigned the value {value} in the text above."
            lead = (
                " Answer: According to the chain(s) of variable assignment in the text above, "
                f"{LINKS} variables are assigned the value {value}, they are:"
            )
            return NeedleQuestion(needles, None, told, lead, told + lead, tuple(names))
        names = _drawn(rng, others + 1, lambda rng: f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}")
        numbers = _drawn(rng, others + 1, _number)
        needles = tuple(_needle(name, number) for name, number in zip(names, numbers, strict=True))
        asked = rng.randrange(others + 1)
        what = f"special magic number for {names[asked]} mentioned in the provided text"
        told, lead = f"What is the {what}?", f" The {what} is:"
        return NeedleQuestion(needles, asked, told, lead, told + lead, (numbers[asked],))

    def answer_tokens(self, parts: Sequence[str]) -> int:
        return len(self.encode(", ".join(parts))) + SLACK

    def answer_score(self, parts: Sequence[str], answer: Sequence[int]) -> float:
        """RULER's: the share of the parts that the text holds."""
        said = self.tokenizer.decode(list(answer))
        return sum(part in said for part in parts) / len(parts)


def choose_language(
    name: str, tokenizer: Tokenizer, texts: Callable[[], Sequence[str]], opening: Sequence[int] = ()
) -> HaystackLanguage:
    """``auto``: Lookup where every word of it is one token of its own, else English in ``texts()``."""
    if name not in ("auto", "lookup", "english"):
        raise UsageError(f"unknown language {name!r}", "auto, lookup or english")
    knows = _knows_lookup(tokenizer)
    if name == "lookup" and not knows:
        raise UsageError(
            "this model's tokenizer does not know the words of the lookup language",
            "train one with runs/lookup-cpu.toml, or ask in English: --language english",
        )
    if name == "lookup" or (name == "auto" and knows):
        return LookupLanguage(tokenizer, opening)
    return EnglishLanguage(tokenizer, texts(), opening)


def _knows_lookup(tokenizer: Tokenizer) -> bool:
    seen = set[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a word that it does not know
        for word in datasets.synthetic.vocabulary():
            ids = tokenizer.encode(word)
            if len(ids) != 1 or ids[0] in seen:
                return False
            seen.update(ids)
    return True


def make_task(
    kind: Kind, language: HaystackLanguage, length: int, depth: float, seed: int, *, align: int = 1, told: bool = False
) -> NeedleTask:
    """A task of at most ``length`` tokens, answer included; UsageError where needles and question do not fit.

    ``told``: the prompt ends in the question.  Its length is a multiple of ``align`` where it is as long as that: a
    cache that cuts every so many tokens does so right behind it.
    """
    own = stable_seed(kind, language.name, length, round(1000 * depth), seed)
    said = language.make_question(kind, own, language.num_distractors(length) if kind == "many" else 0)
    needles = [language.encode(needle) for needle in said.needles]
    before = language.encode(said.prompt_question) if told else []
    question, room = language.encode(said.answer_prefix if told else said.question), language.answer_tokens(said.parts)
    fixed = len(language.opening) + sum(map(len, needles)) + len(before)
    most = length - room - len(question)
    hay = (most // align * align or most) - fixed
    if hay < 0:
        raise UsageError(
            f"a {kind} task does not fit in {length} tokens: needles, question and answer take "
            f"{fixed + len(question) + room}",
            "ask for longer ones with --lengths",
        )
    lines = _haystack(language, own, hay)
    cuts = _needle_depths(len(needles), said.target_index, depth, random.Random(own))
    context, at, passed = _insert_needles(lines, needles, cuts)
    real = passed[said.target_index or 0] / hay if hay else 0.0
    opening = language.opening
    places = tuple(place + len(opening) for place in at)
    prompt = (*opening, *context, *before)
    return NeedleTask(kind, length, real, seed, prompt, tuple(question), said.parts, room, places)


def stable_seed(*parts: object) -> int:
    """A seed that is a function of the parts, on every machine."""
    return random.Random("\0".join(map(str, parts))).getrandbits(48)


def _insert_needles(
    lines: Sequence[Sequence[int]], needles: Sequence[Sequence[int]], cuts: Sequence[float]
) -> tuple[list[int], list[int], list[int]]:
    """(the lines with each needle between two of them, nearest to its cut; where each begins; the hay before it).

    lines of 5, 5 and 4 tokens, one needle of 2 at cut 0.5:  edges 0 5 10 14, nearest to 7 is 5:  5 hay, needle, 9 hay
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
    """Lines of ``size`` tokens in all; the last may be cut."""
    found, total = list[list[int]](), 0
    for line in language.lines(seed):
        if total >= size:
            break
        ids = language.encode(line)[: size - total]
        if ids:
            found.append(ids)
            total += len(ids)
    return found


def _needle_depths(count: int, asked: int | None, depth: float, rng: random.Random) -> list[float]:
    """Where each needle stands, 0 to 1, in order: the asked one at ``depth``, those of a chain from there to the end,
    the others anywhere on their side of it."""
    if asked is None:
        return [depth + (1 - depth) * link / count for link in range(count)]
    before = sorted(rng.uniform(0, depth) for _ in range(asked))
    after = sorted(rng.uniform(depth, 1) for _ in range(count - asked - 1))
    return [*before, depth, *after]


def _needle(name: str, number: str) -> str:
    return f"One of the special magic numbers for {name} is: {number}.\n"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _variable(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))


def _drawn(rng: random.Random, count: int, draw: Callable[[random.Random], str]) -> list[str]:
    """``count`` different ones."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


# Names of needles: words that are common, and mean nothing together.
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
