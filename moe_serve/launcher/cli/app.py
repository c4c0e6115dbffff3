"""The `moe-serve` command. Each subcommand parses, calls the package and prints; what is heavy is imported inside.

Exit 0 = done, 1 = it failed while running, 2 = something to correct: one message, no traceback. Results go to stdout,
displays and logs to stderr.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from moe_serve.errors import MoeServeError

app = typer.Typer(
    name="moe-serve",
    help="Serves Mixture-of-Experts language models with expert parallelism, and balances their experts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path | None, typer.Option(help="YAML file with settings; none: the demo model on this CPU, 2 ranks")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="override one setting; repeat for more; wins over all"),
]
ModelPath = Annotated[str | None, typer.Option("--model-path", "--model", help="model.path: a folder, or demo")]
NumRanks = Annotated[
    int | None,
    typer.Option("--ep-size", "--ep", "--expert-parallel-size", "--num-ranks", help="parallel.num_ranks"),
]
LoadFormat = Annotated[str | None, typer.Option(help="model.load_format: auto, or dummy for random weights")]
Dtype = Annotated[str | None, typer.Option(help="model.dtype: auto, float32 or bfloat16")]
SkipTokenizer = Annotated[bool, typer.Option("--skip-tokenizer-init", help="model.skip_tokenizer: ids in, ids out")]


@app.command()
def serve(
    config: Config = None,
    overrides: Overrides = None,
    model_path: ModelPath = None,
    num_ranks: NumRanks = None,
    attn_dp_size: Annotated[
        int | None,
        typer.Option(
            "--attn-dp-size",
            "--attention-data-parallel-size",
            "--dp-size",
            "--data-parallel-size",
            help="parallel.num_ranks as well: attention is data-parallel over all ranks",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="server.host")] = None,
    port: Annotated[int | None, typer.Option(help="server.port; 0: any free one")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="model.served_name")] = None,
    load_format: LoadFormat = None,
    dtype: Dtype = None,
    device: Annotated[str | None, typer.Option(help="parallel.device: auto, cpu or cuda")] = None,
    context_length: Annotated[
        int | None, typer.Option("--context-length", "--max-model-len", help="model.max_model_len, tokens")
    ] = None,
    skip_tokenizer_init: SkipTokenizer = False,
    init_expert_location: Annotated[
        str | None, typer.Option(help="eplb.init_expert_location: trivial, or a placement file (ours or SGLang's)")
    ] = None,
    redundant_experts: Annotated[
        int | None, typer.Option("--ep-num-redundant-experts", help="eplb.num_redundant_experts, per layer")
    ] = None,
    max_running_requests: Annotated[
        int | None,
        typer.Option("--max-running-requests", "--max-num-seqs", help="engine.max_running_requests, per rank"),
    ] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="engine.max_queued_requests, over all ranks; beyond it: HTTP 429")
    ] = None,
    chunked_prefill_size: Annotated[
        int | None,
        typer.Option(
            "--chunked-prefill-size",
            "--max-num-batched-tokens",
            help="engine.max_batch_tokens: tokens of one step of one rank",
        ),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option("--page-size", "--block-size", help="cache.block_size, tokens")
    ] = None,
    disable_radix_cache: Annotated[
        bool, typer.Option("--disable-radix-cache", help="cache.prefix_cache: false")
    ] = False,
) -> None:
    """Serve a model: all ranks of this machine and the HTTP front end. Ctrl-C ends everything."""
    from moe_serve.launcher.cli.flags import effective_config
    from moe_serve.launcher.display import StartDisplay
    from moe_serve.launcher.preflight import look_for_files
    from moe_serve.launcher.system import serve_on_this_machine

    flags = {
        "model.path": model_path,
        "model.served_name": served_model_name,
        "model.load_format": load_format,
        "model.dtype": dtype,
        "model.max_model_len": context_length,
        "model.skip_tokenizer": True if skip_tokenizer_init else None,
        "parallel.num_ranks": [num_ranks, attn_dp_size],
        "parallel.device": device,
        "server.host": host,
        "server.port": port,
        "eplb.init_expert_location": init_expert_location,
        "eplb.num_redundant_experts": redundant_experts,
        "engine.max_running_requests": max_running_requests,
        "engine.max_queued_requests": max_queued_requests,
        "engine.max_batch_tokens": chunked_prefill_size,
        "cache.block_size": page_size,
        "cache.prefix_cache": False if disable_radix_cache else None,
    }
    settings = effective_config(config, flags, overrides or ())
    look_for_files(settings)
    with StartDisplay(settings.parallel.num_ranks) as display:
        display.note("effective configuration", style="bold")
        display.note(settings.to_yaml().rstrip(), style="dim")
        code = serve_on_this_machine(settings, display)
    raise typer.Exit(code)


@app.command()
def frontend(config: Config = None, overrides: Overrides = None) -> None:
    """Run only the HTTP front end, beside ranks that torchrun or mpirun starts."""
    from moe_serve.launcher.frontend import main as front_end

    front_end(config=config, overrides=overrides, http_fd=None)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="one or more texts to continue")],
    config: Config = None,
    overrides: Overrides = None,
    model_path: ModelPath = None,
    num_ranks: NumRanks = None,
    load_format: LoadFormat = None,
    dtype: Dtype = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "--max-tokens", min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="-1 = all")] = -1,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option(help="none: another text each time, where temperature is above 0")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; repeat for more")] = None,
) -> None:
    """Continue a text and print it as it comes; starts the ranks, and ends them again."""
    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.launcher.cli.flags import effective_config
    from moe_serve.launcher.generate import generate_to

    flags = _model_flags(model_path, num_ranks, load_format, dtype)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    params.validate()
    generate_to(sys.stdout, effective_config(config, flags, overrides or ()), prompts, params)


@app.command()
def check(
    config: Config = None,
    overrides: Overrides = None,
    model_path: ModelPath = None,
    num_ranks: NumRanks = None,
    load_format: LoadFormat = None,
    dtype: Dtype = None,
) -> None:
    """Explain a configuration without starting it: memory, experts, buffers, backends, what is missing here."""
    from moe_serve.launcher.cli.flags import effective_config

    settings = effective_config(config, _model_flags(model_path, num_ranks, load_format, dtype), overrides or ())
    from moe_serve.launcher.check.show import print_check  # loads torch: a mistake in the settings is said without it

    raise typer.Exit(print_check(settings))


def _model_flags(
    model_path: str | None, num_ranks: int | None, load_format: str | None, dtype: str | None
) -> dict[str, object]:
    """Returns the settings that the flags of every command with a model stand for."""
    return {
        "model.path": model_path,
        "parallel.num_ranks": num_ranks,
        "model.load_format": load_format,
        "model.dtype": dtype,
    }


def _add_balancer_commands(arguments: list[str]) -> None:
    """Adds `replay`, `simulate` and their like, which live with the balancers, unless a command of ours is called."""
    ours = {command.callback.__name__ for command in app.registered_commands if command.callback}
    if arguments and arguments[0] in ours:
        return
    from moe_serve.launcher.cli.balancer import add_balancer_commands

    add_balancer_commands(app)


def main() -> None:
    """The console script: one line on stderr for every mistake that a user can correct."""
    _add_balancer_commands(sys.argv[1:])
    try:
        app()
    except MoeServeError as error:
        print(f"moe-serve: {error}", file=sys.stderr)
        raise SystemExit(2) from None
