"""The functions ``kvad.train``, ``kvad.plan`` and ``kvad.verify``; the commands of the same names run them.

    import kvad
    kvad.train("corpus/", "runs/mine", preset="tiny", steps=200)
    print(kvad.plan("runs/mine", max_num_seqs=8))
    print(kvad.verify("runs/mine", cache_dtypes=("float32", "int8")))

Each returns a report with a short ``repr`` and ``to_dict()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.api import memory as memory
    from kvad.api import training as training
    from kvad.api import verification as verification
    from kvad.api.memory import plan as plan
    from kvad.api.training import train as train
    from kvad.api.verification import verify as verify

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
