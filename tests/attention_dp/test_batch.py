"""ForwardBatch: which token is in which row, and the slot it is written to."""

import random

import pytest
import torch

from moe_serve.attention_dp.batch import BatchBuilder, ForwardBatch
from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.sequence_states import copies_of
from tests.attention_dp.steps import tables_of


def request(name: str, prompt: list[int], blocks: list[int], output: tuple[int, ...] = ()) -> Request:
    return Request(name, 0, prompt, list(output), SamplingParams(), 0, block_ids=blocks)


def test_rows_of_a_mixed_batch_are_worked_out_by_hand() -> None:
    prefill = request("prefill", list(range(100, 110)), [7, 2, 4])  # blocks of 4 tokens
    decode = request("decode", [50, 51, 52], [9, 1], (60, 61))
    chunks = [ScheduledChunk(prefill, 3, 5, False), ScheduledChunk(decode, 4, 1, True)]
    tables = tables_of(4, [decode, prefill])
    batch = ForwardBatch.build(chunks, tables, "cpu", Numerics(row_tile=4))
    assert batch.input_ids.tolist() == [61, 103, 104, 105, 106, 107, 0, 0]
    assert batch.positions.tolist() == [4, 3, 4, 5, 6, 7, 0, 0]
    assert batch.slot_mapping.tolist() == [4, 31, 8, 9, 10, 11, -1, -1]
    assert batch.block_tables[:, :2].tolist() == [[9, 1], [7, 2]]
    assert batch.query_starts.tolist() == [0, 1, 6]
    assert batch.seq_lens.tolist() == list(batch.host_seq_lens) == [5, 8]
    assert batch.host_query_lens == (1, 5)
    assert batch.logit_rows.tolist() == [0, 5]
    assert (batch.num_tokens, batch.num_decodes, batch.num_padded) == (6, 1, 8)


def test_logit_rows_follow_the_chunks_first_those_that_sample() -> None:
    last = request("last", list(range(10)), [0, 1, 2])
    plain = request("plain", [1, 2], [3], (5,))
    again = request("again", [1, 2], [4, 5], (6, 7, 8))
    first = request("first", list(range(10)), [6])
    chunks = [
        ScheduledChunk(first, 0, 2, False), ScheduledChunk(last, 6, 4, True), ScheduledChunk(plain, 2, 1, True),
        ScheduledChunk(again, 2, 3, True),
    ]  # fmt: skip
    batch = ForwardBatch.build(chunks, tables_of(4, [first, last, plain, again]), "cpu", FAST)
    assert batch.input_ids.tolist() == [5, 0, 1, 6, 7, 8, 6, 7, 8, 9]
    assert batch.logit_rows.tolist() == [9, 0, 5, 2]
    assert batch.num_decodes == 1


def test_halves_of_a_chunk_with_drafts_keep_the_state_behind_each_row_once() -> None:
    drafting, decode = request("drafting", [1, 2], [0, 1], (5,)), request("decode", [3, 4], [2], (6,))
    drafting.state_slot = drafting.state_from = 0
    drafting.draft_slots, decode.state_slot, decode.state_from = [5, 6, 7, 0], 1, 1
    chunks = [ScheduledChunk(drafting, 2, 4, True, (7, 8, 9)), ScheduledChunk(decode, 2, 1, True)]
    batch = ForwardBatch.build(chunks, tables_of(4, [drafting, decode]), "cpu", FAST)
    first, second = batch.halves(FAST)  # of three rows and two
    wanted = (batch, [[1, 1], [0, 0, 5, 6, 7]]), (first, [[1, 1], [0, 0, 5, 6]]), (second, [[0, 0, 7]])
    for part, rows in wanted:
        assert part.state_slots is not None
        lens = part.host_query_lens
        found = [[*row[:2], *(to for after, to in copies_of(row).items() if after <= length)]
                 for row, length in zip(part.state_slots.tolist(), lens, strict=True)]  # fmt: skip
        assert found == rows


@pytest.mark.parametrize("numerics", [FAST, Numerics(row_tile=4)], ids=["fast", "invariant"])
def test_the_empty_batch_has_every_field_with_no_rows(numerics: Numerics) -> None:
    batch = ForwardBatch.empty("cpu", numerics)
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "logit_rows"):
        tensor = getattr(batch, name)
        assert tensor.dtype == torch.int64
        assert tensor.shape[0] == 0
    assert batch.block_tables.dtype == batch.query_starts.dtype == torch.int32
    assert batch.block_tables.shape[0] == 0
    assert batch.query_starts.tolist() == [0]
    assert (batch.num_tokens, batch.num_decodes, batch.num_padded) == (0, 0, 0)


def test_a_batch_in_the_memory_of_the_one_before_is_as_one_in_new_memory() -> None:
    draw = random.Random(7)
    requests = [
        request(str(i), list(range(20 * i, 20 * i + 20)), [5 * i + j for j in range(5)], (i,)) for i in range(6)
    ]
    tables = tables_of(4, requests)
    builder = BatchBuilder(tables, "cpu", Numerics(row_tile=4))
    for step in range(60):
        _change_blocks(tables, draw.sample(requests, draw.randrange(4)), draw)
        lens = [draw.choice((1, 1, 1, 2, 7)) if step % 3 else 1 for _ in requests[: draw.choice((0, 3, 3, 6))]]
        starts = [draw.randrange(21 - length) for length in lens]
        chunks = [ScheduledChunk(*chunk, draw.random() < 0.7) for chunk in zip(requests, starts, lens, strict=False)]
        kept, new = builder.build(chunks), ForwardBatch.build(chunks, tables, "cpu", Numerics(row_tile=4))
        for field, mine, other in zip(ForwardBatch._fields, kept, new, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other, field
        placed = [(chunk.start, chunk.request.token_ids(chunk.start, chunk.start + 1)[0]) for chunk in chunks]
        if all(length == 1 for length in lens):
            rows = zip(kept.positions[: len(chunks)].tolist(), kept.input_ids[: len(chunks)].tolist(), strict=True)
            assert list(rows) == placed


def _change_blocks(tables: BlockTables, changing: list[Request], draw: random.Random) -> None:
    """Lets requests grow, swap blocks as by a found prefix, and leave and come back, also in each other's rows."""
    leaving = []
    for request in changing:
        blocks = [draw.randrange(100) for _ in range(5)]
        match draw.randrange(3):
            case 0:
                tables.extend(request, blocks[: draw.randrange(3)])
            case 1:
                tables.replace(request, draw.randrange(3), blocks[:2])
            case 2:
                tables.drop(request)
                leaving.append((request, blocks))
    for request, blocks in leaving:
        tables.extend(request, blocks)
