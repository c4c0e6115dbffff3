"""Advises how many redundant experts to take, who should plan them, and how often: what each choice serves and costs.

Every choice (slots, policy, interval) is replayed, so its balance is the one *served*, on windows that its plans have
not seen. A long trace is replayed in stretches of neighbouring windows, spread evenly over it. Each stretch begins with
a plan made from its first window, which is not scored. "in order" is what an engine without EPLB does; "planned once"
keeps one plan, made from the first window of the trace.

Confidence is a bootstrap over blocks of neighbouring windows, the same blocks for all choices: in how many resamples
would the advised choice be within TOLERANCE of the best one.

Shape words: W = scored windows of all stretches, C = choices.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from moe_serve.eplb.cost.profile_files import HardwareProfile, ModelProfile
from moe_serve.eplb.files.windows import cut_stretches, folded
from moe_serve.eplb.load import LoadRecord, LoadTrace, Phase
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.names import SERVED
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.replay import num_passes, replay
from moe_serve.eplb.replay.report import as_bytes, as_number, as_seconds, printed, text_console
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.eplb.replay.settings import ReplaySettings, starting_placement
from moe_serve.errors import ConfigError, TraceError

Floats = NDArray[np.float64]
IN_ORDER, ONCE = "in order", "planned once"
OWN_SPLITS = ("nearest", "exact", "time")  # of our server alone
TOLERANCE = 0.005  # of the throughput: choices this close to the best one are as good, and the smallest is advised
RESAMPLES = 1000
LEAST_BLOCKS = 6  # fewer say nothing about other days
ENOUGH = 0.95  # of the resamples
UNFIT = "!: the requests of the trace do not fit into the KV cache that is left"
_BUFFER_TOKENS = 128  # dispatch buffers are sized for a multiple of it


@dataclass(frozen=True)
class Memory:
    """What a rank holds beside the KV cache, in bytes.

    usable:  of the GPU, for weights, buffers and cache
    experts: routed experts, with the redundant ones;  redundant: of these
    other:   all other weights
    buffers: of low-latency dispatch and combine, which grow with the slots; 0 in prefill, whose buffers do not
    kv_token: of a token in the cache
    """

    usable: int
    experts: int
    redundant: int
    other: int
    buffers: int
    kv_token: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 where the rest fills the memory."""
        return max(0, self.usable - self.experts - self.other - self.buffers) // self.kv_token


@dataclass(frozen=True, eq=False)
class Choice:
    """One choice, and what it serves.

    policy:   of `make_policy`, IN_ORDER or ONCE;  interval: windows between plans, None = it never moves experts
    summary:  of its replay, see `ReplayReport.summary`
    seconds:  [W], predicted time of each window: steps, and the pause before it
    served_range: that holds the balancedness served in 90 % of the resamples; None: too few windows to tell
    fits:     the requests of the trace have room in the KV cache
    """

    num_slots: int
    num_redundant: int
    policy: str
    interval: int | None
    summary: dict[str, Any]
    seconds: Floats
    served_range: tuple[float, float] | None
    memory: Memory
    fits: bool


@dataclass(frozen=True, eq=False)
class Advice:
    """What was found.

    baseline:  IN_ORDER, with the fewest slots
    choices:   all, ascending by slots
    advised:   the smallest of those within TOLERANCE of the fastest that fits
    confidence: share of resamples in which it stays within TOLERANCE of the best one; None: too few windows to tell
    gain:      throughput over that of the baseline, and the interval that holds it in 90 % of the resamples (or None)
    tokens_per_request: that a request gets from a decode step;  needed_tokens: that the cache of a rank must hold
    phase:     of all windows; "" where they differ
    """

    conditions: dict[str, str]
    baseline: Choice
    choices: tuple[Choice, ...]
    advised: Choice
    num_blocks: int
    confidence: float | None
    gain: tuple[float, float | None, float | None]
    tokens_per_request: float
    needed_tokens: float
    num_ranks: int
    num_nodes: int
    phase: str
    window_steps: int
    gpu_hour_price: float | None
    split: str


@dataclass(frozen=True)
class AdviseSettings:
    """What to compare.

    replay:       cluster, costs and intervals; its num_slots is not used
    policies:     that plan at these intervals
    redundant:    extra slots per layer, rounded up to the ranks; () = five numbers up to one more slot per two experts
    num_windows:  that are scored, about;  window_steps: folded into one of them, 0 = windows as recorded
    gpu_memory:   bytes of a GPU;  memory_share: of it, for weights, buffers and cache
    Raises ConfigError for values that cannot work.
    """

    replay: ReplaySettings
    hardware: HardwareProfile
    policies: tuple[str, ...] = ("deepseek", "incremental")
    redundant: tuple[int, ...] = ()
    num_windows: int = 64
    window_steps: int = 0
    gpu_memory: float | None = None
    memory_share: float = 0.9
    gpu_hour_price: float | None = None

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigError("no policy is named; give at least one with --policy")
        for policy in self.policies:
            if policy not in SERVED:
                raise ConfigError(f"policy {policy!r} is none that an engine plans with; use {', '.join(SERVED)}")
        if any(extra < 0 for extra in self.redundant):
            raise ConfigError(f"redundant holds {min(self.redundant)}; give whole numbers of at least 0")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory share is {self.memory_share:g}; give a share above 0, up to 1")

    def slots(self, num_logical: int) -> list[int]:
        """Returns the numbers of slots to compare, ascending; the fewest is always one."""
        ranks = self.replay.topology.num_ranks
        least = -(-num_logical // ranks)
        if self.redundant:
            per_rank = {-(-(num_logical + extra) // ranks) for extra in self.redundant}
            if max(per_rank) > num_logical:
                raise ConfigError(
                    f"{max(self.redundant)} redundant experts are more than {num_logical} a rank; use fewer"
                )
        else:
            per_rank = {min(least + max(extra, math.ceil(least * extra / 8)), num_logical) for extra in range(1, 5)}
        return [slots * ranks for slots in sorted({least} | per_rank)]


def advise(
    trace: LoadTrace, settings: AdviseSettings, progress: Callable[[int, int], None] | None = None, jobs: int = 1
) -> Advice:
    """Returns what to do. progress: called with (windows done, windows);  jobs: replays at the same time

    Raises TraceError for a trace of fewer than 3 windows or without steps, ConfigError for one of another model.
    """
    costs = settings.replay.costs
    assert costs is not None
    trace = costs.of_model(trace)
    costs, batches = costs.with_spread(trace)
    settings = replace(settings, replay=replace(settings.replay, costs=costs))
    if settings.window_steps:
        trace = folded(trace, settings.window_steps)
    stretches = cut_stretches(trace, settings.num_windows, max(settings.replay.intervals))
    if len(stretches[0]) < 3:
        raise TraceError(
            f"{trace.source or 'the trace'} has {len(stretches[0])} windows, and advice needs at least 3; fold fewer "
            "steps into a window (--window), or record longer"
        )
    # A longer interval than the trace would never plan.
    kept = tuple(n for n in settings.replay.intervals if n < len(stretches[0])) or (1,)
    settings = replace(settings, replay=replace(settings.replay, intervals=kept))
    model = costs.model.model
    slots = settings.slots(trace.num_logical)
    passes = 1 + (1 + num_passes(settings.policies, settings.replay, jobs)) * len(slots)
    total, done = sum(len(stretch) for stretch in stretches) * passes, 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(min(done, total), total)

    def replayed(num_slots: int, policies: Sequence[str], start_of: Callable[[LoadTrace], Placement]) -> ReplayReport:
        reports = []
        for records in stretches:
            stretch = replace(trace, open_records=records.__iter__, num_records=len(records))
            chosen = replace(settings.replay, num_slots=num_slots, start=start_of(stretch))
            reports.append(replay(stretch, policies, chosen, lambda _: tick(), jobs))
        return joined(reports)

    def kept_plan(placement: Placement) -> Callable[[LoadTrace], Placement]:
        return lambda _: placement

    def planned(num_slots: int) -> Callable[[LoadTrace], Placement]:
        chosen = replace(settings.replay, num_slots=num_slots)

        def of_first(stretch: LoadTrace) -> Placement:
            request = chosen.request([next(iter(stretch))], moe_layer_ids=trace.moe_layer_ids)
            return make_policy("refined").plan(request).placement

        return of_first

    topology = settings.replay.topology
    base = replayed(slots[0], (), lambda stretch: starting_placement(stretch, topology, slots[0]))
    assert trace.topk
    tokens, phases = _tokens_per_rank(stretches, trace.topk, costs)
    if not base.tokens.any():
        raise TraceError(f"{trace.source or 'the trace'} has no windows with steps, so times cannot be predicted")

    blocks = blocks_of([len(stretch) - 1 for stretch in stretches], max(settings.replay.intervals))
    needed = max(costs.requests(tokens, "decode") * (costs.serving.context + costs.serving.answer / 2), 1)

    def choice(report: ReplayReport, index: int, num_slots: int, policy: str, interval: int | None) -> Choice:
        result = report.results[index]
        seconds = result.step_s * report.num_steps / report.utilisation + result.stall_s
        memory = memory_of(settings, model, num_slots, slots[0], tokens if "decode" in phases else 0.0)
        return Choice(
            num_slots,
            num_slots - trace.num_logical,
            policy,
            interval,
            report.summary(result),
            np.where(report.num_steps > 0, seconds, result.stall_s),
            served_range(result.served.mean(axis=1), blocks),
            memory,
            memory.kv_tokens >= needed,
        )

    baseline = choice(base, 0, slots[0], IN_ORDER, None)
    choices = [baseline]
    first = LoadTrace.of(stretches[0][:1], trace.moe_layer_ids, trace.topk)
    for num_slots in slots:
        once = replayed(num_slots, (), kept_plan(planned(num_slots)(first)))
        choices.append(choice(once, 0, num_slots, ONCE, None))
        report = replayed(num_slots, settings.policies, planned(num_slots))
        pairs = [(policy, interval) for policy in settings.policies for interval in settings.replay.intervals]
        choices += [choice(report, 1 + i, num_slots, *pair) for i, pair in enumerate(pairs)]
    advised, confidence, gain = weigh(choices, blocks)
    windows = sum(len(stretch) - 1 for stretch in stretches)
    return Advice(
        conditions={
            **{name: words for name, words in base.conditions.items() if name in ("trace", "model")},
            "cluster": f"{topology.num_ranks} ranks on {topology.num_nodes} node{'s' * (topology.num_nodes > 1)}",
            "windows": f"{windows} scored, in {len(stretches)} stretch{'es' * (len(stretches) > 1)} of neighbours",
            "prices": costs.words(),
            **batches,
        },
        baseline=baseline,
        choices=tuple(choices),
        advised=advised,
        num_blocks=len(blocks),
        confidence=confidence,
        gain=gain,
        tokens_per_request=costs.serving.tokens_per_step,
        needed_tokens=needed,
        num_ranks=topology.num_ranks,
        num_nodes=topology.num_nodes,
        phase=phases[0] if len(phases) == 1 else "",
        window_steps=round(float(np.median([r.num_steps for stretch in stretches for r in stretch]))),
        gpu_hour_price=settings.gpu_hour_price,
        split=settings.replay.split,
    )


def blocks_of(scored: Sequence[int], length: int) -> list[NDArray[np.int64]]:
    """Returns the windows of each block: up to `length` neighbours of one stretch. scored: windows of each stretch"""
    blocks, begin = [], 0
    for number in scored:
        count = max(1, number // length)
        blocks += [part + begin for part in np.array_split(np.arange(number), count)]
        begin += number
    return blocks


def joined(reports: Sequence[ReplayReport]) -> ReplayReport:
    """Returns the report of several stretches, replayed alike, as one."""
    results = []
    for parts in zip(*(report.results for report in reports), strict=True):
        arrays = {
            name: sum(part.arrays()[name] for part in parts)
            if name in ("traffic", "received")
            else np.concatenate([part.arrays()[name] for part in parts])
            for name in parts[0].arrays()
        }
        unkept = tuple(dict.fromkeys(words for part in parts for words in part.unkept))
        results.append(replace(parts[-1], **arrays, unkept=unkept))
    return replace(
        reports[0],
        results=tuple(results),
        first_steps=np.concatenate([report.first_steps for report in reports]),
        num_steps=np.concatenate([report.num_steps for report in reports]),
        tokens=np.concatenate([report.tokens for report in reports]),
        phases=tuple(phase for report in reports for phase in report.phases),
        load=np.sum([report.load for report in reports], axis=0),
    )


def memory_of(
    settings: AdviseSettings, model: ModelProfile, num_slots: int, least_slots: int, tokens_per_rank: float
) -> Memory:
    """Returns the memory of a rank. tokens_per_rank: of a decode step, with drafts; 0: no step decodes alone"""
    ranks = settings.replay.topology.num_ranks
    of_slot = model.num_moe_layers * model.expert_bytes
    max_tokens = max(1, math.ceil(tokens_per_rank / _BUFFER_TOKENS)) * _BUFFER_TOKENS
    return Memory(
        usable=int(settings.memory_share * (settings.gpu_memory or settings.hardware.hbm_bytes)),
        experts=num_slots // ranks * of_slot,
        redundant=(num_slots - least_slots) // ranks * of_slot,
        other=model.other_bytes,
        buffers=low_latency_bytes(num_slots, max_tokens, model.hidden) if tokens_per_rank else 0,
        kv_token=model.kv_token_bytes,
    )


def low_latency_bytes(num_slots: int, max_tokens: int, hidden: int) -> int:
    """Returns the buffers of DeepEP's low-latency kernels on each rank: two, each with a side to send and to receive.

    A side has a message for each physical expert and each token of any one rank: a row in BF16 with the minima and
    maxima of its blocks of 128, the larger of what dispatch and combine send. Flags are left out.
    """
    message = max(16 + 2 * hidden, 2 * hidden + 4 * hidden // 128)
    return 2 * 2 * num_slots * max_tokens * message


def weigh(
    choices: Sequence[Choice], blocks: Sequence[NDArray[np.int64]]
) -> tuple[Choice, float | None, tuple[float, float | None, float | None]]:
    """Returns the choice to advise, its confidence, and its gain over the first choice; see `Advice`."""
    usable = [choice for choice in choices if choice.fits] or list(choices)
    seconds = np.array([choice.seconds for choice in usable])  # [C, W]
    total = seconds.sum(axis=1)
    near = [i for i in range(len(usable)) if total[i] <= total.min() * (1 + TOLERANCE)]
    best = min(near, key=lambda i: (usable[i].num_slots, usable[i].summary["moves"], total[i]))
    base_s = choices[0].seconds
    gain = float(base_s.sum() / total[best] - 1)
    if len(blocks) < LEAST_BLOCKS:
        return usable[best], None, (gain, None, None)
    draw = _draws(blocks)
    by_block = np.array([seconds[:, block].sum(axis=1) for block in blocks])  # [blocks, C]
    base_by_block = np.array([base_s[block].sum() for block in blocks])
    drawn = by_block[draw].sum(axis=1)  # [RESAMPLES, C]
    stays = drawn[:, best] <= drawn.min(axis=1) * (1 + 2 * TOLERANCE)
    gains = base_by_block[draw].sum(axis=1) / drawn[:, best] - 1
    low, high = np.quantile(gains, (0.05, 0.95))
    return usable[best], float(stays.mean()), (gain, float(low), float(high))


def served_range(served: Floats, blocks: Sequence[NDArray[np.int64]]) -> tuple[float, float] | None:
    """Returns what holds the mean of `served`, [W], in 90 % of the resamples; None of too few blocks."""
    if len(blocks) < LEAST_BLOCKS:
        return None
    draw = _draws(blocks)
    total = np.array([served[block].sum() for block in blocks])[draw].sum(axis=1)
    size = np.array([len(block) for block in blocks])[draw].sum(axis=1)
    low, high = np.quantile(total / size, (0.05, 0.95))
    return float(low), float(high)


def _draws(blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the blocks of each resample, [RESAMPLES, blocks], the same on every call."""
    return np.random.default_rng(0).integers(0, len(blocks), (RESAMPLES, len(blocks)))


def _tokens_per_rank(
    stretches: Sequence[Sequence[LoadRecord]], topk: int, costs: ProfileCosts
) -> tuple[float, list[Phase]]:
    """Returns a rank's tokens that decode, with drafts, in a step of the fullest window; the phases of the trace."""
    shares = {"decode": 1.0, "mixed": costs.serving.decode_share}
    busy = [record for stretch in stretches for record in stretch if record.busy_steps]
    each = [
        float(record.tokens.sum(axis=1).max(initial=0))
        * shares.get(costs.phase_of(record.phase), 0.0)
        / (topk * record.busy_steps * costs.model.topology.num_ranks)
        for record in busy
    ]
    return max(each, default=0.0), sorted({costs.phase_of(record.phase) for record in busy})


def choice_row(advice: Advice, choice: Choice) -> dict[str, Any]:
    """Returns a choice as plain JSON types."""
    rate, step_s = choice.summary["tokens_per_s"], choice.summary["step_s"]
    hours = advice.num_ranks * 1e6 / rate / 3600
    total = float(choice.seconds.sum())
    low, high = choice.served_range or (None, None)
    return {
        "num_redundant": choice.num_redundant,
        "num_slots": choice.num_slots,
        "policy": choice.policy,
        "interval_windows": choice.interval,
        "served_mean": choice.summary["served_mean"],
        "served_low": low,
        "served_high": high,
        "served_min": choice.summary["served_min"],
        "moved_share": choice.summary["moved_share"],
        "stall_share": choice.summary["stall_s"] / total if total else 0.0,
        "redundant_bytes": choice.memory.redundant,
        "kv_tokens": choice.memory.kv_tokens,
        "kv_tokens_lost": advice.baseline.memory.kv_tokens - choice.memory.kv_tokens,
        "buffer_bytes": choice.memory.buffers,
        "fits": choice.fits,
        "step_s": step_s,
        "tokens_per_s_per_rank": rate / advice.num_ranks,
        "tokens_per_s_per_request": advice.tokens_per_request / step_s if advice.phase in ("decode", "mixed") else None,
        "gpu_hours_per_million_tokens": hours,
        "price_per_million_tokens": None if advice.gpu_hour_price is None else hours * advice.gpu_hour_price,
    }


def advice_to_json(advice: Advice, trace: str, model: str) -> dict[str, Any]:
    """Returns the advice as plain JSON types. trace, model: as they are to stand in commands"""
    gain, low, high = advice.gain
    return {
        "format": "moe_serve.advice",
        "conditions": advice.conditions,
        "choices": [choice_row(advice, choice) for choice in advice.choices],
        "advised": choice_row(advice, advice.advised),
        "gain": {"mean": gain, "low": low, "high": high},
        "confidence": advice.confidence,
        "num_blocks": advice.num_blocks,
        "verdict": advice_verdict(advice),
        "commands": commands(advice, trace, model),
    }


def advice_to_table(advice: Advice, trace: str, model: str, color: bool = False) -> str:
    """Returns the advice for a terminal; trace and model as above."""
    console = text_console(160, color)
    for name, words in advice.conditions.items():
        console.print(Text(f"{name:>10}", style="bold"), "", words, soft_wrap=True)
    console.print()
    columns, rows = advice_cells(advice)
    table = Table(box=None)
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for choice, cells in zip(advice.choices, rows, strict=True):
        table.add_row(*cells, style="green" if choice is advice.advised else "dim" if choice is advice.baseline else "")
    console.print(table)
    if not all(choice.fits for choice in advice.choices):
        console.print(UNFIT, style="dim")
    console.print()
    for sentence in advice_verdict(advice):
        console.print(sentence, soft_wrap=True)
    console.print()
    for name, lines in commands(advice, trace, model).items():
        console.print(Text(name, style="bold"))
        for line in lines:
            console.print("  " + line, soft_wrap=True)
    return printed(console)


def advice_cells(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and cells of the choices."""
    priced = advice.gpu_hour_price is not None
    columns = ["redundant", "policy", "every", "served", "worst layer", "of slots", "stall", "memory", "KV tokens",
               "buffers", "step", "tokens/s/rank", "per request", "GPU h/M"]  # fmt: skip
    rows = []
    for choice in advice.choices:
        row = choice_row(advice, choice)
        speed = row["tokens_per_s_per_request"]
        cells = [
            f"{row['num_redundant']}" + ("" if choice.fits else " !"),
            choice.policy,
            "-" if choice.interval is None else f"{choice.interval}",
            as_number(row["served_mean"]),
            as_number(row["served_min"]),
            f"{row['moved_share']:.1%}" if row["moved_share"] else "-",
            f"{row['stall_share']:.1%}" if row["stall_share"] else "-",
            "+" + as_bytes(row["redundant_bytes"]),
            f"{row['kv_tokens']:,}",
            as_bytes(row["buffer_bytes"]) if row["buffer_bytes"] else "-",
            as_seconds(row["step_s"]),
            f"{row['tokens_per_s_per_rank']:,.0f}",
            "-" if speed is None else f"{speed:.1f}",
            as_price(row["gpu_hours_per_million_tokens"]),
        ]
        if priced:
            cells.append(as_price(row["price_per_million_tokens"]))
        rows.append(cells)
    return [*columns, *(["price/M"] if priced else [])], rows


def as_price(value: float) -> str:
    """Returns a number with three digits that say something."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def advice_verdict(advice: Advice) -> list[str]:
    """Returns a few sentences: what to take, what it gains, and whether the windows are enough to say so."""
    best, row = advice.advised, choice_row(advice, advice.advised)
    gain, low, high = advice.gain
    how = {IN_ORDER: "experts in order, without EPLB", ONCE: "one plan, kept"}.get(
        best.policy, f"{best.policy}, a plan every {'window' if best.interval == 1 else f'{best.interval} windows'}"
    )
    sure = "" if low is None else f" (90 %: {low:+.1%} to {high:+.1%})"
    lost = row["kv_tokens_lost"]
    out = []
    if not any(choice.fits for choice in advice.choices):
        out.append(
            f"No choice leaves room for the requests of the trace, which need {advice.needed_tokens:,.0f} tokens of KV "
            "cache on each rank: take more ranks, fewer requests, or GPUs with more memory. If it did:"
        )
    out.append(
        f"Take {best.num_redundant} redundant experts ({best.num_slots} slots, {best.num_slots // advice.num_ranks} a "
        f"rank): {how}. It serves at balancedness {row['served_mean']:.3f} and gains {gain:+.1%}{sure} over experts in "
        f"order, for {as_bytes(row['redundant_bytes'])} of memory on each rank"
        + (f", {lost:,} tokens of KV cache." if lost else ".")
    )
    fast = min(advice.choices, key=lambda choice: float(choice.seconds.sum()))
    if best.fits and not fast.fits:
        out.append(f"{fast.num_redundant} redundant experts with {fast.policy} would be faster, but do not fit (!).")
    if advice.confidence is None:
        out.append(
            f"Too few windows to tell how sure this is: {advice.num_blocks} blocks of neighbours, and {LEAST_BLOCKS} "
            "are needed, each as long as the longest interval. Score more windows (--windows) if the trace has them, "
            "record longer, or fold fewer steps into a window (--window)."
        )
    elif advice.confidence >= ENOUGH:
        out.append(
            f"These windows are enough: in {advice.confidence:.0%} of {RESAMPLES:,} resamples of them it is within "
            f"{2 * TOLERANCE:.0%} of the best choice."
        )
    else:
        out.append(
            f"These windows are not enough to be sure: only in {advice.confidence:.0%} of {RESAMPLES:,} resamples of "
            f"them is it within {2 * TOLERANCE:.0%} of the best choice. Record longer."
        )
    return out


def commands(advice: Advice, trace: str, model: str) -> dict[str, list[str]]:
    """Returns what to type, by engine. trace: the file;  model: name or path for the engine

    How the nodes of an engine find each other is left to its user. Where only our server has the split, others say so.
    """
    best, extra = advice.advised, advice.advised.num_redundant
    trace, model = shlex.quote(trace), shlex.quote(model)
    if best.policy == IN_ORDER:
        return {"any engine": ["leave EPLB off, and take no redundant experts"]}
    ranks, nodes = advice.num_ranks, advice.num_nodes
    cluster = f"--ranks {ranks} --nodes {nodes}" if nodes > 1 else f"--ranks {ranks}"
    plan = f"moe-serve plan {trace} {cluster} --slots {best.num_slots}"
    start = {name: f"{plan} -o {file} --for {name}" for name, file in
             (("sglang", "experts.json"), ("tensorrt_llm", "lb.yaml"), ("vllm", "start.json"))}  # fmt: skip
    ours = "" if best.policy in ("deepseek", ONCE) else f"MOE_SERVE_EPLB={best.policy} "
    steps = (best.interval or 0) * advice.window_steps
    window = advice.window_steps
    config = f'{{"num_redundant_experts": {extra}, "window_size": {window}, "step_interval": {steps}}}'
    vllm = f"vllm serve {model} --data-parallel-size {ranks} --enable-expert-parallel --enable-eplb --eplb-config "
    sglang = f"python -m sglang.launch_server --model-path {model} --tp-size {ranks} --dp-size {ranks} "
    sglang += f"--enable-dp-attention --ep-size {ranks} --ep-num-redundant-experts {extra}"
    balancer = "moe_config: {load_balancer: lb.yaml}    # in the extra LLM API options"
    serve = f"moe-serve serve --model {model} --ep {ranks}"
    others: list[str] = []
    if advice.split in OWN_SPLITS:
        serve += f" --set eplb.split={advice.split}"
        others = [f"# shares tokens evenly over replicas: less balanced than said, by the split {advice.split}"]
    if best.policy == ONCE:
        once = f'{{"num_redundant_experts": {extra}, "window_size": {window}, "step_interval": {40 * window}}}'
        return {
            "vLLM": [
                *others,
                start["vllm"],
                "# its first rebalance, a quarter of step_interval after the start, installs the file; later ones edit",
                f"MOE_SERVE_EPLB=incremental MOE_SERVE_EPLB_PLACEMENT=start.json {vllm}'{once}'",
            ],
            "SGLang": [*others, start["sglang"], f"{sglang} --init-expert-location experts.json"],
            "TensorRT-LLM": [*others, start["tensorrt_llm"], balancer],
            "moe-serve": [
                f"{plan}{' --planned-split exact' if advice.split in ('exact', 'time') else ''} -o placement.json",
                f"{serve} --set eplb.init_expert_location=placement.json",
            ],
        }
    return {
        "vLLM": [*others, f"{ours}{vllm}'{config}'"],
        "SGLang": [*others, f"{ours}{sglang} --enable-eplb --eplb-rebalance-num-iterations {steps}"],
        "TensorRT-LLM": [
            *others,
            start["tensorrt_llm"],
            "# layer_updates_per_iter above 0 in it: it moves experts on",
            balancer,
        ],
        "moe-serve": [
            f"{serve} --set eplb.mode=dynamic --set eplb.num_redundant_experts={extra} "
            f"--set eplb.policy={best.policy} --set eplb.record_window_steps={window}"
        ],
    }
