"""Bytes and floating-point operations of recorded launches, and the bytes that no decode step can do without.

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
from moe_serve.models.weight_share import WeightShare
from moe_serve.roofline.launches import Launch
from moe_serve.roofline.step import GPU, DecodeStep

_PRODUCTS = ("mm", "addmm", "addmm_", "bmm")
_LOOK_UPS = ("embedding", "index_select")


@dataclass(frozen=True)
class Work:
    """num_bytes: read and written;  flops: of matrix products and attention"""

    num_bytes: float
    flops: float = 0.0


def work_of(launch: Launch, step: DecodeStep) -> Work:
    """Returns what a launch of a step does."""
    if launch.name in _RULES:
        return _RULES[launch.name](launch.arguments, launch, step)
    num_bytes = sum(tensor.nbytes for tensor in launch.tensors)
    if launch.name in _PRODUCTS:
        sizes = [float(tensor.numel()) for tensor in launch.tensors[-3:]]
        batch = launch.tensors[-1].shape[0] if launch.name == "bmm" else 1
        return Work(num_bytes, 2 * math.sqrt(math.prod(sizes) / batch))
    if launch.name in _LOOK_UPS:
        return Work(2 * launch.tensors[-1].nbytes)
    return Work(num_bytes)


def rows_of(step: DecodeStep) -> int:
    """Returns the rows that the experts of a rank get."""
    return step.tokens * step.spec.topk


def touched(num_slots: int, step: DecodeStep) -> float:
    """Returns how many of a rank's experts have rows, on average."""
    return num_slots * (1 - (1 - 1 / num_slots) ** rows_of(step))


def _grouped_gemm(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    x, weight, n, k = (getattr(at[name], "base", at[name]) for name in ("x", "weight", "n", "k"))
    rows = rows_of(step)
    moved = rows * (k * x.itemsize + n * at["y"].itemsize) + touched(at["num_groups"], step) * n * k * weight.itemsize
    return Work(moved, 2.0 * rows * n * k)


def _silu_mul(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    rows = rows_of(step) if at["SLABS"] else at["gate_up"].shape[0]
    return Work(rows * at["width"] * (2 * at["gate_up"].itemsize + at["out"].itemsize))


def _attend(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    q, out, parts = at["q"], at["out"], at["part_out"]
    listed = at["BLOCK_SIZE"] == 1  # of keys that an indexer has chosen
    keys = step.tokens * min(step.context + 1, at["tables"].shape[1] if listed else step.context + 1)
    moved = q.nbytes + keys * at["k"][0].nbytes + (out if parts is None else parts).nbytes
    heads = q.numel() // (step.tokens * q.shape[-1])
    return Work(moved, 2.0 * keys * heads * (q.shape[-1] + out.shape[-1]))


def _combine_parts(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    return Work(at["part_out"].nbytes + at["part_sums"].nbytes + at["out"].nbytes)


def _index_scores(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    keys = step.tokens * (step.context + 1)
    moved = at["index_q"].nbytes + at["weights"].nbytes + keys * at["keys"][0].nbytes + 4.0 * keys
    return Work(moved, 2.0 * keys * at["HEADS"] * at["WIDTH"])


def _choose(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    passes = 5 if at["SCORED"] else 0  # a digit each, and the choice
    return Work(passes * 4.0 * step.tokens * (step.context + 1) + at["slots"].nbytes)


def _norm(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    again = at["x"].nbytes if at["ADDS"] else 0
    return Work(again + sum(tensor.nbytes for tensor in launch.tensors))


def _rope_write(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    return Work(2 * (at["q"].nbytes + at["k"].nbytes) + at["turns"].nbytes)


def _mla_rope_write(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    turned = step.tokens * at["num_heads"] * 2 * at["NUM_PAIRS"] * at["q"].itemsize
    return Work(2 * (turned + at["row"].nbytes) + at["turns"].nbytes)


def _dispatch_send(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    staged = 2 * step.tokens * at["row_bytes"] if at["STAGES"] else 0
    return Work(at["x"].nbytes + staged + rows_of(step) * at["row_bytes"])


def _dispatch_receive(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    return Work(rows_of(step) * (at["row_bytes"] + at["hidden"] * at["slab"].itemsize))


def _combine_send(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    times = 4 if at["STAGES"] else 2  # a result is read and written, with staging once more
    return Work(rows_of(step) * times * at["result_row_bytes"])


def _combine_receive(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    return Work(rows_of(step) * at["result_row_bytes"] + at["out"].nbytes)


def _finish(at: dict[str, Any], launch: Launch, step: DecodeStep) -> Work:
    return Work(8.0 * at["num_ranks"])


_RULES: dict[str, Callable[[dict[str, Any], Launch, DecodeStep], Work]] = {
    "grouped_gemm_kernel": _grouped_gemm,
    "silu_mul_kernel": _silu_mul,
    "attend_kernel": _attend,
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
    "finish_kernel": _finish,
}


def unavoidable_bytes(step: DecodeStep) -> float:
    """Returns the bytes that the layers of a step move at least: weights once, the cache once, rows there and back.

    Rows are the residual, read and written by each layer, and an expert's rows and results, each written and read once.
    """
    spec, rows = step.spec, rows_of(step)
    share = WeightShare(spec, step.placement, 0, torch.bfloat16, GPU, step.expert_form)
    dense = sum(size for name, size in share.dense_bytes.items() if name.startswith("layers."))
    slots = step.placement.slots_per_rank
    experts = spec.num_moe_layers * touched(slots, step) * share.slot_form.num_bytes
    keys = step.tokens * (step.context + 1)
    cache = keys * 2.0 * sum(layout.elements_per_token for layout in kv_layouts(spec))
    row = 2 * spec.hidden
    row_there = spec.hidden if step.expert_form == "fp8" else row
    carried = spec.num_moe_layers * rows * 2.0 * (row_there + row)
    return dense + experts + cache + spec.num_layers * step.tokens * 2 * row + carried


def in_layers(launches: list[Launch]) -> list[Launch]:
    """Returns the launches that belong to layers: neither embedding nor logits, nor what a step begins with."""
    return [launch for launch in launches if launch.part not in (VOCABULARY, -1)]


def total(works: "list[Work]") -> Work:
    """Returns the sum."""
    return Work(sum(work.num_bytes for work in works), sum(work.flops for work in works))
