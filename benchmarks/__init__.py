"""Scripts that measure adalog: run one with `python -m benchmarks.NAME ...` or `python benchmarks/NAME.py ...`."""
