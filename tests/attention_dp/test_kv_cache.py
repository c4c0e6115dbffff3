"""The paged cache: rows by slot, and sizes."""

import os
import sys
from pathlib import Path

import pytest
import torch

from moe_serve.attention_dp.kv_cache import KvCache, KvLayout, bytes_per_block
from moe_serve.errors import CapacityError

LAYOUTS = (KvLayout.gqa(2, 4), KvLayout.mla(6, 2))


def rows_for(layout: KvLayout, ids: list[int]) -> torch.Tensor:
    """Returns rows that identify themselves: token id, then position in the row."""
    heads, width = layout.row_shape
    place = torch.arange(heads * width).view(heads, width) / 1000
    return torch.tensor(ids, dtype=torch.float32)[:, None, None] + place


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
def test_what_is_written_to_a_slot_is_gathered_from_it(layout: KvLayout) -> None:
    cache = KvCache([layout, layout], 4, 4, torch.float32, "cpu")
    slots = [5, 0, 15, 9]
    rows = rows_for(layout, slots)
    cache.layer(1)[slots] = rows
    keys, values = cache.gather(1, layout.gather_rows(torch.tensor([[15, 5], [9, 0]])), 2)
    assert keys.shape == (2, layout.num_heads, 2, layout.width)
    for seq, tokens in enumerate(((15, 5), (9, 0))):
        for place, slot in enumerate(tokens):
            row = rows[slots.index(slot)]
            if layout.kind == "gqa":
                assert torch.equal(keys[seq, :, place], row[:2])
                assert torch.equal(values[seq, :, place], row[2:])
            else:
                assert torch.equal(keys[seq, 0, place], row[0])
                assert torch.equal(values[seq, 0, place], row[0, :6])
    assert not cache.gather(0, layout.gather_rows(torch.arange(16)[None]), 1)[0].any(), "another layer was written"


def test_padding_rows_touch_no_block() -> None:
    layout = LAYOUTS[0]
    cache = KvCache([layout], 2, 4, torch.float32, "cpu")
    cache.layer(0)[[3, -1, -1]] = rows_for(layout, [3, 7, 8])
    keys, values = cache.gather(0, layout.gather_rows(torch.arange(8)[None]), 1)
    whole = torch.cat((keys, values), 1)[0].transpose(0, 1)
    assert torch.equal(whole[3], rows_for(layout, [3])[0])
    assert not whole[[0, 1, 2, 4, 5, 6, 7]].any()


def test_bytes_per_block_are_those_of_the_tensors() -> None:
    blocks = [torch.empty(5, *layout.row_shape, dtype=torch.bfloat16) for layout in LAYOUTS]
    assert bytes_per_block(LAYOUTS, 5, torch.bfloat16) == sum(block.nbytes for block in blocks)


def test_a_cache_that_does_not_fit_says_which_setting_to_lower() -> None:
    with pytest.raises(CapacityError, match=r"lower cache\.num_blocks"):
        KvCache(LAYOUTS, 1 << 50, 16, torch.float32, "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_touched_pool_is_there_before_a_block_is_written() -> None:
    cache = KvCache([KvLayout.gqa(2, 64)] * 2, 2048, 16, torch.float32, "cpu")
    num_bytes = 2048 * cache.page_bytes

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    cache.touch()
    assert resident_bytes() - before > num_bytes // 2, "of 64 MiB; torch and Python may give some of theirs back"
    assert not cache.layer(0).any()
