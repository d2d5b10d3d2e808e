"""llama.cpp's own server, built from the sources that llama-cpp-python's package brings along: once."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from sash.bench.peers.environment import run
from sash.bench.peers.process import PeerError

# The same version as the peer's library, so that both figures are of one llama.cpp.
VERSION = "0.3.36"
_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)
_DOWNLOAD_S, _BUILD_S = 900.0, 3600.0


def llama_server(root: Path, say: Callable[[str], object] = print) -> Path:
    """The binary below ``root``, built for this processor if it isn't there.

    Raises:
        PeerError: no sources, no cmake, or no compiler that can build it.
    """
    place = root / f"llama-server-{VERSION}"
    binary = place / "llama-server"
    if binary.is_file():
        return binary
    say(f"building llama-server into {place} (minutes, the first time)")
    if shutil.which("cmake") is None:
        raise PeerError("llama-server: cmake is not installed: apt-get install cmake")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    wanted = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", str(place))
    run([*pip, *wanted], "llama-server: no sources", _DOWNLOAD_S)
    archive = place / f"llama_cpp_python-{VERSION}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    source, build = place / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp", place / "build"
    run(["cmake", "-S", str(source), "-B", str(build), *_OPTIONS], "llama-server: cmake refuses", _BUILD_S)
    build_command = ["cmake", "--build", str(build), "--target", "llama-server", "--parallel", str(os.cpu_count() or 1)]
    run(build_command, "llama-server: can't be built", _BUILD_S)
    # Under its name only when whole; the sources and objects are a gigabyte.
    os.replace(build / "bin" / "llama-server", binary)
    for rest in (archive, build, place / f"llama_cpp_python-{VERSION}"):
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
    return binary
