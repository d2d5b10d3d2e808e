"""A GGUF file as a Hugging Face folder of bfloat16 weights: ``python make_folder.py FILE FOLDER``.

Runs in the transformers environment. The folder appears whole or not at all, and has no tokenizer.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def main(file: Path, folder: Path) -> None:
    """Dequantise ``file`` and save it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain by now; what remembers that they were not refuses to save.
    model.hf_quantizer = None
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    os.replace(part, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
