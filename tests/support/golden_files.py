"""Writer of `tests/golden_files/formats`: one file of every format that kvad stores, from a tiny model.

    python -m tests.support.golden_files FOLDER

The files are written once. `tests/test_golden_files.py` loads them with the current code; a change that cannot read
them needs a new format number and a message that explains how to write the file again.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from kvad import LLM
from kvad.cli.main import main

PROMPT = "ada bob cleo "
TUNE = "--seq-len 32 --batch-size 2 --steps 2 --precision fp32 --seed 3 --save-interval 2 --eval-interval 2"
_LAYER = "decoder.layer_types.L"
TINY = (
    f"{TUNE} --tokenizer byte --set model.hidden_size=16 --set decoder.num_layers=1"
    f" --set {_LAYER}.mlp.intermediate_size=16 --set {_LAYER}.attention.num_heads=2"
)
SUMMARIES = (
    f"{TUNE} --objective summarizer --set summarizer.ratio=4 --set summarizer.recent=8 --set summarizer.interval=8"
)


def run(*arguments: object) -> str:
    """Run a command of kvad and return what it prints.

    Raises:
        AssertionError: The command failed.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([str(argument) for argument in arguments])
    assert code in (0, None), f"kvad {' '.join(map(str, arguments))}: exit code {code}"
    return out.getvalue()


def scores(model: Path, **options: Any) -> list[float]:
    """Return the log-probability of each prompt token after the first."""
    with LLM.load(model, **options) as llm:
        return [float(score) for score in llm.score(PROMPT).logprobs[1:]]


def write(folder: Path) -> None:
    """Write every format into `folder`, and `expected.json` with the expected scores."""
    folder.mkdir(parents=True)
    text = folder / "text.txt"
    names = ("ada", "bob", "cleo", "dan")
    rng = random.Random(5)
    text.write_text("".join(f"{rng.choice(names)} {rng.choice(names)}\n" for _ in range(120)), encoding="utf-8")
    hf, native = folder / "run-hf", folder / "run-native"
    run("train", text, "--preset", "tiny", *TINY.split(), "--set", f"{_LAYER}.attention.num_kv_heads=1", "--out", hf)
    longer = ("--steps", 4, "--set", "train.keep_best=false")
    run("train", text, "--preset", "shakespeare-char", *TINY.split(), *longer, "--out", native)
    shutil.rmtree(native / "checkpoints" / "step-00000004")  # resumed by the test
    run("train", text, "--init", hf, "--lora-rank", 2, *TUNE.split(), "--out", folder / "adapter")
    run("train", text, "--init", hf, *SUMMARIES.split(), "--out", folder / "summarizer")
    run("data", "prepare", text, "--tokenizer", "byte", "--out", folder / "prepared")
    run("session", "save", hf, "notes", "--prompt", PROMPT, "--session-dir", folder / "sessions")
    prefix = ("--prompt", PROMPT, "--name", "names", "--prefix-cache-dir", folder / "prefix-cache")
    run("prefix", "add", hf, *prefix, "--block-size", 4)
    expected = {"run-hf": scores(hf), "run-native": scores(native), "adapter": scores(hf, adapter=folder / "adapter")}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    for leftover in [*folder.rglob("*.png"), *folder.rglob("*.svg")]:
        leftover.unlink()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    write(target)
