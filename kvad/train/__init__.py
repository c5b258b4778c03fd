"""Training: from documents to checkpoints from which a run resumes bit for bit.

``train.loop.train_model(config, corpus, out)`` runs a training; ``train.loop.trainer`` is the loop. Imports neither
``cache`` nor ``engine``.
"""

from __future__ import annotations

import sys

from kvad._lazy import CallablePackage

sys.modules[__name__].__class__ = CallablePackage  # kvad.train(...)
