"""``python -m sash`` is the ``sash`` command."""

from __future__ import annotations

from sash.cli.main import main

if __name__ == "__main__":
    main()
