"""The balancer's commands: replay, simulate, plan, convert. Each parses, calls moe_serve.eplb, and prints.

Results go to stdout, progress to stderr. Exit code 0 = done, 1 = --fail-below failed, 2 = bad input, said in one line.
"""

import typer

from moe_serve.launcher.cli.convert import CONVERT_HELP, convert
from moe_serve.launcher.cli.plan import PLAN_HELP, plan
from moe_serve.launcher.cli.replay import REPLAY_HELP, replay
from moe_serve.launcher.cli.simulate import SIMULATE_HELP, simulate


def add_balancer_commands(app: typer.Typer) -> None:
    """Registers replay, simulate, plan and convert."""
    app.command("replay", help=REPLAY_HELP)(replay)
    app.command("simulate", help=SIMULATE_HELP)(simulate)
    app.command("plan", help=PLAN_HELP)(plan)
    app.command("convert", help=CONVERT_HELP)(convert)
