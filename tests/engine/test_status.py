"""The report of a rank: all its totals under their own names."""

from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.engine.status import EngineCounters, make_status


def test_the_outcomes_of_the_exact_split_are_told_where_it_serves() -> None:
    blocks = RequestBlocks(num_blocks=4, block_size=2, prefix_cache=False)
    scheduler = Scheduler(blocks, max_running=2, max_batch_tokens=4, max_model_len=8)
    counters = EngineCounters(num_forwards=3)
    without = make_status(1, 0, 7, scheduler, counters, [0.5, 0.0])
    assert without.counters["num_forwards"] == 3
    assert not [name for name in without.counters if name.startswith("num_splits")]
    status = make_status(1, 0, 7, scheduler, counters, [0.5, 0.0], [5, 2, 1])
    told = {name: status.counters[name] for name in status.counters if name.startswith("num_splits")}
    assert told == {"num_splits_proven": 5, "num_splits_repaired": 2, "num_splits_unproven": 1}
