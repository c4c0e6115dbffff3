"""The declaration of what transports can do: one rule each, with its fix, and the documents say the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from moe_serve.config import load_config
from moe_serve.dispatch.capabilities import TRANSPORTS, Backend, Wanted, problems, refusals, transports_of
from moe_serve.errors import ConfigError

GUIDE = Path(__file__).parents[2] / "docs" / "communication.md"


@pytest.mark.parametrize("backend", get_args(Backend))
def test_every_backend_has_a_transport_somewhere(backend: str) -> None:
    found = {name for device in ("cpu", "cuda") for ranks in (1, 2) for name in transports_of(backend, device, ranks)}
    assert found
    assert found <= TRANSPORTS.keys()
    assert any(not problems(name, Wanted(n, d)) for name in found for n in (1, 2) for d in ("cpu", "cuda"))


def test_every_transport_serves_what_it_declares_and_refuses_the_rest() -> None:
    for name, can in TRANSPORTS.items():
        wanted = Wanted(max(2, can.min_ranks) if can.max_ranks != 1 else 1, min(can.devices))
        assert problems(name, wanted) == [], name
        for rows in ("packed", "masked"):
            assert (problems(name, replace(wanted, rows=rows)) == []) == (rows in can.rows), (name, rows)
        for combine in ("ordered", "rank_sum"):
            assert (problems(name, replace(wanted, combine=combine)) == []) == (combine in can.combine), (name, combine)
        assert (problems(name, replace(wanted, batch_invariant=True)) == []) == can.bitwise, name


@pytest.mark.parametrize(
    "changes",
    [{"num_ranks": 1}, {"num_ranks": 63}, {"rows": "packed"}, {"rows": "masked"}, {"combine": "rank_sum"},
     {"device": "cpu"}, {"batch_invariant": True}, {"combine": "rank_sum", "batch_invariant": True}],
)  # fmt: skip
def test_every_refusal_names_its_fix(changes: dict[str, Any]) -> None:
    refused = [text for name in TRANSPORTS for text in problems(name, replace(Wanted(4, "cuda"), **changes))]
    assert refused
    assert all("; set dispatch." in text or "backend: auto" in text for text in refused), refused


def test_a_backend_is_refused_only_where_no_device_can_do_it() -> None:
    unknown = Wanted(2, "auto", rows="packed")
    assert refusals("low_latency", unknown) == []
    assert refusals("low_latency", replace(unknown, device="cuda"))
    assert refusals("auto", replace(unknown, device="cuda")) == []


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["dispatch.backend=collective", "dispatch.rows=masked"], "set dispatch.rows: auto, or dispatch.backend: low"),
        (["dispatch.backend=deepep", "dispatch.rows=packed"], "deepep chooses the form of rows itself; set"),
        (["dispatch.backend=deepep", "engine.numerics=batch_invariant"], "in an order of its own, .*backend: auto"),
        (["dispatch.combine=rank_sum", "engine.numerics=batch_invariant"], "set dispatch.combine: ordered, or engine"),
        (["dispatch.combine=rank_sum", "dispatch.backend=deepep"], "deepep adds results its own way; set"),
        (["dispatch.backend=low_latency", "parallel.num_ranks=63", "parallel.device=cpu"], "joins up to 62 CPU ranks"),
        (["dispatch.backend=local"], "local serves one rank: set dispatch.backend: auto"),
    ],
)
def test_the_configuration_refuses_what_no_transport_can_do(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=["parallel.num_ranks=2", *overrides])


def test_the_guide_has_the_table_of_the_declaration() -> None:
    rows = ["| transport | `dispatch.backend` | devices | ranks | rows | combine | bitwise | lost rank | handles |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, can in TRANSPORTS.items():
        most = "any number" if can.max_ranks is None else f"up to {can.max_ranks}"
        ranks = "1" if can.max_ranks == 1 else f"{can.min_ranks} or more" if most == "any number" else most
        cells = [
            f"`{name}`", f"`{can.backend}`", ", ".join(sorted(can.devices)), ranks,
            ", ".join(sorted(can.rows)) or "its own choice", ", ".join(sorted(can.combine)),
            "yes" if can.bitwise else "no", "goes on" if can.survives_lost_rank else "ends serving",
            str(can.live_handles),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    assert table in GUIDE.read_text(encoding="utf-8"), f"docs/communication.md needs this table:\n{table}"
