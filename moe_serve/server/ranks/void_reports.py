"""One sentence on why a step was void, from what all ranks report of it."""

from collections.abc import Callable, Collection, Iterable

from moe_serve.engine.protocol.messages import Voided
from moe_serve.errors import name_ranks

HostOf = Callable[[int], str]


class VoidReports:
    """The reports of the void step, until all ranks that go on have reported."""

    def __init__(self) -> None:
        self._reports: dict[int, Voided] = {}

    def add(self, report: Voided) -> None:
        """Takes a rank's report; of several the last."""
        self._reports[report.rank] = report

    def settle(self, members: Collection[int], host_of: HostOf) -> str | None:
        """Returns the sentence once all ranks that go on have reported, and forgets the reports; else None.

        members: they go on; [] = none does, so that no further report is waited for
        """
        if not self._reports or not self._reports.keys() >= set(members):
            return None
        reports, self._reports = self._reports, {}
        return explain(reports.values(), host_of)


def explain(reports: Iterable[Voided], host_of: HostOf) -> str | None:
    """Returns which ranks waited in which call for which others; None where none waited."""
    told = {report.rank: report for report in reports}
    waiting = {rank: report for rank, report in told.items() if report.missing}
    if not waiting:
        return None
    last = max(waiting.values(), key=lambda report: (report.step, report.layer, report.sequence))
    layer = "" if last.layer < 0 else f", layer {last.layer}"
    where = f"step {last.step}{layer}, {last.phase}{f' {last.sequence}' if last.sequence >= 0 else ''}"
    missed = {rank for report in waiting.values() for rank in report.missing}
    silent = missed - waiting.keys()
    blamed = silent or missed
    waiters = [rank for rank, report in waiting.items() if blamed & set(report.missing)]
    text = f"{where}: {name_ranks(waiters, host_of)} waited for {name_ranks(blamed, host_of)}"
    if silent:
        look_at = f"{'its' if len(silent) == 1 else 'their'} last lines"
        unheard = sorted({host_of(rank) for rank in silent} - {host_of(rank) for rank in told})
        if unheard:
            return (
                f"{text}, of which nothing was heard: look at {look_at}, and at the network to {' and '.join(unheard)}"
            )
        return f"{text}, which waited for nobody: look at {look_at}"
    apart = all(host_of(rank) != host_of(missing) for rank, report in waiting.items() for missing in report.missing)
    if apart:
        return f"{text}, all of them for ranks of other hosts: look at the network between these"
    return f"{text}, so they wait for each other: look at what each logged of this step"
