"""How the tokens of a step are shared among prefills, so that neither a long prompt nor short ones wait for the others.

The oldest prefill is sure of half of the budget; the rest goes to the others, those with the fewest tokens left first.
So a prompt of n tokens has its first token after at most ceil(w / r) steps, from the one that admits it: w is n plus
the tokens of prompts with fewer left than it has, r half of the smallest budget of these steps. The number and length
of longer prompts do not matter. And the oldest of all takes at most twice the steps that it would take alone.
Prompts that begin alike do not compute the same block side by side: one does, the others wait for its step and take the
block over, which saves them more than they wait.
"""

from collections.abc import Sequence


def share_budget(num_left: Sequence[int], block_keys: Sequence[bytes | None], budget: int) -> list[int]:
    """Returns how many tokens each prefill computes in a step; together the whole budget, where so many are left.

    num_left:   tokens that each prefill has left, at least 1, oldest first
    block_keys: prefix-cache key of the block that it computes next; None: nobody waits for it
    budget:     tokens, at least 1 where there is a prefill
    """
    if not num_left:
        return []
    shares = [0] * len(num_left)
    shares[0] = min(num_left[0], (budget + 1) // 2)
    budget -= shares[0]
    computed = {block_keys[0]}
    for index in sorted(range(1, len(num_left)), key=num_left.__getitem__):  # of equals the older one first
        if budget == 0:
            break
        key = block_keys[index]
        if key is not None and key in computed:
            continue
        computed.add(key)
        shares[index] = min(num_left[index], budget)
        budget -= shares[index]
    shares[0] += min(num_left[0] - shares[0], budget)
    return shares
