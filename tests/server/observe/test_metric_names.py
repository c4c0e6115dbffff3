"""The page, the board and the alerts name the metrics that a front end has, with their labels; and all of them."""

import asyncio
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from tests.server.observe.metric_scene import all_families

ROOT = Path(__file__).parents[3]
PAGE, ALERTS = ROOT / "docs" / "metrics.md", ROOT / "deploy" / "prometheus" / "alerts.yaml"
BOARD = ROOT / "deploy" / "grafana" / "moe_serve.json"
OF_PROMETHEUS = {"instance", "job"}  # labels that it adds itself
NAME = re.compile(r"\b(?:moe_serve|process)_\w+")


@cache
def families() -> dict[str, Metric]:
    return asyncio.run(all_families())


def labels_of_samples() -> dict[str, set[str]]:
    """The labels of each series, by its name."""
    found: dict[str, set[str]] = {}
    for family in families().values():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def row(name: str, family: Metric) -> str:
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    shown = name + ("_total" if family.type == "counter" else "")
    return f"| `{shown}` | {family.type} | {', '.join(labels)} | {family.documentation} |"


def expressions() -> dict[str, str]:
    """PromQL by the panel or the alert that asks it."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    found = {
        f"{panel['title']}, {target['legendFormat']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return found | {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def test_the_page_has_a_row_for_every_metric() -> None:
    rows = [row(name, family) for name, family in families().items()]
    written = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in rows if line not in written] == []
    listed = {line.split("`")[1] for line in written if re.match(r"\| `(moe_serve|process)_", line)}
    assert listed == {line.split("`")[1] for line in rows}, "and none for what is no metric"


def test_every_metric_says_what_it_is_and_has_samples() -> None:
    for name, family in families().items():
        assert family.documentation.endswith(".") or name.startswith("moe_serve"), name
        assert family.samples, name
        assert family.type in ("counter", "gauge", "histogram"), name


@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_the_page_names_those_of_a_peer(peer: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    theirs = [name for name in asyncio.run(all_families(peer)) if name.startswith(f"{peer}:")]
    assert len(theirs) > 8
    assert [name for name in theirs if not re.search(rf"`{name.partition(':')[2]}(_total)?`", text)] == []


def test_board_and_alerts_ask_for_series_and_labels_that_exist() -> None:
    known = labels_of_samples()
    for who, expression in expressions().items():
        names = NAME.findall(expression)
        assert names or "up{" in expression, who
        assert [name for name in names if name not in known] == [], who
        labels = set().union(OF_PROMETHEUS, *(known[name] for name in names))
        grouped = {label.strip() for each in re.findall(r"by \(([^)]*)\)", expression) for label in each.split(",")}
        chosen = set(re.findall(r"[{,]\s*(\w+)=", expression))
        assert grouped | chosen <= labels, who
        assert expression.count("(") == expression.count(")"), who


def test_legends_name_labels_that_their_query_keeps() -> None:
    for who, expression in expressions().items():
        legend = set(re.findall(r"{{(\w+)}}", who))
        kept = {label.strip() for each in re.findall(r"by \(([^)]*)\)", expression) for label in each.split(",")}
        assert legend <= (kept or {"instance"}), who


def test_the_board_shows_every_metric_of_ranks_and_requests() -> None:
    asked = set().union(*(NAME.findall(expression) for expression in expressions().values()))
    left_out = {"moe_serve_degradation_steps"}  # which of them are taken shows in the calls that they change
    for name, family in families().items():
        if name.startswith("moe_serve_") and not name.startswith("moe_serve_eplb") and name not in left_out:
            assert asked & {sample.name for sample in family.samples}, name


def test_the_board_is_the_one_that_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_grafana_board", ROOT / "tools" / "make_grafana_board.py")
    assert spec is not None
    assert spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert BOARD.read_text(encoding="utf-8") == made.as_text(), "run python tools/make_grafana_board.py"
    panels = json.loads(made.as_text())["panels"]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({place[2:] for place in places}) == len(places), "no panel lies on another"
