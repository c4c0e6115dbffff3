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

from moe_serve.attention_dp.draft_gate import DecodeStep, DraftGate, expected_right
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.text_index import TextIndex

_INDEXED_AT_ONCE = 8192  # tokens in one step, about 2 ms
_FEWEST_INDEXED = 32  # of an output at once, at half the time for each
_SAMPLED = 4  # while no drafts pay, one of so many outputs is entered, at its end
# Where drafts come from: the request's own text, another one's, the form that its output must have, and the model's
# layer for multi-token prediction.
OWN, SHARED, FORM, MTP = SOURCES = "own", "shared", "form", "mtp"


class _Offer(NamedTuple):
    """Drafts for the next step of a request. kind: one of SOURCES"""

    kind: str
    drafts: tuple[int, ...]


@dataclass(slots=True)
class _Follower:
    """What is known about one request. source, at: the text that it seems to repeat, and where it is there"""

    text: int
    num_read: int = 0  # of its known tokens
    source: int = 0
    at: int = 0
    right: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))  # recent ones count more
    tried: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))
    offers: tuple[_Offer, ...] = ()  # of the last look
    offered_from: int = 0  # tokens that were known then
    predicted: tuple[int, ...] = ()  # by the model
    predicted_from: int = 0  # tokens that were known then


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
        """
        self.counters = SpeculationCounters()
        self.gate = DraftGate(predicted_drafts > 0 and not always, always)
        self._predicted_drafts = predicted_drafts
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
        self._without_layer: set[Request] = set()  # that began before the model's layer did, of which it has no keys
        # Of this step:
        self._look_s = 0.0
        self._num_drafts = self._num_layer_drafts = self._num_layer_requests = self._num_layer_right = 0

    def is_due(self, newest: Request) -> bool:
        """Returns whether to look for drafts in this step. Called once for each step that decodes.

        newest: of the requests that decode
        """
        has_new, self._newest = newest is not self._newest, newest
        self._look_s = 0.0
        self._num_drafts = self._num_layer_drafts = self._num_layer_requests = self._num_layer_right = 0
        return self.gate.is_due(has_new)

    def num_predictions(self, has_prompt: bool, going_on: Iterable[Request]) -> int:
        """Returns how many tokens the model's layer should predict of each request behind this step; 0: it may rest.

        has_prompt: the step begins a prompt;  going_on: the requests that it does not begin
        """
        if not self._predicted_drafts:
            return 0
        has_rested = not self.gate.layer_runs
        if not self._always and not self.gate.wants_layer(has_prompt):
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
        began_s = time.perf_counter()
        self._drafted.clear()  # of a step that was void
        self._num_layer_requests = len(requests) - sum([request in self._without_layer for request in requests])
        room, found, chances = _INDEXED_AT_ONCE, [], []
        for request in requests:
            follower = self._follower(request)
            if follower.offers:
                self._see_whether_right(request, follower)
            if self._reads_text:
                room = self._read(request, follower, room)
            follower.offers, follower.offered_from = self._offers(request, follower), request.num_known
            offer, chance = self._best(follower)
            found.append(offer)
            chances.append(chance)
        if self._always:
            lengths = [len(each.drafts) for each in found]
        else:
            lengths = self.gate.lengths(len(requests), chances, [len(each.drafts) for each in found], num_rows)
        drafts = []
        for request, offer, length in zip(requests, found, lengths, strict=True):
            drafts.append(offer.drafts[: min(length, num_rows)])
            num_rows -= len(drafts[-1])
            if drafts[-1]:
                self._drafted[request] = offer.kind
        self._look_s = time.perf_counter() - began_s
        return drafts

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learns how many drafts of a request were right."""
        kind = self._drafted.pop(request)
        self.counters.count(kind, num_drafts, num_accepted)
        self._num_drafts += num_drafts
        if kind == MTP:
            self._num_layer_drafts += num_drafts
            self._num_layer_right += 0 if request in self._without_layer else num_accepted

    def ended(self, num_requests: int, num_tokens: int, seconds: float, layer_s: float = 0.0) -> None:
        """Learns what a step of decodes alone took and yielded, drafts and the runs of the model's layer included."""
        if self.gate.measures:
            of_layer = layer_s, self._num_layer_drafts, self._num_layer_requests, self._num_layer_right
            self.gate.ended(DecodeStep(num_requests, self._num_drafts, num_tokens, seconds, self._look_s, *of_layer))

    def totals(self) -> dict[str, float]:
        """Returns its counters by name, and the time that drafts have saved."""
        return self.counters.totals() | {"speculation_saved_seconds": self.gate.saved_s}

    def end(self, request: Request) -> None:
        """Forgets what it knows about a request, which has left; its text stays in the index."""
        if request is self._newest:
            self._newest = None
        self._without_layer.discard(request)
        follower = self._followers.pop(request, None)
        has_use = self._always or self.gate.pays
        if follower is not None and follower.num_read and (has_use or follower.text % _SAMPLED == 0):
            new = request.token_ids(follower.num_read, min(request.num_known, follower.num_read + _INDEXED_AT_ONCE))
            self._index.extend(follower.text, self._salt(request, follower), new)

    def _follower(self, request: Request) -> _Follower:
        follower = self._followers.get(request)
        if follower is None:
            follower = self._followers[request] = _Follower(self._index.begin())
        return follower

    def _read(self, request: Request, follower: _Follower, room: int) -> int:
        """Adds what is new of a request to the index, at most `room` tokens; returns how much room is left."""
        num_new = min(request.num_known - follower.num_read, room)
        if num_new <= 0:
            return room
        new = request.token_ids(follower.num_read, follower.num_read + num_new)
        follower.num_read += num_new
        source = self._index.text(follower.source) if follower.source else None
        if source is not None and source[follower.at : follower.at + num_new].tolist() == new:
            follower.at += num_new
        else:
            follower.source = 0
        # While no drafts pay, nobody asks for most of the text, and entering it takes 1 to 2 us a token.
        has_use = self._always or self.gate.pays
        many = has_use and self._index.num_left(follower.text) + num_new >= _FEWEST_INDEXED
        enters = many or follower.num_read - num_new < len(request.prompt_ids)
        self._index.extend(follower.text, self._salt(request, follower), new, enters)
        return room - num_new

    def _see_whether_right(self, request: Request, follower: _Follower) -> None:
        """Learns from what was found in the last look, verified or not, up to the first that was wrong, as far as what
        came instead is known."""
        came = request.token_ids(follower.offered_from, request.num_known)
        for kind, drafts in follower.offers:
            both = list(zip(drafts, came, strict=False))
            num_right = next((i for i, (draft, token) in enumerate(both) if draft != token), len(both))
            num_tried = min(len(both), num_right + 1)
            follower.right[kind] = 0.9 * follower.right[kind] + num_right
            follower.tried[kind] = 0.9 * follower.tried[kind] + num_tried
            self._right[kind] = 0.99 * self._right[kind] + num_right
            self._tried[kind] = 0.99 * self._tried[kind] + num_tried

    def _offers(self, request: Request, follower: _Follower) -> tuple[_Offer, ...]:
        """Returns what its form forces next; or else what followed where the last tokens of a request came before, and
        what the model predicts, as far as there are such."""
        if self._forced is not None and request.params.constraint is not None and (forced := self._forced(request)):
            return (_Offer(FORM, forced[: self._max_drafts]),)
        found = []
        if follower.predicted and follower.predicted_from == request.num_known:
            found.append(_Offer(MTP, follower.predicted))
        if self._reads_text and (offer := self._from_text(request, follower)) is not None:
            found.append(offer)
        return tuple(found)

    def _from_text(self, request: Request, follower: _Follower) -> _Offer | None:
        if follower.num_read < request.num_known:
            return None
        if not follower.source:
            place = self._index.find(follower.text, self._salt(request, follower))
            if place is None:
                return None
            follower.source, follower.at = place
        source = self._index.text(follower.source)
        if source is None:
            follower.source = 0
            return None
        drafts = tuple(source[follower.at : follower.at + self._max_drafts])
        return _Offer(OWN if follower.source == follower.text else SHARED, drafts) if drafts else None

    def _best(self, follower: _Follower) -> tuple[_Offer, float]:
        """Returns the offer of which more are right on average, and the chance of each of its drafts."""
        best, best_chance, most = _Offer(OWN, ()), 0.5, 0.0
        for offer in follower.offers:
            chance = self._chance(follower, offer.kind)
            if (right := expected_right(chance, len(offer.drafts))) > most:
                best, best_chance, most = offer, chance, right
        return best, best_chance

    def _salt(self, request: Request, follower: _Follower) -> str:
        return request.salt if self._shares_text else str(follower.text)

    def _chance(self, follower: _Follower, kind: str) -> float:
        usual = self._right[kind] / self._tried[kind]
        return min(0.98, (follower.right[kind] + 2 * usual) / (follower.tried[kind] + 2))
