"""Calibrate a captured program: observe its values, search its quantizers, and refine the result."""
