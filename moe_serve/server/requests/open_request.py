"""An open request: its spec, its output so far, and how its reader is notified."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moe_serve.attention_dp.request import Handover, SamplingParams
from moe_serve.engine.output.incremental_decoder import Decoder
from moe_serve.engine.output.logprobs import TokenLogprobs
from moe_serve.engine.output.routed_experts import RoutedExperts
from moe_serve.engine.output.stop_matcher import FinishReason, StopMatcher
from moe_serve.engine.protocol.messages import Submit, TokenEvent
from moe_serve.errors import ModelError, MoeServeError, RequestError
from moe_serve.log import call_id

_TURN_S = 0.001


class UnavailableError(MoeServeError):
    """The engine cannot serve now: it is starting or ending, or a rank is lost. The same request may succeed later."""


class OwnTimeoutError(RequestError):
    """No token came within the time that the client itself gave the request."""


@dataclass(frozen=True)
class RequestSpec:
    """What to generate. A value, so it may be submitted again at any time.

    salt:       requests share cached prefixes only with those of the same salt
    session_id: requests of one session go to one rank
    rank:       the rank that the caller chose; None = any
    priority:   head starts in the line of waiting requests (admission.py)
    rid:        id chosen by its client, or for it; unique among open requests
    timeout_s:  it is cut short after so long; None = never

    group:          shared by the outputs of one prompt
    shows_logprobs: the answer shows the log probabilities of its output; otherwise they only choose the best output
    """

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    salt: str = ""
    session_id: str | None = None
    rank: int | None = None
    priority: int = 0
    rid: str | None = None
    timeout_s: float | None = None
    group: str | None = None
    shows_logprobs: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the longest output."""
        return len(self.prompt_ids) + self.params.max_new_tokens


class Changes:
    """Tells one reader which of its requests have changed. Several unread changes of a request are told once.

    ends_only: tell of a request only when it is done, so that its tokens do not wake the reader
    """

    def __init__(self, ends_only: bool = False) -> None:
        self._ends_only = ends_only
        self._changed: dict[int, OpenRequest] = {}  # in the order of their changes
        self._event = asyncio.Event()
        self._notifier: Notifier | None = None
        self._take: Callable[[OpenRequest], bool] | None = None

    def notify(self, request: "OpenRequest") -> None:
        if self._ends_only and not request.is_done:
            return
        self._changed[id(request)] = request
        if self._notifier is None:
            self._event.set()
        else:
            self._notifier.add(self)

    def notify_by(self, notifier: "Notifier", take: "Callable[[OpenRequest], bool]") -> None:
        """Lets a notifier hand over changed requests without waking the reader.

        take: gets a request; returns False to wake the reader, which then gets it from `next`
        """
        self._notifier, self._take = notifier, take

    def deliver(self) -> None:
        """Hands over the requests that have changed."""
        assert self._take is not None
        while self._changed:
            key = next(iter(self._changed))
            try:
                is_taken = self._take(self._changed[key])
            except Exception:  # the reader repeats the mistake where its answer can end with an error
                self._notifier = None
                is_taken = False
            if not is_taken:
                self._event.set()
                return
            del self._changed[key]

    async def next(self) -> "OpenRequest":
        """Waits for a request that has changed, and returns it."""
        while not self._changed:
            self._event.clear()
            await self._event.wait()
        return self._changed.pop(next(iter(self._changed)))


class Notifier:
    """Hands changed requests to the readers that asked for it, once per turn of the event loop.

    Waking a task for each token of each stream would cost as much as sending it. A turn takes at most a millisecond, so
    that other work gets its share. Changes that come meanwhile are handed over together.
    """

    def __init__(self) -> None:
        self._waiting: dict[Changes, None] = {}

    def add(self, changes: Changes) -> None:
        """Notes that something has changed for a reader."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._waiting[changes] = None

    def _deliver(self) -> None:
        ends_s = time.monotonic() + _TURN_S
        try:
            while self._waiting and time.monotonic() < ends_s:
                changes = next(iter(self._waiting))
                del self._waiting[changes]
                changes.deliver()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._deliver)


class OpenRequest:
    """One submitted request.

    rank:       the rank that serves it now; None while it waits for one
    attempt:    number of the valid submit; events of other attempts are dropped
    matcher:    its output as the reader sees it
    failure:    why it ended without an answer; RequestError: the client's fault
    num_cached: prompt tokens that the prefix cache of the rank held that computed the prompt; what that rank hands over
                is not cached
    handover:   where a prefill rank has left pages of the prompt; None: none has computed any
    hand_over_from: the first block that it hands over;  hand_over_to: the decode host that gets the pages; None: all do
    pages_at:   the rank of another host that may have more pages of the prompt than that of `rank`; None: none has
    handed_over_s, resumed_s: when a prefill rank had computed it, and when it was sent to a decode rank; None: not yet
    call_id:    the X-Request-Id of its call
    queued_s:   its wait so far: here for a rank, and on ranks until they began with it
    route:      where it began, "prefill" or why not; None: there are no prefill ranks

    output_logprobs, prompt_logprobs: log probabilities so far (engine/output/logprobs.py says what each entry is);
    None: it asks for none. Those of the output are as many as `matcher.output_ids`.
    routed_experts: of its first `num_routed` tokens; None: it does not ask for them
    num_changed: choices of gates that the capacity of experts has changed, so far; None: there is no such limit
    embedding: as TokenEvent has it, from its first token on; None: it does not ask for it
    """

    def __init__(
        self,
        request_id: str,
        spec: RequestSpec,
        tokenizer: Decoder | None,
        eos_token_ids: Sequence[int],
        changes: Changes,
    ):
        self.request_id = request_id
        self.spec = spec
        self.rank: int | None = None
        self.attempt = 0
        self.has_started = False  # the rank has sent a token of this attempt
        self.route: str | None = None
        self.matcher = StopMatcher(tokenizer, spec.params, eos_token_ids, spec.prompt_ids)
        self.failure: MoeServeError | None = None
        self.was_cut_short = False
        self.num_cached = 0
        self.handover: Handover | None = None
        self.hand_over_from = 0
        self.pages_at: int | None = None
        self.hand_over_to: int | None = None
        self.handed_over_s: float | None = None
        self.resumed_s: float | None = None
        params = spec.params
        self.output_logprobs = _empty(params.logprobs, params.logprob_token_ids)
        self.prompt_logprobs = _empty(params.prompt_logprobs, params.logprob_token_ids)
        self.num_changed: int | None = None
        self.routed_experts = RoutedExperts() if params.return_routed_experts else None
        self.embedding: bytes | None = None
        self.call_id = call_id.get()
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finished_s: float | None = None
        self.queued_s = 0.0
        self._waits_since_s = self.submitted_s
        self._changes = changes
        self._num_losses = 0
        self._num_output_at_loss = 0
        self._prompt_from: OpenRequest | None = None
        self._waiting_for_prompt: list[OpenRequest] = []

    @property
    def is_done(self) -> bool:
        return self.finished_s is not None

    @property
    def num_routed(self) -> int:
        """Returns how many tokens have gone through the experts: the last one of the output was only drawn."""
        return len(self.spec.prompt_ids) + max(0, self.num_output - 1)

    @property
    def num_output(self) -> int:
        return len(self.matcher.output_ids)

    def take_prompt_logprobs_of(self, first: "OpenRequest") -> None:
        """Shares the log probabilities of another request with the same prompt; this one does not ask for any itself.

        Its reader is told nothing before they are complete.
        """
        self.prompt_logprobs = first.prompt_logprobs
        self._prompt_from = first

    def submit_message(self, prefill: bool = False) -> Submit:
        """Returns the message with which a rank starts, or continues where an earlier attempt stopped.

        prefill: up to the next token alone
        """
        most = max(1, self.spec.params.max_new_tokens)
        is_handed_over = prefill and most > self.num_output + 1
        return Submit(
            request_id=self.request_id,
            attempt=self.attempt,
            prompt_ids=self.spec.prompt_ids,
            # A rank computes a prompt to sample from it; a token that nobody asked for is dropped here.
            params=replace(self.spec.params, max_new_tokens=min(most, self.num_output + 1) if prefill else most),
            seed=self.spec.seed,
            output_ids=list(self.matcher.output_ids),
            salt=self.spec.salt,
            num_prompt_logprobs=0 if self.prompt_logprobs is None else len(self.prompt_logprobs),
            hand_over_from=self.hand_over_from if is_handed_over else None,
            hand_over_to=self.hand_over_to if is_handed_over else None,
            handover=None if prefill else self.handover,
            pages_at=self.pages_at,
        )

    def lacks_tokens_before(self, event: TokenEvent) -> bool:
        """Returns whether events before this one were lost with a connection."""
        block, mine = event.prompt_logprobs, self.prompt_logprobs
        return event.index > self.num_output or (block is not None and mine is not None and block.start > len(mine))

    def is_handed_over(self, event: TokenEvent) -> bool:
        """Returns whether an event of a prefill rank ends its part alone, so that a decode rank goes on."""
        return event.finish == "length" and event.index + len(event.token_ids) < self.spec.params.max_new_tokens

    def went_elsewhere(self, host: int) -> bool:
        """Returns whether the pages of its prompt went to another decode host than this one, as far as is known."""
        is_whole = self.handover is not None and not self.handover.why_short
        return is_whole and self.hand_over_to not in (None, host)

    def end_handover(self, why_short: str) -> None:
        """Notes that its prefill rank hands no more pages over, and why; "": it has computed the prompt."""
        if self.handover is not None:
            self.handover = replace(self.handover, why_short=why_short)

    def go_to(self, rank: int) -> None:
        """Notes that a rank serves it from now on."""
        self.rank = rank
        self.queued_s += time.monotonic() - self._waits_since_s

    def leave_rank(self) -> None:
        """Takes the request from its rank. It keeps its output, and can be submitted again."""
        self.rank = None
        self._waits_since_s = time.monotonic()
        self.attempt += 1
        self.has_started = False

    def count_loss(self) -> int:
        """Counts that its rank has ended. Returns how many have since its last token."""
        if self.num_output > self._num_output_at_loss:
            self._num_losses = 0
        self._num_losses += 1
        self._num_output_at_loss = self.num_output
        return self._num_losses

    def apply(self, event: TokenEvent) -> None:
        """Handles an event of its rank; drops old and repeated tokens. No tokens may be missing before it."""
        if self.is_done or event.attempt != self.attempt:
            return
        if event.finish == "error":
            message = event.message or "the rank could not serve this request"
            self.fail(RequestError(message, event.field) if event.field else ModelError(message))
            return
        assert not self.lacks_tokens_before(event), "tokens before these are missing"
        if not self.num_output:
            self.num_cached = max(self.num_cached, event.num_cached_prompt)
        self.queued_s += event.queued_us / 1e6
        if event.prompt_logprobs is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs.add(event.prompt_logprobs)
        if event.experts is not None and self.routed_experts is not None:
            self.routed_experts.add(event.experts)
        if event.num_changed is not None:
            self.num_changed = event.num_changed
        self.embedding = event.embedding or self.embedding
        if not event.token_ids:  # a part of the prompt is computed
            return
        if self.spec.params.max_new_tokens == 0:
            reason: FinishReason | None = FinishReason("length")
            self.matcher.close(FinishReason("length"))
        else:
            _, reason = self.matcher.push(event.token_ids[self.num_output - event.index :])
        if reason is None and event.finish is not None:
            reason = FinishReason("stop" if event.finish == "stop" else "length", matched=event.matched_id)
            self.matcher.close(reason)
        if event.logprobs is not None and self.output_logprobs is not None:
            self.output_logprobs.add(event.logprobs)
            self.output_logprobs.cut(self.num_output)  # not of tokens behind the end
        if reason is not None:
            self.finished_s = time.monotonic()
        self._tell()

    def cut_short(self, why: str) -> None:
        """Ends the request with its output so far."""
        if not self.is_done:
            self.matcher.close(FinishReason("abort", matched=why))
            self.finished_s = time.monotonic()
            self._tell()

    def end_empty(self) -> None:
        """Turns a request that was cut short before its first token into one with an empty output."""
        assert self.was_cut_short
        self.matcher.close(FinishReason("abort", matched=str(self.failure)))
        self.failure = None

    def fail(self, failure: MoeServeError, was_cut_short: bool = False) -> None:
        """Ends the request without an answer. was_cut_short: for a reason of its own, such as its timeout"""
        if not self.is_done:
            self.failure = failure
            self.was_cut_short = was_cut_short
            self.finished_s = time.monotonic()
            self._tell()

    def _tell(self) -> None:
        """Tells the reader of a change, and requests that share this one's prompt that it is computed."""
        first = self._prompt_from
        if first is not None and not first.has_prompt:
            if self not in first._waiting_for_prompt:
                first._waiting_for_prompt.append(self)
            return
        self._changes.notify(self)
        while self._waiting_for_prompt and self.has_prompt:
            self._waiting_for_prompt.pop(0)._tell()

    @property
    def has_prompt(self) -> bool:
        """Whether the log probabilities of the prompt are complete."""
        return self.num_output > 0 or self.is_done


def _empty(num_top: int | None, token_ids: Sequence[int]) -> TokenLogprobs | None:
    return None if num_top is None else TokenLogprobs(num_top, token_ids)
