"""Write docs/reference/matrix.md: measured exactness of every policy, format, encoding and topology.

    scripts/matrix                  docs/reference/matrix.md from docs/reference/matrix.json
    scripts/matrix --run            measure every cell first (cells.py, lives.py in this folder; half an hour, two
    cores)
    scripts/matrix --lives          measure the storage cells only (ten minutes)
    scripts/matrix --quality FILE   store the lines of ``kvad bench cache-quality --out`` in
    docs/reference/matrix.json first

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
from kvad.verify.scenario import sized_policy
from tests.support.matrix import lives, lives_page
from tests.support.matrix.cells import (
    BLOCK,
    ENCODINGS,
    EXACT,
    LAYOUTS,
    LONGEST,
    TOPOLOGIES,
    all_cells,
    key,
    measure_cell,
)

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "reference" / "matrix.md", ROOT / "docs" / "reference" / "matrix.json"
SHORT = ROOT / "docs" / "explanation" / "kv-cache" / "verify.md"
AGAIN = "scripts/matrix --run"
KINDS = ("single", "many", "chain")

Results = dict[str, Any]  # table -> cell -> result; "quality" -> costs
Footnotes = dict[str, int]  # error text -> its number

HEAD = """# The matrix: exactness of every cache configuration

Written by `scripts/matrix` from `matrix.json`; measured by `{again}` on tiny random models, in float64, with ragged
sequences, in chunks, in batches, freed blocks filled with NaN. `tests/docs/test_matrix_page.py` fails if a
policy, a format, an encoding or a topology is missing, and measures some cells again. Variants of
position encodings, norms, kinds of heads, preemption, prefix hits and forks are covered by
`tests/cache/test_cached_equals_uncached.py` and `tests/cache/test_position_policies.py`.

{legend}
Policies are sized for sequences of {longest} tokens, in blocks of {block}: {sizes}. A format applies to keys and
values; a format by channel applies to keys, with its counterpart for the values. Layout and `rope_at` alternate from
cell to cell.
"""
LEGEND = (
    ("cell", "measured result"),
    ("**exact**", "max \\|dlogit\\| <= 1e-10 from the uncached model whose layers see what the policy lets them see"),
    (
        "**exact, x**",
        (
            "the same, with that model's keys and values quantized to the format and back; x is the largest change "
            "of a logit by the format, for logits of a few units"
        ),
    ),
    (
        "**own**",
        (
            "the policy drops or merges tokens: within 1e-10 a sequence has the logits of its solo run in other "
            "chunks, for any batch; the loss is below"
        ),
    ),
    ("a number in brackets", "refused; the error is below"),
)


# ---------------------------------------------------------------- measuring


def run(workers: int, *, only_lives: bool = False) -> dict[str, Any]:
    """Measure every cell, or record its refusal."""
    results: dict[str, Any] = {}
    work = [*([] if only_lives else all_cells()), *lives.storage_cells()]
    with Pool(workers, initializer=_single_thread) as pool:
        for number, (table, cell, result) in enumerate(pool.imap(_measure, work, chunksize=8), 1):
            results.setdefault(table, {})[key(*cell)] = {name: _short(value) for name, value in result.items()}
            if number % 100 == 0:
                print(f"{number} of {len(work)}", flush=True)
    sharded = lives.shards([cell for _, cell in lives.sharded()])
    results["shards"] = {
        key(*cell): {name: _short(each) for name, each in result.items()} for cell, result in sharded.items()
    }
    return results


def _single_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _measure(what: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    table, cell = what
    return table, cell, lives.measure_round_trip(cell) if table == "lives" else measure_cell(table, cell)


def _short(value: Any) -> Any:
    return float(f"{value:.1e}") if isinstance(value, float) and math.isfinite(value) else value


def quality(path: Path) -> list[dict[str, Any]]:
    """Read a benchmark's costs of each cache, as ``kvad/planning/fit.py`` reads them."""
    return [{**vars(each), "costs": [vars(cost) for cost in each.costs]} for each in read_costs(path)]


def stored(results: Results) -> str:
    return json.dumps(results, indent=0, sort_keys=True) + "\n"


# ---------------------------------------------------------------- writing


def page(results: Results) -> str:
    footnotes: Footnotes = {}
    sizes = ", ".join(f"`{sized_policy(name, LONGEST, BLOCK)}`" for name in POLICIES if name != "full")
    legend = _table(LEGEND[0], LEGEND[1:])
    parts = [HEAD.format(again=AGAIN, legend=legend, longest=LONGEST, block=BLOCK, sizes=sizes)]
    for topology in TOPOLOGIES:
        parts.append(f"## {topology.capitalize()}\n\n" + _product(results["product"], topology, footnotes))
    parts.append("## Layout, and when keys are rotated\n\n" + _layouts(results["layouts"], footnotes))
    parts.append("## Endless sequences\n\n" + _endless(results["endless"], footnotes))
    storage = lives_page.pages(results, lambda policy, result: _cell(policy, result, footnotes), _table)
    parts.append("## Storage\n\n" + storage)
    parts.append(
        "## Refused configurations\n\n" + "\n".join(f"{number}. {words}" for words, number in footnotes.items()) + "\n"
    )
    parts.append("## Cost of lossy configurations\n\n" + _costs(results.get("quality", [])))
    return "\n".join(parts)


def _product(result: Mapping[str, Any], topology: str, footnotes: Footnotes) -> str:
    lines = []
    for policy in POLICIES:
        for form in FORMATS:
            cells = [result.get(key(topology, encoding, policy, form), {}) for encoding in ENCODINGS]
            lines.append((f"`{policy}`", f"`{form}`", *(_cell(policy, cell, footnotes) for cell in cells)))
    merged = _merge_formats(lines)
    return _table(("policy", "format", *ENCODINGS), merged)


def _merge_formats(lines: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge the lines of a policy's formats with equal results."""
    formats_by_cells: dict[tuple[str, ...], list[str]] = {}
    for policy, form, *cells in lines:
        formats_by_cells.setdefault((policy, *cells), []).append(form)
    return [(policy, ", ".join(forms), *cells) for (policy, *cells), forms in formats_by_cells.items()]


def _layouts(result: Mapping[str, Any], footnotes: Footnotes) -> str:
    headings = [f"{layout}, {rotate}, {encoding}" for layout, rotate in LAYOUTS for encoding in ("rope", "alibi")]
    cells = [(layout, rotate, encoding) for layout, rotate in LAYOUTS for encoding in ("rope", "alibi")]
    lines = [
        (f"`{policy}`", *(_cell(policy, result.get(key(policy, *cell), {}), footnotes) for cell in cells))
        for policy in POLICIES
    ]
    return _table(("policy", *headings), lines)


def _endless(result: Mapping[str, Any], footnotes: Footnotes) -> str:
    lines = [
        (f"`{policy}`", *(_cell(policy, result.get(key(each, policy), {}), footnotes) for each in ENCODINGS))
        for policy in POLICIES
    ]
    return "Sequences of over 100 tokens, in models with a limit of 96.\n\n" + _table(("policy", *ENCODINGS), lines)


def _cell(policy: str, result: Mapping[str, Any], footnotes: Footnotes) -> str:
    if not result:
        return "not measured"
    if "refused" in result:
        return f"[{footnotes.setdefault(result['refused'], len(footnotes) + 1)}]"
    if not result["structure"] <= EXACT:
        return f"**BROKEN** by {result['structure']:.1e}"
    if result.get("moved") == 0:
        why = f" [{footnotes.setdefault(result['missed'], len(footnotes) + 1)}]" if "missed" in result else ""
        return f"{'own' if result.get('reference') == 'solo' else 'exact'}, computed{why}"
    if result.get("reference") == "solo":
        return "own"
    return f"exact, {result['loss']:.0e}" if "loss" in result else "exact"


def _costs(measured: Sequence[Mapping[str, Any]]) -> str:
    if not measured:
        return (
            "Not measured yet: random models have no quality to lose. `kvad bench cache-quality` measures the cost on "
            "a model that\nlooks keys up (`recipes/lookup-cpu.toml`), and `scripts/matrix --quality FILE` adds its "
            "lines here; `kvad verify\n--policy` measures it for any model.\n"
        )
    head = ("cache", "dropped", "KL", "perplexity, times", *KINDS)
    return "\n".join(_source(each) + _table(head, map(_cost_row, each["costs"])) for each in measured)


def _source(each: Mapping[str, Any]) -> str:
    options = each["options"]
    position, evicted = options.get("question_position", "after"), options.get("evict_after", "chunk")
    setting = f"question {position} eviction, evicted after each {evicted}"
    return (
        f"`{each['model']}` at {each['commit'] or 'no commit'}, {setting}, compared with the uncached model; recall "
        "over all lengths at which the\nfull cache finds the needle. For `quest`, dropped tokens are those not read. "
        "[cache-quality.md](../explanation/cache-quality.md) describes the method.\n\n"
    )


def _cost_row(cost: Mapping[str, Any]) -> tuple[str, ...]:
    recall = [_number(cost["recall"].get(kind), ".2f") for kind in KINDS]
    return (
        f"`{cost['cache']}`",
        f"{cost['ratio']:.1%}",
        _number(cost["kl"], ".1e"),
        _number(cost["perplexity_ratio"], ".3f"),
        *recall,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="measure every cell")
    parser.add_argument("--lives", action="store_true", help="measure the storage cells")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quality", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: Results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if options.run or options.lives:
        results = {**results, **run(options.jobs, only_lives=not options.run)}
    if options.quality is not None:
        results["quality"] = quality(options.quality)
    RESULTS.write_text(stored(results), "utf-8")
    PAGE.write_text(page(results), "utf-8")
    SHORT.write_text(lives_page.with_table(SHORT.read_text("utf-8"), results, _table), "utf-8")


if __name__ == "__main__":
    main()
