"""Scripts that measure adalog: run one with `python -m benchmarks.NAME ...` or `python benchmarks/NAME.py ...`.

Each script prints one JSON object, and saves it in benchmarks/results or as the file of --json. The folder of --work
keeps artifacts and finished parts for later runs, as long as the sources of the package stay the same.
"""
