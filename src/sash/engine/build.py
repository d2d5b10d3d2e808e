"""From a model argument to a running core: locate, describe, size, load."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import torch

from sash.engine.core import EngineCore
from sash.engine.grammars import Grammars
from sash.engine.processors import use_processors
from sash.engine.runner import Runner
from sash.kv.storage import KVPool
from sash.models.decoder import Decoder
from sash.models.prepare import Prepared, Weights, prepare
from sash.models.smooth import smooth
from sash.ops.base import Ops
from sash.ops.registry import resolve_ops
from sash.spec.config import EngineConfig, ResolvedConfig
from sash.spec.errors import ConfigError
from sash.spec.load import load_spec
from sash.spec.locate import ModelSource, locate
from sash.spec.log import logger
from sash.spec.machine import Machine, probe_cpu
from sash.spec.model import ModelSpec
from sash.weights.cache import WeightCache
from sash.weights.load import Progress, load_weights

# Raise it when smoothing, rounding or the layout of packed weights changes: what other versions kept isn't read then.
CONVERSION = 1


@dataclass(frozen=True, slots=True)
class Built:
    """A core with what stands in front of it needs to know, and the runner that carries out its plans."""

    core: EngineCore
    runner: Runner
    spec: ModelSpec
    source: ModelSource
    config: ResolvedConfig


def probe(device: str) -> Machine:
    """The machine behind a device name.

    Raises:
        ConfigError: the device is unknown or not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cpu":
        return probe_cpu()
    if device == "cuda" and torch.cuda.is_available():
        return Machine(torch.cuda.mem_get_info()[0], torch.cuda.is_bf16_supported(), device)
    if device == "mps" and torch.backends.mps.is_available():
        return Machine(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), True, device)
    if device in ("cuda", "mps"):
        raise ConfigError(f"device {device} is not available on this machine; use device=cpu or auto")
    raise ConfigError(f"device {device!r} is unknown; use cpu, cuda, mps or auto")


def build_core(model: str | os.PathLike[str], options: EngineConfig, progress: Progress | None = None) -> Built:
    """Load a model and size its pools.

    Raises:
        ModelError: the model can't be found, read or run.
        ConfigError: an option can't work.
    """
    started = time.perf_counter()
    source = locate(model)
    spec = load_spec(source)
    config = options.resolve(spec, probe(options.device))
    for reason in config.reasons:
        logger().info(reason)
    ops = _ops(config)
    use_processors(options, ops)
    runner = _runner(spec, config, _decoder(spec, config, ops, _weights(source, spec, config, ops, progress)))
    core = _core(spec, config, runner)
    core.grammars = Grammars(str(source.path), spec.vocab_size, spec.stop_token_ids, options.max_num_seqs)
    logger().info(config.pool_line())
    logger().info(
        "ready",
        model=source.name,
        dtype=config.dtype,
        quantization=core.config.quantization,
        seconds=round(time.perf_counter() - started, 2),
    )
    return Built(core, runner, spec, source, core.config)


def build_beside(built: Built, options: EngineConfig, spec: ModelSpec | None = None) -> Built:
    """A second core over the weights of the first, which exist once: pools and scheduler are its own.

    Args:
        built: dtype, quantization and device are its; so are the frequencies of dynamic NTK and LongRoPE.
        options: everything else.
        spec: the same model with other spans, or None.

    Raises:
        ConfigError: an option can't work.
    """
    first, spec = built.config, spec or built.spec
    fixed = replace(options, dtype=first.dtype, quantization=first.quantization, device=first.device)
    config = fixed.resolve(spec, probe(first.device))
    runner = _runner(spec, config, built.runner.decoder)
    core = _core(spec, config, runner)
    return Built(core, runner, spec, built.source, core.config)


def assemble(spec: ModelSpec, config: ResolvedConfig, weights: dict[str, torch.Tensor]) -> EngineCore:
    """A core from loaded weights (canonical names; emptied)."""
    ops = _ops(config)
    return _core(spec, config, _runner(spec, config, _decoder(spec, config, ops, _converted(spec, weights, ops))))


def _ops(config: ResolvedConfig) -> Ops:
    ops = resolve_ops(deterministic=config.options.deterministic, quantization=config.quantization)
    logger().info(f"{ops.name} kernels" + (f": {ops.note}" if ops.note else ""))
    return ops


def _weights(
    source: ModelSource, spec: ModelSpec, config: ResolvedConfig, ops: Ops, progress: Progress | None
) -> Prepared:
    """What the decoder multiplies with, from the last start's files where there are some."""
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    keep = ops.quantization != "none" and config.device == "cpu" and _cache_wanted()
    variant = f"{ops.quantization}-{config.dtype}"
    cache = WeightCache(source.path, variant, f"{CONVERSION} {spec}") if keep else None
    found = cache.load(progress) if cache else None
    if found is not None:
        return found
    converted = _converted(spec, load_weights(source.path, spec, dtype, device, progress), ops)
    if cache:
        cache.save(converted)
    return converted


def _cache_wanted() -> bool:
    """Whether ``SASH_WEIGHT_CACHE`` lets converted weights be kept.

    Raises:
        ConfigError: it is neither 1 nor 0.
    """
    value = os.environ.get("SASH_WEIGHT_CACHE", "1")
    if value not in ("0", "1"):
        raise ConfigError(f"SASH_WEIGHT_CACHE={value!r} must be 1, or 0 to keep no converted weights")
    return value == "1"


def _converted(spec: ModelSpec, weights: Weights, ops: Ops) -> Prepared:
    if ops.quantization != "none":
        smooth(spec, weights, ops)
    return prepare(spec, weights, ops)


def _decoder(spec: ModelSpec, config: ResolvedConfig, ops: Ops, weights: Prepared) -> Decoder:
    return Decoder(spec, weights, ops, max_model_len=config.max_model_len)


def _runner(spec: ModelSpec, config: ResolvedConfig, decoder: Decoder) -> Runner:
    pools = tuple(
        KVPool(group, pages, config.demand.page_size, getattr(torch, dtype), decoder.device)
        for group, pages, dtype in zip(config.groups, config.pages, config.demand.dtypes, strict=True)
    )
    runner = Runner(spec, decoder, decoder.ops, config, pools)
    if runner.op_by_op and decoder.ops.name == "native":
        logger().info(f"layers run op by op: {runner.op_by_op}")
    return runner


def _core(spec: ModelSpec, config: ResolvedConfig, runner: Runner) -> EngineCore:
    return EngineCore(replace(config, quantization=runner.decoder.ops.quantization), spec.vocab_size, runner)
