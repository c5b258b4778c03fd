"""Generator of docs/reference/models.md: the Hugging Face families that kvad reads, with the tests' results.

scripts/models            docs/reference/models.md from the goldens, the families and docs/reference/models.json
scripts/models --run      runs the tests of tests/checkpoint first and writes docs/reference/models.json

Only the text around the tables is written by hand; ``tests/docs/test_models_page.py`` compares page and output.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvad.checkpoint import families
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import FAMILIES, UNSUPPORTED
from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    LearnedPositionsConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
)
from kvad.config.model import ModelConfig
from kvad.errors import KvadError
from tests.hf_parity import checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "reference" / "models.md", ROOT / "docs" / "reference" / "models.json"
FILES = ("tests/checkpoint/test_families.py", "tests/checkpoint/test_generation_config.py")
CHECKS = {  # a test of each case -> what it checks
    "test_outputs_are_theirs": "outputs",
    "test_written_back_it_is_the_same_checkpoint": "written",
    "test_the_greedy_answer_is_theirs": "greedy",
    "test_the_four_best_of_a_search_are_theirs": "beams",
    "test_what_no_model_of_ours_has_is_refused_by_name": "refused",
}
TOPOLOGIES = {"decoder": "decoder", "encoder": "encoder", "encoder-decoder": "encoder-decoder"}
POSITIONS = ("learned", "sinusoidal", "T5 bias", "ALiBi", "RoPE", "none")
AGAIN = "scripts/models --run"

Results = dict[str, dict[str, dict[str, dict[str, Any]]]]  # case -> oracle -> check -> {"outcome", "largest", "says"}


# ---------------------------------------------------------------- test results


def ask(arguments: list[str]) -> Results:
    """Run the tests, and read their report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.hf_parity.record", f"--junitxml={report}"]
        subprocess.run([*command, *FILES, *arguments], cwd=ROOT, check=False)
        return parse(report.read_text("utf-8"))


def parse(report: str) -> Results:
    """Parse junit.xml: tests of ``CHECKS`` whose names end in ``[case-oracle]`` or ``[oracle-case]``."""
    collected: Results = {}
    versions = "|".join(map(re.escape, checkpoint.ORACLES))
    for test in ElementTree.fromstring(report).iter("testcase"):
        name, _, case = str(test.get("name")).partition("[")
        case_first = re.fullmatch(rf"(?P<case>.+)-(?P<oracle>{versions})\]", case)
        version_first = re.fullmatch(rf"(?P<oracle>{versions})-(?P<case>.+)\]", case)
        match = case_first or version_first
        if name not in CHECKS or match is None:
            continue
        entry: dict[str, Any] = {"outcome": "passed"}
        for kind in ("failure", "error", "skipped"):
            if (element := test.find(kind)) is not None:
                entry = {"outcome": kind, "says": str(element.get("message")).splitlines()[0]}
        for test_results in test.iter("property"):
            if test_results.get("name") == "largest" and entry["outcome"] == "passed":
                entry["largest"] = float(str(test_results.get("value")))
        collected.setdefault(match["case"], {}).setdefault(match["oracle"], {})[CHECKS[name]] = entry
    return collected


def stored(results: Results) -> str:
    """Format the results, one line per case and version."""
    cases = []
    for case, each in sorted(results.items()):
        lines = [
            f"    {json.dumps(oracle)}: {json.dumps(test_results, sort_keys=True)}"
            for oracle, test_results in each.items()
        ]
        cases.append(f"  {json.dumps(case)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(cases) + "\n}\n"


# ---------------------------------------------------------------- families of the goldens


@dataclass
class Family:
    """One ``model_type``: its cases and their configs."""

    model_type: str
    classes: dict[str, None] = field(default_factory=dict)  # an ordered set
    cases: dict[str, dict[str, str]] = field(default_factory=dict)  # oracle -> case -> output
    configs: list[ModelConfig] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in TOPOLOGIES if any(config.kind == kind for config in self.configs)]


def gather() -> dict[str, Family]:
    """Return every family that kvad reads, with or without cases, ordered by topology and name."""
    collected = {model_type: Family(model_type) for model_type in FAMILIES}
    for oracle in checkpoint.ORACLES:
        for case in checkpoint.names(oracle):
            meta = json.loads((checkpoint.GOLDENS / oracle / f"{case}.json").read_text("utf-8"))
            family = collected.get(meta["config"]["model_type"])
            if family is None:
                continue
            family.classes[meta["model"]] = None
            family.cases.setdefault(oracle, {})[case] = meta["output"]
            config = _read(meta["config"])
            if config is not None:
                family.configs.append(config)

    def sort_key(each: Family) -> tuple[int, str]:
        return (list(TOPOLOGIES).index(each.kinds[-1]) if each.kinds else len(TOPOLOGIES), each.model_type)

    return {each.model_type: each for each in sorted(collected.values(), key=sort_key)}


def _read(content: Mapping[str, Any]) -> ModelConfig | None:
    fields = HFConfigReader(content, "config.json")
    try:
        return families.find_family(fields.model_type).read(fields)
    except KvadError:
        return None  # a case that is refused


def positions(config: ModelConfig) -> list[str]:
    """Return the model's ``POSITIONS``; "none" if some layers have none."""
    collected: set[str] = set()
    absolute = config.embedding.position
    if isinstance(absolute, LearnedPositionsConfig):
        collected.add("learned")
    if isinstance(absolute, SinusoidalPositionsConfig):
        collected.add("sinusoidal")
    names = {RopeConfig: "RoPE", AlibiConfig: "ALiBi", T5BiasConfig: "T5 bias"}
    for attention in _attentions(config):
        if attention.position is not None:
            collected.add(names.get(type(attention.position), "custom"))
        elif absolute is None:
            collected.add("none")
    return [name for name in POSITIONS if name in collected]


def _attentions(config: ModelConfig) -> Iterator[AttentionConfig]:
    for stack in _stacks(config):
        yield from (layer.attention for layer in stack.layer_types.values())


def _stacks(config: ModelConfig) -> list[StackConfig]:
    return [stack for stack in (config.encoder, config.decoder) if stack is not None]


def norms(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(stack.norm_position for stack in _stacks(config)))


# ---------------------------------------------------------------- the page


def page(results: Results) -> str:
    collected = gather()
    parts = [
        HEAD.format(again=AGAIN, versions=_versions()),
        "## Positions, topologies, norms\n",
        MATRIX,
        *_matrix(collected),
        "## Families\n",
        TABLE,
        *_table(collected, results),
        "## Cases without a reference, or with another result\n",
        *_missing_results(results),
        "## Disagreements between the two versions\n",
        DISAGREEMENTS,
        "## Refused models and options\n",
        REFUSALS,
        *_refused(),
    ]
    return "\n".join(parts)


DISAGREEMENTS = """\
- Logits of T5 and UMT5: 4.57 multiplies them by hidden_size^-0.5 if `tie_word_embeddings` is true. 5 always ties; it
  multiplies for T5 if `scale_decoder_outputs` is true, and always for UMT5. kvad uses `scale_decoder_outputs`, and
  without it `tie_word_embeddings`: a file is read as the version that wrote it does, and Google's UMT5 as it was
  trained, with the logits of 4.57.
- A window of w in T5Gemma's encoder: |i - j| < w in 4.57, |i - j| <= w in 5. kvad follows 4.57, which is Gemma's mask.
- Longrope, if a text exceeds the original limit: 4.57 retains cached keys, 5 recomputes them. Dynamic rope: both retain
  them. kvad returns the uncached result, which is the same in both: a cache changes nothing.

`python -m tests.hf_parity.compare` prints the differences between the goldens.
"""

HEAD = """# Models

The Hugging Face families that kvad reads, with test results. All tables are written by `{again}`
from the tests' report (`docs/reference/models.json`), the goldens (`tests/golden_files/hf_parity`) and the families
(`kvad/checkpoint/families`); `tests/docs/test_models_page.py` checks that the page is up to date.

The references are transformers {versions}: tiny models with awkward shapes and random values in every parameter,
compared logit by logit in float32 (`tests/hf_parity/README.md`). `kvad inspect MODEL --tree` draws each of these models
and `kvad plan MODEL` computes its size, both from a folder's `config.json`. They need no torch for checkpoints in
kvad's layout and for known models; a Hugging Face config imports torch, because the file of a family has both the
config's and the tensors' conversion.
"""
MATRIX = """A family is in every row whose positions it has. A note such as *(parallel)* gives the position of its norms
if it is neither before (pre) nor after (post) each half of a layer; `kvad inspect MODEL --tree` prints the formula.
"-": no family.
"""
TABLE = """*4.57* and *5*: the largest difference of any output from that version's, over all of the family's cases;
*file*: the exported checkpoint has the same tensors and the same config; *greedy*: 12 tokens generated with kvad's
cache are equal; *beams*: the four best hypotheses of two searches and their scores are equal. "n of m": n of the
family's m cases have the check; "-": none.
"""
REFUSALS = """An unknown `model_type` is refused; the hint is the most similar known one. Refused for a reason:
"""


def _versions() -> str:
    test_results = [
        json.loads((checkpoint.GOLDENS / one / "index.json").read_text("utf-8")) for one in checkpoint.ORACLES
    ]
    return " and ".join(each["transformers"] for each in test_results)


def _rows(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["--"] * len(head), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def _matrix(collected: Mapping[str, Family]) -> list[str]:
    cells: dict[tuple[str, str, str], dict[str, None]] = {}
    for family in collected.values():
        for config in family.configs:
            sort_key = "post" if "post" in norms(config) else "pre"
            other = [name for name in norms(config) if name not in ("pre", "post")]
            shown = f"`{family.model_type}`" + (f" *({', '.join(other)})*" if other else "")
            for position in positions(config):
                if position == "none" and len(positions(config)) > 1:
                    continue
                cells.setdefault((position, config.kind, "other" if other else sort_key), {})[shown] = None
    columns = [
        (kind, sort_key)
        for kind in TOPOLOGIES
        for sort_key in ("pre", "post", "other")
        if any((position, kind, sort_key) in cells for position in POSITIONS)
    ]
    head = ["", *(f"{kind}, {sort_key}" for kind, sort_key in columns)]
    rows = [
        [position, *(", ".join(cells.get((position, *column), {})) or "-" for column in columns)]
        for position in POSITIONS
        if any((position, *column) in cells for column in columns)
    ]
    return _rows(head, rows)


def _table(collected: Mapping[str, Family], results: Results) -> list[str]:
    head = ["family", "classes", "topology", "positions", "norms", *checkpoint.ORACLES, "file", "greedy", "beams"]
    rows = []
    for family in collected.values():
        where = dict.fromkeys(" + ".join(positions(config)) for config in family.configs)
        places = dict.fromkeys(name for config in family.configs for name in norms(config))
        rows.append(
            [
                f"`{family.model_type}`",
                ", ".join(f"`{name}`" for name in family.classes) or "-",
                ", ".join(family.kinds) or "-",
                "; ".join(where) or "-",
                ", ".join(places) or "-",
                *(_outputs(family, oracle, results) for oracle in checkpoint.ORACLES),
                *(_check(family, check, results) for check in ("written", "greedy", "beams")),
            ]
        )
    return _rows(head, rows)


def _outputs(family: Family, oracle: str, results: Results) -> str:
    """Return the cell of one oracle: the largest difference, or what failed."""
    cases = family.cases.get(oracle, {})
    if not cases:
        return "no reference"
    test_results = [results.get(case, {}).get(oracle, {}) for case in cases]
    entries = [each["outputs"] for each in test_results if "outputs" in each]
    wrong = [entry for entry in entries if entry["outcome"] in ("failure", "error")]
    if wrong:
        return f"**{len(wrong)} of {len(entries)} fail**"
    differences = [entry["largest"] for entry in entries if "largest" in entry]
    if not differences:
        return "differs, see below" if entries else "not run"
    count = f", {len(differences)} cases" if len(differences) > 1 else ""
    return f"{max(differences):.0e}{count}"


def _check(family: Family, check: str, results: Results) -> str:
    """Return the cell of a check over both oracles."""
    pairs = [(oracle, case) for oracle, cases in family.cases.items() for case in cases]
    test_results = [results.get(case, {}).get(oracle, {}) for oracle, case in pairs]
    entries = [each[check] for each in test_results if check in each]
    passed = sum(entry["outcome"] == "passed" for entry in entries)
    wrong = sum(entry["outcome"] in ("failure", "error") for entry in entries)
    if wrong:
        return f"**{wrong} of {len(entries)} fail**"
    num_read = sum("refused" not in each for each in test_results)
    return "-" if not passed else "yes" if passed == num_read else f"{passed} of {num_read}"


def _missing_results(results: Results) -> list[str]:
    lines = []
    for oracle in checkpoint.ORACLES:
        index = json.loads((checkpoint.GOLDENS / oracle / "index.json").read_text("utf-8"))
        lines += [f"- `{case}`: {why}." for case, why in index["skipped"].items()]
    for case, each in sorted(results.items()):
        for oracle, checks in each.items():
            for check, entry in checks.items():
                if check == "refused":
                    lines.append(f"- `{case}` of {oracle}: refused by name, as expected ({entry['outcome']}).")
                elif entry["outcome"] == "skipped":
                    lines.append(
                        f"- `{case}` of {oracle}, {check}: kvad differs; `{entry['says']}` tests the difference."
                    )
    return [*dict.fromkeys(lines), ""]


def _refused() -> list[str]:
    lines = [f"- `{model_type}`: {why}." for model_type, why in sorted(UNSUPPORTED.items())]
    rows = []
    for path in sorted((ROOT / "kvad" / "checkpoint" / "families").glob("*.py")):
        rows += [[f"`{path.stem}`", *cells] for cells in _refusals(path.read_text("utf-8"))]
    test_results = (
        "These options of configs are refused by name. Names with an underscore are files that families share."
    )
    return [*lines, "", test_results, "", *_rows(["file", "option", "supported values", "reason"], rows)]


def _refusals(source: str) -> Iterator[list[str]]:
    """Yield each ``fields.require_one_of(NAME, *allowed, reason=...)`` of a file with a literal name, in order."""
    seen = set()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "require_one_of" and call.args):
            continue
        name, *allowed = call.args
        if not isinstance(name, ast.Constant) or name.value in seen:
            continue
        seen.add(name.value)
        why = next((keyword.value for keyword in call.keywords if keyword.arg == "reason"), None)
        shown = why.value if isinstance(why, ast.Constant) else ""
        values = ", ".join(f"`{ast.unparse(value)}`" for value in allowed) or "absent"
        yield [f"`{name.value}`", values.replace("|", "\\|"), str(shown)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", action="store_true", help="run the tests first; further arguments are passed to pytest"
    )
    options, further = parser.parse_known_args()
    if options.run:
        RESULTS.write_text(stored(ask(further)), encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text("utf-8"))), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(FAMILIES)} families")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
