"""GGUF, llama.cpp's format: one file with config, tokenizer and tensors, read and written through Hugging Face's names.

| module | content |
|---|---|
| `architectures` | pairs of GGUF architectures and Hugging Face classes, with their keys |
| `metadata` | the keys of a file, from and to ``config.json`` |
| `packings` | tensors that Hugging Face stores in another number of pieces, or in another order |
| `reader` | a GGUF file as a checkpoint; its matrices are used as they are, others dequantized when they are read |
| `tokenizer` | the tokenizer in the metadata, from and to ``tokenizer.json`` |
| `writer` | export of a checkpoint in float32, bfloat16 or Q8_0 |

The file format and the dequantization are the ``gguf`` package's (``pip install gguf``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.checkpoint.gguf import architectures as architectures
    from kvad.checkpoint.gguf import metadata as metadata
    from kvad.checkpoint.gguf import packings as packings
    from kvad.checkpoint.gguf import reader as reader
    from kvad.checkpoint.gguf import tokenizer as tokenizer
    from kvad.checkpoint.gguf import writer as writer
    from kvad.checkpoint.gguf.reader import GGUFCheckpoint as GGUFCheckpoint
    from kvad.checkpoint.gguf.writer import FILE_TYPES as FILE_TYPES
    from kvad.checkpoint.gguf.writer import export_gguf as export_gguf

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
