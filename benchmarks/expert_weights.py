"""What each form of expert weights costs on a CPU: memory, time of one expert call, and how far its result is off.

    python -m benchmarks.expert_weights [--rounds 7]

One thread. The forms take turns within a round; a ratio is the median over rounds of (dense time / the form's time).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import add_isa, conditions, save
from moe_serve.dispatch.base import PackedRows
from moe_serve.ep.expert_form import MATRICES, ExpertForm, SlotForm, scale_of
from moe_serve.ep.expert_store import ExpertStore, expert_ffn
from moe_serve.kernels.quantised import has_vnni, quantize_int8, quantize_weight

# (whose experts, H, I, slots): together larger than the caches, but for the demo's
SHAPES = (("demo", 192, 64, 32), ("H 512", 512, 256, 64), ("Qwen3-30B-A3B", 2048, 768, 16))
ROWS = (1, 4, 16, 64)
FORMS: tuple[ExpertForm, ...] = ("dense", "int8", "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not has_vnni():
        raise SystemExit("this CPU has no AVX-512 VNNI: int8 experts are refused here, and there is nothing to compare")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = conditions("moe-serve")
    rows = [row for shape in SHAPES for row in measure(*shape, args.rounds)]
    print(
        save(
            "expert_weights",
            "Forms of expert weights on a CPU",
            rows,
            facts,
            "`model.expert_weights`; both products and SwiGLU of all slots, the same number of rows for each, one "
            "thread, float32 rows; interleaved. `x` is dense time / this form's time, the median of ratios (in "
            "brackets the smallest and the largest). Error: ||result - exact|| / ||exact||, exact in float64 with the "
            "unquantised weights, random normal ones; fp8's holds the rounding of the weights, which an FP8 checkpoint "
            "has in any form. `load` is the machine's load average while the row ran. fp8 is for GPUs (not run); a CPU "
            "widens a matrix each time it is used, and saves memory only.",
        )
    )


def measure(whose: str, hidden: int, width: int, slots: int, rounds: int) -> list[dict[str, Any]]:
    weights = {
        name: torch.randn(slots, n, k) / k**0.5 for name, (n, k) in zip(MATRICES, sizes(hidden, width), strict=True)
    }
    stores = {form: make_store(form, weights) for form in FORMS}
    found = []
    for num_rows in ROWS:
        x, counts = torch.randn(slots * num_rows, hidden), torch.full((slots,), num_rows)
        exact = reference(x[: 2 * num_rows], weights, num_rows)
        calls: dict[ExpertForm, Callable[[], Tensor]] = {
            form: partial(expert_ffn, PackedRows(x, counts), store) for form, store in stores.items()
        }
        times: dict[ExpertForm, list[float]] = {form: [] for form in FORMS}
        for number in range(rounds + 1):
            for form, call in calls.items():
                started = time.perf_counter()
                call()
                if number:  # the first round warms up
                    times[form].append(time.perf_counter() - started)
        for form in FORMS:
            ratios = [dense / its for dense, its in zip(times["dense"], times[form], strict=True)]
            error = float((calls[form]()[: 2 * num_rows].double() - exact).norm() / exact.norm())
            found.append(
                {
                    "experts": f"{whose}: {slots} x (H {hidden}, I {width})",
                    "rows per expert": num_rows,
                    "form": form,
                    "MiB": round(slots * SlotForm(form, hidden, width, torch.float32).num_bytes / 2**20, 2),
                    "ms": round(1e3 * statistics.median(times[form]), 2),
                    "x": f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})",
                    "error": f"{error:.1e}",
                    "load": round(os.getloadavg()[0], 2),
                }
            )
            print(found[-1], flush=True)
    return found


def sizes(hidden: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * width, hidden), (hidden, width)


def make_store(form: ExpertForm, weights: dict[str, Tensor]) -> ExpertStore:
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match form:
            case "dense":
                tensors[name] = weight.clone()
            case "int8":
                tensors[name], tensors[scale_of(name)] = quantize_int8(weight)
            case "fp8":
                blocks = quantize_weight(weight, parts=2 if name == "gate_up" else 1)  # gate and up are two matrices
                tensors[name], tensors[scale_of(name)] = blocks.q, blocks.scale
    return ExpertStore(tensors)


def reference(x: Tensor, weights: dict[str, Tensor], num_rows: int) -> Tensor:
    """Returns the results of the first slots in float64. x: rows of those slots, num_rows of each"""
    out = []
    for slot, rows in enumerate(x.double().split(num_rows)):
        gate, up = (rows @ weights["gate_up"][slot].double().T).chunk(2, -1)
        out.append((gate * gate.sigmoid() * up) @ weights["down"][slot].double().T)
    return torch.cat(out)


if __name__ == "__main__":
    main()
