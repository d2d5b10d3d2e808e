"""Which ops run: native where the C++ kernels are built, else torch; reference is the oracle."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from sash.ops import packed
from sash.ops.base import Ops, as_is
from sash.spec.errors import ConfigError

KERNELS = ("native", "torch", "reference")


def resolve_ops(*, deterministic: bool = False, kernels: str | None = None, quantization: str = "none") -> Ops:
    """The table to run with.

    Args:
        deterministic: a row's result must not depend on the rows beside it, bit for bit.
        kernels: native, torch, reference, or auto: native where it is built, else torch, with the reason in
            the table's ``note``; None reads the environment's SASH_KERNELS.
        quantization: of the linear layers: none, int8, int4, or auto: int8 where the native kernels run.

    Raises:
        ConfigError: an unknown name, native kernels that aren't built, or reference kernels for a
            deterministic engine; int8 or int4 with either.
    """
    name = kernels or os.environ.get("SASH_KERNELS") or "auto"
    if name not in ("auto", *KERNELS):
        raise ConfigError(f"SASH_KERNELS={name!r} is unknown; use auto, {' or '.join(KERNELS)}")
    if name == "reference" and deterministic:
        raise ConfigError(
            "deterministic=True can't run on SASH_KERNELS=reference, whose rows depend on their batch: "
            "use SASH_KERNELS=torch or auto"
        )
    if quantization in packed.ROUNDED and (deterministic or name == "reference"):
        how = "deterministic" if deterministic else "on SASH_KERNELS=reference"
        raise ConfigError(f"quantization={quantization} can't run {how}: use quantization=none")
    if name == "reference":
        return _reference()
    if deterministic:
        return _deterministic()
    table = _torch() if name == "torch" else _native(quantization, required=name == "native")
    if quantization in packed.ROUNDED and table.name == "torch":
        pack, head = partial(packed.pack, kind=quantization), partial(packed.pack, kind="int8")
        return replace(table, pack=pack, pack_head=head, looks_up=True, quantization=quantization)
    return table


def _native(quantization: str, *, required: bool) -> Ops:
    from sash.ops import native, native_draw, native_linear

    module, note = native.load()
    if module is None and required:
        raise ConfigError(f"SASH_KERNELS=native: {note}, or use SASH_KERNELS=torch")
    if module is None:
        return replace(_torch(), note=note)
    quantization = "int8" if quantization == "auto" else quantization
    return replace(
        _torch(),
        name="native",
        linear=native_linear.linear,
        attention=native.attention,
        quantise=native.quantise,
        pack=partial(native_linear.pack, quantization=quantization),
        pack_head=partial(native_linear.pack, quantization="int8" if quantization == "int4" else quantization),
        embedding=native_linear.embedding,
        looks_up=True,
        argmax=native_linear.argmax,
        race=native_draw.race,
        quantization=quantization,
        note=note,
    )


def _torch() -> Ops:
    from sash.ops import attention_torch, torch_ops

    return Ops(
        name="torch",
        linear=torch_ops.linear,
        rms_norm=torch_ops.rms_norm,
        layer_norm=torch_ops.layer_norm,
        rope=torch_ops.rope,
        gated=torch_ops.gated,
        attention=attention_torch.attention,
        pack=torch_ops.pack,
    )


def _deterministic() -> Ops:
    from sash.ops import fixed, reference

    # reference.gated: torch's activations round by an element's place in the tensor.
    return replace(
        _torch(),
        name="deterministic",
        linear=fixed.linear,
        gated=reference.gated,
        attention=fixed.attention,
        pack=as_is,
    )


def _reference() -> Ops:
    from sash.ops import attention_reference, reference

    return Ops(
        name="reference",
        linear=reference.linear,
        rms_norm=reference.rms_norm,
        layer_norm=reference.layer_norm,
        rope=reference.rope,
        gated=reference.gated,
        attention=attention_reference.attention,
    )
