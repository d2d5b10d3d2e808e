"""Rotary embedding of a config.json, in the transformers-5 form and in the older ones.

New form: ``rope_parameters``, one dictionary or one per layer type. Old form: ``rope_theta``,
``rope_scaling``, ``rope_local_base_freq`` (window layers of Gemma 3), ``swa_rotary_base``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sash.spec.errors import ModelError
from sash.spec.hf_families import Family
from sash.spec.hf_fields import Fields
from sash.spec.hf_windows import CHUNKED, FULL, SLIDING
from sash.spec.model import RopeKind, RopeSpec

LAYER_TYPES = (FULL, SLIDING, CHUNKED)
OLD_NAMES = {"su": "longrope"}


def rope_of(fields: Fields, family: Family, layer_type: str, head_dim: int) -> RopeSpec:
    """RopeSpec of the layers of one type.

    Args:
        fields: the config with its family's defaults.
        family: says how the config's rotary fields are meant.
        layer_type: ``full_attention``, ``sliding_attention`` or ``chunked_attention``.
        head_dim: dimensions of a head; ``partial_rotary_factor`` of them rotate.

    Raises:
        ModelError: an unknown type or a missing or impossible number, named.
    """
    where, params = _parameters(fields, layer_type, family.rope_scale_full_only)
    own = Fields(params, {}, fields.architecture)
    kind = _kind(own, where, yarn_is_longrope=family.yarn_is_longrope)
    partial = own.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary = int(head_dim * partial)
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        raise ModelError(
            f"partial_rotary_factor={partial} rotates {rotary} of {head_dim} dimensions; it must be an even number"
        )
    base = own.number("rope_theta", fields.number("rope_theta", 10000.0))
    if layer_type == SLIDING and fields.given("swa_rotary_base"):
        base = fields.number("swa_rotary_base")
    if base <= 1:
        raise ModelError(f"rope_theta must be above 1, got {base}")
    if kind is RopeKind.DEFAULT:
        return RopeSpec(rotary, base, interleaved=family.interleaved_rope)
    return RopeSpec(rotary, base, kind, family.interleaved_rope, **_scaling(fields, own, kind, rotary, where))


def _parameters(fields: Fields, layer_type: str, scale_full_only: bool) -> tuple[str, dict[str, Any]]:
    """The dictionary that speaks of ``layer_type``, and how to name it."""
    given = fields.get("rope_parameters")
    if given is not None:
        nested = _mapping("rope_parameters", given)
        if not any(name in nested for name in LAYER_TYPES):
            return "rope_parameters", dict(nested)
        own = _mapping(f"rope_parameters.{layer_type}", nested.get(layer_type) or {})
        base = _old_base(fields, layer_type)
        return f"rope_parameters.{layer_type}", ({} if base is None else {"rope_theta": base}) | dict(own)
    params: dict[str, Any] = {}
    scaling = fields.get("rope_scaling")
    if scaling is not None and not (scale_full_only and layer_type != FULL):
        params = dict(_mapping("rope_scaling", scaling))
    base = _old_base(fields, layer_type)
    if base is not None:
        params.setdefault("rope_theta", base)
    return "rope_scaling", params


def _old_base(fields: Fields, layer_type: str) -> Any:
    if layer_type == SLIDING and fields.get("rope_local_base_freq") is not None:
        return fields.get("rope_local_base_freq")
    return fields.get("rope_theta")


def _kind(own: Fields, where: str, *, yarn_is_longrope: bool) -> RopeKind:
    name = own.get("rope_type") or own.get("type") or "default"
    if not isinstance(name, str):
        raise own.error(f"rope_type of {where}", name, f"one of {', '.join(RopeKind)}")
    name = OLD_NAMES.get(name, name)
    if yarn_is_longrope and name == "yarn":
        name = "longrope"
    if name not in list(RopeKind) or own.get("mrope_section"):
        raise ModelError(f"{where} has rope_type={name!r}, which sash doesn't know; known: {', '.join(RopeKind)}")
    return RopeKind(name)


def _scaling(fields: Fields, own: Fields, kind: RopeKind, rotary: int, where: str) -> dict[str, Any]:
    longest = fields.integer("max_position_embeddings")
    original = fields.get("original_max_position_embeddings") or own.get("original_max_position_embeddings") or longest
    good = isinstance(original, (int, float)) and not isinstance(original, bool) and 2 <= original < 2**63
    if not good:
        raise fields.error("original_max_position_embeddings", original, "a number of 2 or more tokens")
    out: dict[str, Any] = {"max_position": longest, "original_max_position": int(original)}
    needs_factor = kind not in (RopeKind.YARN, RopeKind.LONGROPE)
    factor = own.number("factor", None if needs_factor else longest / original)
    if factor <= 0:
        raise ModelError(f"factor in {where} must be above 0, got {factor}")
    out["factor"] = factor
    if kind in (RopeKind.YARN, RopeKind.LONGROPE) and own.get("attention_factor") is not None:
        out["attention_factor"] = own.number("attention_factor")
    if kind is RopeKind.YARN:
        out |= {"beta_fast": own.number("beta_fast", 32.0, above=0), "beta_slow": own.number("beta_slow", 1.0, above=0)}
        out |= {n: own.number(n) for n in ("mscale", "mscale_all_dim") if own.get(n) is not None}
        out["truncate"] = own.flag("truncate", True)
    elif kind is RopeKind.LLAMA3:
        low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
        if high <= low:
            raise ModelError(f"high_freq_factor in {where} must be above low_freq_factor={low}, got {high}")
        out |= {"low_freq_factor": low, "high_freq_factor": high}
    elif kind is RopeKind.LONGROPE:
        out |= {name: _factors(own, name, rotary // 2, where) for name in ("short_factor", "long_factor")}
    return out


def _factors(own: Fields, name: str, count: int, where: str) -> tuple[float, ...]:
    value = own.get(name)
    good = isinstance(value, list) and all(isinstance(x, (int, float)) and x > 0 for x in value)
    if not good or len(value) != count:
        got = f"{len(value)} entries" if good else repr(value)
        raise ModelError(f"{name} in {where} must be a list of {count} positive numbers, got {got}")
    return tuple(float(x) for x in value)


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{name} in config.json must be a dictionary, got {value!r}")
    return value
