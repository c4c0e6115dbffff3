"""The script door to `moe-serve simulate`: python tools/simulate_balancer.py --model DeepSeek-V3 --hardware H800"""

import typer

from moe_serve.launcher.cli.simulate import SIMULATE_HELP, simulate

app = typer.Typer(add_completion=False)
app.command(help=SIMULATE_HELP)(simulate)

if __name__ == "__main__":
    app()
