"""The judge of a lossy format: Fresh, whose keys and values go through the format and back.

A per-token format makes of a token's key what it is by that key alone.  So a cache of that format must say, to the last
rounding of float64, what the model without a cache says of keys and values that were encoded and decoded: whatever the
blocks, the chunks and the neighbours.  What the format itself loses is another question, and is measured apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from kvad.cache.formats import get_format
from kvad.model.fresh import NoCache
from kvad.ops.quantize import FormatCodec, get_codec
from kvad.ops.rotary import RotaryCache
from kvad.step import AttentionParams, CacheProtocol, CacheView, ModelInput

__all__ = ["QuantizedNoCache"]


class QuantizedNoCache:
    """``inner`` (a :class:`Fresh`) with keys and values in the formats of those names.

    ``rotate``: whether keys are encoded rotated, or as the model gave them; ``exact``: as :class:`Angles` has it.
    """

    def __init__(
        self,
        inner: NoCache | CacheProtocol,
        keys: str,
        values: str,
        *,
        rotate: Literal["write", "read"] = "write",
        exact: bool = False,
    ) -> None:
        assert not get_format(keys).is_blockwise and not get_format(values).is_blockwise, (
            "whole blocks: not a matter of one token"
        )
        self._inner, self._codecs = inner, (get_codec(keys), get_codec(values))
        self._rotates, self._exact = rotate == "write", exact

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        turning = _RotatedInputs(step.positions, self._exact) if self._rotates else None
        return [_QuantizedView(view, turning, *self._codecs) for view in self._inner.open(step)]


class _RotatedInputs:
    """Rotates q and k, and changes k.  ``exact``: both are turned back, so that whoever is inside rotates as it would:
    it may turn sinks further.  (Angles in float32 cannot be turned back: cos^2 + sin^2 is 1 to eight digits.)"""

    def __init__(self, positions: Tensor, exact: bool) -> None:
        self._there = RotaryCache(positions, exact=exact)
        self._back = RotaryCache(-positions, exact=True) if exact else None

    def through(
        self, codec: FormatCodec, q: Tensor, k: Tensor, score: AttentionParams
    ) -> tuple[Tensor, Tensor, AttentionParams]:
        rotary = score.rotary
        assert rotary is not None
        k = _quantize_dequantize(codec, self._there.rotate(k, rotary))
        if self._back is None:
            return self._there.rotate(q, rotary), k, score._replace(rotary=None)
        return q, self._back.rotate(k, rotary._replace(factor=1 / rotary.factor)), score


class _QuantizedView:
    def __init__(self, view: CacheView, turning: _RotatedInputs | None, keys: FormatCodec, values: FormatCodec) -> None:
        self._view, self._turning, self._keys, self._values = view, turning, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        if k is None or v is None:
            return self._view.attend(q, k, v, score)
        if score.rotary is not None and self._turning is not None:
            q, k, score = self._turning.through(self._keys, q, k, score)
        else:
            k = _quantize_dequantize(self._keys, k)
        return self._view.attend(q, k, _quantize_dequantize(self._values, v), score)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(_quantize_dequantize(self._keys, k), _quantize_dequantize(self._values, v))


def _quantize_dequantize(codec: FormatCodec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.dtype)
