"""The largest logits of each row in one order: larger first, equal ones by token id. Plain torch."""

from torch import Tensor


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns at least the `count` largest logits of each row, largest first and equal ones by id, and their ids."""
    logits = logits + 0.0  # no negative zeros, which some sorts put behind zeros
    if count == logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    least = logits.topk(count, dim=1).values[:, -1:]
    count = int((logits >= least).sum(dim=1).max())  # equal ones included, of which topk takes any
    ids = logits.topk(count, dim=1).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
