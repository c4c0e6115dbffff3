"""The placement of experts on all ranks, masked ones included, as a rank knows it, broadcasts it and compares it.

A masked rank keeps the slots that it had when it was masked, and the others go on moving experts without it. So the
full placement has the slots of live ranks as they serve, and those of a masked rank as it holds them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from moe_serve.dispatch.votes import Decision, Electorate
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.repair import ReloadedExpert, with_lost_experts
from moe_serve.errors import PeerError, PlacementError
from moe_serve.models.weights import ExpertToRead

_FORM = 1  # of the message
_NAMED = 5  # of several, in a message


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """form: of this message;  table: physical_to_logical as little-endian int32, row by row"""

    form: int
    version: int
    table: bytes


def encode(full: Placement) -> bytes:
    """Returns a placement as bytes for a broadcast."""
    return msgspec.msgpack.encode(_Message(_FORM, full.version, full.physical_to_logical.astype("<i4").tobytes()))


def decode(data: bytes, like: Placement) -> Placement:
    """Returns the placement in a broadcast. like: one of the same shape. Raises PeerError for anything else."""
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        if message.form != _FORM:
            raise PlacementError(f"form {message.form}, expected {_FORM}")
        table = np.frombuffer(message.table, dtype="<i4").reshape(like.physical_to_logical.shape)
        return replace(like, physical_to_logical=table, version=message.version)
    except (msgspec.DecodeError, ValueError, PlacementError) as error:
        text = f"the placement that this rank was told does not fit ({error}); start all ranks with one version"
        raise PeerError(text, -1, "placement", 0) from None


def encode_now(full: Placement, members: Sequence[int]) -> bytes:
    """Returns where experts are, and which ranks take part, for one that is started beside them."""
    return msgspec.msgpack.encode((encode(full), list(members)))


def decode_now(data: bytes, like: Placement) -> tuple[Placement, list[int]]:
    """Returns what `encode_now` was given. Raises as `decode` does."""
    try:
        full, members = msgspec.msgpack.decode(data, type=tuple[bytes, list[int]])
    except msgspec.DecodeError:
        full, members = b"", []
    return decode(full, like), members


def slots_to_read(holds: Placement, wanted: Placement, rank: int) -> list[ExpertToRead]:
    """Returns the experts of a rank's own slots in `wanted` that those slots do not hold."""
    first, end = rank * wanted.slots_per_rank, (rank + 1) * wanted.slots_per_rank
    own = wanted.physical_to_logical[:, first:end]
    differs = (own != holds.physical_to_logical[:, first:end]) & (own >= 0)
    return [ExpertToRead(row, int(own[row, slot]), slot) for row, slot in np.argwhere(differs).tolist()]


def with_reloads(full: Placement, masked: Collection[int]) -> tuple[Placement, list[ReloadedExpert]]:
    """Returns the full placement in which experts that only masked ranks hold have slots on the others, too.

    Raises PlacementError when these have too few slots.
    """
    serving, reloaded = with_lost_experts(full.without_ranks(masked)[0], masked)
    table = serving.physical_to_logical.copy()
    for rank in masked:
        slots = slice(rank * full.slots_per_rank, (rank + 1) * full.slots_per_rank)
        table[:, slots] = full.physical_to_logical[:, slots]
    # Not the next version: that may be the one of a round that some rank still has staged for the placement before.
    return replace(full, physical_to_logical=table, version=full.version + 2), reloaded


def has_slots_without(placement: Placement, num_lost: int) -> bool:
    """Returns whether the others have slots for all experts when so many ranks are lost."""
    return (placement.num_ranks - num_lost) * placement.slots_per_rank >= placement.num_logical


def spareable_ranks(placement: Placement) -> list[int]:
    """Returns the ranks of which any one can be lost: all where the others have slots for all experts, else none."""
    return list(range(placement.num_ranks)) if has_slots_without(placement, 1) else []


def meaning_of_a_loss(placement: Placement, restarts: bool = False, maps_all: bool = False) -> tuple[str, str]:
    """Returns what the loss of one rank means for serving, and why.

    restarts: our own launcher restarts it;  maps_all: every rank maps all experts
    """
    if not has_slots_without(placement, 1):
        return "the others wait until it is started again" if restarts else "ends serving", _slots_without(placement, 1)
    if maps_all:
        return "the others serve on without any", "every rank maps all experts"
    return "the others serve on without any", _reloads(
        placement, {f"rank {rank}": [rank] for rank in range(placement.num_ranks)}, "ranks"
    )


def meaning_of_a_lost_host(placement: Placement, host_of: Sequence[int], names: Sequence[str]) -> tuple[str, str]:
    """Returns what the loss of a whole host means for serving, and why. host_of: of each rank;  names: of the hosts"""
    ranks_of = {host: [rank for rank, its in enumerate(host_of) if its == host] for host in range(len(names))}
    most = max(map(len, ranks_of.values()))
    if not has_slots_without(placement, most):
        return "the others wait until it is back", _slots_without(placement, most)
    rule = Electorate(Decision(0, ()), host_of)
    spared = {names[host]: ranks for host, ranks in ranks_of.items() if rule.is_quorum(ranks_of.keys() - {host})}
    why = _reloads(placement, spared, "hosts")
    waited_for = [name for name in names if name not in spared]
    if not waited_for:
        return "the others serve on without any", why
    return f"the others serve on without {_list(spared)}", (
        f"{why}; without {_list(waited_for)} they wait until it is back: as fewer than half of the ranks, or a half "
        "without rank 0, they cannot tell its loss from that of the cable"
    )


def _reloads(placement: Placement, parts: Mapping[str, Sequence[int]], what: str) -> str:
    """Returns what a loss of any one of these parts of the ranks leaves to read. what: "ranks" or "hosts" """
    lost = {name: experts for name, ranks in parts.items() if (experts := placement.without_ranks(ranks)[1])}
    if not lost:
        return f"every expert has slots on two {what}"
    of = "any" if len(lost) == len(parts) > 1 else _list(lost)
    rows = sorted({row for experts in lost.values() for row, _ in experts})
    layers = f"layer{'s' * (len(rows) > 1)} {_list(str(placement.moe_layer_ids[row]) for row in rows)}"
    most = max(map(len, lost.values()))
    text = f"after the loss of {of} they first read up to {most} experts from the checkpoint again ({layers})"
    if placement.num_slots < 2 * placement.num_logical:
        return f"{text}; eplb.num_redundant_experts: {placement.num_logical} would leave none to read"
    return f"{text}; another placement would leave none to read (eplb.init_expert_location)"


def _list(names: Iterable[str]) -> str:
    """Returns such as "a, b, c, …": some of them."""
    named = list(names)
    return ", ".join(named[:_NAMED]) + (", …" if len(named) > _NAMED else "")


def too_few_slots(full: Placement, masked: Sequence[int]) -> str:
    """Returns the reason why serving ends without these ranks."""
    ranks = " and ".join(f"rank {rank}" for rank in masked) + (" together" if len(masked) > 1 else "")
    return f"{ranks} cannot be spared: {_slots_without(full, len(masked))}; start the ranks again"


def _slots_without(placement: Placement, num_lost: int) -> str:
    left = placement.num_ranks - num_lost
    wanted = -(-placement.num_logical // left) * placement.num_ranks - placement.num_logical
    ranks = "rank that is left has" if left == 1 else "ranks that are left have"
    return (
        f"the {left} {ranks} {left * placement.slots_per_rank} slots per layer for {placement.num_logical} experts; "
        f"to go on, raise eplb.num_redundant_experts to {wanted}, or change the file in eplb.init_expert_location"
    )


def what_is_lost(full: Placement, masked: Sequence[int], lost: Sequence[tuple[int, int]]) -> str:
    """Returns a message that names the lost ranks and experts. lost: (row, expert) without other slots, ascending"""
    row = lost[0][0]
    experts = [str(expert) for lost_row, expert in lost if lost_row == row]
    ranks = " and ".join(f"rank {rank}" for rank in masked)
    layers = len({lost_row for lost_row, _ in lost})
    over = f" over {layers} layers" if layers > 1 else ""
    layer = full.moe_layer_ids[row]
    return f"{ranks} held the only slots of {len(lost)} experts{over} (layer {layer}: {_list(experts)})"
