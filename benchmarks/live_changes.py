"""Shift and loss rows of benchmarks/live_balancing.py: the load changes, or ranks are killed."""

import signal
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.live_clients import NUM_EXPERTS, Row, TokenClock, settings, wait_for
from moe_serve.launcher.cli.demo_balance import Story, run_demo, timeline_svg
from moe_serve.launcher.llm import LLM


def measure_shift(num_ranks: int, num_windows: int, picture: Path | None) -> list[Row]:
    """Clients change their domain; what was served beside what the placement at the start would have served."""
    config = settings(num_ranks, 8, "eplb.record_window_steps=60")
    story = run_demo(config, num_windows, lambda domain, point, news: None)
    if picture is not None:
        picture.write_text(timeline_svg(story))
    return rows_of_shift(story)


def rows_of_shift(story: Story) -> list[Row]:
    """Returns the rows of what was served while clients changed their domain."""
    rows = [
        {
            "what": f"balancedness, {words}",
            "value": f"{served:.3f}",
            "detail": f"none: {kept:.3f}" + ("" if stale is None else f", static (placed for code): {stale:.3f}"),
        }
        for words, served, kept, stale in story.summary()
    ]
    after = story.points[story.num_before_shift :]
    settled = statistics.fmean(point.served for point in after[-4:])
    recovered = next((n for n, point in enumerate(after) if n and point.served >= settled - 0.01), None)
    rows.append(
        {
            "what": "windows until balanced again after the change (goal ≤ 2)",
            "value": str(recovered),
            "detail": f"{' '.join(f'{point.served:.2f}' for point in after[:6])} …; {story.num_experts} experts moved "
            f"in {len(story.moves)} moves, all windows",
        }
    )
    return rows


def measure_loss() -> list[Row]:
    """Every expert is on two of four ranks, with slots to spare; one rank is killed, then another."""
    config = settings(4, 56, "eplb.record_window_steps=60", "engine.step_deadline_s=10")
    rows: list[Row] = []
    with LLM.from_config(config) as llm:
        clock = TokenClock(llm)
        wait_for(lambda: llm.balance.placement is not None)
        time.sleep(2.0)
        for victim in (3, 2):
            assert llm._ranks.ranks is not None
            llm._ranks.ranks.children[victim].signal(signal.SIGKILL)
            killed_s = time.monotonic()
            live = range(victim)
            needed = 2 if victim > 2 else 1
            wait_for(lambda live=live, needed=needed: _least_ranks(llm, live) >= needed)  # type: ignore[misc]
            took_s = time.monotonic() - killed_s
            what = "every expert is on two ranks again (goal ≤ 5 s)" if needed == 2 else "the other two serve on"
            rows.append({"what": f"rank {victim} killed: {what}", "value": f"{took_s:.2f} s", "detail": "88 slots"})
            time.sleep(1.0)
        num_before = len(clock.gaps)
        time.sleep(1.0)
        alive = len(clock.gaps) > num_before and clock.failure is None
        clock.close()
    rows.append({"what": "tokens still come after two kills", "value": str(alive), "detail": ""})
    return rows


def _least_ranks(llm: LLM, live: range) -> int:
    """Returns on how many live ranks the expert with the fewest is; 0 while the placement still names others."""
    table = np.array(llm.balance.placement).reshape(4, 4, -1)  # layers, ranks, slots
    if (table[:, len(live) :] >= 0).any():
        return 0
    return int(min((layer == expert).any(axis=1).sum() for layer in table for expert in range(NUM_EXPERTS)))
