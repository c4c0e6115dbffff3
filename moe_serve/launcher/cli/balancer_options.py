"""What the balancer commands share: options that describe a cluster, prices and the trace, and how they fail.

Nothing here imports torch; reading a `.pt` does, in the reader.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from moe_serve.eplb.load import LoadTrace
from moe_serve.errors import ConfigError, MoeServeError
from moe_serve.topology import Topology

Trace = Annotated[
    str,
    typer.Argument(
        help="Load trace, recognised by content: ours (.npz, .jsonl, .csv), an SGLang recorder dump (.pt, or the "
        "folder of all ranks), TensorRT-LLM statistics (a folder), vLLM or ADRS JSON, a Megatron router trace; or "
        "example:demo and example:demo_unbalanced.",
        show_default=False,
    ),
]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Expert ranks (GPUs).", show_default="8 a node")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines that the ranks are spread over.")]
Slots = Annotated[
    int | None,
    typer.Option("--slots", min=1, help="Physical experts per layer, a multiple of the ranks.", show_default=False),
]
Redundant = Annotated[
    int,
    typer.Option("--redundant", min=0, help="Instead of --slots: slots above one per expert, rounded up to the ranks."),
]
Window = Annotated[
    int,
    typer.Option("--window", min=0, help="Fold so many steps into one window of load; 0 = windows as recorded."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Model profile for predicted times: DeepSeek-V3, Qwen3-235B-A22B, … or a YAML file."),
]
Hardware = Annotated[
    str | None, typer.Option("--hardware", help="Hardware profile: H800, H100, H200, GB200, … or a YAML file.")
]
Context = Annotated[float, typer.Option("--context", min=1, help="Tokens in the cache per request (decode).")]
Phase = Annotated[str, typer.Option("--phase", help="prefill or decode, for windows that do not say it.")]
Groups = Annotated[int | None, typer.Option("--groups", min=1, help="Expert groups of the router (DeepSeek-V3: 8).")]
OffHome = Annotated[
    float,
    typer.Option("--off-home", min=0, max=1, help="Share of the load that may leave its expert's home node; 0 = "
                 "DeepSeek's hard hierarchy, 1 = none."),
]  # fmt: skip
Topk = Annotated[int | None, typer.Option("--topk", min=1, help="Experts per token, where the trace does not say it.")]
Experts = Annotated[
    int | None, typer.Option("--experts", min=1, help="Experts per layer, where the trace does not say it.")
]
MaxPt = Annotated[float, typer.Option("--max-pt-gib", min=0, help="Largest .pt file to load whole, in GiB.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Breaks ties and drives searches.")]
JsonOut = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout instead of tables.")]
HtmlOut = Annotated[
    Path | None, typer.Option("--html", help="Also write one self-contained page with pictures.", show_default=False)
]
FailBelow = Annotated[
    float | None,
    typer.Option("--fail-below", min=0, max=1, help="Exit with 1 when the best balancedness is below this (for CI).",
                 show_default=False),
]  # fmt: skip

Command = TypeVar("Command", bound=Callable[..., None])


def one_line_errors(command: Command) -> Command:
    """Returns the command with our errors turned into one line on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except MoeServeError as problem:
            typer.echo(f"error: {problem}", err=True)
            raise typer.Exit(2) from None
        except BrokenPipeError:  # somebody looked at the head of the output only
            sys.stderr.close()
            raise typer.Exit(0) from None

    return run  # type: ignore[return-value]


def cluster(ranks: int | None, nodes: int) -> Topology:
    """Returns the topology of --ranks and --nodes."""
    total = ranks or 8 * nodes
    if total % nodes:
        raise ConfigError(f"{total} ranks do not divide over {nodes} nodes; give a multiple of {nodes} for --ranks")
    return Topology(nodes, total // nodes)


def slots_of(slots: int | None, redundant: int, num_logical: int, topology: Topology) -> int:
    """Returns the slots per layer of --slots or --redundant."""
    return slots or -(-(num_logical + redundant) // topology.num_ranks) * topology.num_ranks


def open_trace(
    path: str,
    progress: Callable[[int, int], None] | None,
    window: int = 0,
    topk: int | None = None,
    experts: int | None = None,
    max_pt_gib: float = 1.0,
) -> LoadTrace:
    """Returns the trace of a command line."""
    from moe_serve.eplb.files.fold import folded
    from moe_serve.eplb.files.traces import read_trace

    trace = read_trace(path, progress=progress, num_logical=experts, max_torch_bytes=int(max_pt_gib * 2**30))
    if topk is not None and trace.topk not in (None, topk):
        raise ConfigError(f"--topk is {topk} but the trace says {trace.topk}; leave --topk out")
    if topk is not None:
        trace = replace(trace, topk=topk)
    return folded(trace, window) if window else trace


@contextmanager
def progress_bar(words: str, quiet: bool = False) -> Iterator[Callable[[float, float | None], None]]:
    """Yields a function (done, total or None) that moves a bar on stderr, and without a terminal, nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
