"""Store the logits that llama.cpp computes for the files of ``export_gguf``; imports nothing of kvad.

/tmp/kvad-oracle/llama-cpp/bin/python tests/file_parity/make_llama_cpp.py FOLDER OUT.npz
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama


def logits(path, token_ids):
    """Return logits [tokens, vocabulary] of one file, with a float32 cache."""
    model = Llama(
        str(path), n_ctx=256, n_batch=64, n_ubatch=64, logits_all=True, n_threads=1, type_k=0, type_v=0, verbose=False
    )
    model.eval(token_ids)
    return np.array(model.scores[: len(token_ids)], np.float32)


def main(folder, out):
    cases = json.loads((folder / "cases.json").read_text())
    found = {name: logits(folder / f"{name}.gguf", cases["token_ids"]) for name in cases["digests"]}
    np.savez_compressed(out, digests=json.dumps(cases["digests"]), **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
