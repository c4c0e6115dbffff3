"""Paged attention against the plain formula, for both layouts, in groups and in chunks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_serve.attention_dp import attention_plan
from moe_serve.attention_dp.attention import Attention, AttentionShape, PagedAttention, attention_reference
from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.kernels.numerics import FAST, Numerics
from tests.attention_dp.steps import tables_of
from tests.tolerance import FLOAT32, relative_error

BLOCK_SIZE = 4
SCALE = 0.3
LAYOUTS = {"gqa": (KvLayout.gqa(2, 8), 3), "mha": (KvLayout.gqa(3, 8), 1), "mla": (KvLayout.mla(12, 4), 5)}
MODES = {"fast": FAST, "invariant": Numerics(row_tile=4, kv_tile=16)}
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
# layout, group, window, whether heads have sinks, chunk
SEEING = {
    "window 6 and sinks": (*LAYOUTS["gqa"], 6, True, None),
    "window 1": (*LAYOUTS["gqa"], 1, False, None),
    "window 17": (*LAYOUTS["mha"], 17, False, None),
    "chunks of 5": (*LAYOUTS["gqa"], None, False, 5),
    "chunks of 17 and sinks": (*LAYOUTS["gqa"], None, True, 17),
    "sinks": (*LAYOUTS["mha"], None, True, None),
    "window 6, sinks and narrower values": (KvLayout.gqa(2, 8, 5), 3, 6, True, None),
}
# (start, length) of every sequence: decodes of very different lengths, a whole prompt, a chunk behind a prefix
CASES = {
    "decodes": [(0, 1), (40, 1), (17, 1), (3, 1)],
    "one decode": [(30, 1)],
    "prefills": [(0, 19), (16, 9), (31, 2)],
    "mixed": [(5, 12), (63, 1), (0, 33), (2, 1), (15, 1)],
}


def run(
    layout: KvLayout,
    group: int,
    numerics: Numerics,
    case: list[tuple[int, int]],
    stale: float = 0.0,
    fault: tuple[int, float] | None = None,
    window: int | None = None,
    chunk: int | None = None,
    has_sinks: bool = False,
    make: Callable[..., Attention] = PagedAttention,
) -> tuple[Tensor, Tensor]:
    """Returns (what attention made by `make` gives, what the reference gives), real rows only.

    stale: what slots hold that no sequence has written;  fault: (sequence, value of one element of its first row)
    window, chunk, has_sinks: as layers have them
    """
    generator = torch.Generator().manual_seed(0)
    cache = KvCache([layout], 64, BLOCK_SIZE, torch.float32, "cpu")
    cache.layer(0).fill_(stale)
    free = list(range(63, -1, -1))
    chunks = []
    rows = {}
    for i, (start, length) in enumerate(case):
        end = start + length
        blocks = [free.pop((7 * len(free)) // 11) for _ in range(-(-end // BLOCK_SIZE))]
        rows[str(i)] = torch.randn(end, *layout.row_shape, generator=generator)
        if fault is not None and fault[0] == i:
            rows[str(i)][0, -1, 0] = fault[1]
        slots = [blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(end)]
        cache.layer(0)[slots] = rows[str(i)]
        request = Request(str(i), 0, [0] * end, [], SamplingParams(), 0, block_ids=blocks)
        chunks.append(ScheduledChunk(request, start, length, False))
    tables = tables_of(BLOCK_SIZE, [chunk.request for chunk in chunks])
    batch = ForwardBatch.build(chunks, tables, "cpu", numerics)
    q = torch.randn(batch.num_padded, layout.num_heads, group, layout.width, generator=generator)
    shape = AttentionShape(layout, group, SCALE, has_sinks=has_sinks)
    sinks = torch.linspace(-2, 3, layout.num_heads * group) if has_sinks else None
    attention = make(shape, numerics, torch.float32, "cpu")
    got = attention(q, cache, 0, attention.plan(batch, window, chunk), sinks)
    assert got.shape == (*q.shape[:-1], layout.value_width)
    wanted = []
    row = 0
    for each in sorted(chunks, key=lambda c: c.length):
        both = rows[each.request.request_id].transpose(0, 1)
        keys, values = (both, both[..., : layout.value_width])
        if layout.kind == "gqa":
            keys, values = both[: layout.num_heads], both[layout.num_heads :, :, : layout.value_width]
        mine = q[row : row + each.length]
        wanted.append(attention_reference(mine, keys, values, SCALE, each.start, window, sinks, chunk))
        row += each.length
    return got[:row], torch.cat(wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_paged_attention_matches_the_formula(kind: str, case: str, mode: str) -> None:
    got, wanted = run(*LAYOUTS[kind], MODES[mode], CASES[case])
    assert relative_error(got, wanted) < FLOAT32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", SEEING)
def test_windows_and_sinks_match_the_formula_whatever_freed_blocks_hold(kind: str, case: str, mode: str) -> None:
    layout, group, window, has_sinks, chunk = SEEING[kind]
    seeing = {"window": window, "has_sinks": has_sinks, "chunk": chunk}
    got, wanted = run(layout, group, MODES[mode], CASES[case], **seeing)
    assert relative_error(got, wanted) < FLOAT32
    dirty, _ = run(layout, group, MODES[mode], CASES[case], stale=float("nan"), **seeing)
    assert torch.equal(got, dirty)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_freed_blocks_and_slot_tails_hold_changes_no_bit(kind: str, case: str, mode: str, value: float) -> None:
    layout, group = LAYOUTS[kind]
    clean, _ = run(layout, group, MODES[mode], CASES[case])
    dirty, _ = run(layout, group, MODES[mode], CASES[case], stale=value)
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_fault_in_one_sequences_cache_changes_no_bit_of_the_others(
    kind: str, case: str, mode: str, value: float
) -> None:
    layout, group = LAYOUTS[kind]
    lengths = [length for _, length in CASES[case]]
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])  # rows of the batch
    clean, _ = run(layout, group, MODES[mode], CASES[case])
    for faulty in range(len(lengths)):
        dirty, _ = run(layout, group, MODES[mode], CASES[case], fault=(faulty, value))
        for seq, before, after in zip(order, clean.split(sorted(lengths)), dirty.split(sorted(lengths)), strict=True):
            if seq != faulty:
                assert torch.equal(before, after), f"sequence {seq} reads the cache of sequence {faulty}"
            else:
                assert not after[-1].isfinite().all(), "the fault is hidden"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_decodes_of_different_length_go_in_groups(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "ALWAYS_TOGETHER", 2)
    layout, group = LAYOUTS[kind]
    case = [(0, 1), (60, 1), (17, 1), (3, 1), (55, 1), (20, 1)]
    got, wanted = run(layout, group, MODES[mode], case)
    assert relative_error(got, wanted) < FLOAT32
    lens = tuple(start + 1 for start, _ in case)
    batch = ForwardBatch.empty("cpu", FAST)
    groups = attention_plan.groups_of(_with_lens(batch, lens), layout)
    assert [list(g) for g in groups] == [[1, 4], [5, 2], [3], [0]]


def test_a_group_is_cut_before_its_copy_of_the_cache_grows_large(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["gqa"][0]
    monkeypatch.setattr(attention_plan, "LARGEST_GATHER", 3 * 10 * layout.elements_per_token)
    groups = attention_plan.groups_of(_with_lens(ForwardBatch.empty("cpu", FAST), (10,) * 8), layout)
    assert sorted(map(len, groups)) == [2, 3, 3]


def _with_lens(batch: ForwardBatch, lens: tuple[int, ...]) -> ForwardBatch:
    return batch._replace(host_seq_lens=lens, host_query_lens=(1,) * len(lens), num_decodes=len(lens))
