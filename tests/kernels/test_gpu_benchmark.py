"""benchmarks/gpu.py is ready to run: its scenes with several ranks run here, tiny and in the interpreter, untimed.

The scenes that only call one kernel each have sizes of their own, far too large for the interpreter; their kernels have
tests and are compiled at these sizes.
"""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.kernels.conftest import RunCheck

TINY = {"HIDDEN": 128, "TOPK": 2, "RANKS": 2, "SLOTS": 2, "TOKENS": 2, "REPEATS": 1}


class OnTheHost(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def check_scenes(device: str, *unused: object) -> None:
    from benchmarks import gpu, gpu_timing

    def once(calls: list[Any], repeats: int = 1) -> float:
        calls[0]()
        return 10.0

    def once_in_a_graph(step: Any, inner: int = 1) -> float:
        step()
        return 10.0

    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 0.01)
    stream = mock.MagicMock()
    nothing = {
        "Event": lambda enable_timing: event, "_sleep": lambda cycles: None, "synchronize": lambda: None,
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda one: contextlib.nullcontext(),
    }  # fmt: skip
    on_gpu = gpu.virtual_regions
    with (
        mock.patch.multiple(gpu, time_us=once, graph_us=once_in_a_graph, **TINY),
        mock.patch.object(gpu_timing, "L2_BYTES", 1024),
        mock.patch.object(gpu, "virtual_regions", lambda region, _: on_gpu(region, torch.device("cpu"))),
        mock.patch.multiple(torch.cuda, **nothing),
        OnTheHost(),
    ):
        ceilings = gpu.Ceilings(4000.0, 4000.0, 800.0)
        rows = [row for scene in (gpu.low_latency, gpu.small_batches, gpu.overlap) for row in scene(ceilings)]
    assert len(rows) == (4 + 1) + 2 + 3
    assert all(row.value > 0 for row in rows if "hidden" not in row.name)
    goals = [row.name for row in rows if row.goal]
    assert len(goals) == 2 + 2 + 2, goals


def test_scenes_with_several_ranks_run(interpreter: RunCheck) -> None:
    interpreter(check_scenes)
