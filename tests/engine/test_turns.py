"""Threads that share an engine, and threads that still run when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from tests.engine.conftest import OPTIONS

from sash import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_threads_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = [[f"{'text ' * i}{thread}" for i in range(1, 5)] for thread in range(4)]
    alone = [llm.generate(own, PARAMS) for own in prompts]
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for _ in range(4):
                got = llm.generate(prompts[number], PARAMS)
                streamed = [delta.outputs[0].text for delta in llm.stream(prompts[number][0], PARAMS)]
                if [a.outputs for a in got] != [a.outputs for a in alone[number]]:
                    wrong.append(number)
                if "".join(streamed) != alone[number][0].outputs[0].text:
                    wrong.append(number)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


CODE = """
import sys, threading, time
from sash import LLM, SamplingParams
llm = LLM(sys.argv[1], **eval(sys.argv[2]))
def work():
    while True:
        llm.generate(["a text"] * 4, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
threading.Thread(target=work, daemon=True).start()
time.sleep(float(sys.argv[3]))
"""


def test_an_interpreter_ends_while_a_thread_generates(folder: Path) -> None:
    for delay in ("0.1", "0.15", "0.2"):
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(folder), repr(OPTIONS), delay], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
