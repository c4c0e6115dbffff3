"""Runs real engines on forked ranks, without front end and sockets: requests in, tokens out."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.exchange import make_exchange
from moe_serve.engine.mailbox import Inbound, QueueMailbox
from moe_serve.engine.messages import Submit, Tokens
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


def tiny_model(folder: Path, family: str) -> Path:
    """Returns a folder that holds the config.json of a tiny model; served with model.load_format=dummy."""
    path = folder / family
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(_COMMON | TINY[family]))
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
    finish: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    load: list[list[list[int]]] = field(default_factory=list)  # per record, [layers][logical]
    slot_rows: list[list[int]] = field(default_factory=list)  # [layers][slots], rows that each received
    num_steps: int = 0


class StaggeredMailbox(QueueMailbox):
    """Lets requests arrive a few at a time, between steps, as a seed says."""

    def __init__(self, requests: Sequence[Submit], seed: int):
        super().__init__()
        self._later = list(requests)
        self._draw = random.Random(seed)

    def poll(self, timeout_s: float) -> list[Inbound]:
        arrived: list[Inbound] = []
        while self._later and (timeout_s > 0 or self._draw.random() < 0.4):
            arrived.append(self._later.pop(0))
            if timeout_s > 0:
                break
        return arrived or super().poll(timeout_s)


def serve(
    num_ranks: int,
    submits: Sequence[Submit],
    overrides: Sequence[str] = (),
    stagger: int | None = None,
    timeout_s: float = 240,
) -> Served:
    """Returns what num_ranks engines made of the requests; request i goes to rank i % num_ranks.

    stagger: a seed by which requests arrive over time; None: all at once
    """
    settings = [f"parallel.num_ranks={num_ranks}", "cache.memory_gib=0.05", *overrides]
    parts = run_ranks(num_ranks, _serve_on_rank, list(submits), settings, stagger, timeout_s=timeout_s)
    return _merge(parts)


def _serve_on_rank(
    rank: int, group: EpGroup, submits: list[Submit], overrides: list[str], stagger: int | None
) -> Served:
    config = load_config(overrides=overrides)
    mine = [submit for index, submit in enumerate(submits) if index % group.num_ranks == rank]
    mailbox = QueueMailbox(mine) if stagger is None else StaggeredMailbox(mine, stagger + rank)
    exchange = make_exchange(config.engine.exchange, group.process_group, True, 60.0)
    engine = build_engine(config, group, exchange, mailbox)
    records: list[list[list[int]]] = []
    engine.served.on_record = lambda record: records.append(record.tokens.tolist())
    engine.run()
    engine.scheduler.check()
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_blocks, "finished requests hold blocks"
    exchange.close()
    served = Served(
        counters=dict(vars(engine.counters)),
        stats={name: getattr(engine.scheduler.stats, name) for name in engine.scheduler.stats.__slots__},
        load=records,
        num_steps=engine.step,
        slot_rows=engine.served.recorder.slot_rows.tolist(),
    )
    for message in mailbox.sent:
        if isinstance(message, Tokens):
            for event in message.events:
                tokens = served.tokens.setdefault(event.request_id, [])
                assert event.index == len(tokens), "tokens arrive once and in order"
                tokens += event.token_ids
                if event.finish:
                    served.finish[event.request_id] = event.finish
                    served.messages[event.request_id] = event.message or ""
    return served


def _merge(parts: Sequence[Served]) -> Served:
    assert len({part.num_steps for part in parts}) == 1, "all ranks make the same steps"
    layers = range(len(parts[0].slot_rows))
    slot_rows = [[rows for part in parts for rows in part.slot_rows[layer]] for layer in layers]
    whole = Served(load=parts[0].load, num_steps=parts[0].num_steps, slot_rows=slot_rows)
    for part in parts:
        whole.tokens |= part.tokens
        whole.finish |= part.finish
        whole.messages |= part.messages
        for name, value in part.counters.items():
            whole.counters[name] = whole.counters.get(name, 0) + value
        for name, value in part.stats.items():
            whole.stats[name] = whole.stats.get(name, 0) + value
    return whole
