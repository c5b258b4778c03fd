"""Compare kvad with other engines on the same random weights, by turns in one run.

    make peers                                          # once: the environment of the other engines
    python -m benchmarks.peers run --quick              # 135M, one row and a prompt: about 3 minutes
    python -m benchmarks.peers run --shapes 135m --scenarios decode-128 prefill-512 \\
        --engines kvad llama.cpp openvino --precisions bfloat16 int8 --repeats 3 --out /tmp/x.jsonl
    python -m benchmarks.peers table /tmp/x.jsonl       # values, ratios to each engine, bars
    python -m benchmarks.peers docs dev/results/peers.jsonl    # the tables of docs/explanation/decoding-speed.md
    kvad plot dev/results/peers.jsonl --x context --y median --group-by label --log-x -o peers.svg

kvad is imported from this checkout, so another commit is another worktree. Every value is one timed run; a line has
the median of all turns with the smallest and the largest, the machine's limits measured in the same rounds, and how
many of the tokens are the most likely ones of the float32 model.
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
from benchmarks.peers.scenarios import DEFAULT, QUICK, SCENARIOS, Selection, select
from benchmarks.peers.shapes import SHAPES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "decoding-speed.md"
PRECISIONS = ("float32", "bfloat16", "int8", "int8-cache")
ENGINES = ("kvad", "llama.cpp", "openvino", "transformers", "ctranslate2")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and print one JSON line per engine, precision and scenario")
    run.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="NAME", help=f"{', '.join(SHAPES)} [default: all]")
    run.add_argument(
        "--scenarios",
        nargs="+",
        choices=SCENARIOS,
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)} [default: a selection for each shape]",
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
        "bfloat16 int8; encoder-decoders: float32 int8]",
    )  # fmt: skip
    run.add_argument("--repeats", type=int, default=5, help="timed runs of each engine [default: 5]")
    run.add_argument(
        "--max-seconds", type=float, default=180.0,
        help="begin no round of a scenario later than this after its start [default: 180]",
    )  # fmt: skip
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    run.add_argument("--out", type=Path, help="file to which the lines are appended too")
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
    docs.add_argument("files", nargs="+", type=Path)
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
            sources = ", ".join(f"`{path}`" for path in options.files)
            options.page.write_text(with_tables(options.page.read_text("utf-8"), lines, sources), "utf-8")
    except (OSError, ValueError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def read_lines(files: list[Path]) -> list[dict[str, Any]]:
    """Return the lines of this benchmark; ValueError if a file has none."""
    lines = []
    for path in files:
        parsed = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        parsed = [line for line in parsed if line.get("bench") == "peers"]
        if not parsed:
            raise ValueError(f"{path} has no lines of this benchmark. Measure them: python -m benchmarks.peers run")
        lines += parsed
    return lines


def selections(options: argparse.Namespace) -> tuple[Selection, ...]:
    """Return the default selection, or what the options name."""
    if options.scenarios:
        wanted = tuple((shape, tuple(options.scenarios), ()) for shape in options.shapes or SHAPES)
    else:
        wanted = QUICK if options.quick else DEFAULT
        wanted = tuple(each for each in wanted if not options.shapes or each[0] in options.shapes)
    chosen = [select(shape, names, options.precisions or precisions) for shape, names, precisions in wanted]
    return tuple(each for each in chosen if each.scenarios)


def measure(options: argparse.Namespace) -> int:
    from benchmarks.peers.driver import Driver, Settings

    if options.repeats < 1 or options.threads < 1:
        print("--repeats, --threads: must be at least 1", file=sys.stderr)
        return 2
    python = Path(options.peers) / "bin" / "python"
    if not python.exists():
        print(f"--peers: no Python in {options.peers}. Run: make peers", file=sys.stderr)
        return 2
    settings = Settings(
        selections=selections(options),
        engines=tuple(options.engines),
        repeats=min(options.repeats, 3) if options.quick else options.repeats,
        max_seconds=options.max_seconds,
        threads=options.threads,
        cache=options.cache,
        peers_python=str(python),
        kvad_python=sys.executable,
        check=not options.no_check,
        verbose=options.verbose,
        log=subprocess.DEVNULL if options.log is None else options.log.open("wb"),
    )
    driver = Driver(settings)
    if options.convert_only:
        driver.prepare()
        return 0
    lines = []
    for line in driver.run():
        lines.append(line)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(table(lines), bars_table(lines), sep="\n\n", file=sys.stderr)
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
