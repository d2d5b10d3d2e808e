"""Weights of a model on disk, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sash.spec.model import ModelSpec

# progress(stage, done, total): one stage may be told of many times, its last call has done = total.
Progress = Callable[[str, int, int], None]


def load_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Read the weights of ``spec`` from a GGUF file or a folder of safetensors.

    Args:
        path: the file or folder.
        spec: the model that they are for.
        dtype: of the result: float32, bfloat16 or float16.
        device: of the result.
        progress: called with ("weights", bytes read, bytes in all).

    Returns:
        Exactly the names and shapes of ``expected_weights(spec)``.

    Raises:
        ModelError: it is neither, or the weights don't fit the spec.
    """
    if path.is_dir():
        from sash.weights.safetensors import load_safetensors

        return load_safetensors(path, spec, dtype, device, progress)
    from sash.weights.gguf import load_gguf

    return load_gguf(path, spec, dtype, device, progress)
