"""The fast combine mode: each rank sums its experts' results of a token, the token's rank adds one row for each rank.

Reductions in float32 with fused steps, in a fixed order: within a rank by k, between ranks by rank; each rank's sum is
rounded to the compute dtype and to the wire in between. So results are the same in every run and on every transport,
but not those of the ordered combine, and they depend on where experts live. As in the expert-parallel combines of
DeepEP's normal mode and of SGLang and vLLM on top of it.

Shape words: T tokens, K topk, R ranks, N entries, U rows.
"""

import torch
from torch import Tensor

from moe_serve.kernels.rows import weighted_sum


def index_by_row(
    row_of_entry: Tensor, placed: Tensor, weights: Tensor, num_rows: int, topk: int
) -> tuple[Tensor, Tensor]:
    """Returns for `weighted_sum` which results belong to each row that arrived: index and weights, [U, K] each.

    row_of_entry: [N] int64, ascending; entries of a row by k
    placed:       [N] int64 row of its result;  weights: [N] float32
    """
    position = torch.arange(row_of_entry.shape[0], device=row_of_entry.device)
    first = torch.full((num_rows,), row_of_entry.shape[0], dtype=torch.int64, device=row_of_entry.device)
    first.scatter_reduce_(0, row_of_entry, position, reduce="amin")
    k = position - first[row_of_entry]
    index = torch.full((num_rows, topk), -1, dtype=torch.int64, device=row_of_entry.device)
    index[row_of_entry, k] = placed
    scale = torch.zeros(num_rows, topk, device=weights.device)
    scale[row_of_entry, k] = weights
    return index, scale


def rank_index(token_of_entry: Tensor, row_of_entry: Tensor, entries_per_rank: list[int], num_tokens: int) -> Tensor:
    """Returns which sum of each rank belongs to each token: [T, R] int64, -1 = it made none.

    token_of_entry, row_of_entry: [N] int64, entries by rank
    """
    device = token_of_entry.device
    num_ranks = len(entries_per_rank)
    ranks = torch.arange(num_ranks).repeat_interleave(torch.tensor(entries_per_rank)).to(device)
    index = torch.full((num_tokens, num_ranks), -1, dtype=torch.int64, device=device)
    index[token_of_entry, ranks] = row_of_entry
    return index


def add_rank_sums(sums: Tensor, index: Tensor) -> Tensor:
    """Returns each token's sums added in the order of ranks. sums: [U, H];  index: [T, R] -> [T, H]"""
    return weighted_sum(sums, index, torch.ones(index.shape, device=sums.device))
