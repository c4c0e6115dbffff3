"""The `moe-serve` command. Each subcommand parses, calls the package and prints; heavy imports are inside.

Exit 0 = done, 1 = failed while running, 2 = the user has something to correct: one message, no traceback. Results go to
stdout, displays and logs to stderr.
"""

import sys
from typing import Annotated

import typer

import moe_serve.launcher.cli.options as opt
from moe_serve.errors import MoeServeError
from moe_serve.launcher.cli.bench import HELP as BENCH_HELP
from moe_serve.launcher.cli.bench import bench
from moe_serve.launcher.cli.chat import HELP as CHAT_HELP
from moe_serve.launcher.cli.chat import chat
from moe_serve.launcher.cli.demo_balance import HELP as DEMO_BALANCE_HELP
from moe_serve.launcher.cli.demo_balance import demo_balance
from moe_serve.launcher.cli.doctor import HELP as DOCTOR_HELP
from moe_serve.launcher.cli.doctor import doctor
from moe_serve.launcher.cli.serve import serve
from moe_serve.launcher.cli.serve_options import with_flags
from moe_serve.launcher.unsupported import refuse_unsupported

_STARTING = ("serve", "generate", "check")  # commands with the options of ranks

app = typer.Typer(
    name="moe-serve",
    help="Serves Mixture-of-Experts language models with expert parallelism, and balances their experts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def frontend(config: opt.Config = None, overrides: opt.Overrides = None) -> None:
    """Run only the HTTP front end, beside ranks that torchrun or mpirun starts."""
    from moe_serve.launcher.frontend import main as front_end

    front_end(config=config, overrides=overrides, http_fd=None)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="one or more texts to continue")],
    config: opt.Config = None,
    overrides: opt.Overrides = None,
    model_path: opt.ModelPath = None,
    num_ranks: opt.NumRanks = None,
    load_format: opt.LoadFormat = None,
    dtype: opt.Dtype = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="none: 128, or as many as fit")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="-1 = all")] = -1,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 = all")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="none: another text each time, where temperature is above 0")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; repeat for more")] = None,
) -> None:
    """Continue a text and print it as it comes; starts the ranks, and ends them again."""
    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.launcher.cli.flags import effective_config
    from moe_serve.launcher.generate import generate_to

    flags = _model_flags(model_path, [num_ranks], load_format, dtype)
    params = SamplingParams(
        max_new_tokens=SamplingParams.max_new_tokens if max_new_tokens is None else max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    params.validate()
    generate_to(sys.stdout, effective_config(config, flags, overrides or ()), prompts, params)


@app.command()
def check(
    config: opt.Config = None,
    overrides: opt.Overrides = None,
    model_path: opt.ModelPath = None,
    num_ranks: opt.NumRanks = None,
    load_format: opt.LoadFormat = None,
    dtype: opt.Dtype = None,
) -> None:
    """Explain a configuration without starting it: memory, experts, buffers, backends, what is missing here."""
    from moe_serve.launcher.cli.flags import effective_config

    settings = effective_config(config, _model_flags(model_path, [num_ranks], load_format, dtype), overrides or ())
    from moe_serve.launcher.examination.show import (
        print_check,
    )  # loads torch, which an error in the settings should not wait for

    raise typer.Exit(print_check(settings))


app.command()(serve)
app.command(help=CHAT_HELP)(chat)
app.command(help=BENCH_HELP)(bench)
app.command(help=DEMO_BALANCE_HELP)(demo_balance)
app.command(help=DOCTOR_HELP)(doctor)


def _model_flags(
    model_path: str | None, num_ranks: list[int | None], load_format: str | None, dtype: str | None
) -> dict[str, object]:
    """Returns the settings of the flags that every command with a model has. num_ranks: of several flags"""
    return {
        "model.path": model_path,
        "parallel.num_ranks": num_ranks,
        "model.load_format": load_format,
        "model.dtype": dtype,
    }


def _add_balancer_commands(arguments: list[str]) -> None:
    """Adds replay, simulate, plan and convert, unless another command is called: they need numpy."""
    ours = {command.callback.__name__ for command in app.registered_commands if command.callback}
    if arguments and arguments[0] in ours:
        return
    from moe_serve.launcher.cli.balancer import add_balancer_commands

    add_balancer_commands(app)


def main() -> None:
    """Runs the console script. A mistake that the user can correct is one line on stderr and exit code 2."""
    try:
        if sys.argv[1:] and sys.argv[1] in _STARTING:
            refuse_unsupported(sys.argv[2:])
        _add_balancer_commands(sys.argv[1:])
        app()
    except MoeServeError as error:
        is_serve = sys.argv[1:2] == ["serve"]
        print(f"moe-serve: {with_flags(str(error)) if is_serve else error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # while modules were imported; typer has seen to all others
        raise SystemExit(130) from None
