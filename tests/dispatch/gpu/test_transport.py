"""The GPU transport above its kernels: nothing is read back within a step, and how a late peer is reported."""

from typing import Any

import pytest
import torch

from moe_serve.dispatch.base import BufferLimits, EpGroup, MaskedRows
from moe_serve.dispatch.gpu.region import gpu_region
from moe_serve.dispatch.gpu.symmetric import SymmetricRegions
from moe_serve.dispatch.gpu.transport import GpuSlabAllToAll
from moe_serve.ep import moe_layer
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PeerError
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import FAST

LIMITS = BufferLimits(max_tokens_per_rank=4, hidden=64, topk=2, slots_per_rank=3)


class Launches(dict[str, Any]):
    """In place of kernels: notes the name of each that would be launched."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __missing__(self, name: str) -> Any:
        launches = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *args, **kwargs: launches.names.append(name)

        return Kernel()


def make(device: str, launches: Launches) -> GpuSlabAllToAll:
    triton_ranks = pytest.importorskip("moe_serve.dispatch.gpu.launch_triton")
    region = gpu_region(2, LIMITS, torch.bfloat16, "fp8", stages=True)
    peers = torch.zeros(2, dtype=torch.int64, device=device)
    regions = SymmetricRegions(region, peers, 0, 1, None, launchers=launches)
    return GpuSlabAllToAll(triton_ranks.SlabRanks(regions, torch.bfloat16), EpGroup(0, 1, peers.device))


@pytest.fixture
def launches() -> Launches:
    return Launches()


def test_no_call_reads_a_tensor_back(launches: Launches) -> None:
    transport = make("meta", launches)  # tensors without data: whoever looks into one gets an error
    hidden = torch.empty(3, 64, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(3, 2, dtype=torch.int64, device="meta")
    weights = torch.empty(3, 2, device="meta")
    transport.begin_step(3)
    sent = [transport.dispatch(hidden, ids) for _ in range(transport.live_handles)]
    for pending in sent:
        arrived = pending.wait()
        assert isinstance(arrived.rows, MaskedRows)
        assert arrived.rows.x.shape == (3, 2 * 4, 64)
        assert arrived.rows.rows_per_slot.device.type == "meta"
        assert transport.combine(arrived.rows.x, weights, arrived.handle).wait().shape == (3, 64)
    round_trip = ["dispatch_receive_kernel", "combine_send_kernel", "combine_receive_kernel"]
    assert launches.names == ["dispatch_send_kernel"] * 2 + round_trip * 2
    with pytest.raises(NotImplementedError):
        transport.end_step()  # which copies what the host will look at: so the test can fail


@pytest.mark.parametrize("num_halves", [1, 2])
def test_a_whole_moe_layer_around_it_reads_nothing_back(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, num_halves: int
) -> None:
    """Gate, load recorder, choice of replica and transport; the experts' own kernels do not run."""
    transport, spec = make("meta", launches), RouterSpec(6, 2)
    placement = Placement.trivial(1, 6, 2)
    recorder = LoadRecorder(1, 6, EpGroup(0, 1, torch.device("meta")))
    parallel = ExpertParallel(0, spec, transport, ReplicaMap(placement, "meta"), recorder, 4, FAST)
    weight = torch.empty(6, 64, device="meta")
    experts = {"gate_up": torch.empty(3, 32, 64, device="meta"), "down": torch.empty(3, 64, 16, device="meta")}
    monkeypatch.setattr(moe_layer, "expert_ffn", lambda rows, experts, numerics, out: rows.x)
    layer = moe_layer.MoeLayer(parallel, 0, moe_layer.MoeWeights(weight, None, ExpertStore(experts)))
    hidden = torch.empty(7, 64, dtype=torch.bfloat16, device="meta")
    halves = hidden.tensor_split(num_halves)
    out = torch.cat(moe_layer.take_turns([layer(half, len(half), 2 // num_halves) for half in halves]))
    assert (out.shape, out.device.type) == ((7, 64), "meta")
    assert launches.names.count("combine_receive_kernel") == 2


def test_the_peer_that_was_missed_last_is_named_and_only_once_a_step_was_late(launches: Launches) -> None:
    transport = make("cpu", launches)
    transport.end_step()
    transport.check_step()
    transport._ranks.late[0] = torch.tensor([4, 9])
    transport.check_step()  # of the step that ended
    transport.end_step()
    with pytest.raises(PeerError, match="rank 1 did not send its rows in round 9") as caught:
        transport.check_step()
    assert (caught.value.rank, caught.value.step) == (1, 9)
