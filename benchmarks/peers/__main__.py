"""Compare kvad with other engines on the same random weights, by turns in one run.

    make peers                                          # once: the environment of the other engines
    python -m benchmarks.peers run --quick              # 135M, one row and a prompt: about 3 minutes
    python -m benchmarks.peers run --shapes 135m --scenarios decode-128 prefill-512 \\
        --engines kvad llama.cpp openvino --precisions bfloat16 int8 --repeats 3 --out /tmp/x.jsonl
    python -m benchmarks.peers table /tmp/x.jsonl       # values, ratios to each engine, bars

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

from benchmarks.peers.report import table
from benchmarks.peers.scenarios import SCENARIOS
from benchmarks.peers.shapes import SHAPES

ROOT = Path(__file__).parents[2]
PRECISIONS = ("float32", "bfloat16", "int8", "int8-cache")
ENGINES = ("kvad", "llama.cpp", "openvino", "transformers", "ctranslate2")
QUICK = {"shapes": ["135m"], "scenarios": ["decode-128", "rows-8", "prefill-512"], "repeats": 3}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and print one JSON line per engine, precision and scenario")
    run.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m"], help="models [default: 135m]")
    run.add_argument("--scenarios", nargs="+", choices=SCENARIOS, help="default: all that the shape has")
    run.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all")
    run.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=["bfloat16", "int8"],
        help="of weights; int8-cache: bfloat16 weights, keys and values in 8 bits [default: bfloat16 int8]",
    )  # fmt: skip
    run.add_argument("--repeats", type=int, default=5, help="turns of each engine [default: 5]")
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    run.add_argument("--out", type=Path, help="file to which the lines are appended too")
    run.add_argument("--quick", action="store_true", help="a small selection, unless options name another")
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
    return result


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvad-peers"


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.command == "table":
        lines = [json.loads(line) for path in options.files for line in path.read_text("utf-8").splitlines()]
        print(table(lines))
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    from benchmarks.peers.driver import Driver, Settings

    python = Path(options.peers) / "bin" / "python"
    if not python.exists():
        print(f"--peers: no Python in {options.peers}. Run: make peers", file=sys.stderr)
        return 2
    scenarios = options.scenarios or (QUICK["scenarios"] if options.quick else list(SCENARIOS))
    settings = Settings(
        shapes=tuple(SHAPES[name] for name in options.shapes),
        scenarios=tuple(SCENARIOS[name] for name in scenarios),
        engines=tuple(options.engines),
        precisions=tuple(options.precisions),
        repeats=min(options.repeats, 3) if options.quick else options.repeats,
        threads=options.threads,
        cache=options.cache,
        peers_python=str(python),
        kvad_python=sys.executable,
        check=not options.no_check,
        verbose=options.verbose,
        log=subprocess.DEVNULL if options.log is None else options.log.open("wb"),
    )
    lines = []
    for line in Driver(settings).run():
        lines.append(line)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(table(lines), file=sys.stderr)
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
