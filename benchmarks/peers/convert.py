"""Conversions of a shape's checkpoint to the format of each engine, made once and stored in the cache folder.

A conversion is written next to its name and renamed when it is complete. Each runs in a process of the environment
that has its packages: ``python -m benchmarks.peers.convert FORMAT SOURCE OUT SHAPE``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.shapes import SHAPES, Shape, write_checkpoint

VERSION = "1"  # of the checkpoints; another one is another folder


def openvino(source: Path, out: Path, _shape: Shape, *, bits: int | None) -> None:
    import torch
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    options: dict[str, Any] = {"load_in_8bit": False} if bits is None else {
        "quantization_config": OVWeightQuantizationConfig(bits=bits)
    }  # fmt: skip
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, dtype=torch.bfloat16, **options)
    model.save_pretrained(out)


def ctranslate2(source: Path, out: Path, shape: Shape, *, precision: str) -> None:
    import torch
    import transformers
    from ctranslate2.converters import transformers as loaders

    pair = shape.is_encoder_decoder
    kind = transformers.AutoModelForSeq2SeqLM if pair else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(source, dtype=torch.float32)
    special = {
        "llama": {2: "</s>"}, "gpt2": {shape.vocab - 1: "</s>"}, "marian": {0: "</s>", shape.vocab - 1: "<pad>"},
        "t5": {0: "<pad>", 1: "</s>"},
    }[shape.kind]  # fmt: skip

    class Names:
        """The tokenizer interface that the converter requires: a name for each id."""

        eos_token, unk_token, bos_token, pad_token = "</s>", "t3", "</s>", "<pad>"

        def get_vocab(self) -> dict[str, int]:
            return {self.convert_ids_to_tokens(i): i for i in range(shape.vocab)}

        def convert_ids_to_tokens(self, token: int) -> str:
            return special.get(token, f"t{token}")

    loader = {
        "llama": loaders.LlamaLoader, "gpt2": loaders.GPT2Loader, "marian": loaders.MarianMTLoader,
        "t5": loaders.T5Loader,
    }[shape.kind]()  # fmt: skip
    spec = loader(model, Names())
    spec.validate()
    spec.optimize(quantization=precision)
    out.mkdir()
    spec.save(str(out))


def kvad(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "kvad", *arguments], check=True, stdout=sys.stderr)


FORMATS = {
    "hf": lambda source, out, shape: write_checkpoint(shape, out),
    "gguf-bfloat16": lambda source, out, shape: kvad(["export", str(source), str(out), "--to", "gguf"]),
    "gguf-float32": lambda source, out, shape: kvad(
        ["export", str(source), str(out), "--to", "gguf", "--save-dtype", "float32"]
    ),
    "gguf-int8": lambda source, out, shape: kvad(
        ["export", str(source), str(out), "--to", "gguf", "--save-dtype", "q8_0"]
    ),
    "kvad-int8": lambda source, out, shape: kvad(["quantize", str(source), str(out), "--bits", "8"]),
    "openvino-bfloat16": lambda source, out, shape: openvino(source, out, shape, bits=None),
    "openvino-int8": lambda source, out, shape: openvino(source, out, shape, bits=8),
    "ctranslate2-float32": lambda source, out, shape: ctranslate2(source, out, shape, precision="float32"),
    "ctranslate2-int8": lambda source, out, shape: ctranslate2(source, out, shape, precision="int8"),
}


def ensure(format_name: str, shape: Shape, folder: Path, python: str, environment: dict[str, str]) -> Path:
    """Return the path of a shape's file or folder in a format; convert it if it is missing.

    Args:
        format_name: A key of ``FORMATS``.
        shape: The shape.
        folder: The cache folder.
        python: Interpreter of the environment that can convert.
        environment: Its environment variables.

    Raises:
        RuntimeError: If the conversion fails; the message has the last line of its output.
    """
    home = folder / f"{shape.name}-{VERSION}"
    out = home / (format_name + ".gguf" if format_name.startswith("gguf") else format_name)
    if out.exists():
        return out
    home.mkdir(parents=True, exist_ok=True)
    partial = out.with_name("partial-" + out.name)
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    print(f"converting {shape.name} to {format_name}", file=sys.stderr, flush=True)
    command = [python, "-m", "benchmarks.peers.convert", format_name, str(home / "hf"), str(partial), shape.name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{shape.name} cannot be converted to {format_name}: {last}")
    os.replace(partial, out)
    return out


if __name__ == "__main__":
    FORMATS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), SHAPES[sys.argv[4]])
