"""The names of the placement policies: plain data for configuration, commands, documentation and tests."""

from typing import Literal, get_args

ServedPolicy = Literal["incremental", "greedy", "refined", "deepseek"]  # what a server may plan with while it serves
SERVED: tuple[str, ...] = get_args(ServedPolicy)
POLICIES = ("deepseek", "greedy", "refined", "incremental", "series", "milp", "static")
