"""Attention over pages, norms, rotations, products and sampling: one signature, several versions."""
