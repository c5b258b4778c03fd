"""Entry point of ``python -m kvad``."""

from __future__ import annotations

import sys

from kvad import cli

if __name__ == "__main__":
    sys.exit(cli.main.main())
