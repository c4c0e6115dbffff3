"""One generation request as a rank sees it: its parameters, its output so far, and how much of it is in the cache.

What a rank computes for a request is a pure function of (prompt ids, output ids so far, parameters, seed). So
preemption, crash recovery and hand-over between engines are one operation: submit again, with the output so far.
The HTTP front end and `LLM` build these types too.
"""

from dataclasses import dataclass, field
from typing import Any

from moe_serve.attention_dp.sampling_params import MAX_SEED as MAX_SEED
from moe_serve.attention_dp.sampling_params import MAX_STOPS as MAX_STOPS
from moe_serve.attention_dp.sampling_params import SamplingParams as SamplingParams
from moe_serve.errors import RequestError


def check_length(
    num_prompt: int, num_output: int, max_new_tokens: int, max_model_len: int, max_cached_tokens: int
) -> None:
    """Raises RequestError when a request of this length can never run on a rank.

    num_prompt, num_output: tokens of the prompt, and produced before this submit
    max_model_len:          tokens of the model's context, prompt and output together
    max_cached_tokens:      tokens that the rank's whole KV cache holds; the last output token needs no slot
    """
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens, needs at least one; send some text or ids", field="input_ids")
    if num_output >= max_new_tokens:
        raise RequestError(
            f"the request brings {num_output} output tokens and max_new_tokens is {max_new_tokens}, so nothing is left "
            "to produce; raise max_new_tokens",
            field="max_new_tokens",
        )
    total = num_prompt + max_new_tokens
    if total > max_model_len:
        field, fix = _shorten(num_prompt, max_model_len - num_prompt)
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_new_tokens is {max_new_tokens}, together {total}, but the "
            f"model takes {max_model_len}; {fix}",
            field=field,
        )
    if total - 1 > max_cached_tokens:
        field, fix = _shorten(num_prompt, max_cached_tokens + 1 - num_prompt)
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_new_tokens is {max_new_tokens}, but the KV cache of a rank "
            f"holds {max_cached_tokens}; {fix}, or serve with a larger cache.num_blocks or cache.memory_gib",
            field=field,
        )


def _shorten(num_prompt: int, max_output: int) -> tuple[str, str]:
    """Returns the field to change and how, for a prompt that leaves space for `max_output` tokens."""
    if max_output >= 1:
        return "max_new_tokens", f"lower max_new_tokens to {max_output} or shorten the prompt"
    return "input_ids", f"shorten the prompt to {num_prompt + max_output - 1} tokens or fewer"


@dataclass(frozen=True)
class Handover:
    """Where the pages of a prompt are that a prefill rank has computed for a request, or has begun to.

    rank, launch_id:  of the prefill rank, by its number among them;  attempt: of the request there
    why_short: why it did not come to the end, "peer_lost" or "late"; "elsewhere": the pages went to another host;
               "": neither
    """

    rank: int
    launch_id: int
    attempt: int
    why_short: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """A request on its rank. Only the scheduler changes the fields below `salt`; the sampler reads `output_ids`.

    The *known* tokens are prompt_ids + output_ids; their KV is computed from left to right, `num_computed` of them so
    far.
    """

    request_id: str
    attempt: int
    prompt_ids: list[int]
    output_ids: list[int]  # produced before this submit, then extended by Scheduler.complete()
    params: SamplingParams
    seed: int
    salt: str = ""  # prompts share cached blocks only within one salt
    # The position whose row tells the next log probability of a prompt token that is wanted; None: no more are. It
    # grows as they are sent, so that a preempted request does not compute them again.
    logprobs_from: int | None = None
    num_experts_sent: int = 0  # leading tokens whose experts the front end has, where it asks for them
    num_changes_counted: int = 0  # leading tokens whose changed choices are in `num_changed`
    num_changed: int = 0
    matcher: Any = None  # with a constraint: the structured.grammar.Matcher of an empty output, before it is scheduled
    why_none_left: str | None = None  # the sampler says so where no token may come next
    handover: Handover | None = None  # on a decode rank: of the pages that it may take; None: there are none (left)
    hand_over_from: int | None = None  # on a prefill rank: the next block to be handed over; None: none is
    pages_at: int | None = None  # the rank of another host that may have more of its pages than this host; None: none
    hand_over_to: int | None = None  # and the decode host that takes the pages; None: all do
    has_sent_state: bool = False  # and whether the state behind them has been handed over

    arrival: int = -1  # order of add(); a preempted request keeps its place
    block_ids: list[int] = field(default_factory=list)  # cache block i holds tokens i*block_size .. (i+1)*block_size
    table_row: int = -1  # of BlockTables, which keeps block_ids as an array too; -1 while it holds no blocks
    num_computed: int = 0  # tokens whose KV is in the cache
    num_cached_prompt: int = 0  # prompt tokens that the prefix cache supplied at first admission
    num_handed_over: int = 0  # tokens whose pages a prefill rank has supplied
    block_keys: list[bytes] = field(
        default_factory=list
    )  # prefix-cache keys of the leading full blocks, as far as known
    num_published: int = 0  # leading blocks that came from, or were published to, the prefix cache
    # Of a model with states (state_slots.py): its own slot, -1 = none; the slot that its state is read from next, -1 =
    # it is zero; how many tokens that holds, -1 while a step goes on with it; and where a copy is to be kept, behind
    # how many tokens, -1 = nowhere
    state_slot: int = -1
    state_from: int = -1
    num_in_state: int = 0
    snapshot_slot: int = -1
    draft_slots: list[int] = field(default_factory=list)  # of a chunk with drafts: where the state is behind each row
    snapshot_at: int = -1
    branches_at: int = 0  # tokens whose keys and values were cached for others, beyond the last snapshot
    output_snapshot: bytes | None = None  # key of the last snapshot that was kept in the output
    was_preempted: bool = False
    num_lost: int = 0  # tokens that were computed when it was preempted
    arrived_s: float = 0.0  # time.monotonic() of its submit
    queued_us: int = 0  # from there to its first chunk, until that is reported with its first token

    def state_row(self, start: int, length: int) -> tuple[int, ...]:
        """Returns where the state of tokens start..start+length is, as SequenceStates takes it: the slots that it is
        read from and written to, then after how many tokens one copy is kept, and its slot; with drafts -n, and n slots
        """
        if self.draft_slots:
            *copies, to = self.draft_slots
            return self.state_from, to, -len(copies), *copies
        kept_after = self.snapshot_at - start
        if not 0 < kept_after <= length:
            return self.state_from, self.state_slot, 0, 0
        return self.state_from, self.state_slot, kept_after, self.snapshot_slot

    @property
    def num_known(self) -> int:
        """Returns the number of prompt and output tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_reusable(self) -> int:
        """Returns how many leading tokens need no row of their own, so that their KV may come from the prefix cache."""
        return self.num_known - 1 if self.logprobs_from is None else self.logprobs_from

    def prompt_rows(self, start: int, end: int) -> range:
        """Returns which positions among start..end have rows that tell a log probability of a prompt token."""
        if self.logprobs_from is None:
            return range(0)
        return range(max(start, self.logprobs_from), min(end, len(self.prompt_ids) - 1))

    def prompt_scored(self, position: int) -> None:
        """The log probabilities that rows before `position` tell have been sent."""
        self.logprobs_from = position if position < len(self.prompt_ids) - 1 else None

    def token_ids(self, start: int, end: int) -> list[int]:
        """Returns known tokens start..end."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:] + self.output_ids[: end - num_prompt]
