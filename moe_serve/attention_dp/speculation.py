"""Guesses the next tokens of requests that decode, so that one step may yield several: speculative decoding.

A draft is right exactly when it is the token that is drawn, so drafts change no token, only how many a step yields.
They come from text (`TextIndex`): what followed where the last tokens of a request came before, in its own prompt and
output or in those of other requests that may share a prefix with it. Or the form of an output forces them, such as the
keys of a JSON object (jump-forward decoding, as in SGLang, arXiv 2312.07104, but verified). Or a layer of the model has
learnt to predict them (multi-token prediction, DeepSeek-V3, arXiv:2412.19437). Each request takes those of which more
are right on average. `DraftGate` says when to look, and how many are worth their rows. No torch.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_serve.attention_dp.draft_gate import DecodeStep, DraftGate
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.text_index import TextIndex
from moe_serve.process_facts import ProcessorWaits

_READ_AT_ONCE = 8192  # tokens in one step, less than 1 ms
_STEPS_ALIKE = 32
# Where drafts come from: the request's own text, another one's, the form that its output must have, and the model's
# layer for multi-token prediction.
OWN, SHARED, FORM, MTP = SOURCES = "own", "shared", "form", "mtp"


class _Drafts(NamedTuple):
    """What may come next in one request. source: one of SOURCES;  chances: of each to be right with all before it"""

    source: str
    token_ids: Sequence[int]
    chances: Sequence[float]


_NONE = _Drafts("", (), ())


@dataclass(slots=True)
class _Follower:
    """What is known about one request. text: its number in the index"""

    text: int
    num_read: int = 0  # of its known tokens
    predicted: tuple[int, ...] = ()  # by the model
    predicted_from: int = 0  # tokens that were known then
    # Drafts of a form and of the layer in the last look, and how many tokens were known then.
    offers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    offered_from: int = 0
    right: dict[str, float] = field(default_factory=dict)  # of these two; recent ones count more
    tried: dict[str, float] = field(default_factory=dict)


@dataclass
class SpeculationCounters:
    """Totals since the start.

    num_proposals: drafts of one request that a step has verified together
    accepted_at: right ones, by their place in these
    num_drafts, num_accepted: by source, one of SOURCES
    """

    num_proposals: int = 0
    accepted_at: list[int] = field(default_factory=list)
    num_drafts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    num_accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))

    def count(self, kind: str, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of one request in one step."""
        self.num_proposals += 1
        self.num_drafts[kind] += num_drafts
        self.num_accepted[kind] += num_accepted
        self.accepted_at += [0] * (num_drafts - len(self.accepted_at))
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def totals(self) -> dict[str, float]:
        """Returns them by name; drafts as `num_drafts_own_right` and so on."""
        named = {"num_draft_proposals": float(self.num_proposals)}
        named |= {f"num_accepted_at_{place}": float(number) for place, number in enumerate(self.accepted_at)}
        for source, num_right in self.num_accepted.items():
            named[f"num_drafts_{source}_right"] = float(num_right)
            named[f"num_drafts_{source}_wrong"] = float(self.num_drafts[source] - num_right)
        return named


class Speculator:
    """Drafts tokens from text, from the forms of outputs and from the model's layer, as many as pay."""

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
        Raises ConfigError where text is read and there is no compiler.
        """
        self.counters = SpeculationCounters()
        self.gate = DraftGate(predicted_drafts > 0, always)
        self._predicted_drafts = predicted_drafts
        self._max_drafts = max_drafts
        self._index = TextIndex(index_bytes, max_drafts) if reads_text else None
        self._shares_text = shares_text
        self._always = always
        self._forced = forced
        self._followers: dict[Request, _Follower] = {}
        self._num_begun = 0
        self._drafted: dict[Request, str] = {}  # the source of drafts that are being verified
        self._right = {FORM: 1.0, MTP: 1.0}  # of all requests
        self._tried = {FORM: 2.0, MTP: 2.0}
        self._num_since = 0  # steps since one was measured
        self._num_alike = -1  # requests of steps that are like others, and not measured; -1: none are
        self._waits = ProcessorWaits()
        self._waited_s: float | None = None  # by this thread, until the next step began; None: not known
        self._without_layer: set[Request] = set()  # that began before the model's layer did, of which it has no keys
        # Of this step:
        self._look_s, self._num_decodes = 0.0, 0
        self._num_drafts = self._num_right = 0
        self._num_layer_drafts = self._num_layer_requests = self._num_layer_right = 0

    def num_predictions(self, has_prompt: bool, going_on: Iterable[Request]) -> int:
        """Returns how many tokens the model's layer should predict of each request behind this step; 0: it may rest.

        has_prompt: the step begins a prompt;  going_on: the requests that it does not begin
        """
        if not self._predicted_drafts:
            return 0
        has_rested = not self.gate.layer_runs
        if not self.gate.wants_layer(has_prompt):
            return 0
        if has_rested:
            self._without_layer = set(going_on)
        return self._predicted_drafts

    def predict(self, request: Request, token_ids: Sequence[int]) -> None:
        """Takes what the model predicts behind the known tokens of a request, as drafts for its next step."""
        follower = self._follower(request)
        follower.predicted, follower.predicted_from = tuple(token_ids), request.num_known

    def draft(self, requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
        """Returns tokens that may come next in each request, together at most `num_rows`."""
        began_s, self._waited_s = time.perf_counter(), self._waits.seconds()
        self._drafted.clear()  # of a step that was void
        self._num_decodes = len(requests)
        if self._predicted_drafts:
            self._num_layer_requests = len(requests) - len(self._without_layer.intersection(requests))
        found = self._from_text(requests)
        for row, request in enumerate(requests):
            follower = self._followers[request]
            if follower.predicted or follower.offers or request.params.constraint is not None:
                self._offer(request, follower)
                for kind, tokens in follower.offers:
                    chance = self._chance(follower, kind)
                    chances = [chance**number for number in range(1, len(tokens) + 1)]
                    if kind == FORM or sum(chances) > sum(found[row].chances):
                        found[row] = _Drafts(kind, tokens, chances)
        chosen: list[tuple[int, ...]] = [()] * len(requests)
        if any(each.source for each in found):
            chances_of = [each.chances for each in found]
            lengths = list(map(len, chances_of))
            if not self._always:
                lengths = self.gate.lengths(len(requests), chances_of, num_rows)
            for row, (length, (source, token_ids, _)) in enumerate(zip(lengths, found, strict=True)):
                if length and num_rows > 0:
                    chosen[row] = tuple(token_ids[: min(length, num_rows)])
                    num_rows -= len(chosen[row])
                    self._drafted[requests[row]] = source
        else:
            self.gate.found_none()
        self._look_s = time.perf_counter() - began_s
        self.gate.looked(self._look_s)
        return chosen

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learns how many drafts of a request were right."""
        kind = self._drafted.pop(request)
        self.counters.count(kind, num_drafts, num_accepted)
        self._num_drafts += num_drafts
        self._num_right += num_accepted
        if kind == MTP:
            self._num_layer_drafts += num_drafts
            self._num_layer_right += 0 if request in self._without_layer else num_accepted

    def own_s(self) -> float:
        """Returns seconds of a clock that stands while this thread waits for its processor."""
        return time.perf_counter() - self._waits.seconds()

    def ended(self, num_requests: int, num_tokens: int, seconds: float, layer_s: float = 0.0) -> None:
        """Learns what a step took and yielded, drafts and the runs of the model's layer included.

        num_requests: 0 in steps that did not decode alone; of those only the layer's time counts
        layer_s: of the time, running the layer, by `own_s`

        Of steps without looks, one stands for several, since a step may take a quarter of a millisecond. What this
        thread has waited for its processor is left out: other processes would make steps with drafts, which are longer
        and so wait more often, look dear. So a step without a look is measured where the waits before it are known.
        """
        num_since = self._num_since = self._num_since + (num_requests > 0)
        if not (self._look_s or layer_s or self.gate.pays):
            if num_since < _STEPS_ALIKE - 1 and num_requests == self._num_alike:
                return
            is_known = not num_requests or self.gate.costs.plain_s(num_requests) is not None
            is_alike = is_known and num_since < _STEPS_ALIKE
            if is_alike or self._waited_s is None:
                is_next = not is_known or num_since >= _STEPS_ALIKE - 1
                self._waited_s = self._waits.seconds() if is_next else None
                self._num_alike = -1 if is_next else num_requests
                return
        self._num_alike = -1
        # A look that took longer, and waits that did, were of a step that was void.
        began_s, look_s = time.perf_counter(), self._look_s if self._look_s + layer_s < seconds else 0.0
        waited_s = self._waits.seconds()
        if self._waited_s is not None and look_s + layer_s < (own_s := seconds - (waited_s - self._waited_s)):
            seconds = own_s
        self._waited_s = waited_s
        if num_requests:
            of_layer = layer_s, self._num_layer_drafts, self._num_layer_requests, self._num_layer_right
            step = DecodeStep(num_requests, self._num_drafts, num_tokens, seconds, look_s, *of_layer)
            self.gate.ended(step, num_since)
            self._num_since = 0
        else:
            self.gate.layer_ran(layer_s)
            self.gate.ran_beside(self._num_decodes, self._num_drafts, self._num_right, look_s)
        self._look_s = 0.0
        self._num_drafts = self._num_right = 0
        self._num_layer_drafts = self._num_layer_requests = self._num_layer_right = 0
        if look_s:
            self.gate.looked(time.perf_counter() - began_s)

    def totals(self) -> dict[str, float]:
        """Returns its counters by name, and the time that drafts have saved, which is not known where all are verified:
        nearly every step has some then."""
        saved = {} if self._always else {"speculation_saved_seconds": self.gate.saved_s}
        return self.counters.totals() | saved

    def end(self, request: Request) -> None:
        """Forgets what it knows about a request, which has left; its text stays in the index."""
        self._without_layer.discard(request)
        follower = self._followers.pop(request, None)
        if follower is None or self._index is None:
            return
        if follower.num_read and self.gate.is_due:
            began_s = time.perf_counter()
            new = request.token_ids(follower.num_read, min(request.num_known, follower.num_read + _READ_AT_ONCE))
            self._index.read(follower.text, new)
            self.gate.looked(time.perf_counter() - began_s)
        self._index.end(follower.text)

    def _follower(self, request: Request) -> _Follower:
        follower = self._followers.get(request)
        if follower is None:
            text = -1
            if self._index is not None:
                self._num_begun += 1
                text = self._index.begin(f"of all: {request.salt}" if self._shares_text else str(self._num_begun))
            follower = self._followers[request] = _Follower(text)
        return follower

    def _from_text(self, requests: Sequence[Request]) -> list[_Drafts]:
        """Returns what may come next in each request, as far as it is in the index."""
        followers, found = [self._follower(request) for request in requests], [_NONE] * len(requests)
        if self._index is None:
            return found
        room, counts, new, behind = _READ_AT_ONCE, [], [], []
        for row, (request, follower) in enumerate(zip(requests, followers, strict=True)):
            num_known, num_read = request.num_known, follower.num_read
            number = num_known - num_read
            if number > room:
                number = room
                behind.append(row)  # at the end of what is read, something else came next
            room -= number
            counts.append(number)
            new += request.token_ids(num_read, num_read + number)
            follower.num_read = num_read + number
        drafts = self._index.look([follower.text for follower in followers], counts, new)
        if drafts.number:
            for row in drafts.num_drafts.nonzero()[0].tolist():
                number = drafts.num_drafts[row]
                source = OWN if drafts.are_own[row] else SHARED
                found[row] = _Drafts(
                    source, drafts.drafts[row, :number].tolist(), drafts.chances[row, :number].tolist()
                )
            for row in behind:
                found[row] = _NONE
        return found

    def _offer(self, request: Request, follower: _Follower) -> None:
        """Learns from drafts of the last look that are not of text, verified or not, up to the first that was wrong, as
        far as what came instead is known. Offers what its form forces next; or else what the model predicts."""
        came = request.token_ids(follower.offered_from, request.num_known) if follower.offers else []
        for kind, drafts in follower.offers:
            both = list(zip(drafts, came, strict=False))
            num_right = next((i for i, (draft, token) in enumerate(both) if draft != token), len(both))
            num_tried = min(len(both), num_right + 1)
            follower.right[kind] = 0.9 * follower.right.get(kind, 0.0) + num_right
            follower.tried[kind] = 0.9 * follower.tried.get(kind, 0.0) + num_tried
            self._right[kind] = 0.99 * self._right[kind] + num_right
            self._tried[kind] = 0.99 * self._tried[kind] + num_tried
        follower.offers, follower.offered_from = (), request.num_known
        if self._forced is not None and request.params.constraint is not None and (forced := self._forced(request)):
            follower.offers = ((FORM, forced[: self._max_drafts]),)
        elif follower.predicted and follower.predicted_from == request.num_known:
            follower.offers = ((MTP, follower.predicted[: self._max_drafts]),)

    def _chance(self, follower: _Follower, kind: str) -> float:
        usual = self._right[kind] / self._tried[kind]
        return min(0.98, (follower.right.get(kind, 0.0) + 2 * usual) / (follower.tried.get(kind, 0.0) + 2))
