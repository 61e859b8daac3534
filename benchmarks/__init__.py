"""One script for each claim: `python -m benchmarks.NAME ...` or `python benchmarks/NAME.py ...`."""
