"""What one rank has in memory: weights, caches, the largest step. Sizes and forms are those of its plan.

`moe-serve check` shows all of it; the log of a start has what a rank alone has between steps. Programs,
libraries and what Python keeps are not counted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from moe_serve.attention_dp.batch import bucket_of
from moe_serve.attention_dp.kv_cache import bytes_per_block, state_bytes
from moe_serve.attention_dp.scheduler import most_yielding_rows
from moe_serve.config import ServeConfig
from moe_serve.dispatch.buffer_sizes import BufferSizes
from moe_serve.engine.model.model_plan import ModelPlan, cache_layouts, num_draft_states
from moe_serve.engine.model.shared_weights import Sharing
from moe_serve.engine.model.working_memory import StepSizes, working_memory
from moe_serve.engine.output.row_logprobs import rows_at_once
from moe_serve.models.decoder.gqa import rope_table_bytes
from moe_serve.models.decoder.graphs import graph_logits
from moe_serve.models.decoder.moe_decoder import captures_decodes, state_shapes

_MOST_NAMED = 3  # parts, in the log


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs for something. why: how many of what;  shared: all ranks of a host have them once"""

    name: str
    num_bytes: int
    why: str
    shared: bool = False


def lasting_memory(config: ServeConfig, plan: ModelPlan, taken: BufferSizes | None = None) -> Iterator[Memory]:
    """Yields what a rank alone has beside its weights between steps. taken: dispatch buffers allocated at the start"""
    yield from _cache(config, plan)
    yield from _index_of_texts(config)
    yield from _dispatch_buffers(config, plan, taken)
    yield _rotations(plan)


def page_memory(config: ServeConfig) -> Iterator[Memory]:
    """Yields a rank's part of what the ranks of a host fill together. This is for `check`: a rank of one role does not
    know how many of the other are beside it."""
    num_ranks, parallel = config.ranks_per_host + _num_prefill_beside(config), config.parallel
    if parallel.num_prefill_ranks:
        num_rings = config.ranks_per_host if parallel.role == "prefill" else parallel.num_prefill_ranks
        why = f"its part of {num_rings} x parallel.handover_gb {parallel.handover_gb:g}, which all ranks of a host use"
        yield Memory("pages on their way", int(parallel.handover_gb * 1e9) * num_rings // num_ranks, why)
    if config.cache.host_gb is not None:
        pages = f"its part of cache.host_gb {config.cache.host_gb:g}, which the ranks of a host fill together"
        yield Memory("pages in memory", int(config.cache.host_gb * 1e9) // num_ranks, pages)


def step_memory(config: ServeConfig, plan: ModelPlan) -> Iterator[Memory]:
    """Yields what the largest step takes. With compiled kernels it is recorded for that, by parts of torch that a rank
    would keep 100 MiB of: this is for `check`."""
    yield from _working_memory(config, plan)
    yield _prompt_logits(config, plan)


def weight_memory(config: ServeConfig, plan: ModelPlan, num_sharing: int) -> Iterator[Memory]:
    """Yields the memory of the weights. num_sharing: ranks of a host that share them, where any do"""
    spec, num_slots = plan.spec, plan.placement.slots_per_rank
    dense_bytes = plan.share(0).dense_bytes
    sharing = Sharing.of(config, plan, num_sharing)
    where = "" if config.model.weight_cache == "memory" else f", mapped from a file in {config.model.weight_cache}"
    num_all = num_sharing + _num_prefill_beside(config)
    why = f"once for {num_all} ranks{where}" if sharing.dense else "the same on every rank"
    yield Memory("attention, embeddings, shared experts", sum(dense_bytes.values()), why, sharing.dense)
    if spec.tie_embeddings and plan.device.type == "cpu" and not plan.numerics.compiled:
        why = "the embedding's values, packed for the product"
        yield Memory("output projection", dense_bytes["embed"], why)
    expert_bytes = plan.slot_form.num_bytes
    all_layers = sum(form.num_bytes for form in plan.share(0).slot_forms.values())
    less = ", less in some layers" if all_layers != spec.num_moe_layers * expert_bytes else ""
    if sharing.experts:
        num_experts = spec.num_logical * spec.num_moe_layers
        size = f"{num_experts} x {bytes_in_words(expert_bytes)}{less}"
        why = f"{size}, once for {num_sharing} ranks{where}; slots name them"
        yield Memory("experts", spec.num_logical * all_layers, why, shared=True)
        return
    slots = f"{num_slots} slots x {spec.num_moe_layers} layers x {bytes_in_words(expert_bytes)}{less}"
    yield Memory("expert slots", num_slots * all_layers, slots)
    if config.eplb.mode == "dynamic" and config.parallel.num_ranks > 1:
        staging = config.eplb.staging_slots
        why = f"eplb.staging_slots {staging} x {bytes_in_words(expert_bytes)}, to send and to receive"
        yield Memory("experts that move", 2 * staging * expert_bytes, why)


def _cache(config: ServeConfig, plan: ModelPlan) -> Iterator[Memory]:
    block_size = config.cache.block_size
    layouts = cache_layouts(config, plan.spec)
    num_bytes = plan.num_blocks * bytes_per_block(layouts, block_size, plan.cache_dtype)
    blocks = f"{plan.num_blocks} blocks of {block_size} tokens: {plan.num_blocks * block_size} tokens"
    kept = "" if plan.cache_dtype == plan.dtype else f", in {config.cache.dtype} with a scale for each head and token"
    kept += ", and the experts of each token" if config.engine.return_routed_experts else ""
    kept += ", and how many experts of each token changed" if config.engine.expert_capacity else ""
    yield Memory("KV cache", num_bytes, blocks + kept)
    if shapes := state_shapes(plan.spec):
        running, size = config.engine.max_running_requests, state_bytes(shapes)
        why = f"engine.max_running_requests {running} x {bytes_in_words(size)}, of layers that keep one"
        yield Memory("states of requests", running * size, why)
        if number := num_draft_states(config):
            why = f"{number} x {bytes_in_words(size)}, of which wrong drafts leave the right ones"
            yield Memory("states behind drafts", number * size, why)
        why = f"{plan.num_snapshots} x {bytes_in_words(size)}, from which requests with an equal beginning go on"
        if not plan.num_snapshots:
            why = f"cache.snapshot_gib {config.cache.snapshot_gib:g} holds none, so no prefix is reused"
        yield Memory("snapshots of states", plan.num_snapshots * size, why)


def _index_of_texts(config: ServeConfig) -> Iterator[Memory]:
    if config.speculation.reads_text:
        index_mib = config.speculation.index_mib
        yield Memory("index of texts", int(index_mib * 2**20), f"speculation.index_mib {index_mib:g}, as texts come")


def _dispatch_buffers(config: ServeConfig, plan: ModelPlan, taken: BufferSizes | None) -> Iterator[Memory]:
    """Yields the largest memory of rows between ranks. taken: buffers that are allocated at the start"""
    spec = plan.spec
    if taken is not None:
        yield Memory("dispatch buffers", taken.total, f"for {taken.max_tokens} tokens per rank, allocated at the start")
    if config.parallel.num_ranks == 1 or (taken is not None and taken.max_tokens >= plan.max_tokens_per_rank):
        return
    tokens = _tokens_at_once(config, plan)
    row_bytes = spec.expert_hidden * plan.dtype.itemsize
    sent_bytes = 2 * tokens * spec.topk * row_bytes
    worst_rows = config.parallel.num_ranks * tokens * min(spec.topk, plan.placement.slots_per_rank)
    rows = f"{tokens} tokens x top-{spec.topk} rows of {bytes_in_words(row_bytes)}, out and back"
    yield Memory("dispatch, sending", sent_bytes, rows)
    worst = f"if all tokens choose this rank's experts: {bytes_in_words(2 * worst_rows * row_bytes)}"
    yield Memory("dispatch, receiving (even load)", sent_bytes, worst)


def _working_memory(config: ServeConfig, plan: ModelPlan) -> Iterator[Memory]:
    """Yields the memory of the largest step, apart from the rows between ranks, and what its attention keeps."""
    on_gpu = plan.device.type == "cuda"
    if on_gpu and find_spec("triton") is None:
        return  # among the problems; its kernels know what they take
    running = config.engine.max_running_requests
    sizes = StepSizes(
        rows=config.engine.max_batch_tokens,
        keys=min(plan.max_model_len, plan.num_blocks * config.cache.block_size),
        sequences=running if config.speculation.mode == "off" else most_yielding_rows(running),
        itemsize=plan.dtype.itemsize,
        in_halves=config.dispatch.overlap_from_tokens is not None,
        on_gpu=on_gpu,
    )
    num_bytes, largest = working_memory(plan.spec, plan.numerics, sizes)
    yield Memory("a step at its largest", num_bytes, f"{largest}, with even load of experts")
    if captures_decodes(plan.spec, plan.numerics, plan.device, config.engine.attention_backend):
        rows = bucket_of(running)
        decodes = replace(sizes, rows=rows, sequences=rows)
        logits = sum(graph_logits(rows)) * plan.spec.vocab_size * torch.float32.itemsize
        why = f"between the launches of {rows} decodes, once for all graphs, and logits"
        yield Memory("graphs of decode steps", working_memory(plan.spec, plan.numerics, decodes)[0] + logits, why)
    if on_gpu and config.engine.attention_backend == "flashinfer":
        from moe_serve.attention_dp.attention_packages import WORKSPACE_BYTES

        yield Memory("attention workspace", WORKSPACE_BYTES, "of FlashInfer, for its plans and sums")


def _rotations(plan: ModelPlan) -> Memory:
    ropes, max_position = plan.spec.ropes, plan.spec.max_position
    num_bytes = rope_table_bytes(ropes, max_position, plan.spec.attention.temperature is not None)
    dims = sum(rope.dim for rope in ropes if rope.rotates)
    return Memory("rotations of positions", num_bytes, f"{max_position} positions x {dims} dimensions, float32")


def _prompt_logits(config: ServeConfig, plan: ModelPlan) -> Memory:
    """Returns the memory of the log probabilities of prompts, beside a step."""
    rows = min(rows_at_once(plan.spec.vocab_size), config.engine.max_batch_tokens)
    why = f"{rows} rows x {plan.spec.vocab_size} words at a time, for requests with log probabilities of their prompts"
    return Memory("logits of prompts", rows * plan.spec.vocab_size * torch.float32.itemsize, why)


def _tokens_at_once(config: ServeConfig, plan: ModelPlan) -> int:
    """Returns the most tokens of one rank in one round of a step."""
    return min(plan.max_tokens_per_rank, config.engine.max_batch_tokens)


def own_in_words(parts: Iterable[Memory]) -> str:
    """Returns a line for the log about what of these parts is not shared. parts: of one rank"""
    own = sorted((part for part in parts if not part.shared), key=lambda part: -part.num_bytes)
    largest = ", ".join(f"{part.name} {bytes_in_words(part.num_bytes)}" for part in own[:_MOST_NAMED])
    together = bytes_in_words(sum(part.num_bytes for part in own))
    return f"each rank takes {together} of its own beside its program and its steps: {largest} and less"


def bytes_in_words(number: int) -> str:
    """Returns a size with its binary unit: 1.50 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def _num_prefill_beside(config: ServeConfig) -> int:
    """Returns how many prefill ranks are on the host of those that decode, by the configuration of both."""
    return config.parallel.num_prefill_ranks if config.parallel.role == "both" else 0
