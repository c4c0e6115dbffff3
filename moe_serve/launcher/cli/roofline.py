"""`moe-serve roofline`."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.command import balancer_command, option, progress_bar
from moe_serve.launcher.preflight import check_output

if TYPE_CHECKING:
    from moe_serve.eplb.cost.step_record import ModelSteps

ROOFLINE_HELP = """Show what bounds each kernel of a step on a GPU: launches, bytes and FLOP against the chip's sheet.

Needs no GPU. A packaged model is looked up; of a model folder, with its config.json alone, the decoder's launches are
recorded on tensors without memory, which takes a minute. Nothing is timed. With --save, `simulate --engine FILE` prices
that model's steps.

\b
  moe-serve roofline DeepSeek-V3 --hardware H200 --ranks 32 --tokens-per-rank 128
  moe-serve roofline ./my-model --phase prefill --save steps.json
"""


@dataclass(frozen=True, kw_only=True)
class RooflineOptions:
    """The options of `moe-serve roofline`."""

    model: Annotated[str, typer.Argument(help="a packaged model, a file of --save, or a model folder")]
    hardware: str = option(default="H100", help="Hardware profile: H100, H200, B200, H20, MI300X, … or a YAML file.")
    ranks: int = option(default=8, min=1, help="GPUs over which the experts are spread.")
    phase: str = option(default="decode", help="decode or prefill.")
    tokens_per_rank: int | None = option(
        min=1, help="Tokens that one rank computes in one step.", show_default="128 decode, 16384 prefill"
    )
    context: int = option(default=4096, min=1, help="Tokens in the cache per request, or length of a prompt (prefill).")
    wire: str = option(default="auto", help="Rows on their way to experts, as dispatch.wire_dtype (a model folder).")
    redundant: int = option(default=0, min=0, help="Redundant experts between ranks (a model folder).")
    cache: str = option(default="auto", help="Keys and values, as cache.dtype (a model folder).")
    save: Path | None = option(help="Write all steps of the model there, for simulate --engine.")
    json_output: bool = option("--json", default=False, help="One JSON object on stdout.")


@balancer_command(RooflineOptions)
def roofline(options: RooflineOptions) -> None:
    """Prints the kernels of a step."""
    from moe_serve.eplb.cost.profile_files import load_hardware
    from moe_serve.eplb.cost.step_record import to_json as steps_to_json
    from moe_serve.roofline.table import Sizes, to_json, to_table

    if options.phase not in ("decode", "prefill"):
        raise ConfigError(f"--phase is {options.phase!r}; give decode or prefill")
    check_output(options.save, "--save")
    chip = load_hardware(options.hardware)
    tokens = options.tokens_per_rank or (16384 if options.phase == "prefill" else 128)
    sizes = Sizes(options.phase, options.ranks, tokens, options.context)
    steps = _steps_of(options)
    if options.save is not None:
        options.save.write_text(steps_to_json(steps), encoding="utf-8")
    typer.echo(json.dumps(to_json(steps, chip, sizes)) if options.json_output else to_table(steps, chip, sizes))


def _steps_of(options: RooflineOptions) -> "ModelSteps":
    model = options.model
    if not Path(model).is_dir():
        if options.redundant or options.cache != "auto":
            raise ConfigError(
                f"steps of {model} are recorded already, and --redundant and --cache change what is recorded; name a "
                "model folder, of which config.json is enough"
            )
        from moe_serve.eplb.cost.step_record import load_steps

        return load_steps(model)
    from moe_serve.models.families.registry import read_spec

    spec = read_spec(model)  # before torch is loaded
    if find_spec("triton") is None:
        raise ConfigError("launches are recorded with triton; pip install triton (Linux), or name a packaged model")
    from moe_serve.roofline.record import record_model

    with progress_bar("recording") as show:
        forms = options.redundant, options.cache
        return record_model(spec, Path(model).resolve().name, options.wire, show, *forms)
