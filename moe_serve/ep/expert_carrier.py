"""Chooses how experts travel between the ranks of a group."""

import platform

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.shm.memory import STORE_ORDER
from moe_serve.ep.expert_transfer import ExpertCarrier, NoCarrier


def make_carrier(group: EpGroup, slot_bytes: int, staging_slots: int) -> ExpertCarrier:
    """Returns the carrier of a group; a collective call.

    slot_bytes:    of an expert of one layer;  staging_slots: most experts that a rank sends, or receives, in a round
    Raises CapacityError when shared memory is too small.
    """
    if group.num_ranks == 1:
        return NoCarrier()
    if group.device.type == "cpu" and group.num_nodes == 1 and platform.machine() in STORE_ORDER:
        from moe_serve.ep.expert_carrier_shm import make_shm_carrier

        return make_shm_carrier(group, slot_bytes, staging_slots)
    from moe_serve.ep.expert_carrier_collective import make_collective_carrier

    return make_collective_carrier(group, staging_slots)
