"""The computing part of one rank: decoder, experts, transport, KV cache and load recorder.

The engine above knows requests and steps, the folders below know tensors. `engine/build.py` puts it together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.dispatch.base import AnyAllToAll
from moe_serve.dispatch.membership import Membership
from moe_serve.engine.model.expert_sources import ExpertSources
from moe_serve.engine.model.load_windows import LoadWindows, TraceWriter
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.ep.gate import CapacityLimit
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.pass_recorder import PassRecorder
from moe_serve.ep.peer_experts import SlotChanges
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.part_clock import PartClock
from moe_serve.models.decoder.moe_decoder import MoeDecoder
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weights import ExpertToRead


@dataclass
class ServedModel:
    """A model that is ready to run steps on one rank.

    recorder: counts the load, for records and for the experts that drafts read; None: nobody asks for either
    trace:    the file for load records and events, or None
    passes:   records single passes for clients; None: they cannot ask for that
    sources:  of experts that are read while others serve
    clock:    measures the parts of a step
    num_experts: that the rows of the last forward asked for, as LoadRecorder.step_done tells; 0: nobody counts them
    changing: entered where slots change, until `placement` names the experts that they hold; other ranks read them
    info:     facts for /server_info
    kv_key:   of all that makes cached values differ, as in prefix_cache.root_key
    """

    rank: int
    spec: ModelSpec
    decoder: MoeDecoder
    cache: KvCache
    limits: ModelLimits
    numerics: Numerics
    device: torch.device
    all_to_all: AnyAllToAll
    replica_map: ReplicaMap
    recorder: LoadRecorder | None
    windows: LoadWindows
    sources: ExpertSources
    info: dict[str, Any]
    clock: PartClock
    kv_key: bytes
    trace: TraceWriter | None = None
    passes: PassRecorder | None = None
    limit: CapacityLimit | None = None
    num_experts: int = 0
    changing: SlotChanges = field(default_factory=SlotChanges)

    @property
    def placement(self) -> Placement:
        """The placement in use."""
        return self.windows.placement

    @property
    def waited_s(self) -> list[float]:
        """Seconds that this rank has waited for each other one; empty where the transport does not measure it."""
        return self.all_to_all.waited_s

    @property
    def split_outcomes(self) -> list[int]:
        """Batches that the exact split has proven at once, proven after repair, not proven; empty where none serves."""
        outcomes = self.replica_map.split_outcomes
        return [] if outcomes is None else [int(number) for number in outcomes.cpu()]

    @property
    def changed_choices(self) -> list[int]:
        """Choices of gates that moved over the capacity of an expert, and that were dropped; empty without a limit."""
        return [] if self.limit is None else [int(number) for number in self.limit.totals]

    def begin_step(self, max_tokens: int, split_evenly: bool = False) -> None:
        """Prepares for the forward of a step. Arguments as in the plan, equal on all ranks."""
        self.all_to_all.begin_step(max_tokens)
        self.replica_map.split_evenly(split_evenly)

    def forward(self, batch: ForwardBatch, num_chunks: int, overlap: bool = False) -> Tensor:
        """Returns the logits of the rows that are sampled, [len(logit_rows), vocab] float32.

        Raises PeerError when a peer's rows did not arrive: the step is void, and `void_step` drops its counts. A GPU
        has not computed them yet: `check_step` of the transport says whether they count.
        """
        if self.passes is not None:
            self.passes.begin(batch.input_ids[: batch.num_tokens], batch.positions[: batch.num_tokens])
        logits = self.decoder.forward(batch, self.cache, num_chunks, overlap)
        self.all_to_all.end_step()
        if self.recorder is not None:
            self.num_experts = self.recorder.step_done()
        return logits

    def predict(self, batch: ForwardBatch, num_chunks: int, hidden: Tensor | None = None) -> Tensor:
        """Runs the layer that predicts, as MoeDecoder.predict does. `begin_step` comes before the first run of a step,
        `end_prediction` behind the last. Raises PeerError as `forward` does."""
        return self.decoder.predict(batch, self.cache, num_chunks, hidden)

    def end_prediction(self) -> None:
        """Ends the runs of the layer that predicts. Raises PeerError where rows of a peer did not come."""
        self.all_to_all.end_step()
        self.all_to_all.check_step()

    def logits_of(self, rows: range) -> Tensor:
        """Returns the logits of other rows of the last forward, whose batch had prompt rows: [len(rows), vocab]."""
        return self.decoder.logits_of(rows)

    def rows(self) -> Tensor:
        """Returns the rows of the last forward that are projected to logits, [num_tokens or more, H]; not on GPUs."""
        return self.decoder.run.rows

    @property
    def membership(self) -> Membership | None:
        """The ranks that take part; None where the transport cannot mask one."""
        return self.all_to_all.membership

    def void_step(self) -> None:
        """Drops the counts of an unfinished step, and the load records that some rank may lack."""
        if self.recorder is not None:
            self.recorder.void_step()
        self.windows.void()

    def rejoin(self, first_step: int) -> None:
        """Begins the load record, and goes on with the trace, at the step where this rank rejoins the others."""
        self.windows.rejoin(first_step)
        if self.trace is not None:
            self.trace.rejoin(first_step)

    def activate(self, placement: Placement) -> None:
        """Serves with another placement of the same shape from the next step on; its experts are in their slots."""
        self.replica_map.activate(placement)
        self.windows.placement = placement
        if self.names_experts:
            own = placement.by_rank[:, self.rank]
            for store, experts in zip(self.decoder.experts, own, strict=True):
                store.hold(experts)

    @property
    def names_experts(self) -> bool:
        """Whether slots only name experts, which the ranks of the host share: then none is read, nor moved."""
        return any(store.names_experts for store in self.decoder.experts)

    def read_experts(self, experts: Sequence[ExpertToRead], held: Placement | None = None) -> None:
        """Writes experts into slots of this rank: out of the memory of ranks that hold them, or from the checkpoint.

        held: by the ranks that can be asked; None: nobody holds these
        Where slots name experts there is nothing to write: they name those of the placement that is activated next.
        Raises ModelError when that fails.
        """
        if self.names_experts:
            return
        self.sources.read(experts, self.decoder.experts, held)

    def warm_up(self) -> None:
        """Runs empty steps through every layer and collective, so that the first request does not pay for it."""
        for max_tokens in self.all_to_all.step_sizes:
            self.begin_step(max_tokens)
            self.forward(ForwardBatch.empty(self.device, self.numerics), 1)
            self.all_to_all.check_step()
            if self.spec.predictor_id is not None:
                self.begin_step(max_tokens)
                self.predict(ForwardBatch.empty(self.device, self.numerics), 1)
                self.end_prediction()
