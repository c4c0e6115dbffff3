"""Chooses the rank that gets a new request: the one with the least pending work and most of the prompt in its cache.

A rank's *load* is counted in tokens: prompt tokens still to compute, plus tokens still to produce. A front end counts a
request when it sends it; what a rank reports beyond that belongs to other front ends. A session stays with its rank,
and a prompt goes where its beginning was sent before, until the load of that rank is `load_gap` tokens above the
smallest one, or the caller leaves it out, as one that would not run the request at once. Several outputs of one prompt
go to one rank, which computes it once, until it would be less work to compute it on another one, too. The front end
runs it.

Ranks that take pages of each other's prompts from a tier below the KV cache are *siblings*. There is little reason to
stay with a rank whose sibling has room: fetching a token counts as FETCH_COST of computing it, on every sibling. From
ranks of other hosts it counts as what the ranks have measured, and the rank with most of the prompt is named.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from moe_serve.attention_dp.prefix_cache import block_keys, root_key
from moe_serve.errors import CapacityError

MAX_KEYS = 65536  # entries of the affinity table, about 10 MB
FETCH_COST = 0.1  # of a token whose page comes from memory or a file, over computing it; 0.05 where nothing else runs


def why_local(
    num_uncached: int, least_tokens: int, prefill_wait: int, local_wait: int, num_decoding: int
) -> str | None:
    """Returns why the decode ranks compute a prompt themselves; None: a prefill rank does.

    A local prefill holds up every request that its rank decodes, by about a token's time for each of its tokens. So a
    prefill rank may make the request wait for as long as all of these together would, beside the local wait.

    num_uncached: tokens of the prompt that no decode rank has cached;  least_tokens: for which the hand-over pays
    prefill_wait, local_wait: prompt tokens ahead of it, on the best rank of each kind
    num_decoding: requests of the best decode rank
    """
    if num_uncached < least_tokens:
        return "short"
    if prefill_wait > local_wait + num_uncached * num_decoding:
        return "prefill_busy"
    return None


class RoutedPrompt:
    """What is to be prefilled for a request: on a second attempt the output so far too.

    Its blocks are hashed once for each block size, however many routers are asked, and how often. These keys stay in
    the front end: ranks hash the tokens that they get.

    salt: prompts and sessions of different salts have nothing in common
    """

    def __init__(self, token_ids: Sequence[int], salt: str):
        self.token_ids, self.salt = token_ids, salt
        self._keys: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def keys(self, block_size: int) -> list[bytes]:
        """Returns the keys of its full blocks."""
        if block_size not in self._keys:
            root = root_key(b"", self.salt, block_size)
            self._keys[block_size] = block_keys(root, self.token_ids, block_size)
        return self._keys[block_size]


@dataclass(frozen=True)
class PageSharing:
    """Which ranks take pages of each other's prompts.

    siblings:      a name for each rank, equal for those of a host that share a tier; (): there are no tiers
    between_hosts: whether ranks with different names, which are on different hosts, ask each other, too
    """

    siblings: Sequence[str] = ()
    between_hosts: bool = False


class Source(NamedTuple):
    """Where the pages of a prompt's beginning are, as far as its rank should not compute them.

    where:  "own": in its cache, "host": in a tier of its host, "other_host", "slow": the same, though it seems to take
            less time to compute them, "none": nowhere
    holder: the rank of another host that has more of them than this host; None: none has
    """

    where: str = "none"
    holder: int | None = None


_NOWHERE = Source()


@dataclass(slots=True)
class _Sent:
    """A request of this front end that is not finished."""

    rank: int
    prefill_tokens: int  # expected not to be cached; 0 once the first token has arrived
    new_tokens: int
    source: Source
    group: str | None = None
    keys: Sequence[bytes] = ()  # of a prompt whose pages are to come from another rank


@dataclass(slots=True)
class _RankState:
    """Loads of one rank in tokens.

    page_cost: what a page of another host takes over computing it, as it has measured; None: not yet
    """

    own_prefill: int = 0
    own_new: int = 0
    others: int = 0  # of other front ends, as of the last report
    last_chosen: int = 0  # so that equal ranks take turns
    page_cost: float | None = None

    @property
    def load(self) -> int:
        return self.own_prefill + self.own_new + self.others


class _Found(NamedTuple):
    """How many tokens of a prompt's beginning a rank was sent, and it or one of its siblings was."""

    own: int = 0
    near: int = 0


_NOTHING = _Found()


class _Known(NamedTuple):
    """What is known of a prompt's pages.

    found: by rank, where there is any;  most: tokens that some rank has or can fetch from siblings
    """

    found: dict[int, _Found]
    most: int


class RequestRouter:
    """Routes the requests of one front end to the ranks. Its memory is bounded: LRU over prompt blocks."""

    def __init__(
        self,
        num_ranks: int,
        load_gap: float = 512.0,
        block_size: int = 16,
        first_rank: int = 0,
        sharing: PageSharing | None = None,
    ):
        """first_rank: their numbers begin there;  sharing: None: each rank has its own pages alone"""
        self.load_gap = load_gap
        self.block_size = block_size
        # Those that are not lost.
        self._ranks = {rank: _RankState() for rank in range(first_rank, first_rank + num_ranks)}
        self._sent: dict[str, _Sent] = {}
        self._first_of: dict[str, str] = {}  # group -> its first request that is not finished
        # Block key -> bit mask of the ranks that were sent a prompt with this block. Least recently used first.
        self._ranks_of: OrderedDict[bytes, int] = OrderedDict()
        self._num_routed = 0
        sharing = sharing or PageSharing()
        # Bit masks of siblings. A lost rank keeps its bit: its pages outlive it.
        names = list(enumerate(sharing.siblings, first_rank))
        self._siblings = {sum(1 << rank for rank, name in names if name == one) for one in set(sharing.siblings)}
        self._with_siblings = {rank for rank, name in names if sharing.siblings.count(name) > 1}
        self._between_hosts = sharing.between_hosts
        # Of a token whose page comes from another host: from FETCH_COST to 1, until it is known 1.
        self._page_cost = 1.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks that are not lost."""
        return tuple(self._ranks)

    def load(self, rank: int) -> int:
        """Returns the load of a rank in tokens, as far as this front end knows."""
        return self._ranks[rank].load

    @property
    def prompt_wait(self) -> int:
        """Prompt tokens that are ahead of a new request, on the rank with the fewest; there is one."""
        return min(state.own_prefill + state.others for state in self._ranks.values())

    def cached(self, prompt: RoutedPrompt) -> tuple[int, int]:
        """Returns how many tokens of a prompt's beginning a rank has or can fetch at most, and was sent at least."""
        known = self._known(prompt)
        return known.most, min(known.found.get(rank, _NOTHING).own for rank in self._ranks)

    def source_of(self, request_id: str) -> Source:
        """Returns where the rank of a request that is counted there finds pages of its prompt."""
        return self._sent[request_id].source

    def route(
        self,
        prompt: RoutedPrompt,
        session_id: str | None = None,
        *,
        request_id: str | None = None,
        max_new_tokens: int = 0,
        among: Sequence[int] = (),
        group: str | None = None,
        is_ahead: bool = False,
    ) -> int:
        """Returns the rank for a request, and counts the request there until finished(request_id).

        session_id:     requests of a session go to one rank; front ends agree on it without messages
        request_id:     None: the request is not counted
        max_new_tokens: tokens that it may produce
        among:          choose one of these, which are not lost; () = any
        group:          of requests with the same prompt, sent one after the other
        is_ahead:       it is computed elsewhere and comes later, as `arrived` tells; so no other prompt goes after it
        Raises CapacityError when all ranks are lost.
        """
        if not self._ranks:
            raise CapacityError("all ranks are lost, so nothing can be served; restart the workers")
        known = self._known(prompt)
        rank = self._rank_of_group(group, len(prompt), among or self.ranks)
        if rank is None:
            rank = self._choose(known, session_id, prompt.salt, among or self.ranks)
        self._num_routed += 1
        self._ranks[rank].last_chosen = self._num_routed
        keys = prompt.keys(self.block_size)
        if not is_ahead:
            self._remember(keys, rank)
        if request_id is not None:
            self.finished(request_id)  # a second attempt replaces the first
            num_prefill = 0 if is_ahead else len(prompt) - int(self._saved(known, rank, is_near=True))
            its_keys = keys if is_ahead else ()
            self._count(
                request_id, _Sent(rank, num_prefill, max_new_tokens, self._source(known, rank), group, its_keys)
            )
        return rank

    def arrived(self, request_id: str) -> None:
        """Takes that a request which was routed ahead is sent to its rank, with its prompt computed."""
        self._remember(self._sent[request_id].keys, self._sent[request_id].rank)

    def started(self, request_id: str) -> None:
        """Takes the prompt of a request off its rank's load: its first token has arrived."""
        sent = self._sent.get(request_id)
        if sent is not None:
            if sent.rank in self._ranks:
                self._ranks[sent.rank].own_prefill -= sent.prefill_tokens
            sent.prefill_tokens = 0

    def finished(self, request_id: str) -> None:
        """Takes a request that has ended off its rank's load. Unknown ids are ignored."""
        self.started(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is not None and sent.group is not None and self._first_of.get(sent.group) == request_id:
            del self._first_of[sent.group]
        if sent is not None and sent.rank in self._ranks:
            self._ranks[sent.rank].own_new -= sent.new_tokens

    def update(self, rank: int, prefill_tokens: int, page_cost: float | None = None) -> None:
        """Takes a rank's report.

        prefill_tokens: known tokens whose KV is not computed, over the requests of all front ends
        page_cost:      what a page of another host takes over computing it; None: not known
        """
        state = self._ranks.get(rank)
        if state is not None:
            state.others = max(0, prefill_tokens - state.own_prefill)
        if state is not None and page_cost is not None and self._between_hosts:
            state.page_cost = page_cost
            costs = [each.page_cost for each in self._ranks.values() if each.page_cost is not None]
            self._page_cost = min(1.0, max(FETCH_COST, sum(costs) / len(costs)))

    def forget_prompts(self) -> None:
        """Forgets which prompts each rank was sent: the ranks' caches are empty now."""
        self._ranks_of.clear()

    def mark_lost(self, rank: int) -> None:
        """Stops sending requests to this rank."""
        self._ranks.pop(rank, None)

    def mark_back(self, rank: int) -> None:
        """Sends requests to a lost rank again. It has none now, but still its cached blocks."""
        if rank not in self._ranks:
            self._ranks[rank] = _RankState(last_chosen=self._num_routed)

    def _rank_of_group(self, group: str | None, num_prompt: int, among: Sequence[int]) -> int | None:
        """Returns the rank that computes the prompt for others of the group; None where another one may be better.

        Tokens of this prompt that it has yet to compute do not count: any other rank would compute them, too.
        """
        first = None if group is None else self._sent.get(self._first_of.get(group, ""))
        if first is None or first.rank not in among:
            return None
        least = min(self._ranks[rank].load for rank in among)
        ahead = self._ranks[first.rank].load - first.prefill_tokens - least
        return first.rank if ahead <= max(self.load_gap, num_prompt) else None

    def _choose(self, known: _Known, session_id: str | None, salt: str, among: Sequence[int]) -> int:
        least = min(self._ranks[rank].load for rank in among)
        if session_id is not None:
            rank = max(among, key=lambda rank: _rendezvous_weight(session_id, salt, rank))
            if self._ranks[rank].load - least <= self.load_gap * self._cost_of_leaving(rank):
                return rank

        def work(rank: int) -> tuple[float, int]:
            """Returns (tokens to compute before the first new one, up to a constant; tie-break by turn)."""
            state = self._ranks[rank]
            is_near = state.load - least <= self.load_gap
            return state.load - self._saved(known, rank, is_near), state.last_chosen

        return min(among, key=work)

    def _cost_of_leaving(self, rank: int) -> float:
        """Returns what a page of this rank costs another one, over computing it."""
        return FETCH_COST if rank in self._with_siblings else self._page_cost

    def _saved(self, known: _Known, rank: int, is_near: bool) -> float:
        """Returns the tokens that a rank need not compute, less what it takes to fetch pages.

        is_near: what others would have to pay for, if they got the request, counts
        """
        if not known.most:
            return 0.0
        found, cost = known.found.get(rank, _NOTHING), self._cost_of_leaving(rank)
        here = (1 - cost) * found.near + (cost * found.own if is_near else 0)
        return here + (1 - self._page_cost) * (known.most - found.near)

    def _source(self, known: _Known, rank: int) -> Source:
        if not known.most:
            return _NOWHERE
        here = known.found.get(rank, _NOTHING)
        if self._between_hosts and known.most > here.near:
            # Not one of its siblings, which would have no more.
            holder = max(known.found, key=lambda each: (known.found[each].near, known.found[each].own))
            return Source("other_host" if self._page_cost < 1 else "slow", holder)
        if here.near > here.own:
            return Source("host")
        return Source("own" if here.own else "none")

    def _known(self, prompt: RoutedPrompt) -> _Known:
        # A rank computes the last known token in any case, so a block that ends with it does not help.
        keys = prompt.keys(self.block_size)[: max(0, len(prompt) - 1) // self.block_size]
        own = fetched = sum(1 << rank for rank in self._ranks)
        ends = dict.fromkeys(self._ranks, len(keys)), dict.fromkeys(self._ranks, len(keys))
        for num_blocks, key in enumerate(keys):
            sent = reached = self._ranks_of.get(key, 0)
            for mask in self._siblings:
                reached |= mask if mask & sent else 0
            for left, end in ((own & ~sent, ends[0]), (fetched & ~reached, ends[1])):
                end.update(dict.fromkeys(_bits(left), num_blocks))
            own, fetched = own & sent, fetched & reached
            if not fetched:
                break
        size = self.block_size
        found = {rank: _Found(ends[0][rank] * size, end * size) for rank, end in ends[1].items() if end}
        return _Known(found, max([each.near for each in found.values()], default=0))

    def _remember(self, keys: Sequence[bytes], rank: int) -> None:
        # Tail first, so that the beginning of a prompt is evicted last.
        for key in reversed(keys[:MAX_KEYS]):
            self._ranks_of[key] = self._ranks_of.get(key, 0) | 1 << rank
            self._ranks_of.move_to_end(key)
        while len(self._ranks_of) > MAX_KEYS:
            self._ranks_of.popitem(last=False)

    def _count(self, request_id: str, sent: _Sent) -> None:
        self._sent[request_id] = sent
        if sent.group is not None:
            self._first_of.setdefault(sent.group, request_id)
        self._ranks[sent.rank].own_prefill += sent.prefill_tokens
        self._ranks[sent.rank].own_new += sent.new_tokens


def _rendezvous_weight(session_id: str, salt: str, rank: int) -> bytes:
    """Returns the weight of a rank for a session; the highest wins. When a rank is lost, only its sessions move."""
    session = f"{salt}\0{session_id}".encode("utf-8", "surrogatepass")
    return blake2b(session + b"\0" + rank.to_bytes(4, "little")).digest()


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
