"""Report of ``kvad verify``: known faults, results and the rules of the verdicts.

Rules (the same text is printed):

* *structure* is tested in float64, model and cache: exact is max |dlogit| <= 1e-10 at every computed position;
* a stored dtype is compared with a float32 reference (float64 with a float64 one). Tolerances: float64: 1e-10;
  float32: ``256 eps(float32) * max |logit|``, or 16 times the float64 case's rounding noise carried over to float32 if
  that is more; halves: that and ``8 eps(stored) * max |logit|``;
* **exact**: exact structure, float32 or float64 stored, within the tolerance, and the same greedy token everywhere
  except at ties; a tie is a position where the reference's best two logits are closer than twice the tolerance;
* **within tolerance**: exact structure, a half precision stored, max |dlogit| within the tolerance;
* **lossy by design**: exact structure, a half precision stored, beyond the tolerance, but the first layer reads the
  true keys and values, rounded, and nothing overflows; or a lossy format (fp8, int8, int4) stored, whose structure is
  exact compared with the float64 model whose keys and values pass through it too: it never gets a better verdict;
* a *policy* by position is a mask: exact compared with the model under the same mask, and what the mask hides is the
  policy's loss; a ranking or summarizing policy is **lossy by design** if, in float64, every sequence gets the results
  it gets alone, in other chunks and never preempted, and the reference's until its first eviction;
* **broken**: anything else.

No torch: the command line reads the names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

EXACT = 1e-10
MAX_LISTED = 16  # more cases of one verdict are only counted
UNKNOWN_FAULT = "unknown"
Verdict = Literal["exact", "within tolerance", "lossy by design", "broken"]

RULES = (
    "structure: float64 model and cache, max |dlogit| <= 1e-10",
    "tolerance: float64 1e-10; float32 256 eps x max |logit|, or 16 x the float64 noise in float32's measure if more",
    "           bfloat16, float16: that + 8 eps(stored) x max |logit|",
    "exact: exact structure, float32 or float64 stored, within the tolerance, the same greedy tokens but for ties",
    "tie: the reference's best two logits are closer than twice the tolerance",
    "within tolerance: exact structure, bfloat16 or float16 stored, within the tolerance",
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
)


class FaultDescription(NamedTuple):
    """A fault: ``what`` is wrong with the cache, and typical ``causes``."""

    what: str
    causes: str


FAULTS: dict[str, FaultDescription] = {
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
    "neighbor": FaultDescription(
        "a sequence reads another sequence's keys",
        "block tables in another order than the sequences of the step, a block reused without being cleared",
    ),
    "dtype": FaultDescription(
        "keys or values are rounded more coarsely than the format",
        "a store or a cast in a lower precision, autocast around the write",
    ),
    UNKNOWN_FAULT: FaultDescription(
        "something differs, and no known fault explains it", "Read the first difference, and bisect there."
    ),
}


class MismatchFinding(NamedTuple):
    """The first difference from the reference, and its diagnosis.

    ``row`` and ``sample`` number the request and its sample, ``position`` is the query's; ``what``: q, k, v, scores
    or attention output; ``difference``: its largest element; ``fault``: a key of FAULTS; ``stored``: the dtype of the
    recorded cache, float64 if the structure is broken.
    """

    fault: str
    layer: int
    row: int
    sample: int
    position: int
    what: str
    difference: float
    evidence: str
    stored: str = "float64"

    @property
    def causes(self) -> str:
        return FAULTS[self.fault].causes

    def sentence(self) -> str:
        sample = f" (sample {self.sample})" if self.sample else ""
        recorded = "float64 case" if self.stored == "float64" else f"{self.stored} cache"
        return (
            f"{self.fault}: {FAULTS[self.fault].what}; first at layer {self.layer}, sequence {self.row}{sample}, "
            f"position {self.position} of the {recorded}, where {self.what} differs by {self.difference:.2e}: "
            f"{self.evidence}"
        )


class TokenDivergence(NamedTuple):
    """A greedy token that differs from the reference.

    ``gap`` between the reference's best two logits there.
    """

    row: int
    sample: int
    position: int
    reference_token: int
    cached_token: int
    gap: float
    tie: bool


class NeedleScore(NamedTuple):
    """The share of needles that are found; ``full``: by a cache that keeps everything."""

    recall: float
    full: float
    tasks: int
    length: int


@dataclass(frozen=True)
class LossReport:
    """Loss of a cache compared with the model without a cache, in nats.

    ``agree`` of ``compared`` greedy tokens are equal; perplexity is over the prompts' own tokens; ``recall`` is None if
    not measured, the report's notes have the reason.
    """

    kl_mean: float
    kl_max: float
    agree: int
    compared: int
    perplexity: float
    reference_perplexity: float
    tokens: int
    recall: NeedleScore | None = None

    @property
    def ratio(self) -> float:
        """The cache's perplexity over the reference's."""
        return self.perplexity / self.reference_perplexity if self.reference_perplexity else float("nan")


class SkippedCase(NamedTuple):
    """A case that is impossible, with the error message."""

    memory: str
    reason: str


@dataclass(frozen=True)
class CaseReport:
    """One layout, format, policy and ``rope_at``.

    ``structure``: max |dlogit| in float64 (of a lossy format, its own if that is more; of a lossy policy, compared with
    each sequence alone, and with the reference before its first eviction); ``scenario_counts``: counts of what ran;
    ``reason``: what is broken, if no fault is found.
    """

    layout: str
    dtype: str
    max_dlogit: float
    tolerance: float
    structure: float
    kl_mean: float
    kl_max: float
    agree: int
    compared: int
    ties: int
    first_divergence: TokenDivergence | None
    verdict: Verdict
    seconds: float
    scenario_counts: dict[str, int] = field(default_factory=dict)
    finding: MismatchFinding | None = None
    policy: str = "full"
    rotate: str = "write"
    endless: bool = False
    loss: LossReport | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return case_name(self.layout, self.dtype, self.policy, self.rotate, self.endless)


class RoundTripResult(NamedTuple):
    """Sequences that left the cache and returned.

    ``round_trip``: a name of ``ROUND_TRIPS``; ``moved`` ``unit``: amount that took the round trip; ``max_dlogit``: in
    float64; ``reason``: why nothing moved or why it was skipped (then ``max_dlogit`` is None).
    """

    memory: str
    round_trip: str
    max_dlogit: float | None
    moved: int
    unit: str
    verdict: Literal["exact", "broken", "recomputed", "skipped"]
    reason: str = ""


def case_name(layout: str, dtype: str, policy: str = "full", rotate: str = "write", endless: bool = False) -> str:
    """Build the name, for example ``paged float32`` or ``paged int8 sinks(4, 28) rotate=read endless``."""
    words = (policy * (policy != "full"), f"rotate={rotate}" * (rotate != "write"), "endless" * endless)
    return " ".join((layout, dtype, *filter(None, words)))


@dataclass(frozen=True)
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

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, with ``verdict``, ``broken`` and a finding's texts."""
        plain = asdict(self)
        for case, fields in zip(self.cases, plain["cases"], strict=True):
            if case.first_divergence is not None:
                fields["first_divergence"] = case.first_divergence._asdict()
            if case.finding is not None:
                words = {"causes": case.finding.causes, "sentence": case.finding.sentence()}
                fields["finding"] = {**case.finding._asdict(), **words}
            if case.loss is not None:
                fields["loss"]["ratio"] = case.loss.ratio
                if case.loss.recall is not None:
                    fields["loss"]["recall"] = case.loss.recall._asdict()
        plain["skipped"] = [item._asdict() for item in self.skipped]
        plain["round_trips"] = [item._asdict() for item in self.round_trips]
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
