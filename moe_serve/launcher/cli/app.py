"""The `moe-serve` command. Each subcommand parses, calls the package and prints; heavy imports are inside.

Exit 0 = done, 1 = failed while running, 2 = the user has something to correct: one message, no traceback. Results go to
stdout, displays and logs to stderr.
"""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import moe_serve
from moe_serve.errors import MoeServeError
from moe_serve.launcher.cli.bench import HELP as BENCH_HELP
from moe_serve.launcher.cli.bench import bench
from moe_serve.launcher.cli.command import api_key_of_environment, option, progress_bar, takes
from moe_serve.launcher.cli.options import (
    ConfigOptions,
    ModelOptions,
    NamedModelOptions,
    ServeOptions,
    setting,
    with_flags,
)
from moe_serve.launcher.preflight import refuse_unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.config import ServeConfig

_STARTING = ("serve", "generate", "check", "convert-weights", "run-batch")  # commands with the options of ranks

app = typer.Typer(
    name="moe-serve",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moe-serve {moe_serve.__version__}")
        raise typer.Exit


@app.callback()
def of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version, and end")
    ] = False,
) -> None:
    """Serves Mixture-of-Experts language models with expert parallelism, and balances their experts."""


@app.command()
@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model: all ranks and the HTTP front end. Ctrl-C ends everything.

    On several hosts, run the same command on each, with --nnodes, --dist-init-addr and its own --node-rank, and the
    same $MOE_SERVE_TOKEN; --ep is the number of ranks on all hosts together. HTTP is taken where
    --front-ends says. With --prefill-ranks the last --prefill-nnodes hosts have these, and the first ones the ranks
    that decode; --prefill-ranks and --decode-ranks are the numbers on all hosts of a role together.
    """
    from moe_serve.launcher.display import StartDisplay
    from moe_serve.launcher.preflight import look_for_files
    from moe_serve.launcher.system import serve_on_this_machine, serve_with_other_hosts
    from moe_serve.server.edge.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

    for variable, key in ((API_KEY_VARIABLE, options.api_key), (ADMIN_KEY_VARIABLE, options.admin_api_key)):
        if key is not None:
            os.environ[variable] = key  # not a setting: settings are shown
    config = options.effective_config()
    if options.print_config:
        typer.echo(config.to_yaml(), nl=False)
        return
    is_alone = config.launcher.nnodes == 1
    if is_alone:
        look_for_files(config)
    num_ranks = config.parallel.num_ranks + config.parallel.num_prefill_ranks
    with StartDisplay(num_ranks, with_flags, config.server.log_format) as display:
        changed = "\n".join(f"  {each}" for each in config.changed())
        display.heading(f"moe-serve {moe_serve.__version__}; settings other than defaults:\n{changed}", style="dim")
        if is_alone:
            code = serve_on_this_machine(config, display)
        else:
            code = serve_with_other_hosts(config, display, look_for_files)
    raise typer.Exit(code)


@app.command()
@takes(ConfigOptions)
def frontend(options: ConfigOptions) -> None:
    """Run only the HTTP front end, beside ranks that torchrun or mpirun starts."""
    from moe_serve.launcher.frontend import main as front_end

    front_end(config=options.config, overrides=options.overrides, http_fd=None)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """The options of `moe-serve generate`: those of a model, and how a text goes on."""

    prompts: Annotated[list[str], typer.Argument(help="one or more texts to continue")]
    max_new_tokens: int | None = option("--max-new-tokens", "--max-tokens", min=1, help="none: 128, or as many as fit")
    temperature: float = option(default=0.0, min=0.0, help="0 = always the likeliest token")
    top_k: int = option(default=-1, help="-1 = all")
    top_p: float = option(default=1.0)
    min_p: float = option(default=0.0, help="0 = all")
    seed: int | None = option(help="none: another text each time, where temperature is above 0")
    stop: list[str] | None = option(help="end before this text; repeat for more")


@app.command()
@takes(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Continue a text and print it as it comes; starts the ranks, and ends them again."""
    from moe_serve.attention_dp.request import SamplingParams

    params = SamplingParams(
        max_new_tokens=options.max_new_tokens or SamplingParams.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=tuple(options.stop or ()),
    )
    params.validate()
    write_continued(sys.stdout, options.effective_config(), options.prompts, params)


def write_continued(out: "TextIO", config: "ServeConfig", prompts: "Sequence[str]", params: "SamplingParams") -> None:
    """Writes each prompt with its continuation, in order. All are computed at once; one at a time is shown growing."""
    from moe_serve.launcher.llm import LLM

    with LLM.from_config(config, progress=True) as llm:
        texts = [""] * len(prompts)
        finished = [False] * len(prompts)
        shown, num_chars = 0, 0
        out.write(prompts[0])
        for index, output in llm.stream(prompts, params):
            texts[index], finished[index] = output.text, output.finish_reason is not None
            while shown < len(prompts):
                out.write(texts[shown][num_chars:])
                num_chars = len(texts[shown])
                if not finished[shown]:
                    break
                out.write("\n")
                shown, num_chars = shown + 1, 0
                if shown < len(prompts):
                    out.write(f"\n{prompts[shown]}")
            out.flush()


@dataclass(frozen=True, kw_only=True)
class RunBatchOptions(NamedModelOptions):
    """The options of `moe-serve run-batch`."""

    input_file: Path = option("-i", "--input-file", default=..., metavar="IN.jsonl", help="requests, one per line")
    output_file: Path = option("-o", "--output-file", default=..., metavar="OUT.jsonl", help="answers, one per line")


RUN_BATCH_HELP = """\
Answer a file of requests in the form of OpenAI's Batch API; starts the ranks, and ends them again.

\b
  moe-serve run-batch MODEL -i requests.jsonl -o answers.jsonl
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Answers are written as they end, by custom_id. The same command again goes on where it was cut off: lines that have an
answer are not asked again. Exit 1: some answers of this run are errors, each in its place.
"""


@app.command("run-batch", help=RUN_BATCH_HELP)
@takes(RunBatchOptions)
def run_batch(options: RunBatchOptions) -> None:
    """Answers the lines of a file, with a bar."""
    from moe_serve.launcher.run_batch import run_batch as answer_lines

    config, counted = options.effective_config(), [0, 0]
    with ExitStack() as stack:
        bars: list[Callable[[float, float | None], None]] = []  # one, from the first answer on: the start has its own

        def progress(num: int, num_lines: int) -> None:
            counted[:] = num, num_lines
            if not bars:
                bars.append(stack.enter_context(progress_bar("answering")))
            bars[0](num, num_lines)

        num_errors = answer_lines(config, options.input_file, options.output_file, api_key_of_environment(), progress)
    typer.echo(f"{counted[0]} of {counted[1]} lines are answered, {num_errors} of them now with an error", err=True)
    raise typer.Exit(1 if num_errors else 0)


@app.command()
@takes(NamedModelOptions)
def check(options: NamedModelOptions) -> None:
    """Explain a configuration without starting it: memory, experts, buffers, backends, what is missing here."""
    config = options.effective_config()
    # Loads torch, which an error in the settings should not wait for.
    from moe_serve.launcher.examination.check import print_check

    raise typer.Exit(print_check(config))


@dataclass(frozen=True, kw_only=True)
class ConvertWeightsOptions(ModelOptions):
    """The options of `moe-serve convert-weights`."""

    weight_cache: str | None = setting("model.weight_cache", "--weight-cache", help="the folder", metavar="FOLDER")


CONVERT_WEIGHTS_HELP = """\
Pack a model's weights into the folder of model.weight_cache, so that the first start finds them there.

\b
  moe-serve convert-weights --model MODEL.gguf --weight-cache ~/weights --set model.expert_weights=int4
  moe-serve serve --model MODEL.gguf --set model.weight_cache=~/weights --set model.expert_weights=int4

The file is the one that CPU ranks of one host make at their first start, by the same code, and for any number of them:
settings of the model must be those that it is served with. A file that is there already is compared with its sums.
"""


@app.command("convert-weights", help=CONVERT_WEIGHTS_HELP)
@takes(ConvertWeightsOptions)
def convert_weights(options: ConvertWeightsOptions) -> None:
    """Fills the folder, with a bar."""
    config = options.effective_config()
    from moe_serve.engine.build import pack_weights
    from moe_serve.log import configure_logging

    configure_logging(form=config.server.log_format)
    with progress_bar("packing weights") as show:
        shared = pack_weights(config, lambda phase, fraction: show(fraction, 1.0))
    typer.echo(shared.described(config.model.weight_cache))


DOCTOR_HELP = """\
Examine every rank and every pair of ranks before anything is loaded; run it by the ranks' own launcher.

\b
torchrun --nproc-per-node 8 --nnodes 2 … --no-python moe-serve doctor --config config.yaml
mpirun -n 16 moe-serve doctor --config config.yaml

Alone, it looks at this machine. Rank 0 prints; exit code 1 where the ranks cannot serve together.
"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(ConfigOptions):
    """The options of `moe-serve doctor`."""

    json_output: bool = option("--json", default=False, help="one JSON object on stdout")
    deadline_s: float = option("--deadline", default=60.0, min=1, help="seconds to wait for all ranks")


@app.command(help=DOCTOR_HELP)
@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Examines this rank, and prints the diagnosis of all on rank 0."""
    from moe_serve.config import load_config
    from moe_serve.launcher.rank_env import check_num_ranks, read_rank_env

    config, env = load_config(options.config, options.overrides or ()), read_rank_env()
    is_alone = env.num_ranks == 1 and config.parallel.num_ranks > 1
    if not is_alone:
        check_num_ranks(env, config.parallel.num_ranks)
    from moe_serve.launcher.examination.doctor import print_diagnosis, run_doctor, to_json

    diagnosis = run_doctor(env, config, options.deadline_s)
    if env.rank == 0 and options.json_output:
        print(to_json(diagnosis))
    elif env.rank == 0:
        print_diagnosis(diagnosis)
        if is_alone:
            print("only this machine was examined; the launcher of the ranks can run this command too", file=sys.stderr)
    raise typer.Exit(0 if diagnosis.can_serve else 1)


CHAT_HELP = """Talk with a running server, ours or any with OpenAI's API.

In a terminal: /reset, /system TEXT, /exit; Ctrl-C stops an answer. In a pipe the input is one message. An API key is
read from MOE_SERVE_API_KEY, else OPENAI_API_KEY.

\b
  moe-serve chat
  echo "What is an expert?" | moe-serve chat --max-tokens 64
"""


@app.command(help=CHAT_HELP)
def chat(
    base_url: Annotated[str, typer.Option("--base-url")] = "http://127.0.0.1:30000",
    model: Annotated[
        str | None, typer.Option("--model", help="its name on the server; none: the first it lists")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="the system message")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="of an answer")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0)] = None,
) -> None:
    """Talks with a running server."""
    from moe_serve.launcher.cli.chat import HELP, Chat, ChatServer, converse

    server = ChatServer(base_url, api_key_of_environment())
    name = model or server.model()
    fields = {"model": name, "max_completion_tokens": max_tokens, "temperature": temperature}
    given = {key: value for key, value in fields.items() if value is not None}
    talk = Chat(server, given, sys.stdout, sys.stdout.isatty(), system)
    if not sys.stdin.isatty():
        talk.say(sys.stdin.read().strip())
        return
    import readline  # noqa: F401  lines can be edited, and recalled

    typer.echo(f"{name} at {base_url}. {HELP}", err=True)
    converse(talk, lambda: input("> "))


DEMO_BALANCE_HELP = """Serve the demo model to clients that change from code to prose, and watch the balancer follow.

Each line is a window of load: how balanced the ranks were (mean / max of their load, mean of the layers), and how
balanced the placement at the start would have been with the same tokens. Takes a minute or two.

\b
  moe-serve demo-balance
  moe-serve demo-balance --ranks 2 --redundant 4 --picture balance.svg
"""


@app.command(help=DEMO_BALANCE_HELP)
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
    from moe_serve.launcher.cli.demo_balance import show_demo

    config = load_config(
        overrides=[
            "model.path=demo", "parallel.device=cpu", f"parallel.num_ranks={ranks}", "eplb.mode=dynamic",
            f"eplb.num_redundant_experts={redundant}", f"eplb.record_window_steps={window_steps}",
            "cache.memory_gib=0.25", "engine.max_running_requests=16",
        ]
    )  # fmt: skip
    show_demo(config, windows, picture)


app.command(help=BENCH_HELP)(bench)


def add_balancer_commands(app: typer.Typer) -> None:
    """Registers the commands that serve nothing: advise, replay, simulate, roofline, plan, convert.

    Exit code 0 = done, 1 = --fail-below failed, 2 = bad input, said in one line.
    """
    from moe_serve.launcher.cli.advise import ADVISE_HELP, advise
    from moe_serve.launcher.cli.convert import CONVERT_HELP, convert
    from moe_serve.launcher.cli.plan import PLAN_HELP, plan
    from moe_serve.launcher.cli.replay import REPLAY_HELP, replay
    from moe_serve.launcher.cli.roofline import ROOFLINE_HELP, roofline
    from moe_serve.launcher.cli.simulate import SIMULATE_HELP, simulate

    app.command("advise", help=ADVISE_HELP)(advise)
    app.command("replay", help=REPLAY_HELP)(replay)
    app.command("simulate", help=SIMULATE_HELP)(simulate)
    app.command("roofline", help=ROOFLINE_HELP)(roofline)
    app.command("plan", help=PLAN_HELP)(plan)
    app.command("convert", help=CONVERT_HELP)(convert)


def main() -> None:
    """Runs the console script. A mistake that the user can correct is one line on stderr and exit code 2."""
    try:
        if sys.argv[1:] and sys.argv[1] in _STARTING:
            refuse_unsupported(sys.argv[2:])
        here = {each.callback.__name__.replace("_", "-") for each in app.registered_commands if each.callback}
        if not here & set(sys.argv[1:2]):  # these commands do not pay for the imports of the others
            add_balancer_commands(app)
        app()
    except MoeServeError as error:
        is_serve = sys.argv[1:2] == ["serve"]
        print(f"moe-serve: {with_flags(str(error)) if is_serve else error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # while modules were imported; typer has seen to all others
        raise SystemExit(130) from None
