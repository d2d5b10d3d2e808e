"""Build the kernels with AddressSanitizer and UBSan and run the tests that reach them: ``python tools/sanitize.py``.

The build goes into build/sanitize and leaves the installed one alone. Leaks aren't looked for: Python
and torch keep memory until the process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "sanitize"
# Every kernel on each instruction set, then whole engines with poisoned pages.
TESTS = ["tests/ops", "tests/engine/test_families_engine.py", "tests/equivalence/test_matrix.py"]
# The editable install finds sash before any path does.
RUN = """
import sys
sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
sys.path.insert(0, {site!r})
import sash._native, pytest
assert sash._native.__file__.startswith({site!r}), sash._native.__file__
sys.exit(pytest.main({arguments!r}))
"""


def main() -> int:
    """Exit code of the tests; the first report of a sanitizer ends them."""
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(SITE)]
    subprocess.run([*build, "-C", "cmake.define.SASH_SANITIZE=ON", str(ROOT)], check=True)
    # Before Python, which links neither; the second, so that exceptions of torch are found to be thrown.
    names = ("libasan.so", "libstdc++.so")
    found = [
        subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True, check=True) for n in names
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(done.stdout.strip() for done in found),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
    }
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--capture=sys",
        "-m",
        "not slow and not e2e",
        *(sys.argv[1:] or TESTS),
    ]
    code = RUN.format(site=str(SITE), arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
