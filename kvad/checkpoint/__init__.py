"""Model folders on disk, in kvad's and Hugging Face's layout, written atomically.

``kvad.storage.atomic`` replaces folders; ``kvad.checkpoint.native`` describes kvad's layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.checkpoint import adapter as adapter
    from kvad.checkpoint import conversion as conversion
    from kvad.checkpoint import export as export
    from kvad.checkpoint import folder as folder
    from kvad.checkpoint import generation_config as generation_config
    from kvad.checkpoint import gguf as gguf
    from kvad.checkpoint import handle as handle
    from kvad.checkpoint import hf_layout as hf_layout
    from kvad.checkpoint import hub as hub
    from kvad.checkpoint import loader as loader
    from kvad.checkpoint import native as native
    from kvad.checkpoint import peft as peft
    from kvad.checkpoint import quantized as quantized
    from kvad.checkpoint import safetensors_header as safetensors_header
    from kvad.checkpoint import safetensors_io as safetensors_io
    from kvad.checkpoint import summarizer as summarizer
    from kvad.checkpoint.generation_config import GenerationConfig as GenerationConfig
    from kvad.checkpoint.handle import CheckpointHandle as CheckpointHandle
    from kvad.checkpoint.loader import open_checkpoint as open_checkpoint

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
