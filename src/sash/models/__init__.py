"""One decoder for all families, driven by the spec."""
