"""Runs decode steps on a GPU as captured graphs, one for each padded number of rows and bound of the context.

A graph repeats the launches of a step with the addresses and sizes of its capture, without the host's time for each. So
a captured step lies in static tensors (BatchBuilder), its lengths are upper bounds for the host, and padding rows get
no experts: the device knows them by their cache slots. The first step of a size runs as it is and compiles kernels; the
second one is captured, which runs nothing and waits for no peer, and replayed. All others, and all once a capture has
failed, run as they are.

No two graphs run at once, so one memory serves what lies between the launches of all of them, and few tensors hold
their logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.log import get_logger
from moe_serve.models.decoder.runners import TorchRunner
from moe_serve.models.decoder.stack import StepInputs

log = get_logger(__name__)

Capture = Callable[[Callable[[], object]], Callable[[], None]]
SMALLEST_BOUND = 1024  # keys; the bound of the context doubles from here on


@dataclass
class GraphCapture:
    """Captures graphs in one pool of memory. What a graph keeps between its launches, others overwrite."""

    _pool: Any = None

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """Returns what replays the launches of `run`."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile, as those do that move experts.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


def graph_logits(most_rows: int) -> list[int]:
    """Returns the rows of each tensor that holds logits of graphs of up to so many rows: the powers of two."""
    return [1 << power for power in range((most_rows - 1).bit_length() + 1)]


@dataclass(frozen=True)
class _Graph:
    """batch: whose tensors the launches read"""

    batch: ForwardBatch
    replay: Callable[[], None]


@dataclass
class GraphRunner:
    """StackRunner on GPUs. eager: runs a step as it is"""

    eager: TorchRunner
    parallel: ExpertParallel
    capture: Capture = field(default_factory=GraphCapture)
    _graphs: dict[tuple[int, int, bool], _Graph | None] = field(default_factory=dict)  # None: ran once
    _logits: dict[int, Tensor] = field(default_factory=dict)  # by their rows
    _failed: bool = False

    @torch.inference_mode()
    def __call__(self, step: StepInputs) -> Tensor:
        if self._failed or not self._can_capture(step):
            return self.eager(step)
        batch, num_rows = step.batch, step.batch.num_tokens
        bound = max(SMALLEST_BOUND, 1 << (max(batch.host_seq_lens) - 1).bit_length())
        key = batch.num_padded, bound, self.parallel.replica_map.splits_exactly
        static = replace(step, batch=_static(batch, bound), has_padding=True)
        graph, logits = self._graphs.get(key), self._logits_of(static)
        if key not in self._graphs or (graph is not None and graph.batch.input_ids is not batch.input_ids):
            self._graphs[key] = None
            return self.eager(static)[:num_rows]
        if graph is None:
            try:
                graph = _Graph(batch, self.capture(lambda: self.eager(static, logits)))
            except RuntimeError as error:
                self._failed = True
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("steps are not captured in CUDA graphs, and run launch by launch: %s", reason)
                self.parallel.all_to_all.begin_step(0)  # which the capture has advanced
                return self.eager(static)[:num_rows]
            self._graphs[key] = graph
        graph.replay()
        return logits[:num_rows]

    def _logits_of(self, static: StepInputs) -> Tensor:
        """Returns where the logits of a graph go, [rows, vocab_size] float32."""
        rows = static.batch.num_tokens
        size = graph_logits(rows)[-1]
        if size not in self._logits:
            vocab_size = self.eager.stack.head.out_features
            self._logits[size] = torch.empty(size, vocab_size, device=static.batch.input_ids.device)
        return self._logits[size][:rows]

    def logits_of(self, rows: range) -> Tensor:
        return self.eager.logits_of(rows)

    @property
    def rows(self) -> Tensor:
        return self.eager.rows

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
