"""The report of a rank: all its totals under their own names."""

from types import SimpleNamespace
from typing import Any, cast

from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.engine.recovery.recovery import Recovery
from moe_serve.engine.status import EngineCounters, totals_of


def test_the_outcomes_of_the_exact_split_are_told_where_it_serves() -> None:
    blocks = RequestBlocks(num_blocks=4, block_size=2, prefix_cache=False)
    scheduler = Scheduler(blocks, max_running=2, max_batch_tokens=4, max_model_len=8)
    counters, recovery = EngineCounters(num_forwards=3), Recovery(cast(Any, SimpleNamespace()), "there is one rank")
    without = totals_of(counters, recovery, scheduler, [])
    assert (without["num_forwards"], without["num_voided_steps"]) == (3, 0)
    assert not [name for name in without if name.startswith("num_splits")]
    totals = totals_of(counters, recovery, scheduler, [5, 2, 1])
    told = {name: total for name, total in totals.items() if name.startswith("num_splits")}
    assert told == {"num_splits_proven": 5, "num_splits_repaired": 2, "num_splits_unproven": 1}
