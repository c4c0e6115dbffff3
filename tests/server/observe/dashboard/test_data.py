"""The data of the page at /dashboard. Pure."""

import pytest

from moe_serve.errors import RequestError
from moe_serve.server.observe.dashboard import Seen, page_data
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.ranks.rank_table import RankTable
from tests.server.observe.reports import Story


def test_a_page_gets_only_what_it_has_not_seen():
    book, workers = BalanceBook("dynamic"), RankTable(4)
    reports = list(Story(num_windows=30, shifts=(10,)).reports())
    for at_s, one in reports[:-3]:
        book.take(one, at_s)

    def ask(start: str, **seen: int):
        return page_data(workers, book, {}, "now", Seen(start, **seen), 5.0)

    first = ask("")
    assert len(first["points"]) == first["num_windows"] == book.num_windows
    assert len(first["events"]) == first["num_events"] == book.num_events >= 3
    assert first["placement"] == book.placement
    assert first["load"]["tokens"] == book.window.tokens
    seen = {"windows": first["num_windows"], "events": first["num_events"], "placements": first["num_placements"]}
    second = ask("now", **seen)
    assert (second["points"], second["events"], second["load"], second["placement"]) == ([], [], None, None)
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
