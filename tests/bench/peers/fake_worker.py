"""A worker without an engine, in any mood: ``python fake_worker.py MOOD LOG``. It writes every request to LOG."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(mood: str, log: Path) -> None:
    name = log.stem
    nll = {"other-model": 3.0, "no-number": float("nan")}.get(mood, 2.0)
    runs = 0
    for line in sys.stdin:
        request = json.loads(line)
        do = request["do"]
        with log.with_name("order").open("a") as file:
            file.write(f"{name} {do}\n")
        log.write_text(line)
        if mood == f"fails-{do}":
            print(json.dumps({"error": f"ValueError: no {do} today"}), flush=True)
            continue
        if mood == f"dies-{do}" or (mood == "dies-second-run" and do == "run" and runs):
            print("out of memory", file=sys.stderr)
            os._exit(3)
        if mood == f"hangs-{do}":
            time.sleep(60)
        if mood == f"babbles-{do}":
            print("hello", flush=True)
            continue
        runs += do == "run"
        answers = {
            "load": {
                "version": "1.5",
                "settings": {"precision": {"weight_bytes": 2, "kv": ["bfloat16", "bfloat16"], "gemm": "bfloat16"}},
            },
            "score": {"nll": [nll, nll]},
            "run": {"prefill_s": 0.5 if name == "sash" else 1.0, "decode_s": 2.0, "tokens": []},
        }
        print(json.dumps({"ok": answers[do]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
