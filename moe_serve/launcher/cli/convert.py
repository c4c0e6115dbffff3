"""`moe-serve convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.launcher.cli.command import balancer_command, option, progress_bar

CONVERT_HELP = """Convert load traces and placements between formats. Traces go by suffix, placements by --for.

\b
  moe-serve convert dump.pt trace.npz
  moe-serve convert expert-load.json trace.jsonl --window 100
  moe-serve convert p.json lb.yaml --for tensorrt_llm --ranks 32
"""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(opt.TraceOptions):
    """The options of `moe-serve convert`."""

    source: Annotated[str, typer.Argument(help="A load trace or a placement, recognised by content.")]
    output: Annotated[Path, typer.Argument(help="Target file; traces by suffix .npz, .jsonl, .csv.")]
    target: str | None = option(
        "--for", help="For placements: moe_serve, sglang, tensorrt_llm, vllm or vllm_ascend.", show_default="moe_serve"
    )
    ranks: int | None = option(min=1, help="Ranks of a placement that does not say it.")
    counts_only: bool = option("--counts-only", default=False, help="Leave out all but the expert counts.")
    topk: int | None = opt.topk()
    num_model_layers: int | None = opt.model_layers()
    moe_layers: str | None = option(help="First and last MoE layer of a placement with rows for all layers, like 3-60.")


@balancer_command(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Converts a trace or a placement, by the suffix of the target."""
    if options.output.suffix in (".npz", ".jsonl", ".csv"):
        _convert_trace(options)
    else:
        _convert_placement(options)


def _convert_trace(options: ConvertOptions) -> None:
    from moe_serve.eplb.files.traces import write_trace

    if options.target is not None:
        raise ConfigError(
            f"--for {options.target} is for placements, but {options.output} is a load trace by its suffix; drop --for"
        )
    with progress_bar("converting") as show:
        load = options.open_trace(options.source, show, options.topk)
        number = write_trace(load, options.output, counts_only=options.counts_only)
    typer.echo(
        f"{options.output}: {number} records, {len(load.moe_layer_ids)} layers x {load.num_logical} experts, "
        f"from {load.source}"
    )


def _convert_placement(options: ConvertOptions) -> None:
    from moe_serve.eplb.files.placements import filled_in_place, read_placement, write_placement
    from moe_serve.eplb.policies.make import plan_counts

    placement = read_placement(
        options.source,
        options.ranks,
        options.experts,
        _layer_range(options.moe_layers),
        plan_counts=plan_counts,
        max_torch_bytes=int(options.max_pt_gib * 2**30),
    )
    target = options.target or "moe_serve"
    filled = ""
    if target in ("sglang", "tensorrt_llm"):  # both take ids of experts only, and an expert twice on a rank
        empty = placement.physical_to_logical < 0
        placement = filled_in_place(placement)
        count = int((empty & (placement.physical_to_logical >= 0)).sum())
        filled = f"; {count} empty slots took a second replica of an expert of their rank" if count else ""
    write_placement(placement, options.output, target, num_model_layers=options.num_model_layers)
    typer.echo(
        f"{options.output}: {placement.num_layers} layers x {placement.num_slots} slots on {placement.num_ranks} "
        f"ranks, for {target}{filled}"
    )


def _layer_range(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise PlacementError(f"--moe-layers is {text!r}; give the first and the last layer, like 3-60")
    return tuple(range(int(first), int(last) + 1))
