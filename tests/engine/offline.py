"""Runs real engines on forked ranks, without front end and sockets: requests in, tokens out."""

import hashlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import Proposal, ScheduledChunk
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.output.routed_experts import RoutedExperts
from moe_serve.engine.output.sampler import Sampler
from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Answer, LogprobBlock, Members, Shutdown, Submit, Tokens
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.eplb.load import LoadRecord
from moe_serve.kernels.sampling import LogitChanges
from tests.conftest import _descendants
from tests.engine.queue_mailbox import QueueMailbox
from tests.ep.received import count_received
from tests.models.families import FAMILIES
from tests.ranks import run_ranks

TINY: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 6,
        "num_experts_per_tok": 2, "num_key_value_heads": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 48, "head_dim": 16, "norm_topk_prob": True, "num_key_value_heads": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8,
        "num_experts_per_tok": 3, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
        "sliding_window": 20, "swiglu_limit": 0.7, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
}  # fmt: skip
_COMMON = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "sliding_window": None,
}  # fmt: skip


# Families whose only tiny model is that of the parity tests.
OTHER_FAMILIES = [name for name in FAMILIES if "-" not in name and name not in TINY]


def tiny_model(folder: Path, family: str) -> Path:
    """Returns a folder that holds the config.json of a tiny model; served with model.load_format=dummy."""
    path = folder / family
    path.mkdir(exist_ok=True)
    values = _COMMON | TINY[family] if family in TINY else FAMILIES[family][1] | {"model_type": FAMILIES[family][0]}
    (path / "config.json").write_text(json.dumps(values))
    return path


def prompts_with_shared_beginnings(num_prompts: int, vocab: int, max_len: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts of 1..max_len ids, half of which begin as others do."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, vocab) for _ in range(max_len)] for _ in range(4)]
    prompts = []
    for index in range(num_prompts):
        length = draw.randint(1, max_len)
        if index % 2:
            shared = draw.randint(0, length)
            prompt = draw.choice(stems)[:shared] + [draw.randrange(3, vocab) for _ in range(length - shared)]
        else:
            prompt = [draw.randrange(3, vocab) for _ in range(length)]
        prompts.append(prompt)
    return prompts


def submits_of(
    prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
) -> list[Submit]:
    """Returns one request per prompt; its id is its number."""
    return [
        Submit(str(index), 0, list(prompt), params, seed=seeds[index] if seeds else index)
        for index, prompt in enumerate(prompts)
    ]


@dataclass
class Served:
    """What one rank's engine did."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[str, list[str]] = field(default_factory=dict)  # of the bits of the logits behind each token
    gaps: dict[str, list[float]] = field(default_factory=dict)  # between the two best logits of each token
    logprobs: dict[str, list[LogprobBlock]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[LogprobBlock]] = field(default_factory=dict)
    experts: dict[str, RoutedExperts] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)  # choices of gates, by the capacity of experts
    embeddings: dict[str, bytes] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    pages: Counter[str] = field(default_factory=Counter)  # outside the cache, by what became of them
    load: list[list[list[int]]] = field(default_factory=list)  # per record, [layers][logical]
    records: list[LoadRecord] = field(default_factory=list)  # those of rank 0
    rows: list[dict[int, tuple[int, int]]] = field(default_factory=list)  # by rank: step -> decode and prefill rows
    answers: list[Answer] = field(default_factory=list)  # to commands
    slot_rows: list[list[int]] = field(default_factory=list)  # [layers][slots], rows that each received
    regroups: list[str] = field(default_factory=list)  # why ranks went on as another group
    num_steps: int = 0


Prepare = Callable[[Engine], None]
Script = Sequence[tuple[int, Inbound]]  # (number of polls before it arrives, message), in order


class ScriptedMailbox(QueueMailbox):
    """Delivers each message at its poll, or when the engine sleeps; asks for the end once every rank is through.

    meeting: a folder where ranks leave a mark when their script is over. An engine ends when any rank asks for it, so
    no rank may ask before all are through.
    """

    def __init__(self, script: Script, rank: int, num_ranks: int, meeting: Path):
        super().__init__(end_when_idle=False)
        self.script = list(script)
        self._num_polls = 0
        self._mark = meeting / str(rank)
        self._marks = [meeting / str(peer) for peer in range(num_ranks)]

    def poll(self, timeout_s: float) -> list[Inbound]:
        self._num_polls += 1
        asleep = timeout_s > 0
        arrived: list[Inbound] = []
        while self.script and (self.script[0][0] <= self._num_polls or (asleep and not arrived)):
            arrived.append(self.script.pop(0)[1])
        if arrived or not asleep:
            return arrived
        self._mark.touch()
        if all(mark.exists() for mark in self._marks):
            return [Shutdown()]
        return super().poll(timeout_s)


def staggered(submits: Sequence[Submit], seed: int) -> Script:
    """Returns a script in which requests arrive a few at a time, as the seed says."""
    draw = random.Random(seed)
    at, script = 0, []
    for submit in submits:
        at += draw.choice([0, 0, 0, 1, 2, 5])
        script.append((at, submit))
    return script


def serve(
    num_ranks: int,
    submits: Sequence[Submit],
    overrides: Sequence[str] = (),
    stagger: int | None = None,
    add_in_slot_order: bool = False,
    prepare: Prepare | None = None,
    timeout_s: float = 240,
    placed: Callable[[EpGroup], EpGroup] | None = None,
) -> Served:
    """Returns what num_ranks engines made of the requests; request i goes to rank i % num_ranks.

    stagger:           a seed by which requests arrive over time; None: all at once
    add_in_slot_order: a mutation: expert outputs are added as the ranks that computed them are numbered
    prepare:           changes each rank's engine before it runs; at the top of its module
    placed:            gives each rank the group of other hosts; at the top of its module
    Fails where ranks went on without one: no front end is here that would move its requests to others.
    """
    settings = [
        f"parallel.num_ranks={num_ranks}", "cache.memory_gib=0.05", "engine.heartbeat_s=0.02",
        f"engine.suspect_after_s={timeout_s:g}",  # a busy machine may hold a process up for seconds
        *overrides,
    ]  # fmt: skip
    scripts: list[Script] = []
    for rank in range(num_ranks):
        mine = submits[rank::num_ranks]
        scripts.append([(0, submit) for submit in mine] if stagger is None else staggered(mine, stagger + rank))
    run = _serve_mutated if add_in_slot_order else _serve_on_rank
    with tempfile.TemporaryDirectory() as meeting:
        return _merge(run_ranks(num_ranks, run, scripts, settings, meeting, prepare, placed, timeout_s=timeout_s))


def _serve_mutated(rank: int, group: EpGroup, *args: Any) -> Served:
    from moe_serve.dispatch import collective

    def in_slot_order(rows: Tensor, index: Tensor, weights: Tensor, *flags: bool) -> Tensor:
        order = index.argsort(dim=1)
        return original(rows, index.gather(1, order), weights.gather(1, order), *flags)

    original = collective.weighted_sum
    collective.weighted_sum = in_slot_order
    try:
        return _serve_on_rank(rank, group, *args)
    finally:
        collective.weighted_sum = original


def _serve_on_rank(
    rank: int,
    group: EpGroup,
    scripts: Sequence[Script],
    overrides: list[str],
    meeting: str,
    prepare: Prepare | None,
    placed: Callable[[EpGroup], EpGroup] | None = None,
) -> Served:
    if placed is not None:
        group = placed(group)
    submits = [message for _, message in scripts[rank] if isinstance(message, Submit)]
    produced_before = {submit.request_id: list(submit.output_ids) for submit in submits if submit.output_ids}
    config = load_config(overrides=overrides)
    mailbox = ScriptedMailbox(scripts[rank], rank, group.num_ranks, Path(meeting))
    exchange = make_exchange(config.engine.exchange, group.process_group, True, 60.0)
    engine = build_engine(config, group, exchange, mailbox)
    if prepare is not None:
        prepare(engine)
    records: list[LoadRecord] = []
    engine.served.windows.listeners.append(records.append)
    rows = log_rows(engine)
    noted: dict[str, dict[int, tuple[str, float]]] = {}
    engine.sampler = cast(Sampler, DigestingSampler(engine.sampler, noted))
    with count_received() as received:
        engine.run()
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks, "finished requests hold blocks"
    engine.close()
    patience_s = time.monotonic() + 20  # a killed planner has the lowest priority, also on its way out
    while _descendants(os.getpid()) and time.monotonic() < patience_s:
        time.sleep(0.01)
    assert not _descendants(os.getpid()), "an engine that ends leaves no process behind"
    served = Served(
        tokens=produced_before,
        counters=engine.counters.totals() | {"num_choices_changed": sum(engine.served.changed_choices)},
        stats={name: getattr(engine.scheduler.stats, name) for name in engine.scheduler.stats.__slots__},
        load=[record.tokens.tolist() for record in records],
        records=records,
        rows=[rows],
        num_steps=engine.step,
        slot_rows=received.slot_rows.tolist(),
    )
    if (tiers := engine.scheduler.blocks.tiers) is not None:
        served.pages.update(tiers.counters)
    served.regroups = [f"rank {rank}: {each.reason}" for each in mailbox.sent if isinstance(each, Members)]
    served.answers = [message for message in mailbox.sent if isinstance(message, Answer)]
    for message in mailbox.sent:
        if isinstance(message, Tokens):
            for event in message.events:
                tokens = served.tokens.setdefault(event.request_id, [])
                assert event.index == len(tokens), "tokens arrive once and in order"
                tokens += event.token_ids
                for kept, block in (
                    (served.logprobs, event.logprobs),
                    (served.prompt_logprobs, event.prompt_logprobs),
                ):
                    if block is not None:
                        kept.setdefault(event.request_id, []).append(block)
                if event.experts is not None:
                    served.experts.setdefault(event.request_id, RoutedExperts()).add(event.experts)
                if event.num_changed is not None:
                    served.changed[event.request_id] = event.num_changed
                if event.embedding is not None:
                    served.embeddings[event.request_id] = event.embedding
                if event.finish:
                    served.finish[event.request_id] = event.finish
                    served.messages[event.request_id] = event.message or ""
    for request_id, of_rows in noted.items():
        num_tokens = len(served.tokens.get(request_id, ()))
        kept = [each for index, each in sorted(of_rows.items()) if index < num_tokens]
        served.digests[request_id] = [digest for digest, _ in kept]
        served.gaps[request_id] = [gap for _, gap in kept]
    return served


@dataclass
class DigestingSampler:
    """A sampler that also notes the bits of each row, and the gap between its two best logits.

    noted: by request and place in its output, the newest; rows behind wrong drafts are drawn, too
    """

    sampler: Sampler
    noted: dict[str, dict[int, tuple[str, float]]]

    def __call__(self, logits: Tensor, requests: list[Request]) -> list[int]:
        self._note(logits, requests, [0] * len(requests))
        return self.sampler(logits, requests)

    def again(
        self,
        logits: Tensor,
        requests: list[Request],
        ahead: Sequence[int],
        changes: Sequence[LogitChanges | None] | None = None,
    ) -> list[int]:
        self._note(logits, requests, ahead)
        return self.sampler.again(logits, requests, ahead, changes)

    def behind(self, request: Request, drafts: Sequence[int]) -> list[LogitChanges]:
        return self.sampler.behind(request, drafts)

    def _note(self, logits: Tensor, requests: list[Request], ahead: Sequence[int]) -> None:
        for row, request, later in zip(logits, requests, ahead, strict=True):
            digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest()
            best, second = row.topk(2).values.tolist()
            noted = self.noted.setdefault(request.request_id, {})
            noted[len(request.output_ids) + later] = digest, best - second


def log_rows(engine: Engine) -> dict[int, tuple[int, int]]:
    """Returns a log, filled while the engine runs: the decode and prefill rows that its scheduler commits, by step."""
    rows: dict[int, tuple[int, int]] = {}
    commit = engine.scheduler.commit

    def logged(proposal: Proposal, hold_prefill: bool = False) -> tuple[ScheduledChunk, ...]:
        chunks = commit(proposal, hold_prefill)
        decodes = sum(chunk.length for chunk in chunks if chunk in proposal.decodes)
        rows[engine.step] = (decodes, sum(chunk.length for chunk in chunks) - decodes)
        return chunks

    engine.scheduler.commit = logged  # type: ignore[method-assign]
    return rows


def _merge(parts: Sequence[Served]) -> Served:
    regroups = [reason for part in parts for reason in part.regroups]
    assert not regroups, f"a rank was left out, and has dropped its requests: {'; '.join(regroups)}"
    assert len({part.num_steps for part in parts}) == 1, "all ranks make the same steps"
    layers = range(len(parts[0].slot_rows))
    slot_rows = [[rows for part in parts for rows in part.slot_rows[layer]] for layer in layers]
    whole = Served(load=parts[0].load, records=parts[0].records, num_steps=parts[0].num_steps, slot_rows=slot_rows)
    for part in parts:
        whole.rows += part.rows
        whole.answers += part.answers
        whole.pages += part.pages
        whole.tokens |= part.tokens
        whole.experts |= part.experts
        whole.changed |= part.changed
        whole.embeddings |= part.embeddings
        whole.digests |= part.digests
        whole.gaps |= part.gaps
        whole.logprobs |= part.logprobs
        whole.prompt_logprobs |= part.prompt_logprobs
        whole.finish |= part.finish
        whole.messages |= part.messages
        for name, value in part.counters.items():
            whole.counters[name] = whole.counters.get(name, 0) + value
        for name, value in part.stats.items():
            whole.stats[name] = whole.stats.get(name, 0) + value
    return whole
