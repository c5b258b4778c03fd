"""Rebuilds a case's Hugging Face folder from its golden files, as ``save_pretrained`` wrote it. No transformers.

meta, arrays = load("4.57", "llama")        # goldens/4.57/llama.json and llama.npz
write(meta, arrays, folder)                 # config.json, generation_config.json, model.safetensors
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.hf_parity import weights

GOLDENS = Path(__file__).parents[1] / "golden_files" / "hf_parity"
ORACLES = ("4.57", "5")


def names(oracle: str, goldens: Path = GOLDENS) -> list[str]:
    """Return the cases of a version, in the order of ``cases.py``."""
    index = json.loads((goldens / oracle / "index.json").read_text())
    return list(index["cases"])


def meta(oracle: str, name: str, goldens: Path = GOLDENS) -> dict[str, Any]:
    """Return a case's description: config, tensors, options of its outputs."""
    return dict(json.loads((goldens / oracle / f"{name}.json").read_text()))


def load(oracle: str, name: str, goldens: Path = GOLDENS) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(goldens / oracle / f"{name}.npz", allow_pickle=False) as stored:
        return meta(oracle, name, goldens), {key: stored[key] for key in stored.files}


def made(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return every tensor of the checkpoint by its name in the file; fixed tables are stored in the golden file."""
    recipe = weights.Recipe(**meta["recipe"])
    return {
        name: arrays[f"fixed/{name}"] if name in meta["fixed"] else weights.tensor(name, tuple(shape), recipe)
        for name, shape in meta["tensors"].items()
    }


def tensors(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the same tensors, or raise ValueError if they differ in any bit from those the reference read."""
    got = made(meta, arrays)
    if weights.digest(got) != meta["weights_sha256"]:
        raise ValueError(f"{meta['case']}: the weights are not those of the golden; weights.py was changed")
    return got


def text(config: dict[str, Any]) -> str:
    """Format a JSON file like transformers."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def write(meta: dict[str, Any], arrays: dict[str, np.ndarray], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text(meta["config"]))
    if meta["generation_config"] is not None:
        (folder / "generation_config.json").write_text(text(meta["generation_config"]))
    save_file(tensors(meta, arrays), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
