"""BlockTables: rows that grow with their requests, and are used again."""

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.kernels.numerics import FAST
from tests.attention_dp.steps import make_request


def test_rows_and_lists_agree_while_requests_grow_end_and_come() -> None:
    tables = BlockTables(4)
    requests = [make_request(str(i)) for i in range(40)]  # more than the table has rows at first
    for turn in range(5):
        for i, request in enumerate(requests):
            tables.extend(request, [1000 * i + 10 * turn + j for j in range(i % 6)])  # also none, also past its width
        tables.check(requests)
        for request in requests[turn::7]:
            tables.drop(request)
            assert request.block_ids == []
        tables.check(requests)


def test_what_an_earlier_request_left_in_a_row_is_not_seen() -> None:
    tables = BlockTables(4)
    old, new, long = make_request("old"), make_request("new"), make_request("long", num_prompt=12)
    tables.extend(old, [9, 8, 7])
    row = old.table_row
    tables.drop(old)
    tables.extend(new, [5])
    tables.extend(long, [1, 2, 3])
    assert new.table_row == row
    chunks = [ScheduledChunk(new, 3, 1, False), ScheduledChunk(long, 10, 2, True)]
    batch = ForwardBatch.build(chunks, tables, "cpu", FAST)
    assert batch.block_tables[0, 0] == 5
    assert batch.block_tables[1, :3].tolist() == [1, 2, 3]
    assert batch.slot_mapping.tolist() == [23, 14, 15]
