from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.cli.scripted import STATS, Piece, Run, ScriptedEngine, Step

from sash.cli.options import EngineOptions
from sash.spec.errors import ConfigError, ModelError
from sash.spec.sampling import SamplingParams
from sash.spec.structured import StructuredOutputs


def test_text_is_streamed_to_standard_output(run: Run, hello: ScriptedEngine) -> None:
    outcome = run("generate", "tiny", "Say hello", engine=hello)
    assert (outcome.code, outcome.out, outcome.err) == (0, "Hello!\n", "")
    assert hello.model == "tiny"
    assert hello.requests[0][0] == "Say hello"


def test_prompt_from_file_and_from_standard_input(run: Run, hello: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Grüße, 世界\n\n".encode())
    assert run("generate", "tiny", "--file", str(file), engine=hello).code == 0
    assert run("generate", "tiny", engine=hello, stdin="two\nlines\r\n").code == 0
    assert [prompt for prompt, _ in hello.requests] == ["Grüße, 世界\n", "two\nlines"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([""], None, "the prompt is empty: give at least one character"),
        ([], "", "the prompt is empty"),
        ([], "\n", "the prompt is empty"),
        ([], b"ab\xff", "standard input is not valid UTF-8: byte 0xff at offset 2; convert it first"),
        (["a", "--file", "b"], None, "drop one of them"),
        (["--file", "no-such-file.txt"], None, "--file no-such-file.txt can't be read"),
        (["a\udcff"], None, "not valid UTF-8 at character 1"),
        (["a", "--temperature", "-1"], None, "temperature must be a finite number of 0 or more, got -1.0"),
        (["a", "--top-p", "0"], None, "top_p must be above 0 and at most 1"),
        (["a", "--logit-bias", "x=1"], None, "--logit-bias must be ID=NUMBER, such as 5=-2.5; got 'x=1'"),
        (["a", "--logit-bias", "5"], None, "--logit-bias must be ID=NUMBER"),
        (["a", "--stop-token-ids", "1;2"], None, "--stop-token-ids must be token ids separated by commas"),
        (["a", "--regex", "a", "--choice", "b"], None, "give only one of --json-schema, --regex and --choice"),
        (["a", "--json-schema", "no-such-file.json"], None, "--json-schema no-such-file.json can't be read"),
        (["a", "--regex", ""], None, "structured_outputs regex must be a text that isn't empty"),
        (["a", "--allowed-token-ids", ""], None, "allowed_token_ids must be None or a non-empty list"),
        (["a", "--kv-cache-memory-bytes", "lots"], None, "--kv-cache-memory-bytes must be a size such as 512MiB"),
    ],
)
def test_refused_with_the_fix(
    run: Run, hello: ScriptedEngine, arguments: list[str], stdin: str | bytes | None, message: str
) -> None:
    outcome = run("generate", "tiny", *arguments, engine=hello, stdin=stdin)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.startswith("sash: ")
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    assert hello.requests == []


@pytest.mark.parametrize("arguments", [["--top-k", "many"], ["--no-such-option"], ["--dtype"]])
def test_usage_errors_exit_with_2(run: Run, hello: ScriptedEngine, arguments: list[str]) -> None:
    outcome = run("generate", "tiny", "a", *arguments, engine=hello)
    assert outcome.code == 2
    assert arguments[0] in outcome.err


@pytest.mark.parametrize("error", [ModelError("cut short: m.gguf"), ConfigError("page_size must be at least 1, got 0")])
def test_what_the_engine_refuses_exits_with_2(run: Run, error: Exception) -> None:
    outcome = run("generate", "tiny", "a", engine=ScriptedEngine([error]))
    assert (outcome.code, outcome.err) == (2, f"sash: {error}\n")


def test_interrupt_exits_with_130(run: Run) -> None:
    outcome = run("generate", "tiny", "a", engine=ScriptedEngine([Step([Piece("Hel", [5])]), KeyboardInterrupt()]))
    assert (outcome.code, outcome.out) == (130, "Hel")


def test_closed_pipe_is_silent(run: Run) -> None:
    outcome = run("generate", "tiny", "a", engine=ScriptedEngine([BrokenPipeError(32, "Broken pipe")]))
    assert (outcome.code, outcome.err) == (1, "")


def test_defects_keep_their_traceback(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run("generate", "tiny", "a", engine=ScriptedEngine([ZeroDivisionError()]))


def test_every_sampling_option_arrives(run: Run, hello: ScriptedEngine) -> None:
    given = {
        "max_tokens": ("7", 7), "temperature": ("0.5", 0.5), "top_k": ("3", 3), "top_p": ("0.9", 0.9),
        "min_p": ("0.1", 0.1), "repetition_penalty": ("1.1", 1.1), "presence_penalty": ("0.2", 0.2),
        "frequency_penalty": ("-0.3", -0.3), "logit_bias": ("5=-2.5", {5: -2.5}),
        "allowed_token_ids": ("5,6,7", (5, 6, 7)), "bad_token_ids": ("8, 9", (8, 9)), "stop": ("END", ("END",)),
        "stop_token_ids": ("1,106", (1, 106)), "min_tokens": ("2", 2), "n": ("2", 2), "logprobs": ("4", 4),
        "prompt_logprobs": ("5", 5), "seed": ("11", 11),
    }  # fmt: skip
    flags = {
        "include_stop_str_in_output": ("--include-stop-str-in-output", True),
        "ignore_eos": ("--ignore-eos", True),
        "skip_special_tokens": ("--keep-special-tokens", False),
    }
    arguments = [word for name, (text, _) in given.items() for word in ("--" + name.replace("_", "-"), text)]
    assert run("generate", "tiny", "a", *arguments, *(flag for flag, _ in flags.values()), engine=hello).code == 0
    expected = {name: value for name, (_, value) in (given | flags).items()}
    expected["structured_outputs"] = None
    assert set(expected) == {item.name for item in dataclasses.fields(SamplingParams)}
    assert dataclasses.asdict(hello.requests[0][1]) == expected


def test_a_form_of_the_answer_arrives(run: Run, hello: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')
    for arguments, form in (
        (["--json-schema", str(file)], {"json": '{"type": "string"}'}),
        (["--regex", "[a-z]+"], {"regex": "[a-z]+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ("yes", "no")}),
    ):
        assert run("generate", "tiny", "a", *arguments, engine=hello).code == 0
        assert hello.requests[-1][1].structured_outputs == StructuredOutputs(**form)  # type: ignore[arg-type]


def test_every_engine_option_arrives_and_nothing_else(run: Run, hello: ScriptedEngine) -> None:
    assert run("generate", "tiny", "a", engine=hello).code == 0
    assert hello.options == {}
    given = {
        "dtype": ("float32", "float32"), "max_model_len": ("100", 100), "max_num_seqs": ("2", 2),
        "max_num_batched_tokens": ("64", 64), "page_size": ("0", 0), "chunked_prefill_size": ("32", 32),
        "max_total_tokens": ("1000", 1000), "kv_cache_memory_bytes": ("1.5MiB", 1572864),
        "swa_full_tokens_ratio": ("0.0", 0.0), "hybrid_kvcache_ratio": ("0.5", 0.5), "device": ("cpu", "cpu"),
        "seed": ("0", 0), "request_timeout_s": ("30", 30.0), "speculative": ("ngram", "ngram"),
        "num_speculative_tokens": ("4", 4), "prompt_lookup_max": ("3", 3), "prompt_lookup_min": ("1", 1),
        "kv_cache_dtype": ("int8", "int8"), "swa_kv_cache_dtype": ("auto", "auto"),
        "quantization": ("int4", "int4"), "threads": ("2", 2), "cpu_affinity": ("0,1", "0,1"),
    }  # fmt: skip
    flags = {"disable_hybrid_swa_memory", "deterministic", "debug"}
    arguments = [word for name, (text, _) in given.items() for word in ("--" + name.replace("_", "-"), text)]
    arguments += ["--" + name.replace("_", "-") for name in sorted(flags)]
    assert run("generate", "tiny", "a", *arguments, engine=hello).code == 0
    assert hello.options == {name: value for name, (_, value) in given.items()} | dict.fromkeys(flags, True)
    assert set(hello.options) == {item.name for item in dataclasses.fields(EngineOptions)}


def test_the_documents_names_are_aliases(run: Run, hello: ScriptedEngine) -> None:
    aliases = ["--max-predict-length", "100", "--max-total-num-tokens", "200", "--pin", "0"]
    assert run("generate", "tiny", "a", *aliases, engine=hello).code == 0
    assert hello.options == {"max_model_len": 100, "max_total_tokens": 200, "cpu_affinity": "0"}


def test_json_has_text_ids_reason_timings_and_pool_bytes(run: Run, hello: ScriptedEngine) -> None:
    outcome = run("generate", "tiny", "a", "--json", engine=hello)
    document = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert (document["text"], document["token_ids"], document["finish_reason"]) == ("Hello!", [5, 6, 7], "stop")
    assert document["prompt_token_ids"] == [2, 10, 11]
    timings = document["timings"]
    assert (timings["prompt_tokens"], timings["generated_tokens"]) == (3, 3)
    assert 0 <= timings["first_token_s"] <= timings["total_s"]
    # One uniform cache took 4 pages of all layers at its peak.
    assert document["pools"] == [
        {"pool": "window", "layers": 15, "size_bytes": 9 << 20, "peak_bytes": 2 << 20, "uniform_bytes": 4 << 20},
        {"pool": "full", "layers": 3, "size_bytes": 50 << 10, "peak_bytes": 3 << 10, "uniform_bytes": 4 << 10},
    ]
    assert "logprobs" not in document["outputs"][0]
    assert "prompt_logprobs" not in document


def test_json_carries_several_answers_and_logprobs(run: Run) -> None:
    script = [
        Step(
            [Piece("b", [6], index=1, logprobs=[{6: -0.5}]), Piece("a", [5], logprobs=[{5: -0.25}])],
            [2],
            [None, {3: -1.0}],
        ),
        Step([Piece("c", [7], index=1, logprobs=[{7: -0.1}], finish_reason="length")], [2]),
    ]
    document = json.loads(run("generate", "tiny", "x", "--json", "-n", "2", engine=ScriptedEngine(script)).out)
    assert [output["text"] for output in document["outputs"]] == ["a", "bc"]
    assert document["outputs"][1]["logprobs"] == [{"6": -0.5}, {"7": -0.1}]
    assert document["prompt_logprobs"] == [None, {"3": -1.0}]


def test_several_answers_are_told_apart(run: Run) -> None:
    script = [Step([Piece("b", [6], index=1)]), Step([Piece("a", [5])])]
    outcome = run("generate", "tiny", "x", "-n", "2", engine=ScriptedEngine(script))
    assert outcome.out == "--- answer 1 of 2\na\n--- answer 2 of 2\nb\n"


def test_stats_print_rates_and_the_table(run: Run, hello: ScriptedEngine) -> None:
    outcome = run("generate", "tiny", "a", "--stats", engine=hello)
    assert outcome.out == "Hello!\n"
    assert "prompt 3 tokens at" in outcome.err
    assert "tokens/s" in outcome.err
    for words in (["window", "15", "2.00 MiB"], ["together", "18"], ["one uniform cache"]):
        assert any(all(word in line for word in words) for line in outcome.err.splitlines()), words
    assert "A request of 2047 tokens would hold 4.00 MiB, in one uniform cache 1025.00 MiB." in outcome.err


def test_stats_print_how_many_drafts_were_right(
    run: Run, hello: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "drafts" not in run("generate", "tiny", "a", "--stats", engine=hello).err
    monkeypatch.setattr(hello, "stats", lambda: STATS | {"draft_tokens": 160, "accepted_tokens": 121}, raising=False)
    outcome = run("generate", "tiny", "a", "--stats", engine=hello)
    assert "drafts 160 tokens, of them 121 accepted (76%)\n" in outcome.err


def test_a_failed_answer_exits_with_1_and_the_reason(run: Run) -> None:
    script = [Step([Piece("Hel", [5])]), Step([Piece("", [], finish_reason="error", error="the step raised twice")])]
    outcome = run("generate", "tiny", "a", engine=ScriptedEngine(script))
    assert (outcome.code, outcome.out) == (1, "Hel\n")
    assert outcome.err == "sash: the request failed: the step raised twice\n"
    document = json.loads(run("generate", "tiny", "a", "--json", engine=ScriptedEngine(script)).out)
    assert document["outputs"][0]["error"] == "the step raised twice"


def test_an_answer_out_of_time_says_so(run: Run) -> None:
    script = [Step([Piece("Hel", [5], finish_reason="timeout")])]
    outcome = run("generate", "tiny", "a", engine=ScriptedEngine(script))
    assert (outcome.code, outcome.out) == (0, "Hel\n")
    assert "--request-timeout-s" in outcome.err
