"""Reads the rotary embedding of queries and keys from a config.json.

Rotary embedding: arXiv:2104.09864. YaRN: arXiv:2309.00071; DeepSeek's mscale_all_dim also scales the softmax.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_serve.errors import ModelError
from moe_serve.models.hf_config import is_positive
from moe_serve.models.model_files import shown
from moe_serve.models.spec import LongRopeSpec, RopeSpec, YarnSpec

SUPPORTED = ("default", "linear", "llama3", "yarn")


def read_rope(
    values: Mapping[str, Any],
    dim: int,
    interleaved: bool,
    where: str,
    partial_default: float | None = None,
    may_be_long: bool = False,
) -> RopeSpec:
    """Returns the rotary embedding of a config.json, with old (rope_theta, rope_scaling) or new (rope_parameters) keys.

    dim: width of a head that may be rotated.  where: the file, for messages
    partial_default: share of it that is rotated where config.json does not say; None: always all of it
    may_be_long: whether the family knows LongRoPE
    Raises ModelError for a kind that is not SUPPORTED, and for missing or impossible numbers.
    """
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{where}: rope_parameters is {shown(given)}, expected an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in SUPPORTED and not (may_be_long and kind == "longrope"):
        raise ModelError(f"{where}: rope_type {shown(kind)} is not supported; supported are {', '.join(SUPPORTED)}")
    dim = _rotated(given, values, dim, where, partial_default)
    if dim % 2:
        raise ModelError(f"{where}: the rotated head width is {dim}; it must be even")
    theta = _number(given, "rope_theta", where, default=_number(values, "rope_theta", where, default=10000.0))
    if theta <= 1:
        raise ModelError(f"{where}: rope_theta of the rotary embedding is {theta:g}, expected a number above 1")
    if kind == "default":
        return RopeSpec(dim, theta, interleaved)
    if kind == "linear":
        return RopeSpec(dim, theta, interleaved, linear_factor=_number(given, "factor", where))
    if kind == "llama3":
        return replace(RopeSpec(dim, theta, interleaved), divisors=_llama3_divisors(given, dim, theta, where))
    if kind == "longrope":
        return _read_long(given, RopeSpec(dim, theta, interleaved), where)
    return _read_yarn(given, values, dim, theta, interleaved, where)


def _rotated(
    given: Mapping[str, Any], values: Mapping[str, Any], dim: int, where: str, partial_default: float | None
) -> int:
    """Returns how many elements of a head are rotated."""
    key = "partial_rotary_factor"
    partial = _number(given, key, where, default=_number(values, key, where, default=partial_default or 1.0))
    if partial_default is None and partial != 1.0:
        raise ModelError(f"{where}: {key} {shown(partial)} is not supported; only 1.0 is")
    if partial > 1 or int(dim * partial) < 1:
        raise ModelError(
            f"{where}: {key} of the rotary embedding is {partial:g}, expected at most 1 and enough to rotate"
        )
    return int(dim * partial)


def _llama3_divisors(given: Mapping[str, Any], dim: int, theta: float, where: str) -> tuple[float, ...]:
    """Returns Llama 3's divisors: long waves are stretched by the factor, short ones kept, those between in part."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (_number(given, key, where) for key in keys)
    divisors = []
    for pair in range(dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / dim))  # over the original context
        kept = (turns - low) / (high - low) if low < turns < high else float(turns >= high)
        divisors.append(1 / (kept + (1 - kept) / factor))
    return tuple(divisors)


def _read_long(given: Mapping[str, Any], rope: RopeSpec, where: str) -> RopeSpec:
    key = "original_max_position_embeddings"
    original = _number(given, key, where)
    divisors = []
    for key in ("short_factor", "long_factor"):
        numbers = given.get(key)
        if not isinstance(numbers, list) or len(numbers) != rope.dim // 2:
            raise ModelError(f"{where}: {key} of the rotary embedding: expected a list of {rope.dim // 2} numbers")
        divisors.append(tuple(_number({key: number}, key, where) for number in numbers))
    long = LongRopeSpec(
        original_max_position=int(original),
        short_divisors=divisors[0],
        long_divisors=divisors[1],
        short_factor=_number(given, "short_mscale", where),
        long_factor=_number(given, "long_mscale", where),
    )
    return replace(rope, long=long).in_context(int(original))


def _read_yarn(
    given: Mapping[str, Any], values: Mapping[str, Any], dim: int, theta: float, interleaved: bool, where: str
) -> RopeSpec:
    longest = _number(values, "max_position_embeddings", where)
    original = _number(given, "original_max_position_embeddings", where, default=longest)
    factor = _number(given, "factor", where, default=longest / original)
    if original < 1 or factor < 1:
        raise ModelError(
            f"{where}: original_max_position_embeddings {original:g} and factor {factor:g} of the rotary embedding: "
            "expected at least 1"
        )
    # 0 means the same as none
    mscale, mscale_all = (
        _number(given, key, where) if given.get(key) else None for key in ("mscale", "mscale_all_dim")
    )
    for key, number in (("mscale", mscale), ("mscale_all_dim", mscale_all)):
        if number and number > 1e6:  # real ones are near 1; its square scales the softmax
            raise ModelError(f"{where}: {key} of the rotary embedding is {number:g}, expected at most 1e6")
    unscaled = mscale_of(factor, 1.0)
    if mscale and mscale_all:
        unscaled = mscale_of(factor, mscale) / mscale_of(factor, mscale_all)
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"{where}: truncate of the rotary embedding is {shown(truncate)}, expected true or false")
    return RopeSpec(
        dim,
        theta,
        interleaved,
        yarn=YarnSpec(
            factor=factor,
            original_max_position=int(original),
            beta_fast=_number(given, "beta_fast", where, default=32.0),
            beta_slow=_number(given, "beta_slow", where, default=1.0),
            truncate=truncate,
        ),
        table_factor=_number(given, "attention_factor", where, default=unscaled),
        softmax_factor=mscale_of(factor, mscale_all) ** 2 if mscale_all else 1.0,
    )


def mscale_of(factor: float, mscale: float) -> float:
    """Returns YaRN's attention temperature for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(values: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_positive(value):
        raise ModelError(f"{where}: {key} of the rotary embedding is {shown(value)}, expected a number above 0")
    return float(value)
