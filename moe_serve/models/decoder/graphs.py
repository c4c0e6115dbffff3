"""Runs decode steps on a GPU as captured graphs, one for each padded number of rows and bound of the context.

A graph repeats the launches of a step with the addresses and sizes of its capture, without the host's time for each. So
a captured step lies in static tensors (BatchBuilder), its lengths are upper bounds for the host, and padding rows get
no experts: the device knows them by their cache slots. The first step of a size runs as it is and compiles kernels; the
second one is captured, which runs nothing and waits for no peer, and replayed. All others, and all once a capture has
failed, run as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.log import get_logger
from moe_serve.models.decoder.runners import TorchRunner
from moe_serve.models.decoder.stack import StepInputs

log = get_logger(__name__)

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
SMALLEST_BOUND = 1024  # keys; the bound of the context doubles from here on


def capture_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Returns what replays the launches of `run`, and the tensor that they write."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate and copy meanwhile, as those do that move experts.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


@dataclass(frozen=True)
class _Graph:
    """batch: whose tensors the launches read"""

    batch: ForwardBatch
    replay: Callable[[], None]
    logits: Tensor


@dataclass
class GraphRunner:
    """StackRunner on GPUs. eager: runs a step as it is"""

    eager: TorchRunner
    parallel: ExpertParallel
    capture: Capture = capture_graph
    _graphs: dict[tuple[int, int, bool], _Graph | None] = field(default_factory=dict)  # None: ran once
    _failed: bool = False

    @torch.inference_mode()
    def __call__(self, step: StepInputs) -> Tensor:
        if self._failed or not self._can_capture(step):
            return self.eager(step)
        batch, num_rows = step.batch, step.batch.num_tokens
        bound = max(SMALLEST_BOUND, 1 << (max(batch.host_seq_lens) - 1).bit_length())
        key = batch.num_padded, bound, self.parallel.replica_map.splits_exactly
        static = replace(step, batch=_static(batch, bound), has_padding=True)
        graph = self._graphs.get(key)
        if key not in self._graphs or (graph is not None and graph.batch.input_ids is not batch.input_ids):
            self._graphs[key] = None
            return self.eager(static)[:num_rows]
        if graph is None:
            try:
                graph = _Graph(batch, *self.capture(lambda: self.eager(static)))
            except RuntimeError as error:
                self._failed = True
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("steps are not captured in CUDA graphs, and run launch by launch: %s", reason)
                self.parallel.all_to_all.begin_step(0)  # which the capture has advanced
                return self.eager(static)[:num_rows]
            self._graphs[key] = graph
        graph.replay()
        return graph.logits[:num_rows]

    def logits_of(self, rows: range) -> Tensor:
        return self.eager.logits_of(rows)

    def _can_capture(self, step: StepInputs) -> bool:
        batch, passes = step.batch, self.parallel.passes
        if passes is not None and passes.is_on:
            return False
        only_decodes = 0 < batch.num_tokens == batch.num_decodes and not batch.prompt_rows
        # The builder has padded the batch, in tensors that stay.
        is_padded = batch.seq_lens.shape[0] == batch.num_padded
        is_whole = step.num_chunks == 1 and not step.overlap
        return only_decodes and is_padded and is_whole and self.parallel.all_to_all.captures


def _static(batch: ForwardBatch, bound: int) -> ForwardBatch:
    """Returns the batch with its padding as rows like others, and an upper bound for each length."""
    rows = batch.num_padded
    batch = batch._replace(num_tokens=rows, num_decodes=rows, logit_rows=batch.query_starts[:-1])  # one row for each
    return batch._replace(host_seq_lens=(bound,) * rows, host_query_lens=(1,) * rows)
