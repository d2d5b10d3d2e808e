"""The command line's options, written once and shared by commands.

A command takes a whole set of options as one dataclass argument; ``with_options`` unfolds it into
single options for typer and folds the answers back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from sash.spec.config import DEFAULT_CONTEXT, EngineConfig
from sash.spec.errors import RequestError
from sash.spec.quantity import parse_bytes
from sash.spec.sampling import SamplingParams

# Other engines' names of options: they work, and help names them without a column of their own.
ALIASES = {"max-predict-length": "max-model-len", "max-total-num-tokens": "max-total-tokens"}


def parse_ids(option: str, text: str) -> list[int]:
    """Token ids separated by commas.

    Raises:
        RequestError: something else; ``option`` is named.
    """
    try:
        return [int(item) for item in text.split(",") if item.strip()]
    except ValueError:
        raise RequestError(f"{option} must be token ids separated by commas, such as 1,106; got {text!r}") from None


def parse_bias(items: list[str]) -> dict[int, float]:
    """``ID=NUMBER`` items as a mapping.

    Raises:
        RequestError: an item of another form.
    """
    bias: dict[int, float] = {}
    for item in items:
        token, _, number = item.partition("=")
        try:
            bias[int(token)] = float(number)
        except ValueError:
            raise RequestError(f"--logit-bias must be ID=NUMBER, such as 5=-2.5; got {item!r}") from None
    return bias


def _option(help_text: str, *names: str, panel: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)
    return option


def option_panel(panel: str) -> Callable[..., typer.models.OptionInfo]:
    """Makes options (help, names …) that help shows under a heading."""
    return functools.partial(_option, panel=panel)


_engine, _sampling = option_panel("Engine"), option_panel("Sampling")
_PLAIN = SamplingParams()
# Sampling options that become a field of another name.
_TRANSLATED = ("keep_special_tokens", "json_schema", "regex", "choice")


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is built with. None and False leave the engine's own default."""

    dtype: Annotated[str | None, _engine("float32, bfloat16, float16 or auto.")] = None
    quantization: Annotated[
        str | None,
        _engine("Weights as none, int8, int4 or auto (int8 where the C++ kernels run, unless --dtype asks for more)."),
    ] = None
    kv_cache_dtype: Annotated[
        str | None, _engine("What K and V are stored as: auto (the weights' dtype), bfloat16, float32 or int8.")
    ] = None
    swa_kv_cache_dtype: Annotated[
        str | None, _engine("The same for window layers alone. Default: as --kv-cache-dtype.")
    ] = None
    max_model_len: Annotated[
        int | None,
        _engine(
            "Longest prompt plus answer, in tokens; also --max-predict-length. "
            f"Default: the model's context, at most {DEFAULT_CONTEXT}."
        ),
    ] = None
    max_num_seqs: Annotated[int | None, _engine("Requests that may run at once.")] = None
    max_num_batched_tokens: Annotated[int | None, _engine("Tokens computed in one step.")] = None
    page_size: Annotated[int | None, _engine("Tokens per page of the KV pools.")] = None
    chunked_prefill_size: Annotated[
        int | None, _engine("Prompt tokens of one request in one step. Default: the whole step.")
    ] = None
    max_total_tokens: Annotated[
        int | None,
        _engine("Tokens that the full pool holds; also --max-total-num-tokens. Default: what memory allows."),
    ] = None
    kv_cache_memory_bytes: Annotated[
        str | None,
        _engine("Bytes of all KV pools together, such as 512MiB. Default: a quarter of the free memory."),
    ] = None
    swa_full_tokens_ratio: Annotated[float | None, _engine("Window pool tokens per full pool token, in (0, 1].")] = None
    disable_hybrid_swa_memory: Annotated[
        bool, _engine("Store window layers at full length.", "--disable-hybrid-swa-memory")
    ] = False
    hybrid_kvcache_ratio: Annotated[
        float | None, _engine("0: uniform storage ... 1: windows store windows. Default: 1.")
    ] = None
    device: Annotated[str | None, _engine("cpu, cuda, mps or auto.")] = None
    threads: Annotated[int | None, _engine("Threads that compute. Default: as many as torch takes.")] = None
    cpu_affinity: Annotated[
        str | None, _engine("Processors that they stay on, such as 0,1. Default: any.", "--pin", "--cpu-affinity")
    ] = None
    deterministic: Annotated[bool, _engine("The same tokens whatever else runs, bit for bit.", "--deterministic")] = (
        False
    )
    seed: Annotated[int | None, _engine("Makes sampling repeatable.")] = None
    request_timeout_s: Annotated[
        float | None, _engine("End a request after so many seconds. Default: never; of sash serve: 300.")
    ] = None
    speculative: Annotated[
        str | None, _engine("none, or ngram: guess tokens from the text so far. The same tokens, sooner.")
    ] = None
    num_speculative_tokens: Annotated[int | None, _engine("Most tokens guessed in one step, 1 to 64.")] = None
    prompt_lookup_max: Annotated[int | None, _engine("Last tokens that a guess is looked up by, at most.")] = None
    prompt_lookup_min: Annotated[int | None, _engine("Last tokens that must match at least.")] = None
    debug: Annotated[bool, _engine("Check the books after every step (slow).", "--debug")] = False

    def given(self) -> dict[str, object]:
        """Keyword arguments for LLM: only what was given, so that defaults live in the engine alone."""
        out = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.kv_cache_memory_bytes is not None:
            out["kv_cache_memory_bytes"] = parse_bytes("--kv-cache-memory-bytes", self.kv_cache_memory_bytes)
        return {name: value for name, value in out.items() if value is not None and value is not False}


@dataclass(frozen=True)
class SamplingOptions:
    """What a request wants of the sampler: the fields of SamplingParams, switches as what is not the default."""

    max_tokens: Annotated[int, _sampling("End after so many tokens.")] = 128
    temperature: Annotated[float, _sampling("0 takes the best token each time; 1 is the model's own spread.")] = (
        _PLAIN.temperature
    )
    top_k: Annotated[int, _sampling("Choose among the k best tokens; 0: all.")] = _PLAIN.top_k
    top_p: Annotated[float, _sampling("Choose among the best tokens that together reach this probability.")] = (
        _PLAIN.top_p
    )
    min_p: Annotated[float, _sampling("Drop tokens below this share of the best token's probability.")] = _PLAIN.min_p
    repetition_penalty: Annotated[float, _sampling("Above 1 discourages tokens of prompt and answer.")] = (
        _PLAIN.repetition_penalty
    )
    presence_penalty: Annotated[float, _sampling("Subtracted once from each token of the answer.")] = (
        _PLAIN.presence_penalty
    )
    frequency_penalty: Annotated[float, _sampling("Subtracted for each occurrence in the answer.")] = (
        _PLAIN.frequency_penalty
    )
    logit_bias: Annotated[list[str] | None, _sampling("ID=NUMBER, added to a token's logit; repeatable.")] = None
    allowed_token_ids: Annotated[str | None, _sampling("Only these ids, separated by commas.")] = None
    bad_token_ids: Annotated[str | None, _sampling("Never these ids, separated by commas.")] = None
    stop: Annotated[list[str] | None, _sampling("A string that ends the answer; repeatable.")] = None
    stop_token_ids: Annotated[str | None, _sampling("Ids that end the answer, separated by commas.")] = None
    include_stop_str_in_output: Annotated[bool, _sampling("Keep the stop string.", "--include-stop-str-in-output")] = (
        False
    )
    ignore_eos: Annotated[bool, _sampling("The model's own end tokens don't end the answer.", "--ignore-eos")] = False
    min_tokens: Annotated[int, _sampling("No end before so many tokens.")] = _PLAIN.min_tokens
    n: Annotated[int, _sampling("Number of answers.", "-n", "--n")] = _PLAIN.n
    logprobs: Annotated[int | None, _sampling("Log-probabilities of so many best tokens, with --json.")] = None
    prompt_logprobs: Annotated[int | None, _sampling("The same for each prompt token.")] = None
    keep_special_tokens: Annotated[bool, _sampling("Show control tokens too.", "--keep-special-tokens")] = False
    json_schema: Annotated[Path | None, _sampling("File with a JSON schema that the answer must fit.")] = None
    regex: Annotated[str | None, _sampling("Regular expression that the whole answer must match.")] = None
    choice: Annotated[list[str] | None, _sampling("A text that the answer may be; repeatable.")] = None

    def params(self, seed: int | None = None) -> SamplingParams:
        """The checked SamplingParams.

        Raises:
            RequestError: a value out of range or of the wrong form; the option is named.
        """
        allowed = self.allowed_token_ids
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _TRANSLATED} | {
            "logit_bias": parse_bias(self.logit_bias or []),
            "allowed_token_ids": None if allowed is None else parse_ids("--allowed-token-ids", allowed),
            "bad_token_ids": parse_ids("--bad-token-ids", self.bad_token_ids or ""),
            "stop": self.stop or (),
            "stop_token_ids": parse_ids("--stop-token-ids", self.stop_token_ids or ""),
            "skip_special_tokens": not self.keep_special_tokens,
            "structured_outputs": self._structured(),
            "seed": seed,
        }
        return SamplingParams(**values)

    def _structured(self) -> dict[str, object] | None:
        given: dict[str, object] = {"regex": self.regex, "choice": self.choice or None}
        if self.json_schema is not None:
            try:
                given["json"] = self.json_schema.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise RequestError(f"--json-schema {self.json_schema} can't be read as UTF-8 text: {error}") from error
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise RequestError("give only one of --json-schema, --regex and --choice")
        return given or None


def _told(hint: Any, name: str, default: object) -> Any:
    """An option's annotation whose help ends with its default: its own, or the engine's where it leaves that one."""
    base, option = get_args(hint)
    if default is None and name in EngineConfig.__dataclass_fields__:
        default = EngineConfig.__dataclass_fields__[name].default
    if default is None or isinstance(default, bool):
        return hint
    told = copy(option)
    told.help = f"{option.help} Default: {default}."
    return Annotated[base, told]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Unfold each argument that is an option set (a dataclass such as those above) into single options for typer."""
    hints = get_type_hints(command, include_extras=True)
    sets: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in sets:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        option_hints = get_type_hints(sets[parameter.name], include_extras=True)
        for item in fields(sets[parameter.name]):
            default = inspect.Parameter.empty if item.default is MISSING else item.default
            parameters.append(
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=_told(option_hints[item.name], item.name, default),
                )
            )
    parameters.sort(key=lambda parameter: parameter.kind)

    @functools.wraps(command)
    def folded(**given: object) -> None:
        for name, option_set in sets.items():
            given[name] = option_set(**{item.name: given.pop(item.name) for item in fields(option_set)})
        command(**given)

    signature = inspect.Signature(parameters)
    folded.__signature__ = signature  # type: ignore[attr-defined]
    folded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return folded
