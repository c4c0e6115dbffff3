"""The data of the page at /dashboard. Pure."""

import numpy as np
import pytest

from moe_serve.attention_dp.speculation import FORM, MTP, OWN, SHARED, SpeculationCounters
from moe_serve.engine.protocol.messages import Status
from moe_serve.engine.status import EngineCounters
from moe_serve.eplb.load import DecodeCounts, StepCounts
from moe_serve.errors import RequestError
from moe_serve.server.observe.dashboard import Seen, drafts_json, page_data, pages_json
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.ranks.rank_table import RankTable
from tests.server.observe.reports import Story


def test_a_page_gets_only_what_it_has_not_seen():
    book, workers = BalanceBook("dynamic"), RankTable(4)
    reports = list(Story(num_windows=30, shifts=(10,)).reports())
    for at_s, one in reports[:-3]:
        book.take(one, at_s)

    def ask(start: str, **seen: int):
        return page_data(workers, book, {}, "now", Seen(start, **seen), 5.0, None)

    first = ask("")
    assert len(first["points"]) == first["num_windows"] == book.num_windows
    assert len(first["events"]) == first["num_events"] == book.num_events >= 3
    assert first["placement"] == book.placement
    assert first["load"]["tokens"] == book.window.tokens
    assert first["phases"] == {"decode": book.window.tokens}
    now, before = (np.array(first["load"][name]) for name in ("traffic", "traffic_before"))
    assert now.shape == before.shape == (4, 4)
    assert now.sum(axis=0) == pytest.approx(np.sum(book.window.rank_load, axis=0), abs=4), "to the ranks of the experts"
    assert before.sum(axis=0).max() > now.sum(axis=0).max(), "the move evened it"
    seen = {"windows": first["num_windows"], "events": first["num_events"], "placements": first["num_placements"]}
    second = ask("now", **seen)
    assert (second["points"], second["events"], second["load"], second["placement"]) == ([], [], None, None)
    assert second["phases"] == {}
    for at_s, one in reports[-3:]:
        book.take(one, at_s)
    third = ask("now", **seen)
    assert len(third["points"]) == book.num_windows - first["num_windows"] > 0
    assert third["load"]["tokens"] == book.window.tokens
    assert ask("another start", **seen)["points"] == ask("")["points"]


def test_the_query_of_a_page_is_checked():
    assert Seen.from_query({"start": "a", "windows": "3", "t": "x"}) == Seen("a", 3, 0, 0)
    for text in ("", "-1", "1e3", "٣", "9" * 5000, "0x1"):
        with pytest.raises(RequestError, match="expected a whole number"):
            Seen.from_query({"windows": text})


def test_drafts_are_summed_over_ranks_and_left_out_where_no_rank_makes_any():
    def status(with_drafts: StepCounts, right: int) -> Status:
        counted = SpeculationCounters(3, [2], {OWN: 10, SHARED: 0, FORM: 4, MTP: 0}, {OWN: right, SHARED: 0, FORM: 4})
        counted.num_accepted[MTP] = 0
        decodes = DecodeCounts(with_drafts, StepCounts(10, 20, 20, 400))
        counters = counted.totals() | EngineCounters(decodes=decodes).totals() | {"speculation_saved_seconds": 0.5}
        return Status(0, 0, 7, 1, 0, 5, 10, 0, counters, [])

    both = drafts_json([status(StepCounts(4, 8, 16, 200), 5), status(StepCounts(1, 2, 4, 40), 6)])
    assert both == {
        "sources": {"own": [11, 20], "form": [8, 8]},
        "tokens_per_step": 1.2,
        "experts_per_token": {"with_drafts": 12.0, "without": 20.0},
        "saved_s": 1.0,
    }
    plain = Status(0, 0, 7, 1, 0, 5, 10, 0, EngineCounters().totals(), [])
    assert drafts_json([plain]) is None
    assert drafts_json([]) is None


def test_pages_are_summed_over_ranks_and_left_out_where_there_are_none():
    def status(**counters: float) -> Status:
        return Status(0, 0, 7, 1, 0, 5, 10, 0, {"num_steps": 7.0} | counters, [])

    both = pages_json([status(num_pages_late=1.0, num_pages_from_disk=4.0), status(num_pages_from_disk=2.0)])
    assert both == {"late": 1, "from_disk": 6}
    assert pages_json([status()]) is None
