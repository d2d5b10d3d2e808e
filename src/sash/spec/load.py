"""From a located model to its ModelSpec. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sash.spec.errors import ModelError
from sash.spec.gguf import open_gguf
from sash.spec.gguf_model import spec_from_gguf
from sash.spec.hf import spec_from_hf
from sash.spec.locate import ModelSource
from sash.spec.model import ModelSpec


def load_spec(source: ModelSource) -> ModelSpec:
    """Read a model's description, and nothing of its weights.

    A folder's generation_config.json may name more end tokens than config.json does (chat models
    end a turn with another token than a text); both end a generation.

    Raises:
        ModelError: a file is missing, is no JSON object or no GGUF file, or describes a model that
            sash doesn't run.
    """
    if source.kind == "gguf":
        return spec_from_gguf(open_gguf(source.path))
    if source.kind == "config":
        return spec_from_hf(read_json(source.path))
    spec = spec_from_hf(read_json(source.path / "config.json"))
    generation = source.path / "generation_config.json"
    if not generation.is_file():
        return spec
    more = _token_ids(read_json(generation), generation)
    return replace(spec, stop_token_ids=tuple(dict.fromkeys((*spec.stop_token_ids, *more))))


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        ModelError: it can't be read or isn't an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _token_ids(config: Mapping[str, object], path: Path) -> list[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) != len(values):
        raise ModelError(f"eos_token_id in {path} must be a token id or a list of them, got {value!r}")
    return ids
