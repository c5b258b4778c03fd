"""Log of kvad on stderr: the levels of ``-v`` and ``-vv``, and of the variable ``KVAD_LOG``.

Levels: ``warning`` (default), ``info`` (also full pools, preempted sequences, sizes of the cache) and ``debug`` (also
every admitted and finished sequence, prefix hits and evicted blocks).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

VARIABLE = "KVAD_LOG"
LEVELS = {"warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_log(verbosity: int = 0) -> None:
    """Print the log on stderr, at the level of ``KVAD_LOG`` or of ``verbosity`` (1: info, 2: debug), if lower."""
    name = os.environ.get(VARIABLE, "").lower() or "warning"
    level = min(LEVELS.get(name, logging.WARNING), (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)])
    logger = logging.getLogger("kvad")
    is_first = not any(isinstance(handler, _Handler) for handler in logger.handlers)
    if is_first:
        handler = _Handler(sys.stderr)
        handler.setFormatter(logging.Formatter("kvad: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level if level < logging.WARNING else logging.NOTSET)
    if is_first and name not in LEVELS:
        logger.warning("%s: must be debug, info or warning, got %r", VARIABLE, name)
