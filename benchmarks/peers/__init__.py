"""kvad and other engines on the same random weights, by turns in one run: see ``python -m benchmarks.peers --help``."""
