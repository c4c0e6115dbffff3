"""The adapter to DeepEP against a double of it; no GPU, not DeepEP itself.

Without DEEPEP_SOURCE (see double.py) only the checks that come before any call are tested.
"""

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, EpGroup, MaskedRows, PackedRows, TransportRequest
from moe_serve.dispatch.deepep import checks as deepep_checks
from moe_serve.dispatch.deepep import transport as deepep
from moe_serve.dispatch.deepep.checks import LOW_LATENCY_HIDDEN, LOW_LATENCY_TOPK, NORMAL_RANKS, Machine, look
from moe_serve.errors import CapacityError, ConfigError
from tests.dispatch.contract import Scenario, slots_of_rows
from tests.dispatch.deepep.double import SOURCE, library, source
from tests.ranks import run_ranks
from tests.tolerance import BFLOAT16, FP8_WIRE

needs_source = pytest.mark.skipif(not SOURCE, reason="DEEPEP_SOURCE names no DeepEP source")
HIDDEN = 2048  # the smallest for which DeepEP's low-latency kernels are compiled
LIMITS = BufferLimits(8, HIDDEN, 3, 4)
CUDA = EpGroup(0, 2, torch.device("cuda", 0), mock.Mock())
CASES = {
    "uneven": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, dtype=torch.bfloat16),
    "with -1": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, gate="masked", dtype=torch.bfloat16),
    "all -1": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, gate="none", dtype=torch.bfloat16),
    "one slot": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, gate="one_slot", dtype=torch.bfloat16),
    "idle ranks": Scenario((0, 5, 0, 2), topk=3, slots_per_rank=4, hidden=HIDDEN, dtype=torch.bfloat16),
    "nobody": Scenario((0, 0, 0, 0), topk=3, slots_per_rank=4, hidden=HIDDEN, dtype=torch.bfloat16),
}


def transport(group: EpGroup, mode: str, wire: str = "auto") -> Any:
    with (
        mock.patch.object(deepep, "_load", library),
        mock.patch.object(deepep, "look", return_value=Machine()),
        mock.patch.object(deepep, "choose_mode", return_value=mode),
    ):
        request = TransportRequest("deepep", LIMITS, torch.bfloat16, wire)
        return deepep.make_deepep(replace(group, device=torch.device("cuda", 0)), request)


def on_ranks(name: str, num_ranks: int) -> Scenario:
    return replace(CASES[name], tokens=CASES[name].tokens[:num_ranks])


def check_packed(rank: int, group: EpGroup, mode: str, num_ranks: int) -> None:
    ours = transport(group, mode)
    assert ours.capabilities.bitwise
    for name in CASES:
        one = on_ranks(name, num_ranks)
        hidden, ids, weights = one.inputs(rank)
        arrived = ours.dispatch(hidden, ids).wait()
        assert isinstance(arrived.rows, PackedRows)
        assert torch.equal(arrived.rows.x, one.expected_rows(rank)), name
        mine = one.slot_counts().sum(0)[rank * 4 : rank * 4 + 4]
        assert torch.equal(arrived.rows.rows_per_slot, mine), name
        out = one.expert_out(arrived.rows.x, slots_of_rows(arrived.rows, rank))
        assert torch.equal(ours.combine(out, weights, arrived.handle).wait(), one.expected_combined(rank)), name
    counts = ours.exchange_counts(torch.tensor([rank, 7])).wait()
    assert counts.tolist() == [[r, 7] for r in range(num_ranks)]
    ours.close()


@needs_source
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("mode", ["normal", "elastic"])
def test_pairs_that_travel_alone_return_with_our_bits(mode: str, num_ranks: int) -> None:
    run_ranks(num_ranks, check_packed, mode, num_ranks)


def distinct(ids: Tensor, num_slots: int) -> Tensor:
    """A token names a slot once, as low-latency slabs want it."""
    return torch.where(ids < 0, -1, (ids[:, :1].clamp(min=0) + 5 * torch.arange(ids.shape[1])) % num_slots)


def check_slabs(rank: int, group: EpGroup, wire: str, limit: float, num_ranks: int) -> None:
    ours = transport(group, "low_latency", wire)
    assert not ours.capabilities.bitwise
    assert "bits may differ" in ours.note
    for name in CASES:
        one = on_ranks(name, num_ranks)
        hidden, ids, weights = one.inputs(rank)
        ids = distinct(ids, one.num_slots)
        arrived = ours.dispatch(hidden, ids).wait()
        assert isinstance(arrived.rows, MaskedRows)
        assert arrived.rows.x.shape == (4, 8 * num_ranks, HIDDEN)
        assert arrived.rows.x.dtype == torch.bfloat16
        everybody = torch.cat([distinct(one.inputs(r)[1], one.num_slots) for r in range(num_ranks)])
        mine = torch.bincount(everybody[everybody >= 0], minlength=one.num_slots)[rank * 4 : rank * 4 + 4]
        assert torch.equal(arrived.rows.rows_per_slot, mine), name
        out = arrived.rows.x * torch.arange(1, 5)[:, None, None] * 0.5 ** (rank % 2)
        combined = ours.combine(out, weights, arrived.handle).wait()
        factor = (ids % 4 + 1) * 0.5 ** ((ids // 4) % 2)  # what slot and rank have made of the row
        expected = hidden.float() * (weights * factor).masked_fill(ids < 0, 0).sum(1, keepdim=True)
        assert combined.shape == expected.shape
        assert (combined.float() - expected).norm() <= limit * expected.norm(), name
    ours.close()


@needs_source
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("wire, limit", [("auto", BFLOAT16), ("fp8", FP8_WIRE)])
def test_low_latency_gives_slabs_and_adds_in_its_own_order(wire: str, limit: float, num_ranks: int) -> None:
    run_ranks(num_ranks, check_slabs, wire, limit, num_ranks)


@needs_source
def test_the_double_refuses_a_call_that_deepep_does_not_have() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        library().Buffer(None).dispatch(torch.zeros(1, 1), speed="high")


@needs_source
def test_the_limits_are_those_of_the_source() -> None:
    switch = source("csrc/kernels/legacy/launch.cuh").split("define SWITCH_HIDDEN")[1].split("default:")[0]
    assert tuple(map(int, re.findall(r"case (\d+):", switch))) == LOW_LATENCY_HIDDEN
    kernels = source("csrc/kernels/legacy/internode_ll.cu")
    assert set(re.findall(r"kNumMaxTop[kK] = (\d+);", kernels)) == {str(LOW_LATENCY_TOPK)}
    table = source("deep_ep/buffers/legacy.py").split("config_map = {")[1].split("}")[0]
    assert tuple(map(int, re.findall(r"(\d+): Config", table))) == NORMAL_RANKS
    version = re.search(r"__version__ = '(.*)'", source("deep_ep/__init__.py"))
    assert version is not None
    assert version[1] in inspect.getsource(deepep_checks), "the release that the adapter is written for"


def make(**changes: Any) -> Any:
    library = changes.pop("library", SimpleNamespace(Buffer=object, ElasticBuffer=object))
    machine, mode = changes.pop("machine", Machine()), changes.pop("mode", "low_latency")
    group = changes.pop("group", CUDA)
    with (
        mock.patch.object(deepep, "_load", return_value=library),
        mock.patch.object(deepep, "look", return_value=machine),
        mock.patch.object(deepep, "choose_mode", return_value=mode),
    ):
        return deepep.make_deepep(group, replace(TransportRequest("deepep", LIMITS, torch.bfloat16), **changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": torch.float32}, "set model.dtype: bfloat16"),
        ({"limits": BufferLimits(600, 256, 3, 4)}, "NVSHMEM_QP_DEPTH is 1024 and 600 tokens need 1202"),
        ({"limits": BufferLimits(8, 256, 16, 4)}, "up to 11 experts per token"),
        ({"wire_dtype": "fp8", "mode": "normal"}, "set dispatch.wire_dtype: auto"),
        ({"mode": "elastic", "library": SimpleNamespace(Buffer=object)}, "has no ElasticBuffer"),
        ({"library": SimpleNamespace(Buffer=object, __version__="0.9")}, "DeepEP 0.9 has no Buffer.get_low_latency"),
        ({"limits": BufferLimits(8, 2000, 3, 4)}, "compiled for hidden 2048, .* this model has 2000"),
        ({"mode": "normal", "group": replace(CUDA, num_ranks=3)}, "tuned for 2, 4, 8, .* here are 3"),
        ({"mode": "normal", "limits": BufferLimits(8, 1000, 3, 4)}, "multiple of 16 here, it is 1000"),
        ({"mode": "elastic", "limits": BufferLimits(8, 1001, 3, 4)}, "multiple of 16 bytes, hidden is 1001"),
        ({"group": replace(CUDA, num_ranks=1, process_group=None)}, "set dispatch.backend: local"),
        ({"machine": Machine(num_hosts=2)}, "on 2 hosts, .* mlx5 device, here is none"),
        ({"machine": Machine(cut_off=((0, 3),))}, "GPUs 0 and 3 cannot reach"),
        ({"mode": "elastic", "wire_dtype": "fp8"}, "fp8 rows here in low_latency .* this is elastic"),
    ],
)
def test_limits_are_checked_at_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_without_deepep_the_error_says_what_to_install() -> None:
    with mock.patch.dict("sys.modules", {"deep_ep": None}), pytest.raises(ConfigError, match="install DeepEP from"):
        deepep.make_deepep(CUDA, TransportRequest("deepep", LIMITS, torch.bfloat16))


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"set model.dtype: bfloat16.*up to 11 experts.*this model has 100;"):
        make(dtype=torch.float32, limits=BufferLimits(8, 100, 16, 4))


def test_buffers_that_deepep_cannot_count_are_refused() -> None:
    buffer = SimpleNamespace(get_low_latency_rdma_size_hint=lambda *_: 1 << 36)
    with pytest.raises(CapacityError, match=r"64\.0 GiB for 8 tokens, it can count 32"):
        deepep.DeepEpAllToAll(CUDA, LIMITS, False, "low_latency", SimpleNamespace(Buffer=buffer))  # type: ignore[arg-type]


def test_this_machine_can_be_looked_at() -> None:
    machine = look(EpGroup(0, 1, torch.device("cpu")))
    assert (machine.num_hosts, machine.cut_off) == (1, ())
