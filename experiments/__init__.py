"""Experiments of the AdaLog paper, run from a clone: `python -m experiments.tables 1 --models demo`.

They use adalog and `benchmarks` as any other program would. Nothing in adalog imports them.
"""
