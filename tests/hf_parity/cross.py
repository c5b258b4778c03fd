"""Let one version read the checkpoints of the other, and print the changed outputs.

FOLDER/5/bin/python -m tests.hf_parity.cross [--goldens FOLDER] [--only NAME ...]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.hf_parity import answers, checkpoint, make
from tests.hf_parity.cases import BY_NAME, Case


@torch.no_grad()
def outputs(case: Case, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        model, info = make.read(case, checkpoint.write(meta, arrays, Path(folder)))
    strays = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if strays:
        print(f"    {strays}")
    return answers.runs(case, model, hidden=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goldens", type=Path, default=checkpoint.GOLDENS)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    options = parser.parse_args()
    (writer,) = set(checkpoint.ORACLES) - {make.ORACLE}
    for name in options.only or checkpoint.names(writer, options.goldens):
        meta, arrays = checkpoint.load(writer, name, options.goldens)
        try:
            got = outputs(BY_NAME[name], meta, arrays)
        except Exception as why:
            print(f"{name:28} cannot be read: {type(why).__name__}: {str(why).splitlines()[0]}", flush=True)
            continue
        worst = max(float(np.abs(value - arrays[key]).max()) for key, value in got.items())
        verdict = f"as {writer}" if worst < 1e-5 else f"not as {writer}: {worst:.1e}"
        print(f"{name:28} {make.ORACLE} reads it {verdict}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
