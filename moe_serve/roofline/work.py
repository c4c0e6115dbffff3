"""Bytes and floating-point operations of recorded launches, and the bytes that no step can do without.

Experts are chosen evenly at random, so each rank gets as many rows as it sends. A kernel reads what its neighbour has
written from memory, as if no cache held it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_serve.kernels.part_clock import VOCABULARY
from moe_serve.models.decoder.moe_decoder import kv_layouts
from moe_serve.roofline.launches import Launch
from moe_serve.roofline.step import RankStep

_PRODUCTS = ("mm", "addmm", "addmm_", "bmm")
_LOOK_UPS = ("embedding", "index_select")
_FILLS = ("new_zeros", "zeros_like", "ones_like", "full_like", "new_ones", "new_full")


@dataclass(frozen=True)
class Work:
    """num_bytes: read and written;  flops: of matrix products and attention"""

    num_bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class ExpertLoad:
    """rows: that the experts of a rank get;  experts: of a rank that get any, on average"""

    rows: float
    experts: float


def even_load(step: RankStep) -> ExpertLoad:
    """Returns the load of a step whose experts are chosen evenly."""
    rows, slots = step.tokens * step.spec.topk, step.placement.slots_per_rank
    return ExpertLoad(rows, slots * (1 - (1 - 1 / slots) ** rows))


def work_of(launch: Launch, step: RankStep, load: ExpertLoad | None = None) -> Work:
    """Returns what a launch of a step does, which grows evenly with the load. load: None = even"""
    if launch.name in _RULES:
        return _RULES[launch.name](launch.arguments, step, load or even_load(step))
    num_bytes = sum(tensor.nbytes for tensor in launch.tensors)
    if launch.name in _PRODUCTS:
        sizes = [float(tensor.numel()) for tensor in launch.tensors[-3:]]
        batch = launch.tensors[-1].shape[0] if launch.name == "bmm" else 1
        return Work(num_bytes, 2 * math.sqrt(math.prod(sizes) / batch))
    if launch.name in _LOOK_UPS:
        return Work(2 * launch.tensors[-1].nbytes)
    if launch.name in _FILLS:
        return Work(launch.tensors[-1].nbytes)
    return Work(num_bytes)


def _seen(step: RankStep, most: int | None = None) -> float:
    """Returns how many keys the tokens of a step see, each its own. most: of one token; None: all up to its own"""
    first, last = step.context + 1, step.length
    if most is None or last <= most:
        return step.tokens * (first + last) / 2
    growing = max(most - first, 0)  # tokens that see fewer than `most`
    each = growing * (first + most - 1) / 2 + (step.new_tokens - growing) * most
    return step.sequences * each


def _grouped_gemm(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    x, weight, n, k = (getattr(at[name], "base", at[name]) for name in ("x", "weight", "n", "k"))
    of_scales = at["weight_scale"]
    matrix = (weight.nbytes + (0 if of_scales is None else of_scales.nbytes)) / at["num_groups"]
    # A dense product has all rows of the step.
    rows, experts = (load.rows, load.experts) if at["rows_per_group"] is not None else (float(at["rows"]), 1.0)
    results = at["y"].shape[-1] * at["y"].itemsize * (2 if at["ADDS"] else 1)
    return Work(rows * (k * x.itemsize + results) + experts * matrix, 2.0 * rows * n * k)


def _attend(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    """A cached row is read once for all tokens of its sequence; tiles of rows that read it again find it in the L2."""
    q, out, parts = at["q"], at["out"], at["part_out"]
    heads = q.numel() // (step.tokens * q.shape[-1])
    if at["BLOCK_SIZE"] == 1:  # keys that an indexer has chosen, for each token
        read = seen = _seen(step, at["tables"].shape[1])
    else:
        most = at["window"] if at["WINDOW"] else at["chunk"] if at["CHUNK"] else None
        read = float(step.sequences * min(step.length, step.length if most is None else most + step.new_tokens - 1))
        seen = _seen(step, most)
    row = at["k"][0].nbytes + (0 if at["scales"] is None else at["scales"][0].nbytes)
    moved = q.nbytes + read * row + (out if parts is None else parts).nbytes
    return Work(moved, 2.0 * seen * heads * (q.shape[-1] + out.shape[-1]))


def _expand(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    weight, keys = getattr(at["weight"], "base", at["weight"]), float(step.sequences * step.length)
    heads, latent, width = at["HEADS"], at["LATENT"], at["WIDTH"]
    read = (latent + at["TAIL"] * at["WRITES_TAIL"]) * at["latents"].itemsize
    read += 0 if at["scales"] is None else at["scales"][0].nbytes
    made = (heads * width + at["TAIL"] * at["WRITES_TAIL"]) * weight.itemsize
    return Work(keys * (read + made) + heads * latent * width * weight.itemsize, 2.0 * keys * heads * latent * width)


def _combine_parts(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    return Work(at["part_out"].nbytes + at["part_sums"].nbytes + at["out"].nbytes)


def _index_scores(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    scores, read = _seen(step), step.sequences * step.length
    moved = at["index_q"].nbytes + at["weights"].nbytes + read * at["keys"][0].nbytes + 4.0 * scores
    return Work(moved, 2.0 * scores * at["HEADS"] * at["WIDTH"])


def _choose(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    passes = 5 if at["SCORED"] else 0  # a digit each, and the choice
    return Work(passes * 4.0 * _seen(step) + at["slots"].nbytes)


def _norm(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    again = at["x"].nbytes if at["ADDS"] else 0  # the sum, read and written
    once = {id(each): each.nbytes for each in at.values() if isinstance(each, torch.Tensor)}
    return Work(again + sum(once.values()))


def _rope_write(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    cached = at["k"].numel() * at["cache"].itemsize
    return Work(2 * at["q"].nbytes + at["k"].nbytes + cached + at["turns"].nbytes)


def _mla_rope_write(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    turned = step.tokens * at["num_heads"] * 2 * at["NUM_PAIRS"] * at["q"].itemsize
    cached = at["row"].numel() * at["cache"].itemsize
    return Work(2 * turned + at["row"].nbytes + cached + at["turns"].nbytes)


def _dispatch_send(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    staged = 2 * step.tokens * at["row_bytes"] if at["STAGES"] else 0
    return Work(at["x"].nbytes + staged + load.rows * at["row_bytes"])


def _dispatch_receive(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    return Work(load.rows * (at["row_bytes"] + at["hidden"] * at["slab"].itemsize))


def _combine_send(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    times = 4 if at["STAGES"] and at["COPIES"] else 2  # a result is read and written, where it is staged once more
    return Work(load.rows * times * at["result_row_bytes"])


def _combine_receive(at: dict[str, Any], step: RankStep, load: ExpertLoad) -> Work:
    return Work(load.rows * at["result_row_bytes"] + at["out"].nbytes)


_RULES: dict[str, Callable[[dict[str, Any], RankStep, ExpertLoad], Work]] = {
    "grouped_gemm_kernel": _grouped_gemm,
    "attend_kernel": _attend,
    "expand_kernel": _expand,
    "combine_kernel": _combine_parts,
    "index_scores_kernel": _index_scores,
    "choose_kernel": _choose,
    "norm_kernel": _norm,
    "rope_write_kernel": _rope_write,
    "mla_rope_write_kernel": _mla_rope_write,
    "dispatch_send_kernel": _dispatch_send,
    "dispatch_receive_kernel": _dispatch_receive,
    "combine_send_kernel": _combine_send,
    "combine_receive_kernel": _combine_receive,
}


def unavoidable_bytes(step: RankStep) -> float:
    """Returns the bytes that the layers of a step move at least: weights once, the cache once, rows there and back.

    Rows are the residual, read and written by each layer, and an expert's rows and results, each written and read once.
    """
    spec, load = step.spec, even_load(step)
    share = step.share
    dense = sum(size for name, size in share.dense_bytes.items() if name.startswith("layers."))
    experts = spec.num_moe_layers * load.experts * share.slot_form.num_bytes
    keys = step.sequences * step.length
    cache = float(keys) * sum(layout.slot_bytes(step.cache_dtype) for layout in kv_layouts(spec))
    row = 2 * spec.hidden
    there, back = spec.expert_hidden * (1 if step.expert_form == "fp8" else 2), spec.expert_hidden * 2
    carried = spec.num_moe_layers * load.rows * 2.0 * (there + back)
    return dense + experts + cache + spec.num_layers * step.tokens * 2 * row + carried


def in_layers(launches: list[Launch]) -> list[Launch]:
    """Returns the launches that belong to layers: neither embedding nor logits, nor what a step begins with."""
    return [launch for launch in launches if launch.part not in (VOCABULARY, -1)]


def total(works: "list[Work]") -> Work:
    """Returns the sum."""
    return Work(sum(work.num_bytes for work in works), sum(work.flops for work in works))
