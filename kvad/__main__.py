"""``python -m kvad`` is ``kvad``."""

from __future__ import annotations

import sys

from kvad.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
