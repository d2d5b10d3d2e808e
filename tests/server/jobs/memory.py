from __future__ import annotations

from pathlib import Path

# In memory where there is such a folder: a store waits for the disk at every commit.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
