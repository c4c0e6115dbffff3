"""Guesses the next tokens of requests that decode, so that one step may yield several: speculative decoding.

A draft is right exactly when it is the token that is drawn, so drafts change no token, only how many a step yields.
`TextIndex` finds them in text: where the last tokens of a request came before, in its own prompt and output or in those
of other requests that may share a prefix with it, the tokens that followed may follow again (prompt lookup decoding,
Saxena 2023; with a shared index as in SuffixDecoding, arXiv 2411.04975). Or the form of an output forces them, such as
the keys of a JSON object (jump-forward decoding, as in SGLang, arXiv 2312.07104, but verified). Or a layer of the model
has learnt to predict them (multi-token prediction, DeepSeek-V3, arXiv:2412.19437). `best_lengths` decides
how many of them are worth their rows, from measured times of steps and from how many were right so far: rows of a MoE
model are not free, since each draft reads experts of its own (Cascade, arXiv 2506.20675). Numpy only.
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_serve.attention_dp.request import Request

_NGRAM = 3  # tokens that are looked up
_ID_BITS = 21  # of each in a key
_POSITION_BITS = 32
_INDEX_BYTES = 120  # of one token in the index, measured: two ints and their place in a dict
_INDEXED_AT_ONCE = 8192  # tokens in one step, about 2 ms
_FEWEST_INDEXED = 32  # of an output at once, at half the time for each
_SAMPLED = 4  # while no drafts pay, one of so many outputs is entered, at its end
# Where drafts come from: the request's own text, another one's, the form that its output must have, and the model's
# layer for multi-token prediction.
OWN, SHARED, FORM, MTP = SOURCES = "own", "shared", "form", "mtp"


class TextIndex:
    """Where each run of three tokens came last in the texts of a rank, those of each salt apart.

    Memory is bounded by generations: when the young one holds half of what is allowed, the old one is forgotten.
    """

    def __init__(self, max_bytes: int):
        self._max_entries = max(1, max_bytes // _INDEX_BYTES // 2)  # of a generation
        self._young: dict[str, dict[int, int]] = {}
        self._old: dict[str, dict[int, int]] = {}
        self._num_young = 0
        self._texts: dict[int, array[int]] = {}
        self._num_entered: dict[int, int] = {}  # runs of each text, the first ones
        self._num_texts = 0
        self._of_old: set[int] = set()  # texts that no entry of the young generation names

    def begin(self) -> int:
        """Returns the number of a new text."""
        self._num_texts += 1
        self._texts[self._num_texts] = array("i")
        return self._num_texts

    def text(self, number: int) -> "array[int] | None":
        """Returns the tokens of a text, None if they are forgotten."""
        return self._texts.get(number)

    def extend(self, number: int, salt: str, token_ids: Sequence[int], enters: bool = True) -> None:
        """Adds tokens to a text. The run that ends with the last one is not entered before more follow.

        enters: whether to enter all runs that are not; the others are found in their own text alone
        """
        text = self._texts.setdefault(number, array("i"))
        text.extend(token_ids)
        self._of_old.discard(number)
        if not enters or self.num_left(number) <= 0:
            return
        first, entries = self._num_entered.get(number, 0), self._young.setdefault(salt, {})
        before, ids = len(entries), np.frombuffer(text, np.int32)[first:].astype(np.int64)
        keys = ids[:-3] << 2 * _ID_BITS | ids[1:-2] << _ID_BITS | ids[2:-1]
        places = (number << _POSITION_BITS) + first + _NGRAM + np.arange(len(keys))
        entries.update(zip(keys.tolist(), places.tolist(), strict=True))
        self._num_entered[number] = first + len(keys)
        self._num_young += len(entries) - before
        if self._num_young > self._max_entries:
            self._forget_old()

    def num_left(self, number: int) -> int:
        """Returns how many runs of a text are not entered."""
        return len(self._texts.get(number, ())) - _NGRAM - self._num_entered.get(number, 0)

    def find(self, number: int, salt: str) -> tuple[int, int] | None:
        """Returns a text, and where in it what came after the last three tokens of this one begins; None: nowhere."""
        text = self._texts.get(number)
        if text is None or len(text) < _NGRAM:
            return None
        if (place := self._find_left(number, text)) is not None:
            return number, place
        first, second, third = text[-_NGRAM:]
        key = first << 2 * _ID_BITS | second << _ID_BITS | third
        for generation in (self._young, self._old):
            place = generation.get(salt, {}).get(key)
            if place is not None and place >> _POSITION_BITS in self._texts:
                return place >> _POSITION_BITS, place & (1 << _POSITION_BITS) - 1
        return None

    def _find_left(self, number: int, text: "array[int]") -> int | None:
        """Returns the place among the runs of a text that are not entered."""
        first, size = self._num_entered.get(number, 0), text.itemsize
        if len(text) - _NGRAM <= first:
            return None
        left, run = text[first:].tobytes(), text[-_NGRAM:].tobytes()
        at = left.rfind(run, 0, len(left) - size)
        while at % size and at >= 0:  # bytes of neighbours
            at = left.rfind(run, 0, at + len(run) - 1)
        return None if at < 0 else first + at // size + _NGRAM

    def _forget_old(self) -> None:
        for number in self._of_old:
            self._texts.pop(number, None)
            self._num_entered.pop(number, None)
        self._of_old = set(self._texts)
        self._old, self._young, self._num_young = self._young, {}, 0


class StepCosts:
    """How long steps with drafts take, as a multiple of steps without: moving averages, and straight lines between.

    A multiple is that of steps near each other in time, so that neither longer contexts nor other work on the machine
    make drafts look cheap or dear.
    """

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}  # steps without drafts, by decodes
        self._num_since: dict[int, int] = {}  # steps with drafts since then
        # By powers of two of decodes and of drafts: averages of drafts and multiple, and how many steps these are of.
        self._seen: dict[int, dict[int, tuple[float, float, int]]] = {}

    def add(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        """Counts a step. One that took far longer than usual has waited for something else, and counts little."""
        plain_s = self._plain_s.get(num_decodes)
        if num_drafts == 0:
            self._plain_s[num_decodes] = seconds if plain_s is None else _moved(plain_s, seconds, 0.25)
            self._num_since[num_decodes] = 0
        elif plain_s is not None:
            self._num_since[num_decodes] += 1
            seen = self._seen.setdefault(num_decodes.bit_length(), {})
            guess = 1 + _DRAFT_COST * num_drafts / num_decodes
            drafts, multiple, num_steps = seen.get(num_drafts.bit_length(), (num_drafts, guess, 1))
            weight = max(0.1, 1 / (num_steps + 1))
            drafts += weight * (num_drafts - drafts)
            seen[num_drafts.bit_length()] = drafts, _moved(multiple, seconds / plain_s, weight), num_steps + 1

    def is_fresh(self, num_decodes: int) -> bool:
        """Returns whether a step without drafts was seen not long ago."""
        return self._num_since.get(num_decodes, _FRESH_STEPS) < _FRESH_STEPS

    def doubt(self, num_decodes: int) -> None:
        """Gives the next step with drafts as much weight as all that were seen before it."""
        seen = self._seen.get(num_decodes.bit_length(), {})
        seen.update({key: (drafts, multiple, 1) for key, (drafts, multiple, _) in seen.items()})

    def of(self, num_decodes: int, num_drafts: int) -> list[float]:
        """Returns the multiples of steps with 0, 1, ... num_drafts drafts.

        Beyond what was seen a draft costs what those before it cost; before any was, little, so that some are tried.
        """
        seen = self._seen.get(num_decodes.bit_length(), {}).values()
        points = sorted((drafts, multiple) for drafts, multiple, _ in seen)
        last, multiple = points[-1] if points else (float(num_decodes), 1 + _DRAFT_COST)
        if num_drafts > last or not points:
            most = max(float(num_drafts), last)
            points.append((most, 1 + max(0.0, multiple - 1) * most / last))
        drafts, multiples = zip((0.0, 1.0), *points, strict=True)
        found: list[float] = np.interp(np.arange(num_drafts + 1), drafts, multiples).tolist()
        return found


def _moved(average: float, value: float, weight: float) -> float:
    return average + weight * (min(value, 2 * average) - average)


def best_lengths(
    num_decodes: int, chances: Sequence[float], most: Sequence[int], multiples: Sequence[float]
) -> list[int]:
    """Returns how many drafts of each request to verify, so that a step yields the most tokens per second.

    num_decodes: rows without drafts
    chances:     of the next draft of each request to be right, where those before it are
    most:        drafts that each has
    multiples:   of a step without drafts, how long one takes with 0, 1, ... as many as there is room for
    """
    lengths, best = [0] * len(chances), [0] * len(chances)
    tokens, best_rate = float(num_decodes), _MIN_GAIN * num_decodes
    gains = [(-chance, index) for index, chance in enumerate(chances) if most[index]]
    heapq.heapify(gains)
    for multiple in multiples[1:]:
        if not gains:
            break
        gain, index = gains[0]
        tokens -= gain
        lengths[index] += 1
        if lengths[index] < most[index]:
            heapq.heapreplace(gains, (gain * chances[index], index))
        else:
            heapq.heappop(gains)
        if tokens / multiple > best_rate:
            best, best_rate = list(lengths), tokens / multiple
    return best


_MIN_GAIN = 1.1  # of tokens per second: of many lengths the best looks better than it is, by the noise of times
_FRESH_STEPS = 16  # with drafts, for which the time of a step without is taken to be the same
_LOOK_STEPS, _MOST_LOOK_STEPS = 3, 31  # between two looks for drafts while none pay: behind a new request, and at most
_PATIENCE = 8  # looks that find nothing, behind drafts that paid, before steps are left out
_DRAFT_COST = 0.25  # of a draft, before it is known: a share of a step without drafts, divided by its decodes
# Looks at drafts that do not pay, before some are verified to see whether they still do not: at first, and at most.
_EXPLORE_LOOKS, _MOST_EXPLORE_LOOKS = 2, 16


@dataclass(slots=True)
class _Follower:
    """What is known about one request. source, at: the text that it seems to repeat, and where it is there"""

    text: int
    num_read: int = 0  # of its known tokens
    source: int = 0
    at: int = 0
    kind: str = OWN  # of the drafts that were found last
    right: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))  # recent ones count more
    tried: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))
    unverified: tuple[int, ...] = ()  # found in the last look, but not worth their rows
    unverified_from: int = 0  # tokens that were known then
    predicted: tuple[int, ...] = ()  # by the model
    predicted_from: int = 0  # tokens that were known then


@dataclass
class SpeculationCounters:
    """Totals since the start. num_steps: that verified drafts;  the others: by source, one of SOURCES"""

    num_steps: int = 0
    num_drafts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    num_accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))

    def totals(self) -> dict[str, float]:
        """Returns them by name; drafts as `num_drafts_own_right` and so on."""
        named = {"num_speculative_steps": float(self.num_steps)}
        for source, num_right in self.num_accepted.items():
            named[f"num_drafts_{source}_right"] = float(num_right)
            named[f"num_drafts_{source}_wrong"] = float(self.num_drafts[source] - num_right)
        return named


class Speculator:
    """Drafts tokens from text and from the forms of outputs, as many as pay."""

    def __init__(
        self,
        max_drafts: int,
        index_bytes: int,
        shares_text: bool,
        always: bool = False,
        forced: Callable[[Request], tuple[int, ...]] | None = None,
        predicted_drafts: int = 0,
        reads_text: bool = True,
    ):
        """
        max_drafts:  of one request in one step
        shares_text: requests of one salt draft from each other's text, as they share cached prefixes
        always:      as many as there are, whether or not they pay
        forced:      returns tokens that the form of a request forces next; None: no form is known
        predicted_drafts: that the model predicts of one request in one step; 0: it has no layer for that
        reads_text:  whether drafts come from text
        """
        self.predicted_drafts = predicted_drafts
        self.counters = SpeculationCounters()
        self.costs = StepCosts()
        self.measures = True  # whether the time of this step matters for `costs`
        self._max_drafts = max_drafts
        self._index = TextIndex(index_bytes)
        self._shares_text = shares_text
        self._always = always
        self._forced = forced
        self._reads_text = reads_text
        self._followers: dict[Request, _Follower] = {}
        self._drafted: dict[Request, str] = {}  # the source of drafts that are being verified
        self._right = dict.fromkeys(SOURCES, 1.0)  # of all requests
        self._tried = dict.fromkeys(SOURCES, 2.0)
        self._newest: Request | None = None  # of those that decode
        self._steps_to_look = 0  # as long as that many are left
        self._look_steps = _LOOK_STEPS
        self._num_empty = _PATIENCE  # looks in a row that have found none, since drafts paid
        self._num_looks = 0  # in a row, at drafts that do not pay
        self._explore_looks = _EXPLORE_LOOKS

    def is_due(self, newest: Request) -> bool:
        """Returns whether to look for drafts in this step. Called once for each step that decodes.

        Each one is while they pay. Otherwise some are, which see what would have been right since the last one; the
        steps between run as without a speculator. newest: of the requests that decode
        """
        if newest is not self._newest:
            self._newest, self._look_steps = newest, _LOOK_STEPS
            self._steps_to_look = min(self._steps_to_look, _LOOK_STEPS)
        self._steps_to_look -= 1
        self.measures = self._steps_to_look <= _LOOK_STEPS
        return self._steps_to_look < 0 or self._always

    def predict(self, request: Request, token_ids: Sequence[int]) -> None:
        """Takes what the model predicts behind the known tokens of a request, as drafts for its next step."""
        follower = self._follower(request)
        follower.predicted, follower.predicted_from = tuple(token_ids), request.num_known

    def draft(self, requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
        """Returns tokens that may come next in each request, together at most `num_rows`."""
        self._drafted.clear()  # of a step that was void
        room, found = _INDEXED_AT_ONCE, []
        for request in requests:
            if self._reads_text:
                room = self._read(request, room)
            found.append(self._found(request))
        if self._always:
            lengths = [len(each) for each in found]
        else:
            lengths = self._worth(requests, found, num_rows)
        drafts = []
        for request, each, length in zip(requests, found, lengths, strict=True):
            drafts.append(each[: min(length, num_rows)])
            num_rows -= len(drafts[-1])
            follower = self._followers[request]
            follower.unverified = ()
            if drafts[-1]:
                self._drafted[request] = follower.kind
            elif each:
                follower.unverified, follower.unverified_from = each, request.num_known
        self.counters.num_steps += any(drafts)
        return drafts

    def _worth(self, requests: Sequence[Request], found: Sequence[tuple[int, ...]], num_rows: int) -> list[int]:
        """Returns how many of the drafts that were found to verify.

        Where they would pay if they cost half as much, they are verified now and then, so that their cost is measured
        anew; and steps that verify are now and then followed by one that does not, for the same reason.
        """
        num_decodes, none = len(requests), [0] * len(requests)
        most = list(map(len, found))
        if not self.costs.is_fresh(num_decodes):
            self._steps_to_look = 0
            return none
        if not any(most) and self._num_empty < _PATIENCE:
            self._num_empty += 1
            self._steps_to_look = 0
            return none
        self._look_steps = self._steps_to_look = min(2 * self._look_steps + 1, _MOST_LOOK_STEPS)
        if not any(most):
            return none
        chances = [self._chance(self._followers[request]) for request in requests]
        multiples = self.costs.of(num_decodes, min(num_rows, sum(most)))
        lengths = best_lengths(num_decodes, chances, most, multiples)
        if any(lengths):
            self._num_looks, self._explore_looks = 0, _EXPLORE_LOOKS
            self._look_steps = self._steps_to_look = self._num_empty = 0
            return lengths
        self._num_looks += 1
        if self._num_looks < self._explore_looks:
            return none
        self._num_looks, self._explore_looks = 0, min(2 * self._explore_looks, _MOST_EXPLORE_LOOKS)
        self.costs.doubt(num_decodes)
        return best_lengths(num_decodes, chances, most, [(1 + multiple) / 2 for multiple in multiples])

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learns how many drafts of a request were right."""
        kind = self._drafted.pop(request)
        self.counters.num_drafts[kind] += num_drafts
        self.counters.num_accepted[kind] += num_accepted
        self._learn(request, kind, min(num_drafts, num_accepted + 1), num_accepted)

    def _learn(self, request: Request, kind: str, num_tried: int, num_right: int) -> None:
        """Counts drafts up to the first that was wrong."""
        if (follower := self._followers.get(request)) is not None:  # else that was its end
            follower.right[kind] = 0.9 * follower.right[kind] + num_right
            follower.tried[kind] = 0.9 * follower.tried[kind] + num_tried
        self._right[kind] = 0.99 * self._right[kind] + num_right
        self._tried[kind] = 0.99 * self._tried[kind] + num_tried

    @property
    def _pays(self) -> bool:
        """Whether drafts pay, as far as is known."""
        return self._always or self._look_steps == 0

    def end(self, request: Request) -> None:
        """Forgets what it knows about a request, which has left; its text stays in the index."""
        if request is self._newest:
            self._newest = None
        follower = self._followers.pop(request, None)
        if follower is not None and follower.num_read and (self._pays or follower.text % _SAMPLED == 0):
            new = request.token_ids(follower.num_read, min(request.num_known, follower.num_read + _INDEXED_AT_ONCE))
            self._index.extend(follower.text, self._salt(request, follower), new)

    def _follower(self, request: Request) -> _Follower:
        follower = self._followers.get(request)
        if follower is None:
            follower = self._followers[request] = _Follower(self._index.begin())
        return follower

    def _read(self, request: Request, room: int) -> int:
        """Adds what is new of a request to the index, at most `room` tokens; returns how much room is left."""
        follower = self._follower(request)
        num_new = min(request.num_known - follower.num_read, room)
        if num_new <= 0:
            return room
        if follower.unverified:
            self._see_whether_right(request, follower)
        new = request.token_ids(follower.num_read, follower.num_read + num_new)
        follower.num_read += num_new
        source = self._index.text(follower.source) if follower.source else None
        if source is not None and source[follower.at : follower.at + num_new].tolist() == new:
            follower.at += num_new
        else:
            follower.source = 0
        # While no drafts pay, nobody asks for most of the text, and entering it takes 1 to 2 us a token.
        many = self._pays and self._index.num_left(follower.text) + num_new >= _FEWEST_INDEXED
        enters = many or follower.num_read - num_new < len(request.prompt_ids)
        self._index.extend(follower.text, self._salt(request, follower), new, enters)
        return room - num_new

    def _see_whether_right(self, request: Request, follower: _Follower) -> None:
        """Learns from drafts that were found but not verified, as far as what came instead is known."""
        came = request.token_ids(follower.unverified_from, request.num_known)
        both = list(zip(follower.unverified, came, strict=False))
        num_right = next((i for i, (draft, token) in enumerate(both) if draft != token), len(both))
        self._learn(request, follower.kind, min(len(both), num_right + 1), num_right)
        follower.unverified = ()

    def _found(self, request: Request) -> tuple[int, ...]:
        """Returns what its form forces next, or else what followed where the last tokens of a request came before, or
        what the model predicts."""
        follower = self._follower(request)
        if self._forced is not None and request.params.constraint is not None and (forced := self._forced(request)):
            follower.kind = FORM
            return forced[: self._max_drafts]
        if follower.predicted and follower.predicted_from == request.num_known:
            follower.kind = MTP
            return follower.predicted
        if not self._reads_text or follower.num_read < request.num_known:
            return ()
        if not follower.source:
            place = self._index.find(follower.text, self._salt(request, follower))
            if place is None:
                return ()
            follower.source, follower.at = place
        source = self._index.text(follower.source)
        if source is None:
            follower.source = 0
            return ()
        follower.kind = OWN if follower.source == follower.text else SHARED
        return tuple(source[follower.at : follower.at + self._max_drafts])

    def _salt(self, request: Request, follower: _Follower) -> str:
        return request.salt if self._shares_text else str(follower.text)

    def _chance(self, follower: _Follower) -> float:
        kind = follower.kind
        usual = self._right[kind] / self._tried[kind]
        return min(0.98, (follower.right[kind] + 2 * usual) / (follower.tried[kind] + 2))
