"""Compare kvad with other engines on the same random weights, by turns in one run.

    make peers                                          # once: the environment of the other engines
    make bench                                          # all rows of the page, hours; started again, it continues
    python -m benchmarks.peers docs                     # the page docs/explanation/decoding-speed-results.md from them
    python -m benchmarks.peers run --quick              # 135M, one row and a prompt: about 3 minutes
    python -m benchmarks.peers run --shapes 135m --scenarios decode-128 prefill-512 \\
        --engines kvad llama.cpp openvino --precisions bfloat16 int8 --repeats 3 --out /tmp/x.jsonl
    python -m benchmarks.peers table /tmp/x.jsonl       # values, ratios to each engine, bars
    kvad plot dev/results/peers.jsonl --x context --y median --group-by label --log-x -o peers.svg

kvad is imported from this checkout, so another commit is another worktree. Every value is one timed run; a line has
the median of all turns with the smallest and the largest, their shares of the machine's limits, which are measured
before and after each round, and how many of the tokens are the most likely ones of the float32 model. Scenarios that
the file of --out has at this commit, from this machine and with enough timed runs, are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.report import bars_table, table, with_tables
from benchmarks.peers.results import ROOT
from benchmarks.peers.scenarios import DEFAULT, QUICK, SCENARIOS, Selection, select
from benchmarks.peers.shapes import SHAPES

PAGE = ROOT / "docs" / "explanation" / "decoding-speed-results.md"
RESULTS = Path("dev/results/peers.jsonl")  # `make bench` appends to it
PRECISIONS = ("float32", "bfloat16", "int8", "int8-cache")
ENGINES = ("kvad", "llama.cpp", "openvino", "transformers", "ctranslate2")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and print one JSON line per engine, precision and scenario")
    run.add_argument(
        "--shapes", nargs="+", choices=SHAPES, metavar="NAME", help=f"{', '.join(SHAPES)} [default: those of the page]"
    )
    run.add_argument(
        "--scenarios",
        nargs="+",
        choices=SCENARIOS,
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)} [default: those of the page]",
    )
    run.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        metavar="NAME",
        default=list(ENGINES),
        help=f"{', '.join(ENGINES)} [default: all]",
    )
    run.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, metavar="NAME", default=[],
        help="float32, bfloat16, int8 (weights) or int8-cache (bfloat16 weights, keys and values in 8 bits) [default: "
        "those of the page; with --scenarios bfloat16 int8, encoder-decoders float32 int8]",
    )  # fmt: skip
    run.add_argument("--repeats", type=int, default=5, help="timed runs of each engine [default: 5]")
    run.add_argument(
        "--max-seconds", type=float, default=900.0,
        help="begin no round of a scenario later than this after the first one, but for the first 3 timed runs; "
        "untimed runs and the comparison of tokens are not counted [default: 900]",
    )  # fmt: skip
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    run.add_argument("--out", type=Path, help="file to which the lines are appended; what it completes is skipped")
    run.add_argument("--again", action="store_true", help="measure what the file of --out has, too")
    run.add_argument("--quick", action="store_true", help="135M: one row, 8 rows and a prompt of 512, 3 times")
    run.add_argument(
        "--convert-only", action="store_true", help="write the checkpoints of all engines, measure nothing"
    )
    run.add_argument("--no-check", action="store_true", help="do not compare the tokens")
    run.add_argument("--verbose", action="store_true", help="print each value")
    run.add_argument("--log", type=Path, help="file for what the engines print")
    run.add_argument("--cache", type=Path, default=default_cache(), help=f"checkpoints [default: {default_cache()}]")
    run.add_argument(
        "--peers", default=os.environ.get("PEERS", str(ROOT / ".venv-peers")),
        help="environment of the other engines [default: $PEERS, else .venv-peers]",
    )  # fmt: skip
    show = commands.add_parser("table", help="print values, ratios and bars of JSON lines")
    show.add_argument("files", nargs="+", type=Path)
    docs = commands.add_parser("docs", help="write the tables of JSON lines into a page, between its two markers")
    docs.add_argument("files", nargs="*", type=Path, default=[ROOT / RESULTS], help=f"default: {RESULTS}")
    docs.add_argument("--page", type=Path, default=PAGE, help=f"default: {PAGE.relative_to(ROOT)}")
    return result


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvad-peers"


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.command == "run":
        return measure(options)
    try:
        lines = read_lines(options.files)
        if options.command == "table":
            print(table(lines), bars_table(lines), sep="\n\n")
        else:
            names = (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path for path in options.files)
            sources = ", ".join(f"`{name}`" for name in names)
            options.page.write_text(with_tables(options.page.read_text("utf-8"), lines, sources), "utf-8")
    except (OSError, ValueError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def read_lines(files: list[Path]) -> list[dict[str, Any]]:
    """Return the lines of this benchmark; ValueError if a file has none."""
    lines = []
    for path in files:
        parsed = [line for line in parse(path) if line.get("bench") == "peers"]
        if not parsed:
            raise ValueError(f"{path} has no lines of this benchmark. Measure them: python -m benchmarks.peers run")
        lines += parsed
    return lines


def parse(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def selections(options: argparse.Namespace) -> tuple[Selection, ...]:
    """Return the default selection, or what the options name."""
    if options.scenarios:
        shapes = options.shapes or SHAPES
        chosen = [select(shape, options.scenarios, options.precisions) for shape in shapes]
    else:
        chosen = [
            each.with_precisions(options.precisions or PRECISIONS)
            for each in (QUICK if options.quick else DEFAULT)
            if not options.shapes or each.shape.name in options.shapes
        ]
    return tuple(each for each in chosen if each.scenarios and each.precisions)


def problem(options: argparse.Namespace) -> str:
    """Return why nothing can be measured with these options; "" if it can."""
    if options.repeats < 1 or options.threads < 1:
        return "--repeats, --threads: must be at least 1"
    if not (Path(options.peers) / "bin" / "python").exists():
        return f"--peers: no Python in {options.peers}. Run: make peers"
    if not selections(options):
        return "--shapes, --precisions: no row of the page has these. Name scenarios: --scenarios decode-128"
    return ""


def measure(options: argparse.Namespace) -> int:
    from benchmarks.peers.driver import Driver, Settings

    try:
        earlier = parse(options.out) if options.out is not None and options.out.exists() else []
    except (OSError, ValueError) as error:
        print(f"--out: {options.out}: {error}", file=sys.stderr)
        return 2
    if text := problem(options):
        print(text, file=sys.stderr)
        return 2
    settings = Settings(
        selections=selections(options),
        engines=tuple(options.engines),
        repeats=min(options.repeats, 3) if options.quick else options.repeats,
        max_seconds=options.max_seconds,
        threads=options.threads,
        cache=options.cache,
        peers_python=str(Path(options.peers) / "bin" / "python"),
        kvad_python=sys.executable,
        check=not options.no_check,
        verbose=options.verbose,
        log=subprocess.DEVNULL if options.log is None else options.log.open("wb"),
        earlier=[] if options.again else [line for line in earlier if line.get("bench", "").startswith("peers")],
    )
    driver = Driver(settings)
    if options.convert_only:
        driver.prepare()
        return 0
    is_complete = not driver.tasks
    lines = [line for line in earlier if line.get("bench") == "peers"]
    num_earlier = len(lines)
    for line in driver.run():
        print(json.dumps(line), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if line["bench"] == "peers":
            lines.append(line)
    if lines:
        print(table(lines), bars_table(lines), sep="\n\n", file=sys.stderr)
    return 0 if len(lines) > num_earlier or is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
