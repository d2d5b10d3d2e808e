"""Benchmarks: ratios in one run, equal outputs first, ceilings beside the figures, a record at the end."""
