"""The script door to `moe-serve replay`: python tools/replay_load.py TRACE --nodes 4 --slots 288"""

import typer

from moe_serve.launcher.cli.replay import REPLAY_HELP, replay

app = typer.Typer(add_completion=False)
app.command(help=REPLAY_HELP)(replay)

if __name__ == "__main__":
    app()
