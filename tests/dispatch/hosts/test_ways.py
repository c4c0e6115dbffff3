"""How often a layer waits for the network between two hosts: once for its rows and once for its results."""

import math
import time

import torch

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.ep.moe_layer import take_turns
from tests.dispatch.contract import Scenario
from tests.dispatch.hosts.pretended import on_hosts
from tests.ep.test_rounds import a_layer, stack
from tests.launcher.hosts import Host, make_hosts, needs_hosts
from tests.ranks import run_ranks

NUM_LAYERS, DELAY_S, NUM_TRIES = 5, 0.05, 20
MOST_WAYS = 2 * NUM_LAYERS + 2.5


def ways_of(rank: int, group: EpGroup, hosts: tuple[Host, Host]) -> list[float]:
    """Returns how many delays a whole batch takes through the layers, and two halves that take turns."""
    with hosts[rank].network():  # threads that are started here stay there
        linked = on_hosts(group, (0, 1), hosts[rank].address)
    one = Scenario((8, 8), topk=2, slots_per_rank=2, hidden=16)
    transport = make_all_to_all(linked, one.request("shm"))
    layer, rows = a_layer(transport, num_ranks=2, rank=rank), one.inputs(rank)[0]
    found = []
    for num_halves in (1, 2):
        least = math.inf
        for _ in range(NUM_TRIES):  # other tests may hold the cores
            is_slow = torch.tensor([least >= MOST_WAYS])
            if not transport.exchange_counts(is_slow.long()).wait().any():  # both begin together
                break
            started_s = time.monotonic()
            take_turns([stack(layer, half, NUM_LAYERS) for half in rows.tensor_split(num_halves)])
            least = min(least, (time.monotonic() - started_s) / DELAY_S)
        found.append(least)
    return found


@needs_hosts
def test_a_layer_waits_for_two_ways_between_hosts_also_in_halves() -> None:
    with make_hosts(2, DELAY_S) as hosts:
        for found in run_ranks(2, ways_of, hosts):
            assert all(2 * NUM_LAYERS - 1 < ways < MOST_WAYS for ways in found), found
