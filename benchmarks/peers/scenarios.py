"""Scenarios: the tokens of each, the numbers of new tokens, and the least time the machine needs. No torch.

A scenario is a value that is sent to every worker. Prompts are random tokens of a fixed seed, so every engine and
every run has the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.peers.shapes import SHAPES, Shape


@dataclass(frozen=True)
class Scenario:
    """One measurement. ``kind`` decides what is timed; a worker that has no such kind refuses it by name.

    decode: the new tokens of all rows, after all prompts were computed. mixed: prompts and new tokens. prefill: a
    prompt up to its first token. prefix-hit: the same, its first ``cached`` tokens having been computed before. load: a
    new process's first token. translate: sources and new tokens of an encoder-decoder.
    """

    name: str
    kind: str
    lengths: tuple[int, ...]  # tokens of each prompt or source
    new: int  # new tokens per row
    cached: int = 0
    beams: int = 1

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def work(self) -> int:
        """Tokens that the rate counts: new ones, or those of the prompt where only it is computed."""
        return sum(self.lengths) if self.kind in ("prefill", "prefix-hit") else self.rows * self.new

    @property
    def steps(self) -> int:
        """Steps of the model, at least."""
        return max(1, self.new)

    @property
    def unit(self) -> str:
        return "seconds" if self.kind in ("prefix-hit", "load") else "tokens/s"

    def prompts(self, shape: Shape) -> list[list[int]]:
        """Return the prompts; ids 0 to 4 and the last one have special roles in some shapes."""
        draws = random.Random(f"{self.name} {shape.name}")
        return [[draws.randrange(5, shape.vocab - 1) for _ in range(length)] for length in self.lengths]

    def with_new_end(self, prompt: list[int], count: int) -> list[int]:
        """Return the prompt with another token after the cached ones, for caches that cannot be cleared."""
        return [*prompt[: self.cached], 5 + count, *prompt[self.cached + 1 :]] if count else prompt

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Scenario:
        return Scenario(**{**fields, "lengths": tuple(fields["lengths"])})


def ragged(rows: int) -> tuple[int, ...]:
    """Lengths from 16 to 256, evenly spread and shuffled."""
    lengths = [16 + round(240 * row / (rows - 1)) for row in range(rows)]
    random.Random(rows).shuffle(lengths)
    return tuple(lengths)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        *(Scenario(f"decode-{name}", "decode", (n,), 64) for name, n in (("128", 128), ("2k", 2048))),
        *(Scenario(f"decode-{name}", "decode", (n,), 32) for name, n in (("8k", 8192), ("16k", 16384))),
        *(Scenario(f"rows-{rows}", "decode", ragged(rows), 32) for rows in (8, 32)),
        *(Scenario(f"mixed-{rows}", "mixed", ragged(rows), 32) for rows in (8, 32)),
        *(Scenario(f"prefill-{length}", "prefill", (length,), 1) for length in (512, 2048)),
        Scenario("prefix-hit-2048", "prefix-hit", (2048,), 1, cached=1920),
        Scenario("load", "load", (8,), 1),
        Scenario("translate-greedy", "translate", (24,) * 32, 32),
        Scenario("translate-beam4", "translate", (24,) * 32, 32, beams=4),
    )
}


def shape_fits(shape: Shape, scenario: Scenario) -> bool:
    """Return whether the scenario exists for this shape."""
    if scenario.kind == "translate" or shape.is_encoder_decoder:
        return scenario.kind == "translate" and shape.is_encoder_decoder
    longest = max(scenario.lengths) + scenario.new
    return longest <= (4096 if shape.kind == "gpt2" else 1 << 15)


@dataclass(frozen=True)
class Selection:
    """Scenarios of one shape, each measured by turns with all engines in these precisions."""

    shape: Shape
    scenarios: tuple[Scenario, ...]
    precisions: tuple[str, ...]
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # precision -> engines, if not all

    def engines(self, precision: str, available: Sequence[str]) -> tuple[str, ...]:
        """Return the engines that are measured in a precision, if they are available."""
        return tuple(name for name in available if name in self.only.get(precision, available))

    def with_precisions(self, precisions: Sequence[str]) -> Selection:
        """Return the part in these precisions."""
        return replace(self, precisions=tuple(each for each in self.precisions if each in precisions))


def select(
    shape: str,
    scenarios: Iterable[str],
    precisions: Sequence[str] = (),
    only: Mapping[str, tuple[str, ...]] | None = None,
) -> Selection:
    """Return the scenarios that the shape has; by default decoders in bfloat16 and int8, others in float32 and int8."""
    model = SHAPES[shape]
    fitting = tuple(SCENARIOS[name] for name in scenarios if shape_fits(model, SCENARIOS[name]))
    default = ("float32", "int8") if model.is_encoder_decoder else ("bfloat16", "int8")
    return Selection(model, fitting, tuple(precisions) or default, only or {})


KVAD = ("kvad",)
# `make bench` measures these, and they are the rows of the page, measured or not. All bars of report.py are among them.
DEFAULT = (
    select("135m", ("decode-128",), ("bfloat16", "int8", "float32"), {"float32": ("ctranslate2",)}),
    select("135m", ("decode-2k", "decode-8k")),
    select("135m", ("decode-16k",), ("bfloat16", "int8-cache"), {"bfloat16": KVAD, "int8-cache": KVAD}),
    select("135m", ("rows-8", "rows-32", "mixed-8", "mixed-32", "prefill-512", "prefill-2048")),
    select("135m", ("prefix-hit-2048", "load"), ("bfloat16",)),
    select("1.1b", ("decode-128", "rows-8", "rows-32")),
    select("1.1b", ("mixed-8", "mixed-32", "prefill-512", "prefill-2048", "load"), ("bfloat16",)),
    select("moe", ("decode-128", "rows-8", "rows-32", "prefill-512")),
    select("marian", ("translate-greedy", "translate-beam4")),
)
QUICK = (select("135m", ("decode-128", "rows-8", "prefill-512")),)
Cell = tuple[str, str, str]  # shape, scenario and precision: a row of the page


def cells(selections: Iterable[Selection]) -> list[Cell]:
    """Return the names of what the selections measure, in their order."""
    return [
        (each.shape.name, scenario.name, precision)
        for each in selections
        for scenario in each.scenarios
        for precision in each.precisions
    ]


def needs_of(scenarios: Sequence[Scenario]) -> dict[str, int]:
    """Return the largest lengths and numbers of rows of the scenarios, for which an engine reserves its cache."""
    is_pair = scenarios[0].kind == "translate"
    lengths = [(1 if is_pair else max(each.lengths)) + each.new + 1 for each in scenarios]
    totals = [each.rows * each.beams * (each.new + 17) + (0 if is_pair else sum(each.lengths)) for each in scenarios]
    return {
        "max_len": max(lengths),
        "rows": max(each.rows * each.beams for each in scenarios),
        "tokens": max(totals) + 64,
        "max_source_len": max(max(each.lengths) for each in scenarios) if is_pair else 0,
    }


@dataclass(frozen=True)
class Cost:
    """Bytes that must be read and operations that must be done, at least, for a whole scenario."""

    bytes: float
    flops: float  # of products whose rows are many enough to be limited by the processor
    prompt_flops: float = 0.0  # the part of ``flops`` that is done before the last row has its first token
    last_row_bytes: float = 0.0  # the part of ``bytes`` that is read after it

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Return the least time, if all reading and computing overlap that can.

        No order of the work avoids the sum: the row whose prompt is computed last has all its other tokens to decode
        when every prompt is done.
        """
        last = self.prompt_flops / flops_per_second + self.last_row_bytes / bytes_per_second
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second, last)


def cost_of(shape: Shape, scenario: Scenario, precision: str) -> Cost:
    """Return what the scenario costs: weights once per step, each row's cache once per step."""
    per_token = shape.cache_bytes(precision)
    head = 2.0 * shape.head_weights
    if scenario.kind == "translate":
        return _translate_cost(shape, scenario, precision)
    if scenario.kind == "load":
        return Cost(shape.token_bytes(precision, math.inf), 0.0)
    read = flops = prompt_flops = last_row_bytes = 0.0
    if scenario.kind != "decode":  # a prompt's tokens attend to half of it on average
        for length in scenario.lengths:
            new = length - scenario.cached
            flops += new * shape.token_flops(scenario.cached + new / 2) + head
            read += per_token * scenario.cached
        read += shape.token_bytes(precision, sum(scenario.lengths) - len(scenario.lengths) * scenario.cached)
    if scenario.kind in ("decode", "mixed"):
        steps = scenario.new
        if scenario.kind == "mixed":  # the prompts' step has the first tokens
            steps -= 1
            prompt_flops = flops
            context = min(scenario.lengths) + scenario.new / 2
            last_row_bytes = steps * (shape.token_bytes(precision) + per_token * context)
        for length in scenario.lengths:
            context = length + scenario.new / 2
            flops += steps * (shape.token_flops(context) + head)
            read += steps * per_token * context
        read += steps * shape.token_bytes(precision, scenario.rows)
    return Cost(read, flops, prompt_flops, last_row_bytes)


def _translate_cost(shape: Shape, scenario: Scenario, precision: str) -> Cost:
    sequences, sources = scenario.rows * scenario.beams, sum(scenario.lengths)
    self_attention = shape.token_flops(scenario.new / 2) + 2.0 * shape.head_weights
    cross = 4.0 * shape.layers * shape.width * scenario.lengths[0]
    encoder = sources * 2.0 * shape.layers * (shape.layer_weights + shape.cross_weights)  # and keys, values once
    flops = encoder + sequences * scenario.new * (self_attention + cross)
    per_token = shape.cache_bytes(precision)
    context = scenario.beams * scenario.rows * scenario.new / 2 + sources
    read = scenario.new * (shape.token_bytes(precision) + per_token * context)
    return Cost(read, flops)
