"""Log probabilities of one request's tokens, on their way from its rank to its reader.

They are those of the model: a softmax over the float32 logits, before penalties, masks, temperature and filters change
them (what vLLM calls raw_logprobs, its default). So they say what the model thinks of a text, whatever the sampling
parameters, and those of a prompt and of an output are comparable.

What a request asks for stands in its SamplingParams: `logprobs` (of output tokens) and `prompt_logprobs` (of prompt
tokens), each None or how many of the likeliest tokens come beside the token itself; `prompt_logprobs_start`;
`logprob_token_ids`, whose log probabilities come at every place, too.

A rank sends `LogprobBlock`s in its TokenEvents. The front end collects them in two `TokenLogprobs`:
`OpenRequest.output_logprobs`, whose entry i is about output token i, and `OpenRequest.prompt_logprobs`, whose entry i
is about prompt token `prompt_logprobs_start + 1 + i`: nothing is known about the first one. Either is None where
the request does not ask for it.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from moe_serve.engine.protocol.messages import LogprobBlock

MAX_ENTRIES = 2**20  # numbers that one call may bring: 12 MB here, and about 30 MB of JSON


class Logprob(NamedTuple):
    """Log probability of one token at one place. rank: 1 for the likeliest; None: not known (asked for by its id)"""

    token_id: int
    logprob: float
    rank: int | None


class TokenLogprobs:
    """The log probabilities of the tokens of one request, of its output or of its prompt; entries are added in order.

    num_top:   likeliest tokens of each entry
    token_ids: whose log probabilities each entry has, too
    """

    def __init__(self, num_top: int, token_ids: Sequence[int] = ()):
        self.num_top = num_top
        self.token_ids = tuple(token_ids)
        self._ranks = array("i")
        self._logprobs = array("f")
        self._top_ids = array("i")
        self._top = array("f")

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, block: LogprobBlock) -> None:
        """Adds the new entries of a block, which begins at the end of the known ones or before."""
        count, per_token, top = len(block.ranks) // 4, 1 + len(self.token_ids), self.num_top
        sizes = 4 * count, 4 * count * per_token, 4 * count * top, 4 * count * top
        assert tuple(map(len, (block.ranks, block.logprobs, block.top_ids, block.top))) == sizes, "not what was asked"
        assert block.start <= len(self), "entries before these are missing"
        known = min(len(self) - block.start, count)
        self._ranks.frombytes(block.ranks[4 * known :])
        self._logprobs.frombytes(block.logprobs[4 * known * per_token :])
        self._top_ids.frombytes(block.top_ids[4 * known * top :])
        self._top.frombytes(block.top[4 * known * top :])

    def cut(self, length: int) -> None:
        """Drops the entries behind the first `length`."""
        del self._ranks[length:]
        del self._logprobs[length * (1 + len(self.token_ids)) :]
        del self._top_ids[length * self.num_top :]
        del self._top[length * self.num_top :]

    def logprob(self, index: int) -> float:
        """Returns the log probability of the token itself."""
        return self._logprobs[index * (1 + len(self.token_ids))]

    def rank(self, index: int) -> int:
        """Returns the token's place among all tokens, 1 for the likeliest."""
        return self._ranks[index]

    def top(self, index: int) -> list[Logprob]:
        """Returns the `num_top` likeliest tokens at this place, likeliest first."""
        begin = index * self.num_top
        pairs = zip(self._top_ids[begin : begin + self.num_top], self._top[begin : begin + self.num_top], strict=True)
        return [Logprob(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(pairs, start=1)]

    def of_ids(self, index: int) -> list[Logprob]:
        """Returns the log probabilities of `token_ids` at this place, in their order."""
        begin = index * (1 + len(self.token_ids)) + 1
        numbers = self._logprobs[begin : begin + len(self.token_ids)]
        return [Logprob(token_id, logprob, None) for token_id, logprob in zip(self.token_ids, numbers, strict=True)]

    def at(self, index: int, token_id: int) -> dict[int, Logprob]:
        """Returns, by token id, what is known at this place: of the token itself, which is `token_id`, the likeliest
        ones and those asked for, in this order (vLLM's form)."""
        own = Logprob(token_id, self.logprob(index), self.rank(index))
        found = {token_id: own}
        for each in (*self.top(index), *self.of_ids(index)):
            found.setdefault(each.token_id, each)
        return found

    @property
    def cumulative(self) -> float:
        """The log probability of all tokens together: the exact sum, rounded once."""
        return math.fsum(self._logprobs[:: 1 + len(self.token_ids)])
