"""The judge of a lossy format: Fresh, whose keys and values go through the format and back.

A per-token format makes of a token's key what it is by that key alone.  So a cache of that format must say, to the last
rounding of float64, what the model without a cache says of keys and values that were encoded and decoded: whatever the
blocks, the chunks and the neighbours.  What the format itself loses is another question, and is measured apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvad.cache.formats import FORMATS
from kvad.model.fresh import Fresh
from kvad.ops.quantize import Codec, find_codec
from kvad.ops.rotary import Angles
from kvad.step import Memory, Score, Step, View

__all__ = ["Rounded"]


class Rounded:
    """``inner`` (a :class:`Fresh`) with keys and values in the formats of those names; keys are encoded rotated."""

    def __init__(self, inner: Fresh | Memory, keys: str, values: str) -> None:
        assert not FORMATS[keys].sealed and not FORMATS[values].sealed, "whole blocks: not a matter of one token"
        self._inner, self._codecs = inner, (find_codec(keys), find_codec(values))

    def open(self, step: Step) -> Sequence[View]:
        angles = Angles(step.positions)
        return [_RoundedView(view, angles, *self._codecs) for view in self._inner.open(step)]


class _RoundedView:
    def __init__(self, view: View, angles: Angles, keys: Codec, values: Codec) -> None:
        self._view, self._angles, self._keys, self._values = view, angles, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        if k is None or v is None:
            return self._view.attend(q, k, v, score)
        if score.rotary is not None:
            q, k = self._angles.rotate(q, score.rotary), self._angles.rotate(k, score.rotary)
        return self._view.attend(q, _through(self._keys, k), _through(self._values, v), score._replace(rotary=None))

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(_through(self._keys, k), _through(self._values, v))


def _through(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.dtype)
