"""Capture models as programs, rewrite the programs, and analyze how data flows through them."""
