"""PEFT as the reference of adapters: write golden files, and read the adapters that kvad writes. Not run by the
tests.

    python -m venv /tmp/kvad-peft && /tmp/kvad-peft/bin/pip install transformers==4.57.6 peft==0.21.2 torch numpy
    /tmp/kvad-peft/bin/python -m tests.hf_parity.adapters make [CASE...]    # the golden files
    /tmp/kvad-peft/bin/python -m tests.hf_parity.adapters read FOLDER IDS   # float64 logits of an adapter

A golden file describes the adapter of a base in goldens/4.57, as written by PEFT's save_pretrained: its config, the
names and shapes of its tensors (values are derived from names, ``weights.py``), and the float64 logits of base and
adapter together.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.hf_parity import checkpoint, weights

FOLDER = checkpoint.GOLDENS / "peft"
ALPHA, RANK = 12, 3
# case -> further options of its LoraConfig; modules have the family's names
CASES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "llama-tied": {"target_modules": "all-linear", "use_rslora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "rank_pattern": {"c_attn": 5}},
    "falcon-new-decoder": {"target_modules": ["query_key_value"]},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "alpha_pattern": {"o_proj": 7}},
    "t5": {"target_modules": ["q", "v", "wo"]},
    "bart": {"target_modules": ["q_proj", "fc1"]},
}
SCALE = 0.2  # standard deviation of both matrices: large enough to change every logit


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float32 values of an adapter's tensor, a function of its name."""
    return (SCALE * weights.noise(name, shape, seed=7)).astype(np.float32)


def tensors(meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a golden file, by PEFT's names."""
    return {name: values(name, tuple(shape)) for name, shape in meta["tensors"].items()}


def load(case: str) -> tuple[dict[str, Any], np.ndarray]:
    """Return a golden file's {"config", "tensors"}, and the logits for the base's ``long`` input."""
    meta = json.loads((FOLDER / f"{case}.json").read_text())
    return meta, np.load(FOLDER / f"{case}.npy")


def _model(case: str, folder: Path) -> Any:
    import torch
    import transformers

    meta, arrays = checkpoint.load("4.57", case)
    base = checkpoint.write(meta, arrays, folder / "base")
    built = getattr(transformers, meta["config"]["architectures"][0])
    return built.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval(), arrays


def _logits(model: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    import torch

    names = ("input_ids", "decoder_input_ids", "token_type_ids")
    given = {name: torch.tensor(arrays[f"long/{name}"]) for name in names if f"long/{name}" in arrays}
    given = {name: value[None] if value.dim() == 1 else value for name, value in given.items()}
    with torch.inference_mode():
        return model.double()(**given).logits[0].numpy()


def make(case: str, options: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write PEFT's adapter of a case to ``out``/adapter with its base; return the golden's description and logits."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors import safe_open

    model, arrays = _model(case, out)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, **options))
    state = adapted.state_dict()
    for name in [name for name in state if ".lora_" in name]:
        state[name].copy_(torch.from_numpy(values(name.replace(".default", ""), tuple(state[name].shape))))
    adapted.save_pretrained(out / "adapter")
    with safe_open(out / "adapter" / "adapter_model.safetensors", "np") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in list(file.keys())}
        assert all(np.array_equal(file.get_tensor(name), values(name, tuple(shape))) for name, shape in shapes.items())
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"])
    config["base_model_name_or_path"] = "base"
    np.save(out / "logits.npy", _logits(adapted, arrays))
    return {"case": case, "config": config, "tensors": shapes}


def main(argv: list[str]) -> None:
    if argv[0] == "read":
        _read(Path(argv[1]), [int(token) for token in argv[2].split(",")])
        return
    FOLDER.mkdir(exist_ok=True)
    for case in argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            meta = make(case, CASES[case], Path(folder))
            (FOLDER / f"{case}.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
            np.save(FOLDER / f"{case}.npy", np.load(Path(folder) / "logits.npy"))
        print(case)


def _read(folder: Path, ids: list[int]) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        print(json.dumps(model(torch.tensor([ids])).logits[0].tolist()))


if __name__ == "__main__":
    main(sys.argv[1:])
