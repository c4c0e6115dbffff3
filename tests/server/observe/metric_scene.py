"""A served system that has something to show in each of its metrics."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from moe_serve.attention_dp.pages import COUNTERS
from moe_serve.attention_dp.speculation import FORM, OWN, SHARED, SpeculationCounters
from moe_serve.engine.protocol.messages import STEP_BOUNDS_S, PhaseTimes, Status
from moe_serve.engine.status import EngineCounters
from moe_serve.eplb.load import DecodeCounts, StepCounts
from moe_serve.server.observe import metrics
from tests.server.observe.reports import Story
from tests.server.served import serving, until


async def all_families(names: str = "") -> dict[str, Metric]:
    """Returns the metric families of /metrics by name, each with samples. names: of the query"""
    story = Story(num_windows=20, shifts=(8,))

    degrade = "server.degrade=[{above: 0.5, max_new_tokens: 64}]"
    async with serving(2, "eplb.mode=dynamic", degrade, info=story.info) as served:
        for _, report in story.reports():
            served.workers[0].say(report)
        times = PhaseTimes(1.0, [1] * (len(STEP_BOUNDS_S) + 1), {"attention": 1.0})
        counters = {f"num_splits_{outcome}": 1.0 for outcome in ("proven", "repaired", "unproven")}
        counters |= {f"num_choices_{outcome}": 1.0 for outcome in ("moved", "dropped")}
        counters |= {f"num_pages_{fate}": 1.0 for fate in COUNTERS}
        counters |= SpeculationCounters(1, [5, 3], {OWN: 4, SHARED: 2, FORM: 6}, {OWN: 3, SHARED: 0, FORM: 5}).totals()
        counters |= EngineCounters(decodes=DecodeCounts(StepCounts(2, 3, 9, 70), StepCounts(4, 5, 5, 60))).totals()
        counters["speculation_saved_seconds"] = 0.25
        for worker in served.workers:
            waited_s, logged = [0.5, 0.5], {"warning": 1, "error": 0}
            told = counters, waited_s, 1, 1, logged, {"decode": times}, 0.5
            worker.say(Status(worker.rank, 0, 7, 1, 0, 5, 10, 0, *told))
        await until(lambda: served.bridge.balance.num_windows == story.num_windows)
        await until(lambda: all(view.status for view in served.bridge.workers))
        for name in (*metrics._BALANCE_TOTALS, *metrics._BALANCE_GAUGES):
            served.bridge.balance.totals.setdefault(name, 1.0)
        served.bridge.book._capacity.routes["prefill"] += 1
        await served.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 3})
        text = (await served.client.get("/metrics", params={"names": names} if names else {})).text
    return {family.name: family for family in text_string_to_metric_families(text)}
