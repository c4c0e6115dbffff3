"""The compiled attention, gate and norms of CPUs against torch.

    python -m benchmarks.cpu_attention [--rounds 15] [--threads 2] [--only decode]

Every round times all contestants of a case one after the other, each for the best of a few calls; ratios are medians
over rounds of ratios within a round, so that a busy machine slows both. torch is given its keys as it likes them: the
plan of a step is made beforehand, and in prefill the keys are gathered beforehand too. On a busy machine only
--threads 1 says something: with more, torch's calls wait for a thread that others keep from running.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.attention import AttentionShape, PagedAttention
from moe_serve.attention_dp.attention_plan import AttentionPlan, DecodeGroup
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.kernels.cpu.attention import AttendRows
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.cpu.tape import RecordedRun, RowInputs
from moe_serve.kernels.forms import AttendShape, RouterSpec
from moe_serve.kernels.numerics import FAST
from moe_serve.kernels.part_clock import PartClock
from moe_serve.kernels.topk_gate import topk_gate_reference

BLOCK = 16
MODELS = {
    "GQA 8/2 x 64 (bench model)": AttendShape(2, 4, 64, 0.125),
    "GQA 32/4 x 128 (Qwen3-30B)": AttendShape(4, 8, 128, 0.09),
    "MLA 16 x 576 (DeepSeek-V2-Lite)": AttendShape(1, 16, 576, 0.07, latent=512),
    "MLA 128 x 576 (DeepSeek-V3)": AttendShape(1, 128, 576, 0.07, latent=512),
}
Case = tuple[
    str, str, Callable[[], Any], str, Callable[[], Any]
]  # what, name and call of ours, name and call of torch's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("decode", "prefill", "rows"))
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(args.threads)
    cpu_library().set_threads(args.threads)
    groups = {"decode": decode_cases, "prefill": prefill_cases, "rows": row_cases}
    rows = []
    for name, cases in groups.items():
        if args.only in (None, name):
            rows += [measure(case, args.rounds) for case in cases()]
    notes = (
        f"{args.threads} threads each, float32, {args.rounds} rounds, built for {cpu_library().form}. Decode: one row "
        "per sequence; torch gathers keys and values, then bmm, softmax, bmm. Prefill: the last rows of a sequence; "
        "torch's fused attention over keys gathered beforehand. `speed-up` is the median of the ratios within a round, "
        "in brackets best call over best call."
    )
    text = save("cpu_attention", "Attention, gate and norms on CPU", rows, facts, notes, per_cpu=True)
    print(text)


def measure(case: Case, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    what, ours_name, ours, theirs_name, theirs = case
    calls = [calls_for(ours), calls_for(theirs)]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for side, call in enumerate((ours, theirs)):
            times[side].append(best_of(call, calls[side], clock))
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    best = min(times[1]) / min(times[0])
    row = {
        "what": what, "case": ours_name, "ours µs": statistics.median(times[0]) * 1e6, "against": theirs_name,
        "its µs": statistics.median(times[1]) * 1e6, "speed-up": f"{ratio:.2f} ({best:.2f})",
    }  # fmt: skip
    print(*row.values(), sep=" | ", flush=True)
    return row


def calls_for(call: Callable[[], Any]) -> int:
    """Returns how many calls fill about 5 ms."""
    call()
    return max(1, min(50, int(0.005 / best_of(call, 2))))


def best_of(call: Callable[[], Any], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    best = float("inf")
    for _ in range(calls):
        start = clock()
        call()
        best = min(best, clock() - start)
    return best


def layout_of(shape: AttendShape) -> KvLayout:
    if shape.latent is None:
        return KvLayout.gqa(shape.heads, shape.width)
    return KvLayout.mla(shape.latent, shape.width - shape.latent)


def filled_cache(shape: AttendShape, num_blocks: int) -> KvCache:
    cache = KvCache([layout_of(shape)], num_blocks, BLOCK, torch.float32, "cpu")
    cache.layer(0).normal_()
    return cache


def decode_cases() -> Iterator[Case]:
    for name, shape in MODELS.items():
        for num_keys in (128, 2048):
            for batch in (1, 16):
                yield decode_case(f"{name}, {num_keys} keys, batch {batch}", shape, num_keys, batch)


def decode_case(name: str, shape: AttendShape, num_keys: int, batch: int) -> Case:
    layout, per_seq = layout_of(shape), num_keys // BLOCK
    cache = filled_cache(shape, batch * per_seq)
    tables = torch.randperm(batch * per_seq).view(batch, per_seq)
    q = torch.randn(batch, shape.heads, shape.group, shape.width)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    rows = AttendRows([shape], torch.full((batch,), num_keys - 1), starts, tables.to(torch.int32), BLOCK)
    slots = (tables[:, :, None] * BLOCK + torch.arange(BLOCK)).view(batch, num_keys)
    mask = torch.zeros(batch * shape.heads, 1, num_keys)
    group = DecodeGroup(None, batch, num_keys, layout.gather_rows(slots), mask)
    plan = AttentionPlan((group,), (), (), batch)
    paged = PagedAttention(AttentionShape(layout, shape.group, shape.scale), FAST, torch.float32, "cpu")
    layer = cache.layer(0)
    ours = recorded(batch, lambda do: do.attend_rows(q, layer, shape), rows)
    torch.testing.assert_close(ours(), paged(q, cache, 0, plan), atol=1e-4, rtol=1e-3)
    return "decode", name, ours, "gather + bmm", lambda: paged(q, cache, 0, plan)


def recorded(
    num_rows: int, note: Callable[[Recorder], torch.Tensor], rows: AttendRows | None = None
) -> Callable[[], torch.Tensor]:
    """Returns what runs an operation as a step does: noted once, run at each call."""
    recorder = Recorder(cpu_library(), num_rows, PartClock())
    result = note(recorder)

    def run() -> torch.Tensor:
        recorder.run(RecordedRun(RowInputs(num_rows, attend=0 if rows is None else rows.address), 1, False))
        return result

    return run


def prefill_cases() -> Iterator[Case]:
    for name, shape in list(MODELS.items())[:3]:
        for context, length in ((0, 512), (0, 2048), (1536, 512)):
            if shape.latent is None or length < 2048:
                yield prefill_case(f"{name}, {length} tokens after {context}", shape, context, length)


def prefill_case(name: str, shape: AttendShape, context: int, length: int) -> Case:
    total = context + length
    cache = filled_cache(shape, total // BLOCK)
    table = torch.randperm(total // BLOCK)
    q = torch.randn(length, shape.heads, shape.group, shape.width)
    positions = torch.arange(context, total)
    starts = torch.tensor([0, length], dtype=torch.int32)
    rows = AttendRows([shape], positions, starts, table[None].to(torch.int32), BLOCK)
    slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).view(1, total)
    keys, values = cache.gather(0, layout_of(shape).gather_rows(slots), 1)
    if shape.latent is not None:
        values = keys  # torch's fused attention needs one width
    keys, values = (x[0][:, None].expand(-1, shape.group, -1, -1) for x in (keys, values))
    mask = None
    if context:
        mask = torch.zeros(1, 1, length, total).masked_fill_(torch.arange(total) > positions[:, None], -torch.inf)
    layer = cache.layer(0)

    def fused() -> torch.Tensor:
        queries = q.permute(1, 2, 0, 3)
        out = functional.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=shape.scale
        )
        return out.permute(2, 0, 1, 3)[..., : shape.value_width]

    ours = recorded(length, lambda do: do.attend_rows(q, layer, shape), rows)
    torch.testing.assert_close(ours(), fused(), atol=1e-4, rtol=1e-3)
    return "prefill", name, ours, "scaled_dot_product_attention", fused


def row_cases() -> Iterator[Case]:
    routers = {
        "softmax, 16 x 32, top 4": (16, RouterSpec(32, 4)),
        "softmax, 16 x 128, top 8": (16, RouterSpec(128, 8)),
        "sigmoid with groups, 64 x 256, top 8": (
            64, RouterSpec(256, 8, "sigmoid", True, 2.5, num_groups=8, topk_groups=4, norm_eps=1e-20),
        ),
    }  # fmt: skip
    for name, (rows, spec) in routers.items():
        logits = torch.randn(rows, spec.num_logical)
        yield "gate", name, gate_call(logits, spec), "torch.topk alone", topk_call(logits, spec.topk)
        yield "gate", name, gate_call(logits, spec), "the gate in torch", plain_gate_call(logits, spec)
    for rows, width in ((1, 512), (16, 512), (16, 2048), (512, 2048)):
        x, weight, delta = torch.randn(rows, width), torch.randn(width), torch.zeros(rows, width)
        name = f"{rows} x {width}"
        yield "norm", name, *norm_calls(x, weight)
        yield "norm with residual", name, *residual_calls(x, delta, weight)


def gate_call(logits: torch.Tensor, spec: RouterSpec) -> Callable[[], Any]:
    load = torch.zeros(logits.shape[1], dtype=torch.int64)
    return recorded(len(logits), lambda do: do.gate(logits, None, spec, load)[0])


def topk_call(logits: torch.Tensor, topk: int) -> Callable[[], Any]:
    return lambda: logits.topk(topk, -1)


def plain_gate_call(logits: torch.Tensor, spec: RouterSpec) -> Callable[[], Any]:
    load = torch.zeros(logits.shape[1], dtype=torch.int64)
    return lambda: topk_gate_reference(logits, None, spec, load)


def norm_calls(x: torch.Tensor, weight: torch.Tensor) -> tuple[Callable[[], Any], str, Callable[[], Any]]:
    width = (x.shape[1],)
    ours = recorded(len(x), lambda do: do.rms_norm(x, weight, 1e-6))
    return ours, "rms_norm", lambda: functional.rms_norm(x, width, weight, 1e-6)


def residual_calls(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
) -> tuple[Callable[[], Any], str, Callable[[], Any]]:
    width = (x.shape[1],)

    def theirs() -> torch.Tensor:
        return functional.rms_norm(x.add_(delta), width, weight, 1e-6)

    ours = recorded(len(x), lambda do: do.add_rms_norm(x, delta, weight, 1e-6))
    return ours, "add_, rms_norm", theirs


if __name__ == "__main__":
    main()
