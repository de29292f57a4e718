"""Measurements beside a peer or a floor of the same run: `python -m benchmarks --help`."""
