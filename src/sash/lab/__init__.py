"""Experiments that show what windows do: measured on real models, each with a record, plots and a verdict."""
