"""The messages between the front end and the ranks: msgspec structs, sent as MessagePack over ZeroMQ.

Every rank connects a DEALER socket to the front end's ROUTER and says `Hello`, then `Ready`, and both again after its
connection was cut. A request is a pure value (`Submit`): it may be sent again, to any rank, with the output so far and
a higher attempt. A *launch* is all ranks that started together; its random id is compared for equality only. Receivers
drop old and repeated events by (launch id, attempt, output index). Nothing is pickled.
"""

from typing import Any, TypeVar

import msgspec

from moe_serve.attention_dp.request import Handover, Request, SamplingParams

ALIVE_PERIOD_S = 1.0  # how often each side shows that it is alive
STEP_WORDS = 11  # of one step in a profile, all int64; see Profiler.add
# Upper bounds of the buckets of a step's time, in seconds; one more bucket is beyond the last.
STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages between front ends, ranks and launchers. Fields travel by position."""


# --- to the ranks -----------------------------------------------------------------------------------------------------


class Submit(Message, tag="submit", frozen=True):
    """Serve this request.

    output_ids:          what earlier attempts have produced; the first new token has that index
    num_prompt_logprobs: entries of the prompt's log probabilities that earlier attempts have sent
    hand_over_from:      to a prefill rank, where a decode rank goes on: the first block whose page that may lack
    hand_over_to:        to a prefill rank, the decode host that takes the pages; None: all do
    handover:            to a decode rank: where pages of the prompt are
    pages_at:            the rank of another host that may have more pages of the prompt than this host; None: none has
    """

    request_id: str
    attempt: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = []
    salt: str = ""
    num_prompt_logprobs: int = 0
    hand_over_from: int | None = None
    hand_over_to: int | None = None
    handover: Handover | None = None
    pages_at: int | None = None

    def to_request(self) -> Request:
        request = Request(
            request_id=self.request_id,
            attempt=self.attempt,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            params=self.params,
            seed=self.seed,
            salt=self.salt,
            handover=self.handover,
            hand_over_from=self.hand_over_from,
            pages_at=self.pages_at,
            hand_over_to=self.hand_over_to,
        )
        if self.params.prompt_logprobs is not None:
            request.prompt_scored(self.params.prompt_logprobs_start + self.num_prompt_logprobs)
        return request


class Expect(Message, tag="expect", frozen=True):
    """To a decode rank: a prefill rank computes this prompt, whose pages it may take as they come.

    The request follows as `Submit`, or `Abort` does.
    """

    request_id: str
    prompt_ids: list[int]
    salt: str
    handover: Handover


class Abort(Message, tag="abort", frozen=True):
    """Forget this request; no more events of it are sent."""

    request_id: str


class Alive(Message, tag="alive", frozen=True):
    """The front end is alive; sent every ALIVE_PERIOD_S."""


class Shutdown(Message, tag="shutdown", frozen=True):
    """End the engine, all ranks together, at the next step."""


class Refused(Message, tag="refused", frozen=True):
    """This rank cannot attach: it ends with the reason."""

    reason: str


class ForFrontEnds(Message, tag="for_front_ends", frozen=True):
    """A message of one of several front ends to the others; a rank passes it on to all of them.

    front_end: the sender
    call_id:   its number, higher than those before; each of the others answers with the same and `what` DONE
    what:      see server/ranks/calls.py
    rid:       client id of the requests that are meant; None: all requests
    lasts:     a front end that starts later receives it, too
    told:      the front ends to which the forwarding rank is connected
    """

    front_end: int
    call_id: int
    what: str
    rid: str | None = None
    lasts: bool = False
    told: list[int] = []


class RecordCommand(Message, tag="record", frozen=True):
    """Start, stop or dump the recorder of expert load; the lowest rank that takes part answers with `Answer`.

    command: one of engine.step.plan.RECORD_COMMANDS
    """

    call_id: int
    command: str


class Rebalance(Message, tag="rebalance", frozen=True):
    """Plan now, without waiting for the next window; answered as RecordCommand."""

    call_id: int


class SetPlacement(Message, tag="set_placement", frozen=True):
    """Move experts to these slots: [layers][slots], -1 = empty. Answered as RecordCommand; a refusal says why."""

    call_id: int
    physical_to_logical: list[list[int]]


class FlushCache(Message, tag="flush_cache", frozen=True):
    """Empty the prefix cache, if no request is open. Every rank answers for itself, with `Answer`."""

    call_id: int


class Profile(Message, tag="profile", frozen=True):
    """Record steps for a profile, or stop and answer with them. Every rank answers for itself, with `Answer`.

    command: "start" or "stop";  max_s, most_steps, most_turns: where a recording ends by itself
    The facts of a stop: steps, int64 [n, STEP_WORDS]; turns, int64 [n, 2] (begin in ns, part); and their words.
    """

    call_id: int
    command: str
    max_s: float = 0.0
    most_steps: int = 0
    most_turns: int = 0


# --- to the front end -------------------------------------------------------------------------------------------------


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits of a request. The engine measures them; the front end checks requests against them."""

    model_name: str
    vocab_size: int
    max_model_len: int  # prompt + output tokens
    max_prompt_len: int  # prompt tokens: they fit one rank's cache beside one output token
    eos_token_ids: list[int]
    block_size: int
    max_logprobs: int = 20  # likeliest tokens at each place
    expert_id_bytes: int | None = None  # of the experts of one token, which are kept for those who ask; None: not
    embedding_size: int = 0  # numbers in a row that is projected to logits; 0: rows cannot be read


SUPERVISOR = -1  # the rank in the Hello of a launcher that watches the ranks


class Hello(Message, tag="hello", frozen=True):
    """A rank attaches; also again, after its connection was cut or while it does not hear the front end.

    num_reconnects: how often its connection was cut; each time it has dropped its requests
    restarts_left:  how often its launcher starts all ranks again when this launch is lost
    is_ready:       `Ready` follows;  num_before: processes that were this rank before, in the same launch
    """

    rank: int
    num_ranks: int
    launch_id: int
    pid: int
    host: str
    num_reconnects: int = 0
    restarts_left: int = 0
    is_ready: bool = False
    num_before: int = 0


class Progress(Message, tag="progress", frozen=True):
    """The phase of a rank's start. fraction: 0..1 of this phase"""

    rank: int
    launch_id: int
    phase: str
    fraction: float


class Ready(Message, tag="ready", frozen=True):
    """A rank accepts requests from now on.

    info:     facts for /server_info (backends, memory, placement, timings)
    computes: what decides about the values that it computes, of ranks of one role: (name, value, note) of each fact
    """

    rank: int
    launch_id: int
    limits: ModelLimits
    info: dict[str, Any]
    computes: list[tuple[str, str, str]] = []


class LogprobBlock(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of n tokens in a row, little-endian; output/logprobs.py says which ones they are.

    start:    index of the first one's entry, as in TokenLogprobs
    ranks:    [n] int32, of the token among all, 1 for the likeliest
    logprobs: [n, 1 + ids] float32: of the token, then of each of logprob_token_ids
    top_ids:  [n, top] int32, likeliest first, equal ones by id;  top: [n, top] float32
    """

    start: int
    ranks: bytes
    logprobs: bytes
    top_ids: bytes = b""
    top: bytes = b""


class ExpertsBlock(msgspec.Struct, frozen=True, array_like=True):
    """Experts of consecutive tokens of a request, prompt and output.

    first: position of the first token
    rows:  [tokens, num_layers, topk] logical ids of the MoE layers, in bytes of `dtype`, "uint8" or "uint16"
    """

    first: int
    num_layers: int
    topk: int
    dtype: str
    rows: bytes


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. index: output index of the first. finish: None while it runs, else why it ended.

    finish: "length" (max_new_tokens or the model's limit), "stop" (matched_id: the end-of-sequence or stop id, which is
    the last of token_ids), or "error" (no tokens; see message). field: of the request, to be changed; None: the model
    failed
    logprobs, prompt_logprobs: of these tokens, and of prompt tokens, which may come without tokens
    queued_us: with the first token of an attempt, how long it has waited on the rank
    experts: of all tokens before the last of token_ids of which none were sent in this attempt, if asked for
    num_changed: choices of gates that the capacity of experts has changed, of all tokens before the last
    embedding: with the first token, if asked for: the row that it was drawn from, float32, little-endian
    """

    request_id: str
    attempt: int
    index: int
    token_ids: list[int]
    finish: str | None = None
    matched_id: int | None = None
    num_cached_prompt: int = 0
    message: str | None = None
    field: str | None = None
    logprobs: LogprobBlock | None = None
    prompt_logprobs: LogprobBlock | None = None
    queued_us: int = 0
    experts: ExpertsBlock | None = None
    num_changed: int | None = None
    embedding: bytes | None = None


class Tokens(Message, tag="tokens", frozen=True):
    """All tokens that one step of one rank produced."""

    rank: int
    launch_id: int
    events: list[TokenEvent]


class PhaseTimes(msgspec.Struct, frozen=True):
    """The steps of one phase: their seconds, how many fell into each bucket, and seconds by part of a step.

    parts: by the names of kernels/part_clock.py; empty on a GPU, where the host does not see them
    """

    seconds: float
    buckets: list[int]
    parts: dict[str, float]


class Status(Message, tag="status", frozen=True):
    """A rank is alive, and its load; sent every ALIVE_PERIOD_S.

    resident_bytes, num_open_files: of its process; 0 where that is not known
    log_lines:                      how many warnings and errors it has logged, by level
    phases:                         the times of its steps, by phase
    page_cost:                      what a page of another host takes over computing it; None: not known
    """

    rank: int
    launch_id: int
    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    pending_tokens: int  # prefill tokens still to compute
    counters: dict[str, float] = {}  # running totals: steps, tokens, preemptions, prefix hits, sleeps
    waited_s: list[float] = []  # for each rank, how long this one has waited for its rows; empty = not measured
    resident_bytes: int = 0
    num_open_files: int = 0
    log_lines: dict[str, int] = {}
    phases: dict[str, PhaseTimes] = {}
    page_cost: float | None = None


class Pulse(Message, tag="pulse", frozen=True):
    """A rank's process lives; sent every ALIVE_PERIOD_S on a socket of its own. phase: of the step; "": between two"""

    rank: int
    launch_id: int
    step: int
    phase: str


class Members(Message, tag="members", frozen=True):
    """The ranks that take part have changed; every one of them reports it. A masked rank holds no requests any more.

    group_epoch:  counts the groups; the highest one holds;  members: ranks that take part, ascending
    reason:       why this rank regrouped
    times_masked: how often this rank was masked; it dropped its requests each time, whether or not others noticed
    ended:        masked ranks whose processes have ended; the other masked ranks were late and may rejoin
    waits:        the members keep their requests, and compute nothing until a masked rank rejoins
    """

    rank: int
    launch_id: int
    group_epoch: int
    members: list[int]
    reason: str
    times_masked: int = 0
    ended: list[int] = []
    waits: bool = False


class Apart(Message, tag="apart", frozen=True):
    """A rank does not reach the hosts of most ranks. It has dropped its requests, and serves none until `Members`.

    group_epoch: of the group that it was in
    """

    rank: int
    launch_id: int
    group_epoch: int
    reason: str


class Voided(Message, tag="voided", frozen=True):
    """A step of this rank is void; `Members` follows where the ranks go on, else `Fatal`.

    layer:           model layer in which it ended; -1: in none
    phase, sequence: of the call that ended, such as "exchange", and which one of its kind
    missing:         ranks that this one waited for; []: it did not wait
    received:        ranks whose part of that call had come
    """

    rank: int
    launch_id: int
    step: int
    layer: int
    phase: str
    sequence: int
    missing: list[int]
    received: list[int]
    reason: str


class Answer(Message, tag="answer", frozen=True):
    """The answer to a command of the front end. text: the result, or the reason of a refusal;  facts: such as files"""

    rank: int
    launch_id: int
    call_id: int
    ok: bool
    text: str
    facts: dict[str, Any] = {}


class WindowReport(msgspec.Struct, frozen=True, array_like=True):
    """The load of a closed window.

    balancedness: mean / max of rank load, of each layer, on the placement in use at its beginning
    mean_at_end:  mean over layers on the placement in use at its end: what a move within it has brought
    traffic:      of all layers, from the rank of a token to that of its expert; [] = not known, or too many ranks
    """

    first_step: int
    num_steps: int
    phase: str
    step_time_s: float
    balancedness: list[float]
    rank_load: list[list[float]]  # [layers][ranks] tokens, under the split in use, evenly shared
    tokens: list[list[int]]  # [layers][experts]
    mean_at_end: float
    traffic: list[list[float]] = []  # [ranks][ranks] tokens, evenly shared


class DecisionReport(msgspec.Struct, frozen=True, array_like=True):
    """A decision of the balancer. at_s: seconds since the epoch (wall clock);  kind: see rebalance/events.py"""

    at_s: float
    step: int
    kind: str
    reason: str
    num_layers: int
    gain_s: float  # predicted, over the horizon; of "watch": the promise of the last move
    cost_s: float  # predicted
    realised_s: float = 0.0  # of "watch": the gain of the last move


class BalanceReport(Message, tag="balance", frozen=True):
    """The placement and the state of the balancer; the lowest rank that takes part sends it at every change.

    state:     "watching", "planning", "moving", or "off"
    alarm:     reason for which the balancer has switched itself off; "" = it has not
    window:    the newest closed window, in the report that follows its end only
    decisions: those since the last report, oldest first
    totals:    running totals by name: see engine/balancing/balancer.py
    placement: [layers][slots] logical experts, in the report that follows a change only
    splits:    how batches of each phase are split, and what that saves against the even split: SplitChoice.describe
    """

    rank: int
    launch_id: int
    step: int
    mode: str
    state: str
    placement_version: int
    totals: dict[str, float]
    alarm: str = ""
    window: WindowReport | None = None
    decisions: list[DecisionReport] = []
    placement: list[list[int]] | None = None
    splits: dict[str, Any] = {}


class Exited(Message, tag="exited", frozen=True):
    """A launcher reports that the process of a rank has ended; its peers will report whether they go on.

    num_before: as in the `Hello` of that process
    """

    rank: int
    launch_id: int
    num_before: int
    reason: str


class Fatal(Message, tag="fatal", frozen=True):
    """This rank ends its launch. lost_rank: the rank that caused it, -1 = unknown; its own for a fault of its own

    Of a launcher: the launch is over.
    """

    rank: int
    launch_id: int
    message: str
    lost_rank: int


class Draining(Message, tag="draining", frozen=True):
    """This rank was asked to end when open requests have; sent again until the front end says `Shutdown`."""

    rank: int
    launch_id: int


class Goodbye(Message, tag="goodbye", frozen=True):
    """This rank ends because it was asked to."""

    rank: int
    launch_id: int


NEXT_STEP = -1  # of a Wake


class Wake(Message, tag="wake", frozen=True):
    """Enter exchange `step` of this launch: a sleeping rank has work. Old and repeated ones are ignored.

    step: NEXT_STEP: whichever is next, since the process of a rank has ended, or a rank waits to rejoin
    """

    launch_id: int
    step: int


# --- as bytes ---------------------------------------------------------------------------------------------------------

ToRank = (
    Submit
    | Expect
    | Abort
    | Alive
    | Shutdown
    | Refused
    | RecordCommand
    | Rebalance
    | SetPlacement
    | FlushCache
    | Profile
    | ForFrontEnds
    | Wake
)
ToFrontEnd = (
    Hello
    | Progress
    | Ready
    | Tokens
    | Status
    | Pulse
    | Members
    | Voided
    | Apart
    | Answer
    | BalanceReport
    | Exited
    | Fatal
    | Draining
    | Goodbye
    | ForFrontEnds
)

Decoded = TypeVar("Decoded")
_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_to_front_end: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
_wake = msgspec.msgpack.Decoder(Wake)


def front_end_of(request_id: str) -> int:
    """Returns the number of the front end that a request belongs to: its id begins with it, and a colon."""
    return int(request_id.partition(":")[0])


def encode(message: Message) -> bytes:
    """Returns the bytes of a message."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Returns the message in data. Raises msgspec.DecodeError for anything else."""
    return _decoded(_to_rank, data)


def decode_to_front_end(data: bytes) -> ToFrontEnd:
    """Returns the message in data. Raises msgspec.DecodeError for anything else."""
    return _decoded(_to_front_end, data)


def decode_wake(data: bytes) -> Wake:
    """Returns the wake in data. Raises msgspec.DecodeError for anything else."""
    return _decoded(_wake, data)


def _decoded(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes) -> Decoded:
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # strings that are not UTF-8, and values nested too deeply
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None
