"""Capacity, cost and advice from a model's shapes alone. Loads no torch."""
