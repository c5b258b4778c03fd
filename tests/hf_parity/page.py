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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

from kvad.checkpoint import families
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import FAMILIES, UNSUPPORTED
from kvad.config.layers import (
    AlibiConfig,
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
FILES = ("tests/checkpoint/test_families.py", "tests/checkpoint/test_family_outputs.py")
CHECKS = {  # a test of each case -> what it checks
    "test_outputs_equal_the_reference": "outputs",
    "test_tensors_and_config_are_written_back": "written",
    "test_greedy_tokens_equal_the_reference": "greedy",
    "test_four_best_beams_equal_the_reference": "beams",
    "test_unsupported_options_are_refused": "refused",
}
TOPOLOGIES = ("decoder", "encoder", "encoder-decoder")
POSITIONS = ("learned", "sinusoidal", "T5 bias", "ALiBi", "RoPE", "none")
AGAIN = "scripts/models --run"

Results = dict[str, dict[str, dict[str, dict[str, Any]]]]  # case, oracle, check, then outcome, largest, message


# ---------------------------------------------------------------- test results


def run_tests(arguments: list[str]) -> Results:
    """Run the tests, and read their report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.hf_parity.record", f"--junitxml={report}"]
        subprocess.run([*command, *FILES, *arguments], cwd=ROOT, check=False, timeout=3600)
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
                entry = {"outcome": kind, "message": str(element.get("message")).splitlines()[0]}
        for test_results in test.iter("property"):
            if test_results.get("name") == "largest" and entry["outcome"] == "passed":
                entry["largest"] = float(str(test_results.get("value")))
        collected.setdefault(match["case"], {}).setdefault(match["oracle"], {})[CHECKS[name]] = entry
    return collected


def stored(results: Results) -> str:
    """Format the results, one line per case and version."""
    cases = []
    for case, each in sorted(results.items()):
        lines = [f'    "{oracle}": {json.dumps(checks, sort_keys=True)}' for oracle, checks in each.items()]
        cases.append(f'  "{case}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(cases) + "\n}\n"


# ---------------------------------------------------------------- families of the goldens


@dataclass
class Family:
    """One ``model_type``: its cases and their configs."""

    model_type: str
    classes: dict[str, None] = field(default_factory=dict)  # an ordered set
    cases: dict[str, list[str]] = field(default_factory=dict)  # by oracle
    configs: list[ModelConfig] = field(default_factory=list)
    options: dict[tuple[str, str, str], None] = field(default_factory=dict)  # refused: name, supported values, reason

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in TOPOLOGIES if any(config.kind == kind for config in self.configs)]


def gather() -> dict[str, Family]:
    """Return every family that kvad reads, with or without cases, ordered by topology and name."""
    collected = {model_type: Family(model_type) for model_type in FAMILIES}
    for oracle in checkpoint.ORACLES:
        for case in checkpoint.names(oracle):
            meta = checkpoint.meta(oracle, case)
            family = collected[meta["config"]["model_type"]]
            family.classes[meta["model"]] = None
            family.cases.setdefault(oracle, []).append(case)
            config = _read(family, meta["config"])
            if config is not None:
                family.configs.append(config)

    def sort_key(each: Family) -> tuple[int, str]:
        return (TOPOLOGIES.index(each.kinds[-1]) if each.kinds else len(TOPOLOGIES), each.model_type)

    return {each.model_type: each for each in sorted(collected.values(), key=sort_key)}


def _read(family: Family, content: Mapping[str, Any]) -> ModelConfig | None:
    """Read a config, and add the options that the family checks to ``family.options``."""
    require_one_of = HFConfigReader.require_one_of

    def recording(reader: HFConfigReader, name: str, *allowed: Any, reason: str = "") -> None:
        caller = sys._getframe(1)
        values, is_literal = _describe_call(caller.f_code.co_filename, caller.f_lineno)
        family.options[f"`{name}`", values, reason if is_literal else ""] = None
        require_one_of(reader, name, *allowed, reason=reason)

    fields = HFConfigReader(content, "config.json")
    with mock.patch.object(HFConfigReader, "require_one_of", recording):
        try:
            return families.find_family(fields.model_type).read(fields)
        except KvadError:
            return None  # a case that is refused


def positions(config: ModelConfig) -> list[str]:
    """Return the model's ``POSITIONS``; "none" if some layers have none."""
    names = {LearnedPositionsConfig: "learned", SinusoidalPositionsConfig: "sinusoidal"}
    names |= {RopeConfig: "RoPE", AlibiConfig: "ALiBi", T5BiasConfig: "T5 bias", type(None): "none"}
    absolute = names.get(type(config.embedding.position), "custom")
    layers = [layer for stack in _stacks(config) for layer in stack.layer_types.values()]
    collected = {absolute, *(names.get(type(layer.attention.position), "custom") for layer in layers)}
    if absolute != "none" or all(layer.attention.position is not None for layer in layers):
        collected.discard("none")
    return [name for name in POSITIONS if name in collected]


def _stacks(config: ModelConfig) -> list[StackConfig]:
    return [stack for stack in (config.encoder, config.decoder) if stack is not None]


def norms(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(stack.norm_position for stack in _stacks(config)))


# ---------------------------------------------------------------- the page


def page(results: Results) -> str:
    collected = gather()
    parts = [
        HEAD.format(again=AGAIN, versions=" and ".join(index["transformers"] for index in _indices())),
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
        *_refused(collected),
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
REFUSALS = """An unknown `model_type` is refused; the hint is the most similar known one, and the nearest family by the
config's keys and the names of the tensors, with what differs. A key that kvad does not use is printed when the model
is loaded (`config.json: not used: ...`), without those of training, metadata and generation. Refused for a reason:
"""


def _indices() -> list[dict[str, Any]]:
    return [json.loads((checkpoint.GOLDENS / one / "index.json").read_text("utf-8")) for one in checkpoint.ORACLES]


def _rows(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["--"] * len(head), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def _matrix(collected: Mapping[str, Family]) -> list[str]:
    cells: dict[tuple[str, str, str], dict[str, None]] = {}
    for family in collected.values():
        for config in family.configs:
            other = [name for name in norms(config) if name not in ("pre", "post")]
            column = "other" if other else "post" if "post" in norms(config) else "pre"
            label = f"`{family.model_type}`" + (f" *({', '.join(other)})*" if other else "")
            for position in [name for name in positions(config) if name != "none"] or ["none"]:
                cells.setdefault((position, config.kind, column), {})[label] = None
    columns = [(kind, column) for kind in TOPOLOGIES for column in ("pre", "post", "other")]
    columns = [column for column in columns if column in {key[1:] for key in cells}]
    rows = [
        [position, *(", ".join(cells.get((position, *column), {})) or "-" for column in columns)]
        for position in POSITIONS
        if position in {key[0] for key in cells}
    ]
    return _rows(["", *map(", ".join, columns)], rows)


def _table(collected: Mapping[str, Family], results: Results) -> list[str]:
    head = ["family", "classes", "topology", "positions", "norms", *checkpoint.ORACLES, "file", "greedy", "beams"]
    rows = []
    for family in collected.values():
        columns = [
            ", ".join(f"`{name}`" for name in family.classes),
            ", ".join(family.kinds),
            "; ".join(dict.fromkeys(" + ".join(positions(config)) for config in family.configs)),
            ", ".join(dict.fromkeys(name for config in family.configs for name in norms(config))),
        ]
        outputs = [_outputs(family, oracle, results) for oracle in checkpoint.ORACLES]
        checks = [_check(family, check, results) for check in ("written", "greedy", "beams")]
        rows.append([f"`{family.model_type}`", *(column or "-" for column in columns), *outputs, *checks])
    return _rows(head, rows)


def _outputs(family: Family, oracle: str, results: Results) -> str:
    """Return the cell of one oracle: the largest difference, or what failed."""
    if oracle not in family.cases:
        return "no reference"
    entries = [each["outputs"] for each in _results(family, results, oracle) if "outputs" in each]
    if failures := _failures(entries):
        return failures
    differences = [entry["largest"] for entry in entries if "largest" in entry]
    if not differences:
        return "differs, see below" if entries else "not run"
    count = f", {len(differences)} cases" if len(differences) > 1 else ""
    return f"{max(differences):.0e}{count}"


def _check(family: Family, check: str, results: Results) -> str:
    """Return the cell of a check over both oracles."""
    all_results = _results(family, results, *family.cases)
    entries = [each[check] for each in all_results if check in each]
    passed = sum(entry["outcome"] == "passed" for entry in entries)
    num_read = sum("refused" not in each for each in all_results)
    return _failures(entries) or ("-" if not passed else "yes" if passed == num_read else f"{passed} of {num_read}")


def _results(family: Family, results: Results, *oracles: str) -> list[dict[str, dict[str, Any]]]:
    return [results.get(case, {}).get(oracle, {}) for oracle in oracles for case in family.cases[oracle]]


def _failures(entries: list[dict[str, Any]]) -> str:
    failures = sum(entry["outcome"] in ("failure", "error") for entry in entries)
    return f"**{failures} of {len(entries)} fail**" if failures else ""


def _missing_results(results: Results) -> list[str]:
    lines = [f"- `{case}`: {reason}." for index in _indices() for case, reason in index["skipped"].items()]
    for case, each in sorted(results.items()):
        for oracle, checks in each.items():
            for check, entry in checks.items():
                if check == "refused":
                    lines.append(f"- `{case}` of {oracle}: refused by name, as expected ({entry['outcome']}).")
                elif entry["outcome"] == "skipped":
                    difference = f"kvad differs; `{entry['message']}` tests the difference."
                    lines.append(f"- `{case}` of {oracle}, {check}: {difference}")
    return [*dict.fromkeys(lines), ""]


def _refused(collected: Mapping[str, Family]) -> list[str]:
    """Return the unsupported types, and a row for each option that the families refuse while they read their cases."""
    families_by_option: dict[tuple[str, str, str], list[str]] = {}
    for family in sorted(collected.values(), key=lambda each: each.model_type):
        for option in family.options:
            families_by_option.setdefault(option, []).append(f"`{family.model_type}`")
    rows = [[*option, ", ".join(names)] for option, names in sorted(families_by_option.items())]
    return [
        *(f"- `{model_type}`: {reason}." for model_type, reason in sorted(UNSUPPORTED.items())),
        "\nThese options of configs are refused by name.\n",
        *_rows(["option", "supported values", "reason", "families"], rows),
    ]


@cache
def _describe_call(path: str, line: int) -> tuple[str, bool]:
    """Return the values that ``require_one_of``, called in a line, accepts, and whether its reason is a literal."""
    calls = [node for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))) if isinstance(node, ast.Call)]
    call = next(
        node
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and node.func.attr == "require_one_of"
        and node.lineno <= line <= (node.end_lineno or 0)
    )
    values = ", ".join(f"`{ast.unparse(value)}`" for value in call.args[1:]) or "absent"
    return values.replace("|", "\\|"), not any(isinstance(word.value, ast.JoinedStr) for word in call.keywords)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_text = "run the tests first; further arguments are passed to pytest"
    parser.add_argument("--run", action="store_true", help=help_text)
    options, further = parser.parse_known_args()
    if options.run:
        RESULTS.write_text(stored(run_tests(further)), encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text("utf-8"))), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(FAMILIES)} families")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
