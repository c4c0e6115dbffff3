"""Ranks of one machine that take each other for ranks of other hosts: rows go over TCP on the loopback interface."""

import socket
from collections.abc import Sequence
from dataclasses import replace

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.hosts.link import Hosts
from moe_serve.launcher.rendezvous import connect_hosts


def on_hosts(group: EpGroup, host_of: Sequence[int], address: str = "127.0.0.1") -> EpGroup:
    """Returns the group with connections between hosts, made anew. host_of: of each rank;  address: of this one"""
    hosts = Hosts.of(host_of)
    if hosts.num_hosts == 1:
        return group
    assert group.process_group is not None
    listener = socket.create_server((address, 0))
    return replace(group, link=connect_hosts(group.rank, hosts, group.process_group, listener, b"key" * 11, 20, 20))
