"""Compare newly computed reference files with the stored ones.

python -m tests.file_parity.compare FOLDER      FOLDER/quantized.safetensors and FOLDER/llama_cpp.npz
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden_files"


def main(folder):
    differences = []
    stored, new = (load_file(path / "quantized.safetensors") for path in (GOLDEN, folder))
    differences += [name for name in stored.keys() | new.keys() if not _equal(stored.get(name), new.get(name))]
    stored, new = (np.load(path / "llama_cpp.npz") for path in (GOLDEN, folder))
    digests = [json.loads(str(arrays["digests"])) for arrays in (stored, new)]
    differences += [
        name for name in digests[0].keys() | digests[1].keys() if digests[0].get(name) != digests[1].get(name)
    ]
    common = set(stored.files) & set(new.files) - {"digests"}
    differences += [name for name in common if not np.allclose(stored[name], new[name], rtol=0, atol=1e-4)]
    for name in sorted(set(differences)):
        print(f"{name}: differs")
    print(f"{len(set(differences))} references differ")
    return int(bool(differences))


def _equal(left, right):
    return left is not None and right is not None and left.dtype == right.dtype and torch.equal(left, right)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
