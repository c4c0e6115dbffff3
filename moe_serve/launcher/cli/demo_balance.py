"""`moe-serve demo-balance`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moe_serve.launcher.balance_picture import TimelinePoint
    from moe_serve.launcher.demo_balance import Story

HELP = """Serve the demo model to clients that change from code to prose, and watch the balancer follow.

Each line is a window of load: how balanced the ranks were (mean / max of their load, mean of the layers), and how
balanced the placement at the start would have been with the same tokens. Takes a minute or two.

\b
  moe-serve demo-balance
  moe-serve demo-balance --ranks 2 --redundant 4 --picture balance.svg
"""
_BAR = 24
_FLOOR = 0.6  # where a bar begins


def demo_balance(
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Processes, each with its share of the experts.")] = 4,
    redundant: Annotated[int, typer.Option("--redundant", min=0, help="Slots above one per expert, per layer.")] = 8,
    windows: Annotated[int, typer.Option("--windows", min=6, help="Windows of load of each domain.")] = 12,
    window_steps: Annotated[int, typer.Option("--window-steps", min=10, help="Steps of a window.")] = 60,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Also draw the story as an .svg file.", show_default=False)
    ] = None,
) -> None:
    """Serves the demo model under a load whose domain changes, and shows what the balancer makes of it."""
    from moe_serve.config import load_config
    from moe_serve.launcher.balance_picture import timeline_svg
    from moe_serve.launcher.demo_balance import run_demo

    config = load_config(
        overrides=[
            "model.path=demo", "parallel.device=cpu", f"parallel.num_ranks={ranks}", "eplb.mode=dynamic",
            f"eplb.num_redundant_experts={redundant}", f"eplb.record_window_steps={window_steps}",
            "cache.memory_gib=0.25", "engine.max_running_requests=16",
        ]
    )  # fmt: skip
    number = 0

    def show(domain: str, point: "TimelinePoint", news: list[str]) -> None:
        nonlocal number
        if number == 0:
            typer.echo("window  clients  served                            kept placement  the balancer")
        number += 1
        bar = "█" * round(_BAR * max(0.0, point.served - _FLOOR) / (1 - _FLOOR))
        said = "; ".join(news[-2:])
        typer.echo(f"{number:6d}  {domain:7s}  {point.served:.3f} {bar:<{_BAR}}    {point.kept:.3f}           {said}")

    typer.echo(f"starting {ranks} ranks of the demo model …", err=True)
    story = run_demo(config, windows, show)
    typer.echo(_summary(story))
    if picture is not None:
        picture.write_text(timeline_svg(story.timeline()), encoding="utf-8")
        typer.echo(f"wrote {picture}", err=True)
    sys.stdout.flush()


def _summary(story: "Story") -> str:
    lines = ["", f"{'balancedness (1 = all ranks equally busy)':42s}  served  placed at the start  placed for code"]
    for words, served, kept, stale in story.summary():
        shown = "" if stale is None else f"{stale:.3f}"
        lines.append(f"{words:42s}  {served:.3f}   {kept:.3f}                {shown}".rstrip())
    times = "time" if len(story.moves) == 1 else "times"
    lines.append(f"{story.num_experts} experts moved, {len(story.moves)} {times}, while requests were served.")
    return "\n".join(lines)
