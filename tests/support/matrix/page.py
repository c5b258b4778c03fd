"""Writes docs/matrix.md: what a cache promises under every policy, format, encoding and topology, as it was measured.

scripts/matrix                  docs/matrix.md from docs/matrix.json
scripts/matrix --run            measures every cell first (cells.py, lives.py in this folder; half an hour, two cores)
scripts/matrix --lives          those of where it lives alone (ten minutes)
scripts/matrix --quality FILE   the lines of a ``kvad bench cache-quality --out`` into docs/matrix.json first

``tests/docs/test_matrix_page.py`` compares the page with this output, the results with the registries, and measures
some cells again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from kvad.cache.policy_parser import POLICIES
from kvad.cache.quantization import FORMATS
from kvad.planning.fit import read_costs
from kvad.verify.cases import sized_policy
from tests.support.matrix import lives, lives_page
from tests.support.matrix.cells import BLOCK, ENCODINGS, EXACT, LAYOUTS, LONGEST, TOPOLOGIES, ask, every, key

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "matrix.md", ROOT / "docs" / "matrix.json"
SHORT = ROOT / "docs" / "kv-cache" / "verify.md"
AGAIN = "scripts/matrix --run"
KINDS = ("single", "many", "chain")

Results = dict[str, Any]  # table -> cell -> what cells.ask says; "quality" -> prices
Notes = dict[str, int]  # a refusal -> its number

HEAD = """# The matrix: what a cache promises

Written by `scripts/matrix` from `docs/matrix.json`; measured by `{again}` on tiny random models, in float64, with
ragged sequences, in chunks, in batches, freed blocks filled with NaN. `tests/docs/test_matrix_page.py` fails if a
policy, a format, an encoding or a topology is missing, and measures some cells again. Position encodings in all their
forms, norms, kinds of heads, and what may happen to rows (preemption, prefix hits, forks) are the business of
`tests/cache/test_cached_equals_uncached.py` and `tests/cache/test_position_policies.py`.

{legend}
Policies are sized for rows of {longest} tokens, in blocks of {block}: {sizes}. Formats are of keys and values alike;
those by channel are for keys, with their sibling for the values. Layout and way of rotating alternate from cell to
cell.
"""
LEGEND = (
    ("a cell says", "it was measured that"),
    (
        "**exact**",
        "max \\|dlogit\\| <= 1e-10 from the model without a cache whose layers see what the policy lets them see",
    ),
    (
        "**exact, x**",
        (
            "the same, if that model's keys and values go through the format and back; x is how far this moves a "
            "logit at most, of logits of a few units"
        ),
    ),
    (
        "**own**",
        (
            "the policy drops or merges tokens: to 1e-10 a sequence has the output that it has alone in other chunks, "
            "whatever its neighbors; the loss is below"
        ),
    ),
    ("a number in brackets", "refused; the words of the refusal are below"),
)


# ---------------------------------------------------------------- asking


def run(workers: int, *, only_lives: bool = False) -> dict[str, Any]:
    """Every cell, measured or refused."""
    results: dict[str, Any] = {}
    todo = [*([] if only_lives else every()), *lives.every()]
    with Pool(workers, initializer=_alone) as pool:
        for number, (table, cell, said) in enumerate(pool.imap(_ask, todo, chunksize=8), 1):
            results.setdefault(table, {})[key(*cell)] = {name: _short(value) for name, value in said.items()}
            if number % 100 == 0:
                print(f"{number} of {len(todo)}", flush=True)
    cut = lives.shards([cell for _, cell in lives.sharded()])
    results["shards"] = {key(*cell): {name: _short(each) for name, each in said.items()} for cell, said in cut.items()}
    return results


def _alone() -> None:
    import torch

    torch.set_num_threads(1)


def _ask(what: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    table, cell = what
    return table, cell, lives.ask(cell) if table == "lives" else ask(table, cell)


def _short(value: Any) -> Any:
    return float(f"{value:.1e}") if isinstance(value, float) and math.isfinite(value) else value


def quality(path: Path) -> list[dict[str, Any]]:
    """What a bench's lines say of each cache, as ``kvad/planning/fit.py`` reads them."""
    return [{**vars(each), "costs": [vars(price) for price in each.costs]} for each in read_costs(path)]


def stored(results: Results) -> str:
    return json.dumps(results, indent=0, sort_keys=True) + "\n"


# ---------------------------------------------------------------- writing


def page(results: Results) -> str:
    notes: Notes = {}
    sizes = ", ".join(f"`{sized_policy(name, LONGEST, BLOCK)}`" for name in POLICIES if name != "full")
    legend = _table(LEGEND[0], LEGEND[1:])
    parts = [HEAD.format(again=AGAIN, legend=legend, longest=LONGEST, block=BLOCK, sizes=sizes)]
    for topology in TOPOLOGIES:
        parts.append(f"## {topology.capitalize()}\n\n" + _product(results["product"], topology, notes))
    parts.append("## Layout, and when keys are rotated\n\n" + _layouts(results["layouts"], notes))
    parts.append("## Rows without an end\n\n" + _endless(results["endless"], notes))
    told = lives_page.pages(results, lambda policy, said: _cell(policy, said, notes), _table)
    parts.append("## Where it lives\n\n" + told)
    parts.append("## What is refused\n\n" + "\n".join(f"{number}. {words}" for words, number in notes.items()) + "\n")
    parts.append("## The price of what is lossy\n\n" + _price(results.get("quality", [])))
    return "\n".join(parts)


def _product(said: Mapping[str, Any], topology: str, notes: Notes) -> str:
    lines = []
    for policy in POLICIES:
        for form in FORMATS:
            cells = [said.get(key(topology, encoding, policy, form), {}) for encoding in ENCODINGS]
            lines.append((f"`{policy}`", f"`{form}`", *(_cell(policy, cell, notes) for cell in cells)))
    merged = _merged(lines)
    return _table(("policy", "format", *ENCODINGS), merged)


def _merged(lines: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Formats of a policy that say the same stand in one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for policy, form, *cells in lines:
        found.setdefault((policy, *cells), []).append(form)
    return [(policy, ", ".join(forms), *cells) for (policy, *cells), forms in found.items()]


def _layouts(said: Mapping[str, Any], notes: Notes) -> str:
    heads = [f"{layout}, {rotate}, {encoding}" for layout, rotate in LAYOUTS for encoding in ("rope", "alibi")]
    cells = [(layout, rotate, encoding) for layout, rotate in LAYOUTS for encoding in ("rope", "alibi")]
    lines = [
        (f"`{policy}`", *(_cell(policy, said.get(key(policy, *cell), {}), notes) for cell in cells))
        for policy in POLICIES
    ]
    return _table(("policy", *heads), lines)


def _endless(said: Mapping[str, Any], notes: Notes) -> str:
    lines = [
        (f"`{policy}`", *(_cell(policy, said.get(key(each, policy), {}), notes) for each in ENCODINGS))
        for policy in POLICIES
    ]
    return "Rows of over 100 tokens, through models of 96.\n\n" + _table(("policy", *ENCODINGS), lines)


def _cell(policy: str, said: Mapping[str, Any], notes: Notes) -> str:
    if not said:
        return "not measured"
    if "refused" in said:
        return f"[{notes.setdefault(said['refused'], len(notes) + 1)}]"
    if not said["structure"] <= EXACT:
        return f"**BROKEN** by {said['structure']:.1e}"
    if said.get("moved") == 0:
        why = f" [{notes.setdefault(said['missed'], len(notes) + 1)}]" if "missed" in said else ""
        return f"{'own' if said.get('judge') == 'own' else 'exact'}, computed{why}"
    if said.get("judge") == "own":
        return "own"
    return f"exact, {said['loss']:.0e}" if "loss" in said else "exact"


def _price(measured: Sequence[Mapping[str, Any]]) -> str:
    if not measured:
        return (
            "Not measured here yet: random models have no quality to lose. `kvad bench cache-quality` measures it on a "
            "model that\nlooks keys up (`recipes/lookup-cpu.toml`), and `scripts/matrix --quality FILE` puts its lines "
            "here; `kvad verify --policy`\nsays it of any model.\n"
        )
    head = ("cache", "dropped", "KL", "perplexity, times", *KINDS)
    return "\n".join(_source(each) + _table(head, map(_priced, each["costs"])) for each in measured)


def _source(each: Mapping[str, Any]) -> str:
    options = each["options"]
    position, evicted = options.get("question_position", "after"), options.get("evict_after", "chunk")
    asked = f"asked {position} eviction, evicted after each {evicted}"
    return (
        f"Of `{each['model']}` at {each['commit'] or 'no commit'}, {asked}: against the model without a cache; recall "
        "over all lengths at which the\nfull cache finds what is hidden. Of `quest`, what is dropped is not read. "
        "[cache-quality.md](cache-quality.md) says how.\n\n"
    )


def _priced(price: Mapping[str, Any]) -> tuple[str, ...]:
    recall = [_said(price["recall"].get(kind), ".2f") for kind in KINDS]
    return (
        f"`{price['cache']}`",
        f"{price['ratio']:.1%}",
        _said(price["kl"], ".1e"),
        _said(price["perplexity_ratio"], ".3f"),
        *recall,
    )


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="measure every cell")
    parser.add_argument("--lives", action="store_true", help="measure those of where it lives")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quality", type=Path, metavar="FILE")
    asked = parser.parse_args()
    results: Results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if asked.run or asked.lives:
        results = {**results, **run(asked.jobs, only_lives=not asked.run)}
    if asked.quality is not None:
        results["quality"] = quality(asked.quality)
    RESULTS.write_text(stored(results), "utf-8")
    PAGE.write_text(page(results), "utf-8")
    SHORT.write_text(lives_page.placed(SHORT.read_text("utf-8"), results, _table), "utf-8")


if __name__ == "__main__":
    main()
