"""Transformer, attention, layers, positions, heads, LoRA, NoCache and summarizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.model import attention as attention
    from kvad.model import batch_invariant as batch_invariant
    from kvad.model import compiled as compiled
    from kvad.model import fingerprint as fingerprint
    from kvad.model import heads as heads
    from kvad.model import layers as layers
    from kvad.model import lora as lora
    from kvad.model import positions as positions
    from kvad.model import recurrent as recurrent
    from kvad.model import summarizer as summarizer
    from kvad.model import transformer as transformer
    from kvad.model.heads import PooledStates as PooledStates
    from kvad.model.no_cache import NoCache as NoCache
    from kvad.model.no_cache import whole_sequences as whole_sequences
    from kvad.model.summarizer import Summarizer as Summarizer
    from kvad.model.transformer import Transformer as Transformer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
