"""`moe-serve advise`."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.launcher.cli.command import balancer_command, option, progress_bar
from moe_serve.launcher.preflight import check_output

if TYPE_CHECKING:
    from moe_serve.eplb.replay.advise import AdviseSettings

ADVISE_HELP = """Advise how many redundant experts to take, who plans them, how often, and what to type into an engine.

Each choice is replayed on the load of the trace, and scored on windows that its plans have not seen. The table says
what it serves, and what it costs: memory, KV cache, buffers, pauses, GPU hours. Below it is the choice to take, whether
the windows are enough to be sure, and the commands for vLLM, SGLang, TensorRT-LLM and moe-serve.

\b
  moe-serve advise dump.pt --nodes 4 --model DeepSeek-V3 --gpu H800 --html advice.html
  moe-serve advise trace.npz --ranks 16 --model DeepSeek-V3 --gpu H200 --gpu-memory 141 --gpu-hour-price 2.5
  moe-serve advise load.jsonl --nodes 4 --model DeepSeek-V3 --gpu H100 --redundant 0,32,64,128 --interval 1,10 --json
"""


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(opt.PageOptions, opt.ServingOptions, opt.SplitOptions, opt.TraceOptions, opt.RankOptions):
    """The options of `moe-serve advise`."""

    trace: opt.TracePath
    model: str = option("--model", default="DeepSeek-V3", help="Model profile, or a YAML file.")
    gpu: str = option("--gpu", "--hardware", default="H800", help="Hardware profile: H800, H200, … or a YAML file.")
    gpu_memory: float | None = option("--gpu-memory", min=0, help="GB of a GPU.", show_default="of the profile")
    memory_share: float = option(
        "--memory-share", default=0.9, min=0, max=1, help="Of it, for weights, buffers and KV cache."
    )
    gpu_hour_price: float | None = option(
        "--gpu-hour-price", min=0, help="Of one GPU, in any currency: adds the price of a million tokens."
    )
    redundant: str | None = option(
        "--redundant",
        help="Slots above one per expert to compare, with commas; each is rounded up to the ranks.",
        show_default="up to half a slot for each expert",
    )
    policy: list[str] | None = option(
        "--policy",
        "-p",
        help="Planners to compare: deepseek (what engines bring), incremental, refined, greedy. Repeat the option.",
        show_default="deepseek incremental",
    )
    interval: str = option("--interval", default="1,4,10", help="Windows between plans, with commas.")
    windows: int = option(
        "--windows", default=64, min=2, help="Windows to score each choice on, spread over the trace."
    )
    served_model: str | None = option(
        "--served-model", help="Name or path of the model in the commands.", show_default="that of --model"
    )
    jobs: int | None = option("--jobs", min=1, help="Replays at once.", show_default="CPUs")

    def settings(self) -> "AdviseSettings":
        """Returns what to compare."""
        from moe_serve.eplb.cost.model import CostModel
        from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
        from moe_serve.eplb.replay.advise import AdviseSettings
        from moe_serve.eplb.replay.costs import ProfileCosts
        from moe_serve.eplb.replay.settings import ReplaySettings

        topology, hardware, model = self.topology(), load_hardware(self.gpu), load_model_profile(self.model)
        costs = ProfileCosts(CostModel(hardware, model, topology, self.engine_profile()), self.serving())
        intervals = tuple(sorted(set(opt.numbers(self.interval, "--interval"))))
        return AdviseSettings(
            ReplaySettings(topology, topology.num_ranks, intervals=intervals, split=self.split, costs=costs),
            hardware,
            tuple(dict.fromkeys(self.policy or ("deepseek", "incremental"))),
            opt.numbers(self.redundant, "--redundant") if self.redundant else (),
            self.windows,
            self.window,
            None if self.gpu_memory is None else self.gpu_memory * 1e9,
            self.memory_share,
            self.gpu_hour_price,
        )


@balancer_command(AdviseOptions)
def advise(options: AdviseOptions) -> None:
    """Compares the choices, and prints what to take and what to type."""
    from moe_serve.eplb.replay.advice_page import advice_to_html
    from moe_serve.eplb.replay.advise import advice_to_json, advice_to_table
    from moe_serve.eplb.replay.advise import advise as run_advise

    check_output(options.html, "--html")
    settings = options.settings()
    model = options.served_model or options.model
    with progress_bar("reading and replaying") as show:
        load = options.open_trace(options.trace, fold=False)
        found = run_advise(load, settings, show, options.jobs or os.cpu_count() or 1)
    options.print(
        lambda: advice_to_json(found, options.trace, model),
        lambda color: advice_to_table(found, options.trace, model, color=color),
    )
    if options.html is not None:
        options.write_page(advice_to_html(found, options.trace, model))
    options.check(found.advised.summary["served_mean"])
