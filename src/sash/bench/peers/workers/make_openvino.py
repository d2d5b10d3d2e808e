"""A Hugging Face folder as an OpenVINO model of int8 weights: ``python make_openvino.py SOURCE FOLDER``.

Runs in the OpenVINO environment. The folder appears whole or not at all, and has no tokenizer.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from optimum.intel import OVModelForCausalLM


def main(source: Path, folder: Path) -> None:
    """Convert ``source`` and save it."""
    model = OVModelForCausalLM.from_pretrained(source, export=True, load_in_8bit=True, compile=False)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    os.replace(part, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
