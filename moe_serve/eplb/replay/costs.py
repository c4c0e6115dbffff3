"""Predicted times for replays and simulations, from a model profile and a hardware profile, and counts of moves."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.batches import expected_experts, find_spread, tokens_of_batch, within_capacity
from moe_serve.eplb.cost.kernels import Batch, gemm_flops
from moe_serve.eplb.cost.model import CostModel, PredictedCost
from moe_serve.eplb.load import LoadRecord, LoadTrace, Phase, slot_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.problem import holds
from moe_serve.eplb.split.time import MAX_WEIGHT_ROWS, ExpertTime
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]
Overlap = Literal["auto", "none", "two-batch"]
OverCapacity = Literal["next", "drop"]


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Experts that ranks receive, over all layers.

    from_node, off_node: [R] int64, experts whose nearest replica was on the same node, or on another one
    by_expert:           [L, E] int64, ranks that receive the expert
    """

    from_node: NDArray[np.int64]
    off_node: NDArray[np.int64]
    by_expert: NDArray[np.int64]

    @property
    def num_moves(self) -> int:
        return int(self.from_node.sum() + self.off_node.sum())


@dataclass(frozen=True)
class Serving:
    """The conditions under which ranks serve.

    phase:       of windows that do not say it ("mixed")
    context:     decode: tokens in the cache per request; prefill and mixed: length of a prompt
    overlap:     two half-batches overlap in every step or in none; auto: in those that they make shorter
    utilisation: share of the time in which steps run; in the rest ranks wait for requests
    cache_hit:   share of the prompts that the cache holds: prefill computes the others, and serves all
    request_spread: how much requests differ in the experts they choose, see `cost/batches.py`; 0 = not at all
    expert_capacity: an expert takes at most this many times the mean of a batch, see `within_capacity`; None: all
    over_capacity:   where the rest goes: next, to other experts; drop, to none
    drafts:      tokens that a decode step verifies of each request behind its next one (speculative decoding)
    acceptance:  chance of a draft to be right, where those before it are
    answer:      mixed: tokens of an answer. Batches hold prompts and decodes as these follow from each other: as many
                 requests begin as end
    attention_tp: ranks that share attention (tensor parallel); 1: each computes its own tokens' (data parallel)
    Raises ConfigError for impossible values.
    """

    phase: Phase = "decode"
    context: float = 4096.0
    overlap: Overlap = "auto"
    utilisation: float = 1.0
    cache_hit: float = 0.0
    request_spread: float = 0.0
    expert_capacity: float | None = None
    over_capacity: OverCapacity = "next"
    drafts: int = 0
    acceptance: float = 0.0
    answer: float = 0.0
    attention_tp: int = 1

    def __post_init__(self) -> None:
        if self.phase not in get_args(Phase):
            raise ConfigError(f"phase is {self.phase!r}; give prefill, decode or mixed")
        if (self.phase == "mixed") != (self.answer > 0) or not self.answer < math.inf:
            raise ConfigError(
                f"phase is {self.phase} and answer {self.answer:g}; give the tokens of an answer (--answer) with phase "
                "mixed, whose batches hold prompts and decodes, and with no other"
            )
        if self.overlap not in get_args(Overlap):
            raise ConfigError(f"overlap is {self.overlap!r}; give one of {', '.join(get_args(Overlap))}")
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"utilisation is {self.utilisation:g}; give the share of the time in steps, above 0 to 1")
        if not 0 <= self.request_spread < math.inf:
            raise ConfigError(f"request spread is {self.request_spread:g}; give a number of at least 0")
        if self.expert_capacity is not None and not 1 <= self.expert_capacity < math.inf:
            raise ConfigError(f"expert capacity is {self.expert_capacity:g}; give at least 1 times the mean")
        if self.over_capacity not in get_args(OverCapacity):
            raise ConfigError(f"over capacity is {self.over_capacity!r}; give next or drop")
        if self.drafts < 0 or not 0 <= self.acceptance <= 1:
            raise ConfigError(
                f"drafts is {self.drafts} and acceptance {self.acceptance:g}; give a number of at least 0, and a "
                "chance from 0 to 1"
            )
        if not 0 <= self.cache_hit < 1:
            raise ConfigError(f"cache hit is {self.cache_hit:g}; give the share of prompts in the cache, 0 to below 1")

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets from a decode step."""
        return float(sum(self.acceptance**right for right in range(self.drafts + 1)))

    @property
    def new_prompt(self) -> float:
        """Tokens of a prompt that are computed."""
        return max(self.context * (1 - self.cache_hit), 1.0)

    @property
    def decode_share(self) -> float:
        """Of the rows of a mixed batch, those that decode: the rows of an answer, over these and its new prompt."""
        rows = self.answer * (1 + self.drafts) / self.tokens_per_step
        return rows / (rows + self.new_prompt)

    def words(self) -> str:
        """Returns a few words for reports."""
        overlap = {
            "none": "no overlap",
            "two-batch": "two batches overlap",
            "auto": "two batches overlap where it pays",
        }
        used = "full batches at all times" if self.utilisation == 1 else f"steps {self.utilisation:.0%} of the time"
        hit = f", {self.cache_hit:.1%} of prompts cached" if self.cache_hit else ""
        hit += f", request spread {self.request_spread:.4g}" if self.request_spread else ""
        if self.expert_capacity is not None:
            hit += f", an expert takes at most {self.expert_capacity:g} x the mean (over it: {self.over_capacity})"
        if self.drafts:
            hit += f", {self.drafts} drafts a request, {self.acceptance:.0%} right: "
            hit += f"{self.tokens_per_step:.2f} tokens a step"
        length = f"context {self.context:,.0f}"
        if self.phase == "mixed":
            length = (
                f"prompts of {self.context:,.0f} tokens and answers of {self.answer:,.0f} ({self.decode_share:.0%} of "
            )
            length += "the rows decode)"
        if self.attention_tp > 1:
            hit += f", {self.attention_tp} ranks share attention"
        return f"{self.phase} unless the trace says it, {length}, {overlap[self.overlap]}, {used}{hit}"


@dataclass(frozen=True)
class ProfileCosts:
    """Predicts steps and moves of a replay."""

    model: CostModel
    serving: Serving = field(default_factory=Serving)

    @property
    def expert_bytes(self) -> int:
        return self.model.model.expert_bytes

    @property
    def expert_time(self) -> ExpertTime:
        """What the split by time balances on this machine."""
        hardware, profile = self.model.hardware, self.model.model
        flops = gemm_flops(hardware, profile.expert_compute or profile.compute)
        read_s = profile.expert_bytes / (hardware.hbm_efficiency * hardware.hbm_bytes_per_s)
        row_s = 6.0 * profile.hidden * profile.moe_intermediate / flops
        return ExpertTime(min(round(read_s / row_s), MAX_WEIGHT_ROWS), hardware.tile_rows)

    def of_model(self, trace: LoadTrace) -> LoadTrace:
        """Returns the trace, with the profile's experts per token where it does not say them.

        Raises ConfigError when the trace is of another model.
        """
        profile = self.model.model
        have = (len(trace.moe_layer_ids), trace.num_logical, trace.topk or profile.topk)
        want = (profile.num_moe_layers, profile.num_logical, profile.topk)
        if have != want:
            raise ConfigError(
                f"the trace has {have[0]} MoE layers x {have[1]} experts, top {have[2]}, the profile {profile.name} "
                f"{want[0]} x {want[1]}, top {want[2]}; name the profile of the traced model, or leave --model out"
            )
        return replace(trace, topk=profile.topk)

    def with_spread(self, trace: LoadTrace) -> tuple["ProfileCosts", dict[str, str]]:
        """Returns these costs with the spread of requests in a trace of single passes, and a line on it for reports.

        A given spread stays, and so do costs where no passes of prompts are found.
        """
        phases = ("prefill", *([] if self.phase_of("mixed") == "decode" else ["mixed"]))
        found = find_spread(
            trace, self.model.model.topk, self.serving.new_prompt, self.model.topology.num_ranks, phases
        )
        if found is None:
            return self, {}
        spread = self.serving.request_spread or found.spread
        return replace(self, serving=replace(self.serving, request_spread=spread)), {"batches": found.words()}

    def step_seconds(
        self,
        tokens: Floats,
        placement: Placement | None,
        num_slots: int,
        tokens_per_step: float,
        phase: str,
        is_mean: bool = True,
        split: Callable[[Floats], Floats] | None = None,
    ) -> float:
        """Returns the mean time of a step in seconds.

        tokens:          [L, E] routed in it, or with is_mean the means over a window's steps
        placement:       None = every slot has the same load
        split:           returns the rows of each slot [L, P] for these tokens; None = replicas share evenly
        tokens_per_step: of all ranks
        """
        mean = self.rank_batch(tokens_per_step, phase)
        return sum(
            share * self.seconds_of(batch, tokens * rows, placement, num_slots, is_mean=is_mean, split=split)
            for share, batch, rows in self._kinds_of_step(mean)
        )

    def _kinds_of_step(self, mean: Batch) -> Iterator[tuple[float, Batch, float]]:
        """Yields the steps whose mean is a batch: the share of each, what it has, and its rows over the mean ones.

        Where prompts are computed whole and a mean batch holds less than one, a rank decodes in most steps, and in the
        others beside a prompt. Ranks are taken to get their prompts in the same steps, as of a benchmark that starts as
        many requests on each rank at once.
        """
        prompts = mean.parts[0].tokens_per_rank / self.serving.new_prompt
        if mean.phase != "mixed" or self.model.engine.prompts != "whole" or prompts >= 1:
            yield 1.0, mean, 1.0
            return
        decodes = mean.parts[1]
        rows = self.serving.new_prompt + decodes.tokens_per_rank
        both = replace(mean, tokens_per_rank=rows, decode_share=decodes.tokens_per_rank / rows)
        for share, batch in ((1 - prompts, decodes), (prompts, both)):
            yield share, batch, batch.tokens_per_rank / mean.tokens_per_rank

    def rank_batch(self, tokens_per_step: float, phase: str) -> Batch:
        """Returns the work of one rank under the conditions of `serving`. tokens_per_step: of all ranks"""
        serving, kind = self.serving, self.phase_of(phase)
        return Batch(
            kind,
            tokens_per_step / self.model.topology.num_ranks,
            serving.context,
            cache_hit=serving.cache_hit if kind != "decode" else 0.0,
            tokens_per_request=1 + serving.drafts if kind != "prefill" else 1,
            decode_share=serving.decode_share,
            decode_context=serving.context + serving.answer / 2,
            attention_ranks=serving.attention_tp,
        )

    def seconds_of(
        self,
        batch: Batch,
        tokens: Floats,
        placement: Placement | None,
        num_slots: int,
        is_mean: bool = True,
        split: Callable[[Floats], Floats] | None = None,
    ) -> float:
        """Returns the same of a step in which each rank has this batch."""
        if placement is None:
            rows, own_rows = np.repeat(tokens.sum(axis=1, keepdims=True) / num_slots, num_slots, axis=1), None
        else:
            rows = slot_load(tokens, placement) if split is None else split(tokens)
            own_rows = self.model.own_rows(tokens, placement)
        tried = {"none": (False,), "two-batch": (True,), "auto": (False, True)}[self.serving.overlap]
        return min(self.model.step(replace(batch, two_batch=two), rows, is_mean, own_rows).total_s for two in tried)

    def batch_of(self, record: LoadRecord, tokens_per_step: float) -> tuple[Floats, bool]:
        """Returns the tokens that experts serve [L, E] in one step of a window, and whether they are its means.

        tokens_per_step: of all ranks

        With a capacity of experts, a window that is one step with its sources is limited as the ranks limit it, each by
        its own tokens. Otherwise each rank is taken to have an equal part of every expert's.
        """
        requests = self.requests(tokens_per_step, record.phase)
        tokens, is_mean = tokens_of_batch(record, self.serving.request_spread, requests, tokens_per_step)
        factor, moves = self.serving.expert_capacity, self.serving.over_capacity == "next"
        if factor is not None and _knows_ranks(record):
            assert record.by_source is not None
            return within_capacity(record.by_source.astype(np.float64), factor, moves), False
        if factor is not None:
            ranks = self.model.topology.num_ranks
            tokens = ranks * within_capacity(tokens[:, None] / ranks, factor, moves)
        return tokens, is_mean

    def capacity_words(self, trace: LoadTrace) -> str:
        """Returns what share of a trace's choices is beyond the capacity of an expert, and where it was counted."""
        free, dropping = (
            replace(self, serving=replace(self.serving, over_capacity="drop", expert_capacity=factor))
            for factor in (None, self.serving.expert_capacity)
        )
        chosen = served = 0.0
        num = num_counted = 0
        assert trace.topk
        for record in trace:
            if not record.busy_steps:
                continue
            per_step = float(record.tokens.sum(axis=1).max()) / trace.topk / record.busy_steps
            chosen += free.batch_of(record, per_step)[0].sum() * record.busy_steps
            served += dropping.batch_of(record, per_step)[0].sum() * record.busy_steps
            num, num_counted = num + 1, num_counted + _knows_ranks(record)
        if not chosen:
            return "no choices, so none is beyond the capacity of an expert"
        how = "counted on each rank in each step"
        if num_counted < num:
            how = f"{how} in {num_counted} of {num} windows, " if num_counted else ""
            how += "estimated from the load of all ranks" + (" in the others" if num_counted else "")
        return f"{1 - served / chosen:.2%} of the choices are beyond that of their expert, {how}"

    def requests(self, tokens_per_step: float, phase: str) -> float:
        """Returns how many requests have tokens in a step of all ranks, see `Batch.tokens_of_request`."""
        return tokens_per_step / self.rank_batch(tokens_per_step, phase).tokens_of_request

    def served_tokens(self, tokens: float, phase: str) -> float:
        """Returns the tokens that requests get when this many are computed: cached ones too, and no wrong drafts."""
        serving, kind = self.serving, self.phase_of(phase)
        decoding = {"prefill": 0.0, "decode": 1.0, "mixed": serving.decode_share}[kind] * tokens
        prompts = (tokens - decoding) / (1 - serving.cache_hit)
        return prompts + decoding * serving.tokens_per_step / (1 + serving.drafts)

    def stall_seconds(self, arrivals: Arrivals) -> float:
        """Returns how long serving stops when these experts move at once: the time of the rank that receives most."""
        busiest = {(int(near), int(far)) for near, far in zip(arrivals.from_node, arrivals.off_node, strict=True)}
        return max(self.model.transfer_seconds(near, far) for near, far in busiest)

    def gate(self) -> PredictedCost:
        """Returns the same cost model for the rebalancer's gate."""
        return PredictedCost(self.model, self.serving.phase)

    def words(self) -> str:
        """Returns one line for reports."""
        model, profile, drafts = self.model, self.model.model, self.serving.drafts
        read = ""
        if drafts:
            one, all_ = (expected_experts(profile.num_logical, profile.topk, rows) for rows in (1, 1 + drafts))
            read = f" that read up to {all_:.1f} experts a layer instead of {one:.0f}"
        return f"{profile.name} on {model.hardware.name} by {model.engine.name}: {self.serving.words()}{read}"

    def phase_of(self, phase: str) -> Phase:
        """Returns the phase that prices a window: its own, or the one that is assumed where it does not say it."""
        known: dict[str, Phase] = {"prefill": "prefill", "decode": "decode"}
        return known.get(phase, self.serving.phase)


def _knows_ranks(record: LoadRecord) -> bool:
    """Returns whether a window is one step with the tokens of each rank."""
    return record.num_steps == 1 and record.by_source is not None


def arrivals(old: Placement, new: Placement, topology: Topology) -> Arrivals:
    """Returns how many experts each rank must receive; the slots of a rank are interchangeable."""
    before, after = (holds(placement.by_rank, placement.num_logical) for placement in (old, new))
    received = after & ~before
    nodes = before.reshape(old.num_layers, topology.num_nodes, topology.ranks_per_node, -1).any(axis=2)
    near = received & np.repeat(nodes, topology.ranks_per_node, axis=1)
    from_node = near.sum(axis=(0, 2))
    return Arrivals(from_node, received.sum(axis=(0, 2)) - from_node, received.sum(axis=1))
