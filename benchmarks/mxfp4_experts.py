"""One call of experts kept in MXFP4 against the same experts in bfloat16, by the compiled kernels of CPUs.

    python -m benchmarks.mxfp4_experts [--rounds 9] [--threads 1] [--only amx|vectors]

Experts of gpt-oss-20b: 32 of hidden 2880 and width 2880, of which each token chooses 4 at random; with biases and the
clamped activation. Takes a minute and 2.5 GB. Both sides have the same bits. Every round times both, one after the
other, and the ratio is the median of the ratios within a round. With one thread the clock is the CPU time of the
thread, which other work on the machine hardly adds to; with more it is that of the wall.
"""

import argparse
import os
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.cpu_attention import measure
from benchmarks.cpu_kernels import ffn
from moe_serve.kernels.cpu.experts import PackedExperts
from moe_serve.kernels.cpu.library import AMX, cpu_library
from moe_serve.kernels.cpu.packed import gate_up_size, pack, pack_gate_up, packed_size
from moe_serve.kernels.forms import Activation
from moe_serve.kernels.huge_pages import zeros_in_huge_pages
from moe_serve.kernels.quantised import dequantise_mxfp4, quantise_mxfp4

HIDDEN, WIDTH, EXPERTS, TOPK = 2880, 2880, 32, 4
TOKENS = (1, 8, 64, 512)
ACTIVATION = Activation("clamped_swiglu", alpha=1.702, limit=7.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("amx", "vectors"))
    args = parser.parse_args()
    facts = conditions()
    torch.manual_seed(0)
    library = cpu_library()
    library.set_threads(args.threads)
    packed, wide = made_experts()
    rows: list[dict[str, Any]] = []
    for by_amx in (True, False):
        if args.only == ("vectors" if by_amx else "amx") or (by_amx and not library.use_amx(True)):
            continue
        library.use_amx(by_amx)
        form = AMX if by_amx else library.vectors
        rows += [row(tokens, form, packed, wide, args) for tokens in TOKENS]
    notes = (
        f"{args.threads} threads, {args.rounds} rounds, built by {library.compiler}. Experts of gpt-oss-20b: {EXPERTS} "
        f"of hidden {HIDDEN} and width {WIDTH}, {TOPK} for each token, with biases and the clamped activation; equal "
        f"bits. In memory {packed_mib(packed):.0f} MiB in MXFP4, {packed_mib(wide):.0f} in bfloat16. `speed-up` is the "
        "median of the ratios within a round, in brackets best call over best call. "
        f"{'CPU time of the thread' if args.threads == 1 else 'Wall time'}. Load average at the end: "
        f"{os.getloadavg()[0]:.2f}."
    )
    print(save("mxfp4_experts", "Experts in MXFP4 and in bfloat16 on CPU", rows, facts, notes, per_cpu=True))


def row(tokens: int, form: str, packed: PackedExperts, wide: PackedExperts, args: argparse.Namespace) -> dict[str, Any]:
    ids = torch.rand(tokens, EXPERTS).topk(TOPK, dim=1).indices
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    x = torch.randn(tokens * TOPK, HIDDEN)
    ours, theirs = ffn(x, counts, packed), ffn(x, counts, wide)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    found = measure((f"{tokens} tokens, {form}", "MXFP4", ours, "bfloat16", theirs), args.rounds, clock)
    return found | {"experts read": int((counts > 0).sum())}


def made_experts() -> tuple[PackedExperts, PackedExperts]:
    """Returns experts in MXFP4 and the same in bfloat16, every expert the same."""
    sizes = {"gate_up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    stored: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, (n, k) in sizes.items():
        blocks, scales = quantise_mxfp4(torch.randn(n, k) * k**-0.5)
        stored[name] = in_every_slot(name, blocks.flatten(1))
        stored[name + "_scale"] = in_every_slot(name, scales)
        wide[name] = in_every_slot(name, dequantise_mxfp4(blocks, scales))
    shared: dict[str, Any] = {
        "hidden": HIDDEN, "width": WIDTH, "activation": ACTIVATION,
        "gate_up_bias": torch.randn(EXPERTS, 2 * WIDTH), "down_bias": torch.randn(EXPERTS, HIDDEN),
    }  # fmt: skip
    return PackedExperts(**stored, **shared), PackedExperts(**wide, **shared)


def in_every_slot(name: str, matrix: Tensor) -> Tensor:
    n, k = matrix.shape
    size = packed_size(n, k) if name == "down" else gate_up_size(n // 2, k)
    slots = zeros_in_huge_pages((EXPERTS, size), matrix.dtype)
    (pack if name == "down" else pack_gate_up)(matrix, slots[0])
    slots[1:] = slots[0]
    return slots


def packed_mib(experts: PackedExperts) -> float:
    tensors = (experts.gate_up, experts.down, experts.gate_up_scale, experts.down_scale)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) / 2**20


if __name__ == "__main__":
    main()
