"""Maps ranks to nodes.

Ranks are numbered node by node: rank r lives on node r // ranks_per_node.
"""

from dataclasses import dataclass

from moe_serve.errors import ConfigError

MAX_RANKS = 65_536  # tables by rank stay in memory; a slip of the hand does not


@dataclass(frozen=True)
class Topology:
    """A cluster of equal nodes.

    num_nodes:      machines (or NVLink domains) joined by the slower link
    ranks_per_node: expert ranks (GPUs, or processes on a laptop) of each node
    """

    num_nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            value = getattr(self, name)
            if int(value) != value or value < 1:
                raise ConfigError(f"Topology.{name} is {value!r}; give a whole number of at least 1")
            object.__setattr__(self, name, int(value))
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(f"{self.num_ranks} ranks on {self.num_nodes} nodes are more than {MAX_RANKS}; use fewer")

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Returns the node of a rank."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Returns the ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
