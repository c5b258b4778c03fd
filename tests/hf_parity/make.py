"""Write the golden files: what one version of transformers computes for every case.

    FOLDER/4.57/bin/python -m tests.hf_parity.make --out tests/golden_files/hf_parity [--only llama t5 ...] [--hidden]

For each case: the model's config decides which tensors ``save_pretrained`` writes; their values are replaced by those
of ``weights.py``; ``from_pretrained`` reads the folder, and only that model is the reference. Checked on the way: no
tensor was missing, unexpected or left at its initial value, the reference writes back every tensor that it read, and
``checkpoint.write`` rebuilds the folder from the golden files.
"""

import argparse
import copy
import json
import os
import re
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.hf_parity import answers, checkpoint, weights
from tests.hf_parity.cases import BY_NAME, Case

ORACLE = "4.57" if transformers.__version__.startswith("4.57.") else transformers.__version__.split(".")[0]


class Unavailable(Exception):
    """Raised if this version has no such class, or cannot use it."""


def build(case: Case) -> Any:
    """Build the model as its class initializes it; only shapes and fixed tables are used."""
    missing = [name for name in (case.model, case.config) if not hasattr(transformers, name)]
    if missing:
        raise Unavailable(f"transformers {transformers.__version__} has no {missing[0]}")
    if ORACLE in case.without:
        raise Unavailable(f"transformers {transformers.__version__} {case.without[ORACLE]}")
    torch.manual_seed(0)
    make = getattr(transformers, case.model)
    config = getattr(transformers, case.config)(**copy.deepcopy(case.options))
    try:
        return make(config).eval()
    except AttributeError:  # 4.57 cannot initialize StableLM's norms without bias, but reads them
        with transformers.modeling_utils.no_init_weights():
            return make(config).eval()


def read(case: Case, folder: Path) -> tuple[Any, dict[str, Any]]:
    model, info = getattr(transformers, case.model).from_pretrained(
        folder, attn_implementation=case.attention, dtype=torch.float32, output_loading_info=True
    )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products require strides that tiny experts do not have
    return model.eval(), info


def prepare(case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Write the checkpoint to ``folder``; return the golden's meta and arrays so far, and the tensors."""
    build(case).save_pretrained(folder, safe_serialization=True)
    saved = load_file(folder / "model.safetensors")
    shapes = {name: saved[name].shape for name in sorted(saved)}
    extra = {name: shape for name, shape in case.extra.items() if name not in shapes}
    fixed = [name for name in shapes if name.endswith(case.fixed)] if case.fixed else []
    wrong = {name: str(value.dtype) for name, value in saved.items() if value.dtype != np.float32}
    if wrong:
        raise AssertionError(f"not float32: {wrong}")
    generation = folder / "generation_config.json"
    meta = {
        "case": case.name,
        "oracle": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]},
        "model": case.model,
        "kind": case.kind,
        "output": case.output,
        "note": case.note,
        "recipe": asdict(case.recipe),
        "config": json.loads((folder / "config.json").read_text()),
        "generation_config": json.loads(generation.read_text()) if generation.exists() else None,
        "tensors": {name: list(shape) for name, shape in sorted({**shapes, **extra}.items())},
        "extra": sorted(extra),
        "fixed": fixed,
    }
    arrays = {f"fixed/{name}": saved[name] for name in fixed}
    tensors_written = checkpoint.made(meta, arrays)
    meta["weights_sha256"] = weights.digest(tensors_written)
    save_file(tensors_written, folder / "model.safetensors", metadata={"format": "pt"})
    return meta, arrays, tensors_written


def check_read(case: Case, model: Any, info: dict[str, Any], tensors_written: dict[str, np.ndarray]) -> list[str]:
    """Check that the reference read every tensor and would write each back, except returned extra ones."""
    strays = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if strays:
        raise AssertionError(f"loading: {strays}")
    with tempfile.TemporaryDirectory() as again:
        model.save_pretrained(again, safe_serialization=True)
        back = load_file(Path(again) / "model.safetensors")
    changed = [name for name, value in back.items() if not np.array_equal(value, tensors_written.get(name, np.nan))]
    not_written = sorted(set(tensors_written) - set(back))
    if changed or not set(not_written) <= set(case.extra):
        raise AssertionError(f"written back with other values: {changed}; not written back: {not_written}")
    return not_written


def recreate(meta: dict[str, Any], arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Check that checkpoint.write rebuilds the folder: configs byte for byte, tensors bit for bit."""
    with tempfile.TemporaryDirectory() as other:
        folders = folder, checkpoint.write(meta, arrays, Path(other))
        for name in ("config.json", "generation_config.json"):
            texts = {(each / name).read_text() if (each / name).exists() else None for each in folders}
            if len(texts) > 1:
                raise AssertionError(f"{name} differs")
        if len({weights.digest(load_file(each / "model.safetensors")) for each in folders}) > 1:
            raise AssertionError("model.safetensors differs")


@torch.no_grad()
def golden(case: Case, hidden: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meta, arrays, tensors_written = prepare(case, folder)
        model, info = read(case, folder)
        meta["not_saved_again"] = check_read(case, model, info, tensors_written)
        recreate(meta, arrays, folder)
        arrays |= answers.runs(case, model, hidden)
        largest = max(float(np.abs(value).max()) for key, value in arrays.items() if key.endswith(f"/{case.output}"))
        finite = all(np.isfinite(value).all() for value in arrays.values())
        if not finite or largest > 60:
            raise AssertionError(f"outputs up to {largest}")
        meta["largest"] = round(largest, 3)
        meta["without_effect"] = answers.without_effect(case, model, arrays)
        meta["greedy"], meta["beams"] = None, []
        if case.kind != "encoder":
            needed = answers.clear_generation_config(model)
            meta["greedy"], more = answers.greedy(case, model, needed)
            arrays |= more
            if case.beams:
                meta["beams"], more = answers.beams(model, needed, arrays["greedy/input_ids"])
                arrays |= more
    return meta, arrays


def readable(meta: dict[str, Any]) -> str:
    """Format JSON with every list of numbers on one line."""

    def line(numbers: re.Match[str]) -> str:
        return "[" + " ".join(numbers[1].split()) + "]"

    return re.sub(r"\[([^\[\]{}\"]*)\]", line, json.dumps(meta, indent=1)) + "\n"


def report(case: Case, out: Path, hidden: bool) -> str | None:
    """Write the case's golden files, or return the reason why this version has none."""
    try:
        meta, arrays = golden(case, hidden)
    except Unavailable as why:
        print(f"{case.name:28} skipped: {why}", flush=True)
        return str(why)
    (out / f"{case.name}.json").write_text(readable(meta))
    np.savez_compressed(out / f"{case.name}.npz", **arrays)
    margin = f", greedy margin {meta['greedy']['margin']:.3f}" if meta["greedy"] else ""
    print(f"{case.name:28} {len(meta['tensors']):3} tensors, outputs to {meta['largest']:.2f}{margin}", flush=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of goldens; the oracle's own is made in it")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(BY_NAME), help="only these cases")
    parser.add_argument("--hidden", action="store_true", help="the hidden states too, for finding where a loader errs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = options.out / ORACLE
    out.mkdir(parents=True, exist_ok=True)
    index = out / "index.json"
    old: dict[str, Any] = json.loads(index.read_text()) if index.exists() and options.only else {}
    reasons: dict[str, str | None] = {**dict.fromkeys(old.get("cases", [])), **old.get("skipped", {})}
    failed = False
    for name in options.only or BY_NAME:
        reasons.pop(name, None)
        try:
            reasons[name] = report(BY_NAME[name], out, options.hidden)
        except Exception as error:
            failed = True
            traceback.print_exc(limit=-4)
            print(f"{name:28} FAILED: {type(error).__name__}: {error}", flush=True)
    result = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "cases": [name for name in BY_NAME if reasons.get(name, "failed") is None],
        "skipped": {name: reasons[name] for name in BY_NAME if reasons.get(name)},
    }
    index.write_text(json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
