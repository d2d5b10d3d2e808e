"""Engine options and how they become a complete, checked configuration with reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import NoneType
from typing import get_args, get_type_hints

from sash.spec import sizing
from sash.spec.errors import ConfigError
from sash.spec.groups import GroupSpec, group_layers
from sash.spec.machine import Machine
from sash.spec.model import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZATIONS = ("auto", "none", "int8", "int4")
KV_DTYPES = ("auto", "bfloat16", "float32", "int8")
DEFAULT_CONTEXT = 32_768
DEFAULT_KV_SHARE = 0.25
SPECULATIVE = ("none", "ngram")
MAX_DRAFT = 64
# How errors name the types of options.
_TYPES = {str: "a name", bool: "True or False", float: "a number", int: "a whole number"}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user asked for; None means: choose for me.

    Args:
        dtype: weights: float32, bfloat16, float16 or auto (bfloat16 where the device has it).
        quantization: of the linear layers: none; int8 (weights per output, activations per row, after a
            rotation); int4 (weights in groups of 32; the head stays int8), which is faster where one request
            reads large layers, slower on many rows, and costs small models 8 to 10 % of perplexity; or
            auto: int8 on a CPU with the C++ kernels unless ``dtype`` asks for float32 or float16 or the
            engine is deterministic.
        kv_cache_dtype: what K and V are stored as: auto (the weights' dtype), bfloat16, float32 (with
            float32 weights) or int8 (a scale per row and head).
        swa_kv_cache_dtype: the same for window layers alone; None: as kv_cache_dtype.
        max_model_len: longest request, prompt and answer, in tokens (``max_predict_length``).
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens that one step computes.
        page_size: tokens in a page, in every group.
        chunked_prefill_size: most tokens of one prompt in one step; None or -1: the whole step.
        max_total_tokens: tokens of the full pool (``max_total_num_tokens``); of the window pool
            where a model has no full layer.
        kv_cache_memory_bytes: bytes of all pools; None: a quarter of the device's free memory.
        swa_full_tokens_ratio: window tokens / full tokens, in (0, 1].
        disable_hybrid_swa_memory: every layer stores the full length.
        hybrid_kvcache_ratio: 0 every layer stores the full length … 1 windows store their ring.
        device: cpu, cuda, mps or auto.
        threads: that compute on the CPU; None: as many as torch takes, or as ``cpu_affinity`` has processors.
        cpu_affinity: numbers of the processors that these threads stay on, such as "0,1" (C++ kernels only).
        deterministic: a request's tokens don't depend on what else runs, bit for bit (slower).
        seed: for requests that bring none.
        request_timeout_s: seconds after which a request is ended; None: never.
        speculative: none, or ngram: guess tokens by looking the last ones up in the text so far, and check
            the guesses in one step. The same tokens, sooner where text repeats itself.
        num_speculative_tokens: most tokens guessed in one step, 1 to 64; windows keep as many rows more.
        prompt_lookup_max: last tokens that a lookup compares at most; a longer match is preferred.
        prompt_lookup_min: last tokens that must match at least.
        debug: check the books after every step.
    """

    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    swa_kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    page_size: int = 16
    chunked_prefill_size: int | None = None
    max_total_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    swa_full_tokens_ratio: float | None = None
    disable_hybrid_swa_memory: bool = False
    hybrid_kvcache_ratio: float | None = None
    device: str = "auto"
    threads: int | None = None
    cpu_affinity: str | None = None
    deterministic: bool = False
    seed: int = 0
    request_timeout_s: float | None = None
    speculative: str = "none"
    num_speculative_tokens: int = 8
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    debug: bool = False

    def resolve(self, spec: ModelSpec, machine: Machine) -> ResolvedConfig:
        """Check every option, choose what was left open, and size the pools.

        Raises:
            ConfigError: an option that can't work, with a value that would.
        """
        self._check_options()
        groups = group_layers(spec)
        reasons: list[str] = []
        dtype = self._dtype(machine, reasons)
        budget = self._budget(machine, reasons)
        length = self.max_model_len
        if length is not None and length > spec.max_position:
            raise ConfigError(
                f"max_model_len={length} is longer than the model was made for; use at most {spec.max_position}"
            )
        demand = sizing.Demand(
            groups=groups,
            dtypes=self._kv_dtypes(groups, dtype, reasons),
            page_size=self.page_size,
            max_model_len=length or min(spec.max_position, DEFAULT_CONTEXT),
            max_num_seqs=self.max_num_seqs,
            hybrid_ratio=self._hybrid_ratio(groups, reasons),
            slack=self.num_speculative_tokens if self.speculative != "none" else 0,
        )
        if length is None:
            demand = self._fit_length(demand, budget, reasons)
        pages = self._split(demand, budget, reasons)
        self._note_ignored_drafts(reasons)
        sizing.check_split(demand, pages, self._ways_out(demand, budget))
        chunk = self.chunked_prefill_size or self.max_num_batched_tokens
        config = ResolvedConfig(
            options=self,
            dtype=dtype,
            quantization=self._quantization(machine),
            device=machine.device,
            demand=demand,
            pages=pages,
            chunk=self.max_num_batched_tokens if chunk < 0 else min(chunk, self.max_num_batched_tokens),
            reasons=tuple(reasons),
        )
        if sum(config.pool_bytes()) > machine.available_bytes:
            name = "kv_cache_memory_bytes" if self.max_total_tokens is None else "max_total_tokens"
            raise ConfigError(
                f"{name}={getattr(self, name)} makes pools of {sum(config.pool_bytes())} bytes, but only "
                f"{machine.available_bytes} are free on {machine.device}: give less, or leave it out"
            )
        return config

    def _check_types(self) -> None:
        """Refuse a value of another type by name, before it is compared with anything."""
        for name, hint in get_type_hints(type(self)).items():
            value: object = getattr(self, name)
            kinds = get_args(hint) or (hint,)
            kind = next(k for k in kinds if k is not NoneType)
            if value is None and NoneType in kinds:
                continue
            good = isinstance(value, (int, float) if kind is float else kind)
            if not good or (isinstance(value, bool) and kind is not bool) or value != value:  # NaN alone isn't itself
                raise ConfigError(f"{name} must be {_TYPES[kind]}, got {value!r}")

    def _check_options(self) -> None:
        self._check_types()
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}; the default is {_default(name)}"
                )
        for name in ("max_model_len", "max_total_tokens", "kv_cache_memory_bytes", "request_timeout_s", "threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0 or left out, got {value}")
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk < 1 and chunk != -1:
            raise ConfigError(f"chunked_prefill_size must be at least 1, or -1 for the whole step, got {chunk}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} can't give each of max_num_seqs="
                f"{self.max_num_seqs} requests a token per step; use at least {self.max_num_seqs}"
            )
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise ConfigError(f"dtype {self.dtype!r} is unknown; use auto, {', '.join(DTYPE_BYTES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization {self.quantization!r} is unknown; use {', '.join(QUANTIZATIONS)}")
        if self.quantization in ("int8", "int4") and self.deterministic:
            raise ConfigError(f"quantization={self.quantization} can't run deterministic: use none or auto")
        for name in ("kv_cache_dtype", "swa_kv_cache_dtype"):
            if getattr(self, name) not in (None, *KV_DTYPES):
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown; use {', '.join(KV_DTYPES)}")
        self.processors()
        self._check_window_options()
        self._check_draft_options()

    def _check_draft_options(self) -> None:
        if self.speculative not in SPECULATIVE:
            raise ConfigError(f"speculative {self.speculative!r} is unknown; use {' or '.join(SPECULATIVE)}")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFT:
            raise ConfigError(
                f"num_speculative_tokens must be 1 to {MAX_DRAFT}, got {self.num_speculative_tokens}; "
                f"the default is {_default('num_speculative_tokens')}, speculative=none guesses nothing"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be at least 1 and at most prompt_lookup_max="
                f"{self.prompt_lookup_max}; the defaults are {_default('prompt_lookup_min')} and "
                f"{_default('prompt_lookup_max')}"
            )

    def processors(self) -> list[int]:
        """Numbers in ``cpu_affinity``, in its order; none where it is left out.

        Raises:
            ConfigError: it holds something else.
        """
        given = self.cpu_affinity
        if given is None:
            return []
        parts = [part.strip() for part in given.split(",")]
        if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts) or len(
            set(map(int, parts))
        ) < len(parts):
            raise ConfigError(f"cpu_affinity must be different processor numbers such as 0,1; got {given!r}")
        return [int(part) for part in parts]

    def _check_window_options(self) -> None:
        ratio, hybrid = self.swa_full_tokens_ratio, self.hybrid_kvcache_ratio
        if ratio is not None and not 0 < ratio <= 1:
            raise ConfigError(
                f"swa_full_tokens_ratio must be above 0 and at most 1, got {ratio}; "
                "0.8 is usual, leaving it out computes the split"
            )
        if hybrid is not None and not 0 <= hybrid <= 1:
            raise ConfigError(f"hybrid_kvcache_ratio must be between 0 (uniform) and 1 (rings), got {hybrid}")
        given = [
            name
            for name, on in (
                ("swa_full_tokens_ratio", ratio is not None),
                ("disable_hybrid_swa_memory", self.disable_hybrid_swa_memory),
                ("hybrid_kvcache_ratio", hybrid is not None),
            )
            if on
        ]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both set the size of the windows' pool; give one of them")

    def _note_ignored_drafts(self, reasons: list[str]) -> None:
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            if self.speculative == "none" and getattr(self, name) != _default(name):
                reasons.append(f"{name} is ignored: speculative is none")

    def _dtype(self, machine: Machine, reasons: list[str]) -> str:
        if self.dtype != "auto":
            return self.dtype
        dtype = "bfloat16" if machine.has_bf16 else "float32"
        reasons.append(f"dtype {dtype}: {machine.device} {'has' if machine.has_bf16 else 'lacks'} bfloat16 arithmetic")
        return dtype

    def _quantization(self, machine: Machine) -> str:
        """What the ops are asked for; auto is left to them where int8 is welcome."""
        if self.quantization in ("int8", "int4") and machine.device != "cpu":
            raise ConfigError(
                f"quantization={self.quantization} has kernels for the CPU alone, not for {machine.device}: "
                "use quantization=none, or device=cpu"
            )
        if self.quantization != "auto":
            return self.quantization
        exact = self.dtype in ("float32", "float16") or self.deterministic or machine.device != "cpu"
        return "none" if exact else "auto"

    def _kv_dtypes(self, groups: tuple[GroupSpec, ...], dtype: str, reasons: list[str]) -> tuple[str, ...]:
        """What each group's K and V are stored as."""
        window = self.kv_cache_dtype if self.swa_kv_cache_dtype is None else self.swa_kv_cache_dtype
        if self.swa_kv_cache_dtype is not None and not any(g.bounded for g in groups):
            reasons.append("swa_kv_cache_dtype is ignored: the model has no window layers")
        wanted = [window if g.bounded else self.kv_cache_dtype for g in groups]
        if "float32" in wanted and dtype != "float32":
            name = "kv_cache_dtype" if self.kv_cache_dtype == "float32" else "swa_kv_cache_dtype"
            raise ConfigError(f"{name}=float32 would store what dtype={dtype} has rounded; use auto, bfloat16 or int8")
        return tuple(dtype if kind == "auto" else kind for kind in wanted)

    def _budget(self, machine: Machine, reasons: list[str]) -> int:
        """Bytes of all pools; not asked for where ``max_total_tokens`` sizes them."""
        budget = int(machine.available_bytes * DEFAULT_KV_SHARE)
        if self.max_total_tokens is not None:
            if self.kv_cache_memory_bytes is not None:
                reasons.append("kv_cache_memory_bytes is ignored: max_total_tokens sizes the pools")
            return budget
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        free = machine.available_bytes / 2**30
        reasons.append(f"KV budget {budget / 2**30:.2f} GiB: a quarter of the {free:.2f} GiB free at start")
        return budget

    def _hybrid_ratio(self, groups: tuple[GroupSpec, ...], reasons: list[str]) -> float:
        if not any(g.bounded for g in groups):
            for name in ("swa_full_tokens_ratio", "disable_hybrid_swa_memory", "hybrid_kvcache_ratio"):
                if getattr(self, name):
                    reasons.append(f"{name} is ignored: the model has no window layers")
            return 1.0
        if self.disable_hybrid_swa_memory:
            return 0.0
        return 1.0 if self.hybrid_kvcache_ratio is None else self.hybrid_kvcache_ratio

    def _fit_length(self, demand: sizing.Demand, budget: int, reasons: list[str]) -> sizing.Demand:
        """The longest max_model_len up to the wanted one for which one request fits the pools."""

        def fits(length: int) -> bool:
            trial = replace(demand, max_model_len=length)
            pages = self._split(trial, budget, [])
            return all(have >= need for have, need in zip(pages, trial.request_pages(), strict=True))

        wanted = demand.max_model_len
        if fits(wanted):
            return demand
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low < 1:
            return replace(demand, max_model_len=1)
        reasons.append(f"max_model_len {low}: shortened from {wanted} so that one request fits the pools")
        return replace(demand, max_model_len=low)

    def _split(self, demand: sizing.Demand, budget: int, reasons: list[str]) -> tuple[int, ...]:
        kinds = {g.bounded for g in demand.groups}
        if self.swa_full_tokens_ratio is not None and kinds == {True}:
            reasons.append("swa_full_tokens_ratio is ignored: every layer has a window, so there is no full pool")
        elif self.swa_full_tokens_ratio is not None and kinds == {True, False}:
            return sizing.ratio_split(demand, budget, self.swa_full_tokens_ratio, self.max_total_tokens)
        if self.max_total_tokens is not None:
            return sizing.total_tokens_split(demand, self.max_total_tokens)
        return sizing.auto_split(demand, budget)

    def _ways_out(self, demand: sizing.Demand, budget: int) -> str:
        if self.swa_full_tokens_ratio is not None:
            needs = demand.request_pages()
            for percent in range(1, 101):
                pages = sizing.ratio_split(demand, budget, percent / 100, self.max_total_tokens)
                if all(have >= need for have, need in zip(pages, needs, strict=True)):
                    return f"give swa_full_tokens_ratio={percent / 100}, or leave it out"
            return (
                "no swa_full_tokens_ratio fits: raise kv_cache_memory_bytes or max_total_tokens, or lower max_model_len"
            )
        if self.max_total_tokens is not None:
            need = max(demand.request_pages()) * demand.page_size
            return f"give max_total_tokens of at least {need}, or lower max_model_len"
        smaller = ", page_size" if demand.page_size > demand.max_model_len else ""
        return f"give kv_cache_memory_bytes of at least {demand.request_bytes()}, or lower max_model_len{smaller}"


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Everything decided. ``pages`` per group of ``demand.groups``; ``chunk`` is the prefill chunk in
    tokens; ``reasons`` are the decisions that were not the user's, for log and inspection."""

    options: EngineConfig
    dtype: str
    quantization: str
    device: str
    demand: sizing.Demand
    pages: tuple[int, ...]
    chunk: int
    reasons: tuple[str, ...]

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The model's KV groups."""
        return self.demand.groups

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens."""
        return self.demand.max_model_len

    def pool_bytes(self) -> tuple[int, ...]:
        """Bytes of each pool."""
        return tuple(n * b for n, b in zip(self.pages, self.demand.page_bytes(), strict=True))

    def pool_line(self) -> str:
        """The start line that users of dual pools know, with the bytes of each pool."""
        size = self.demand.page_size
        # Full groups have equally many pages: each stores every token.
        full = next((n * size for g, n in zip(self.groups, self.pages, strict=True) if not g.bounded), 0)
        window = [n * size for g, n in zip(self.groups, self.pages, strict=True) if g.bounded]
        pools = zip(self.groups, self.pool_bytes(), self.demand.dtypes, strict=True)
        # A dtype that differs from the weights' was asked for, and is told.
        sizes = ", ".join(
            f"{g.name} {b / 2**20:.1f} MiB{'' if dtype == self.dtype else f' {dtype}'}" for g, b, dtype in pools
        )
        if not window:
            return f"Use one growing memory pool. full_layer_tokens={full} ({sizes})"
        shown = window[0] if len(window) == 1 else window
        return f"Use sliding window memory pool. full_layer_tokens={full}, swa_layer_tokens={shown} ({sizes})"


def _default(name: str) -> object:
    return EngineConfig.__dataclass_fields__[name].default
