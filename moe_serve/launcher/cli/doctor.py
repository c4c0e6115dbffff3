"""`moe-serve doctor`: run by the launcher of the ranks, in place of them."""

import sys
from typing import Annotated

import typer

import moe_serve.launcher.cli.options as opt

HELP = """Examine every rank and every pair of ranks before anything is loaded; run it by the ranks' own launcher.

\b
torchrun --nproc-per-node 8 --nnodes 2 … --no-python moe-serve doctor --config config.yaml
mpirun -n 16 moe-serve doctor --config config.yaml

Alone, it looks at this machine. Rank 0 prints; exit code 1 where the ranks cannot serve together.
"""


def doctor(
    config: opt.Config = None,
    overrides: opt.Overrides = None,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
    deadline_s: Annotated[float, typer.Option("--deadline", min=1, help="seconds to wait for all ranks")] = 60.0,
) -> None:
    """Runs the doctor on this rank, and prints on rank 0."""
    from moe_serve.config import load_config
    from moe_serve.launcher.rank_env import check_num_ranks, read_rank_env

    settings, env = load_config(config, overrides or ()), read_rank_env()
    is_alone = env.num_ranks == 1 and settings.parallel.num_ranks > 1
    if not is_alone:
        check_num_ranks(env, settings.parallel.num_ranks)
    from moe_serve.launcher.examination.ranks import run_doctor
    from moe_serve.launcher.examination.show import print_diagnosis, to_json

    diagnosis = run_doctor(env, settings, deadline_s)
    if env.rank == 0 and json_output:
        print(to_json(diagnosis))
    elif env.rank == 0:
        print_diagnosis(diagnosis)
        if is_alone:
            print("only this machine was examined; the launcher of the ranks can run this command too", file=sys.stderr)
    raise typer.Exit(0 if diagnosis.can_serve else 1)
