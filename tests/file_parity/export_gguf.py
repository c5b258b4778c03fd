"""Export the cases to GGUF files, for llama.cpp to read.

.venv/bin/python -m tests.file_parity.export_gguf FOLDER
"""

import json
import sys
from pathlib import Path

from kvad.checkpoint import open_checkpoint
from kvad.checkpoint.gguf import export_gguf
from tests.file_parity.cases import EXPORTS, TOKEN_IDS, content_digest, write_case


def main(folder):
    digests = {}
    for name, (case, stored) in EXPORTS.items():
        source = folder / case
        path = folder / f"{name}.gguf"
        export_gguf(open_checkpoint(source if source.exists() else write_case(case, source)), path, stored)
        digests[name] = content_digest(path)
    (folder / "cases.json").write_text(json.dumps({"token_ids": TOKEN_IDS, "digests": digests}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
