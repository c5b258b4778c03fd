"""Print the differences of two versions: the golden files of one case, array by array, and their configs.

    python -m tests.hf_parity.compare [--goldens FOLDER] [--tolerance 1e-5] [--files]
    python -m tests.hf_parity.compare --new FOLDER        # instead: compare new golden files; exit code 1 if
    different

Processors round differently: new files may differ by the tolerance, as a share of an array's largest number. Tokens,
shapes, names, configs and weights must be equal.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.hf_parity import checkpoint

UNSAID = {"transformers_version", "_from_model_config", "dtype", "torch_dtype"}


def difference(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float(np.abs(one.astype(np.float64) - other).max(initial=0.0))


def arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float) -> list[str]:
    """Return the differences of the outputs, the largest of each kind of array first."""
    worst: dict[str, float] = {}
    for key in sorted(one.keys() | other.keys()):
        kind = key.rsplit("/", 1)[-1] if not key.startswith("beams") else key
        lines = difference(one[key], other[key]) if key in one and key in other else float("inf")
        worst[kind] = max(worst.get(kind, 0.0), lines)
    return [
        f"{kind} {lines:.1e}" for kind, lines in sorted(worst.items(), key=lambda item: -item[1]) if lines > tolerance
    ]


def ratio(one: np.ndarray, other: np.ndarray) -> float | None:
    """Return the factor between two arrays, if there is one."""
    factor = float((one * other).sum() / (other * other).sum())
    return factor if np.abs(one - factor * other).max() < 1e-4 and abs(factor - 1) > 1e-4 else None


def settings(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the config keys that are written differently."""
    keys = sorted((one.keys() | other.keys()) - UNSAID)
    pairs = {key: [json.dumps(config[key]) if key in config else "-" for config in (one, other)] for key in keys}
    return [f"{key}: {left} | {right}" for key, (left, right) in pairs.items() if left != right]


def changed(goldens: Path, new_goldens: Path, tolerance: float) -> list[str]:
    """Return a line for each case whose golden files differ from the new ones."""
    lines = []
    for oracle in checkpoint.ORACLES:
        names = [checkpoint.names(oracle, folder) for folder in (goldens, new_goldens)]
        lines += [f"{oracle}/{name}: in one of them only" for name in sorted(set(names[0]) ^ set(names[1]))]
        for name in sorted(set(names[0]) & set(names[1])):
            pairs = [checkpoint.load(oracle, name, folder) for folder in (goldens, new_goldens)]
            (meta, one), (other_meta, other) = pairs
            keys = sorted(one.keys() | other.keys())
            result = [key for key in keys if not _same(one.get(key), other.get(key), tolerance)]
            result += ["metadata"] if meta != other_meta else []
            lines += [f"{oracle}/{name}: {', '.join(result)}"] if result else []
    return lines


def _same(one: np.ndarray | None, other: np.ndarray | None, tolerance: float) -> bool:
    if one is None or other is None or one.dtype != other.dtype:
        return False
    if one.dtype.kind != "f":
        return np.array_equal(one, other)
    return difference(one, other) <= tolerance * float(np.abs(one).max(initial=0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goldens", type=Path, default=checkpoint.GOLDENS)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--files", action="store_true", help="also how the configs and the names of tensors differ")
    parser.add_argument("--new", type=Path, metavar="FOLDER", help="new golden files to compare with")
    options = parser.parse_args()
    if options.new is not None:
        lines = changed(options.goldens, options.new, options.tolerance)
        print("\n".join(lines) or "the golden files equal the new ones")
        return 1 if lines else 0
    old, new = checkpoint.ORACLES
    names = {oracle: checkpoint.names(oracle, options.goldens) for oracle in checkpoint.ORACLES}
    for name in dict.fromkeys(names[old] + names[new]):
        if name not in names[old] or name not in names[new]:
            print(f"{name:28} only in {old if name in names[old] else new}")
            continue
        (meta, one), (other_meta, other) = (checkpoint.load(oracle, name, options.goldens) for oracle in (old, new))
        result = arrays(one, other, options.tolerance)
        output = f"long/{meta['output']}"
        factor = ratio(one[output], other[output]) if result else None
        result += [f"{output} of {old} = {factor:.5f} x that of {new}"] if factor else []
        if meta["weights_sha256"] != other_meta["weights_sha256"]:
            result.append("other tensors in the file")
        print(f"{name:28} {'; '.join(result) or 'agree'}")
        if options.files:
            for line in settings(meta["config"], other_meta["config"]):
                print(f"    config {line}")
            for tensor in sorted(set(meta["tensors"]) ^ set(other_meta["tensors"])):
                print(f"    tensor {tensor} only in {old if tensor in meta['tensors'] else new}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
