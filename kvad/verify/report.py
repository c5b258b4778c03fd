"""The words of ``kvad verify``: the faults it knows by name, what it found, and how it judges.

Rules (the same text is printed):

* *structure* is judged in float64, model and cache: exact is max |dlogit| <= 1e-10 at every position that was computed;
* a stored dtype is judged beside a float32 judge (float64 beside a float64 one) with the tolerance
  float64: 1e-10; float32: ``256 eps(float32) * max |logit|``, or 16 times the float64 twin's own rounding noise carried
  over to float32 where that is more; halves: that and ``8 eps(stored) * max |logit|``;
* **exact**: exact structure, float32 or float64 stored, within the tolerance, and the same greedy token everywhere but
  at ties; a tie is a position where the judge's best two logits are closer than twice the tolerance;
* **within tolerance**: exact structure, a half precision stored, max |dlogit| within the tolerance;
* **lossy by design**: exact structure, a half precision stored, beyond the tolerance, yet what the first layer reads is
  the true keys and values, rounded, and nothing overflows; or a lossy format (fp8, int8, int4) stored, whose structure
  is exact beside the judge whose keys and values go through it too, in float64: it is never called anything better;
* a *policy* that goes by position is a mask: exact beside the judge under the same mask, and what the mask hides is the
  policy's loss; one that ranks or summarises is **lossy by design** if, in float64, every row says what it says alone,
  in other chunks and never preempted, and what the judge says until it is first cut;
* **BROKEN**: anything else.

No torch here: the command line reads the names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

EXACT = 1e-10
MAX_LISTED = 16  # more memories of one verdict are counted
UNKNOWN_FAULT = "unknown"
Verdict = Literal["exact", "within tolerance", "lossy by design", "BROKEN"]

RULES = (
    "structure: float64 model and cache, max |dlogit| <= 1e-10",
    "tolerance: float64 1e-10; float32 256 eps x max |logit|, or 16 x the float64 noise in float32's measure if more",
    "           bfloat16, float16: that + 8 eps(stored) x max |logit|",
    "exact: exact structure, float32 or float64 stored, within the tolerance, the same greedy tokens but for ties",
    "tie: the judge's best two logits are closer than twice the tolerance",
    "within tolerance: exact structure, bfloat16 or float16 stored, within the tolerance",
    "lossy by design: exact structure, beyond the tolerance, yet what is read are the true keys and values, rounded",
    "           fp8, int8, int4: always; the structure is judged by the model whose keys and values go through them",
)
POLICY_RULES = (
    "policy: one by position is judged by the model under the same mask; what it hides is under 'lost'",
    "           one that ranks or summarises: in float64 each row must say what it says alone, in other chunks, and",
    "           until its first cut what the judge says: then it is lossy by design",
    "lost: against the model that keeps everything; perplexity of the prompts' own tokens",
)
THROUGH_RULES = (
    "through: rows left the cache and came back; in float64 they say what rows that stayed say, or BROKEN",
)


class FaultDescription(NamedTuple):
    """``what`` is wrong with the memory; ``causes``: what usually leads to that."""

    what: str
    causes: str


FAULTS: dict[str, FaultDescription] = {
    "mask": FaultDescription(
        "queries attend to keys that they may not see",
        "a mask of one chunk that forgets the offset of its first query, or none at all while prefilling; "
        "a window that is not applied",
    ),
    "position": FaultDescription(
        "positions are off: what is turned, biased or embedded by position is so by another one",
        "a length counted before the token was added instead of after, or restarted with every chunk or resumed row",
    ),
    "rotation": FaultDescription(
        "keys are turned wrongly",
        "keys stored before they are rotated but read as if after, rotated twice or backwards, "
        "or pairs interleaved where the model splits halves",
    ),
    "scale": FaultDescription(
        "scores are a constant multiple of the right ones",
        "1/sqrt(head dim) applied twice, not at all, or with another head dim",
    ),
    "cursor": FaultDescription(
        "new tokens are not written where the ledger put them",
        "a write cursor that lags by one, or does not move: the last key is overwritten and the newest is missing",
    ),
    "table": FaultDescription(
        "a row reads a block that is not in that place of its table",
        "block tables padded, sorted or cut wrongly, a stale table, a logical block number used as a physical one",
    ),
    "layer": FaultDescription(
        "a layer reads another layer's keys",
        "two layers share one store, or stores are indexed by the layer's place in its group",
    ),
    "neighbour": FaultDescription(
        "a row reads another row's keys",
        "seats or tables in another order than the rows of the step, a block handed on without being cleared",
    ),
    "dtype": FaultDescription(
        "keys or values are rounded more coarsely than promised",
        "a store or a cast in a lower precision, autocast around the write",
    ),
    UNKNOWN_FAULT: FaultDescription(
        "something differs, and no known fault explains it", "read the first difference, and bisect there"
    ),
}


class MismatchFinding(NamedTuple):
    """The first difference from the judge, and its diagnosis.

    ``row`` and ``sample`` number the request and its sample, ``position`` is the query's; ``what``: q, k, v, scores
    or attention output; ``difference``: its largest element.  ``fault`` is a key of FAULTS.  ``stored``: the dtype of
    the memory that was watched, which is the float64 twin where it is the structure that is broken.
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
        watched = "float64 twin" if self.stored == "float64" else f"{self.stored} memory"
        return (
            f"{self.fault}: {FAULTS[self.fault].what}; first at layer {self.layer}, row {self.row}{sample}, "
            f"position {self.position} of the {watched}, where {self.what} differs by {self.difference:.2e}: "
            f"{self.evidence}"
        )


class TokenDivergence(NamedTuple):
    """A greedy token that differs from the judge's; ``gap`` between the judge's best two logits there."""

    row: int
    sample: int
    position: int
    reference_token: int
    cached_token: int
    gap: float
    tie: bool


class NeedleScore(NamedTuple):
    """The share of hidden needles that come out; ``full``: of a cache that keeps everything."""

    recall: float
    full: float
    tasks: int
    length: int


@dataclass(frozen=True)
class LossReport:
    """What a memory that forgets or rounds says, beside the model without a cache, in nats; ``agree`` of ``compared``
    greedy tokens; perplexity over the prompts' own tokens.  ``recall`` None: not measured, the report's notes say why.
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
        """The perplexity over the judge's."""
        return self.perplexity / self.reference_perplexity if self.reference_perplexity else float("nan")


class SkippedCase(NamedTuple):
    """A memory that cannot be, in the words of its refusal."""

    memory: str
    reason: str


@dataclass(frozen=True)
class CaseReport:
    """One layout, format, policy and way of rotating.  ``structure``: max |dlogit| of the float64 twin (of a lossy
    format, its own if that is more; of a lossy policy, from the rows' solo runs, and from the judge before their first
    cut); ``happened``: counts of what ran; ``why``: what is broken, where no fault is found."""

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
    """Rows of a memory that left it and came back.  ``way``: a name of ``through.WAYS``; ``moved`` ``unit``: how much
    really went that way; ``max_dlogit``: in float64, from what the memory promises; ``why``: the reason where nothing
    went, or where it is skipped (then there is no ``max_dlogit``)."""

    memory: str
    round_trip: str
    max_dlogit: float | None
    moved: int
    unit: str
    verdict: Literal["exact", "BROKEN", "computed again", "skipped"]
    reason: str = ""


def case_name(layout: str, dtype: str, policy: str = "full", rotate: str = "write", endless: bool = False) -> str:
    """``paged float32``, ``paged int8 sinks(4, 28) rotate=read endless``: only what differs from the plain cache."""
    words = (policy * (policy != "full"), f"rotate={rotate}" * (rotate != "write"), "endless" * endless)
    return " ".join((layout, dtype, *filter(None, words)))


@dataclass(frozen=True)
class VerifyReport:
    """Everything that ``kvad verify`` prints.  ``broken``: exit code 1."""

    rows: tuple[int, ...]  # tokens of every row, generated ones included
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
        return "BROKEN" in {*(memory.verdict for memory in self.cases), *(each.verdict for each in self.round_trips)}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, with what follows from them: ``verdict``, ``broken``, a finding's words."""
        plain = asdict(self)
        for memory, shown in zip(self.cases, plain["memories"], strict=True):
            if memory.first_divergence is not None:
                shown["first_divergence"] = memory.first_divergence._asdict()
            if memory.finding is not None:
                words = {"causes": memory.finding.causes, "sentence": memory.finding.sentence()}
                shown["finding"] = {**memory.finding._asdict(), **words}
            if memory.loss is not None:
                shown["loss"]["ratio"] = memory.loss.ratio
                if memory.loss.recall is not None:
                    shown["loss"]["recall"] = memory.loss.recall._asdict()
        plain["skipped"] = [each._asdict() for each in self.skipped]
        plain["journeys"] = [each._asdict() for each in self.round_trips]
        return {"verdict": self.verdict(), "broken": self.broken, **plain}

    def verdict(self) -> str:
        """``exact (paged float32, contiguous float32), within tolerance (...)``, the worst last."""
        parts = []
        for word in ("exact", "within tolerance", "lossy by design", "BROKEN"):
            names = [m.name for m in self.cases if m.verdict == word]
            if names:
                parts.append(f"{word} ({', '.join(names) if len(names) <= MAX_LISTED else f'{len(names)} memories'})")
        lost = [f"{each.memory} through {each.round_trip}" for each in self.round_trips if each.verdict == "BROKEN"]
        return ", ".join([*parts, *([f"BROKEN ({', '.join(lost)})"] if lost else [])])
