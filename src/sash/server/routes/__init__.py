"""One file per group of endpoints; each has a ``router``."""
