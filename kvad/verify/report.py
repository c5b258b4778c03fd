"""Report of ``kvad verify``: known faults, results and the rules of the verdicts.

A half precision beyond its tolerance is lossy by design only if the first layer reads the true keys and values,
rounded, and nothing overflows; a lossy format never gets a better verdict. Anything that meets no rule is broken.
No torch: the command line reads the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

EXACT = 1e-10
MAX_LISTED = 16  # more cases of one verdict are only counted
UNKNOWN_FAULT = "unknown"
Verdict = Literal["exact", "within tolerance", "lossy by design", "broken"]

RULES = (
    "engine: the one that generate runs, in the model's dtype",
    "reference: the same weights, unpacked, in float64, without a cache, with plain kernels",
    "structure: the engine in float64, max |dlogit| <= 1e-10",
    "tolerance: max |dlogit| <= 4 x and rms dlogit <= 2 x those of the plain uncached model in the engine's dtype,",
    "           compared with the same reference, + one rounding of the largest logit; float64 1e-10;",
    "           float32: of 4 orders of sums (12 with --activation-bits), because one may be right by luck",
    "exact: exact structure, nothing rounded when stored, within the tolerance, the same greedy tokens but for ties",
    "tie: the reference's best two logits are closer than twice the tolerance",
    "within tolerance: the same, but rounded when stored, as in the plain model, or without a float64 engine",
    "lossy by design: exact structure, beyond the tolerance, but what is read are the true keys and values, rounded",
    "           fp8, int8, int4: always; the structure is compared with the model whose keys and values are quantized",
)
POLICY_RULES = (
    "policy: one by position is compared with the model under the same mask; what it hides is under 'lost'",
    "           one that ranks or summarizes: in float64 each sequence must equal its run alone, in other chunks, and",
    "           until its first eviction the reference: then it is lossy by design",
    "lost: compared with the model that keeps everything; perplexity of the prompts' own tokens",
)
ROUND_TRIP_RULES = (
    "round trip: sequences left the cache and returned; in float64 they equal sequences that stayed, or broken",
    "           beams, in the engine's dtype: each is within the tolerance of its reference, or broken",
)


class FaultDescription(NamedTuple):
    """A fault: ``what`` is wrong with the cache, and typical ``causes``."""

    what: str
    causes: str


FAULTS: dict[str, FaultDescription] = {
    "rank-heads": FaultDescription(
        "a rank of a mesh has the heads of another rank",
        "a shard of q, k or v cut at the offset of another rank, or shards received in another order",
    ),
    "mask": FaultDescription(
        "queries attend to keys that they may not see",
        "a mask of one chunk without the offset of its first query, or none at all while prefilling; "
        "a window that is not applied",
    ),
    "position": FaultDescription(
        "positions are off: rotation, bias or embedding use another position",
        "a length counted before the token was added instead of after, or restarted per chunk or resumed sequence",
    ),
    "rotation": FaultDescription(
        "keys are rotated wrongly",
        "keys stored before they are rotated but read as if after, rotated twice or backwards, "
        "or pairs interleaved where the model splits halves",
    ),
    "scale": FaultDescription(
        "scores are a constant multiple of the right ones",
        "1/sqrt(head dim) applied twice, not at all, or with another head dim",
    ),
    "cursor": FaultDescription(
        "new tokens are not written to their slots",
        "a write cursor that lags by one, or is constant: the last key is overwritten and the newest is missing",
    ),
    "table": FaultDescription(
        "a sequence reads another block than its table has there",
        "block tables padded, sorted or truncated wrongly, stale tables, a logical block index used as a physical one",
    ),
    "layer": FaultDescription(
        "a layer reads another layer's keys",
        "two layers share one store, or stores are indexed by the layer's index in its group",
    ),
    "state": FaultDescription(
        "the state that earlier tokens left is lost",
        "a state set to zero for every chunk, or not copied when a sequence is preempted, forked or resumed",
    ),
    "neighbor": FaultDescription(
        "a sequence reads another sequence's keys",
        "block tables in another order than the sequences of the step, a block reused without being cleared",
    ),
    "dtype": FaultDescription(
        "keys or values are rounded more coarsely than the format",
        "a store or a cast in a lower precision, autocast around the write",
    ),
    "packed": FaultDescription(
        "packed weights differ: a joined product is not the product of its layers",
        "weights joined in another order or split at other sizes, a bias left out, stale packed weights",
    ),
    "prefix": FaultDescription(
        "a prefix hit returns a block that was written behind another history",
        "blocks found by their own tokens without the tokens before them, a hash that ignores the parent",
    ),
    "salt": FaultDescription(
        "a prefix hit returns a block of another salt", "a root without the salt, or one that is shared by all requests"
    ),
    "quantization-scale": FaultDescription(
        "quantized keys are decoded with other scales",
        "scales that are not copied with their block, or are indexed by another slot",
    ),
    "block-store": FaultDescription(
        "a block read from the block store is not the one that was stored",
        "buffers reused before they are copied, loads completed in another order, keys without the parent",
    ),
    "summary": FaultDescription(
        "summaries are not those of the policy's ratio", "a weight of another ratio, a summarizer for other chunks"
    ),
    UNKNOWN_FAULT: FaultDescription(
        "something differs, and no known fault explains it", "Read the first difference, and bisect there."
    ),
}


@dataclass(frozen=True)
class MismatchFinding:
    """The first difference from the reference, and its diagnosis."""

    fault: str  # a key of FAULTS
    layer: int
    row: int  # request; -1: unknown
    sample: int
    position: int  # of the query
    what: str  # q, k, v, scores or attention output
    difference: float  # its largest element
    evidence: str
    stored: str = "float64"  # dtype of the recorded cache; float64 if the structure is broken

    @property
    def causes(self) -> str:
        return FAULTS[self.fault].causes

    def sentence(self) -> str:
        sequence = (
            "" if self.row < 0 else f"sequence {self.row}" + f" (sample {self.sample})" * bool(self.sample) + ", "
        )
        recorded = "float64 case" if self.stored == "float64" else f"{self.stored} cache"
        size = f"differs by {self.difference:.2e}" if self.difference else "differs"
        return (
            f"{self.fault}: {FAULTS[self.fault].what}; first at layer {self.layer}, {sequence}"
            f"position {self.position} of the {recorded}, where {self.what} {size}: {self.evidence}"
        )


@dataclass(frozen=True)
class TokenDivergence:
    """A greedy token that differs from the reference."""

    row: int
    sample: int
    position: int
    reference_token: int
    cached_token: int
    gap: float  # between the reference's best two logits there
    tie: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A cache's logits compared with the reference, over every computed position."""

    max_dlogit: float
    rms_dlogit: float
    kl_mean: float  # nats
    kl_max: float
    agree: int  # equal greedy tokens
    compared: int
    ties: int  # greedy tokens that differ by a tie
    first_divergence: TokenDivergence | None


@dataclass(frozen=True)
class NeedleScore:
    """The share of needles that are found; ``full``: by a cache that keeps everything."""

    recall: float
    full: float
    tasks: int
    length: int


@dataclass(frozen=True)
class LossReport:
    """Loss of a cache compared with the model without a cache, in nats."""

    kl_mean: float
    kl_max: float
    agree: int  # equal greedy tokens
    compared: int
    perplexity: float  # of the prompts' own tokens
    reference_perplexity: float
    tokens: int
    recall: NeedleScore | None = None  # None: not measured; the report's notes have the reason

    @property
    def ratio(self) -> float:
        """The cache's perplexity over the reference's."""
        return self.perplexity / self.reference_perplexity if self.reference_perplexity else float("nan")


@dataclass(frozen=True)
class SkippedCase:
    """A case that is impossible, with the error message."""

    memory: str
    reason: str


@dataclass(frozen=True)
class MemoryCase:
    """One cache configuration."""

    layout: str
    dtype: str  # "int8/int4" if keys and values have different formats
    policy: str = "full"
    rotate: str = "write"
    endless: bool = False

    @property
    def name(self) -> str:
        """The name, for example ``paged float32`` or ``paged int8 sinks(4, 28) rotate=read endless``."""
        rotate = f"rotate={self.rotate}" * (self.rotate != "write")
        words = (self.policy * (self.policy != "full"), rotate, "endless" * self.endless)
        return " ".join((self.layout, self.dtype, *filter(None, words)))


@dataclass(frozen=True, kw_only=True)
class CaseReport(Comparison, MemoryCase):
    """Result of one configuration.

    ``structure`` is max |dlogit| in float64 (of a lossy format, its own if that is more; of a lossy policy, compared
    with each sequence alone, and with the reference before its first eviction); None if a float64 engine did not run.
    """

    tolerance: float
    rms_tolerance: float
    structure: float | None
    verdict: Verdict
    seconds: float
    scenario_counts: dict[str, int] = field(default_factory=dict)
    finding: MismatchFinding | None = None
    loss: LossReport | None = None
    reason: str = ""  # what is broken, if no fault is found

    @property
    def structure_text(self) -> str:
        """The structure for a table; "-" if it was not run."""
        return "-" if self.structure is None else f"{self.structure:.2e}"


def length_notes(longest: int, windows: Iterable[int], retained: Mapping[str, int], limit: int | None) -> list[str]:
    """Return notes about windows, policies (with the tokens that each retains) and a limit that no sequence exceeds."""
    notes = [
        f"no sequence of up to {longest} tokens exceeds the window of {window}: give a longer --prompt"
        for window in sorted(set(windows))
        if longest <= window
    ]
    for policy, num_tokens in retained.items():
        if longest <= num_tokens:
            notes.append(f"{policy} keeps all of a sequence of up to {longest} tokens: give a longer --prompt")
    if limit is not None and longest <= limit:
        notes.append(f"no sequence of up to {longest} tokens exceeds the model's limit of {limit}")
    return notes


@dataclass(frozen=True)
class RoundTripResult:
    """Sequences that left the cache and returned."""

    memory: str
    round_trip: str  # a name of ROUND_TRIPS
    max_dlogit: float | None  # in float64; None: skipped
    moved: int  # amount that took the round trip
    unit: str
    verdict: Literal["exact", "broken", "recomputed", "skipped"]
    reason: str = ""  # why nothing moved, or why it was skipped


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Everything that ``kvad verify`` prints. ``broken``: exit code 1."""

    rows: tuple[int, ...]  # tokens of every sequence, generated ones included
    positions: int
    logit_scale: float
    injected: str | None
    cases: tuple[CaseReport, ...]
    notes: tuple[str, ...]
    seconds: float
    rules: tuple[str, ...] = RULES
    skipped: tuple[SkippedCase, ...] = ()
    round_trips: tuple[RoundTripResult, ...] = ()

    @property
    def broken(self) -> bool:
        return "broken" in {*(case.verdict for case in self.cases), *(item.verdict for item in self.round_trips)}

    def __repr__(self) -> str:
        return f"VerifyReport({self.verdict()}; {self.positions:,} positions in {self.seconds:.1f} s)"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, with ``verdict``, ``broken`` and a finding's texts."""
        plain = asdict(self)
        for case, fields in zip(self.cases, plain["cases"], strict=True):
            if case.finding is not None:
                fields["finding"] |= {"causes": case.finding.causes, "sentence": case.finding.sentence()}
            if case.loss is not None:
                fields["loss"]["ratio"] = case.loss.ratio
        return {"verdict": self.verdict(), "broken": self.broken, **plain}

    def verdict(self) -> str:
        """Build ``exact (paged float32, contiguous float32), within tolerance (...)``, the worst last."""
        parts = []
        for word in ("exact", "within tolerance", "lossy by design", "broken"):
            names = [m.name for m in self.cases if m.verdict == word]
            if names:
                parts.append(f"{word} ({', '.join(names) if len(names) <= MAX_LISTED else f'{len(names)} cases'})")
        lost = [f"{item.memory} through {item.round_trip}" for item in self.round_trips if item.verdict == "broken"]
        return ", ".join([*parts, *([f"broken ({', '.join(lost)})"] if lost else [])])
