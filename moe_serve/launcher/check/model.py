"""The part of `moe-serve check` on the model: its shape, and the memory that one rank needs to serve it."""

from collections.abc import Iterator

import torch

from moe_serve.attention_dp.kv_cache import bytes_per_block
from moe_serve.config import ServeConfig, model_dir
from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.buffer_sizes import BufferSizes
from moe_serve.engine.model_plan import ModelPlan
from moe_serve.engine.output.row_logprobs import rows_at_once
from moe_serve.launcher.check.report import Line, Memory, Report, bytes_in_words, count_in_words
from moe_serve.launcher.check.transport import describe_loss, describe_transport, look_here
from moe_serve.models.attention_spec import GqaSpec
from moe_serve.models.families.registry import read_spec
from moe_serve.models.layers import rope_table_bytes
from moe_serve.models.moe_decoder import kv_layouts
from moe_serve.models.spec import ModelSpec
from moe_serve.models.working_memory import StepSizes, working_memory


def describe_model(report: Report, config: ServeConfig, device: str) -> None:
    """Adds the model, the memory of one rank and the transport. Raises a MoeServeError where it cannot be served.

    device: "cpu" or "cuda"
    """
    spec = read_spec(model_dir(config.model))
    report.model += _shape_lines(config, spec)
    plan = ModelPlan.of(config, spec, torch.device(device))
    report.model += [_slots(plan), Line("expert weights", plan.expert_form, plan.slot_form.meaning)]
    weights = list(_weights(config, plan))
    report.transport = transport = describe_transport(
        config,
        BufferLimits(plan.max_tokens_per_rank, spec.hidden, spec.topk, plan.placement.slots_per_rank),
        plan.dtype,
        device,
        look_here(device, sum(memory.num_bytes for memory in weights)),
    )
    report.problems += transport.problems
    report.model += [Line(*fact) for fact in describe_loss(config, plan.placement, transport.shares_memory)]
    report.memory += [*weights, _cache(config, plan)]
    report.memory += [*_dispatch_buffers(config, plan, transport.taken), _working_memory(config, plan)]
    report.memory += [_rotations(plan), _prompt_logits(config, plan)]
    cache_tokens = plan.num_blocks * config.cache.block_size
    if cache_tokens < plan.max_model_len:
        why = "what the KV cache of one rank holds; raise cache.memory_gib to reach the model's limit"
        report.model.append(Line("longest request", f"{cache_tokens} tokens", why))


def _shape_lines(config: ServeConfig, spec: ModelSpec) -> list[Line]:
    total = spec.dense_parameters + spec.num_moe_layers * spec.num_logical * spec.expert_parameters
    active = spec.dense_parameters + spec.num_moe_layers * spec.topk * spec.expert_parameters
    router = spec.router
    groups = "" if router.num_groups == 1 else f"{router.topk_groups} of {router.num_groups} groups are chosen first"
    return [
        Line("path", str(model_dir(config.model))),
        Line("type", spec.model_type, f"{spec.num_layers} layers, {spec.num_moe_layers} of them with experts"),
        Line("parameters", count_in_words(total), f"{count_in_words(active)} work on each token"),
        Line("experts", f"{spec.num_logical} per layer, top-{spec.topk}", groups),
        Line("context", f"{config.model.max_model_len or spec.default_context} tokens", "prompt + output"),
    ]


def _slots(plan: ModelPlan) -> Line:
    placement = plan.placement
    num_redundant = placement.num_slots - plan.spec.num_logical
    empty = int((placement.physical_to_logical < 0).sum(axis=1).max()) if placement.num_layers else 0
    replicas = int(placement.replica_count.max()) if placement.num_layers else 1
    why = f"{num_redundant - empty} of {placement.num_slots} hold replicas (at most {replicas} of one expert)"
    return Line(
        "slots", f"{placement.slots_per_rank} per rank and layer", why + (f", {empty} stay empty" if empty else "")
    )


def _weights(config: ServeConfig, plan: ModelPlan) -> Iterator[Memory]:
    spec, num_slots = plan.spec, plan.placement.slots_per_rank
    dense_bytes = plan.share(0).dense_bytes
    yield Memory("attention, embeddings, shared experts", sum(dense_bytes.values()), "the same on every rank")
    if spec.tie_embeddings and plan.device.type == "cpu" and not plan.numerics.compiled:
        why = "the embedding's values, packed for the product"
        yield Memory("output projection", dense_bytes["embed"], why)
    expert_bytes = plan.slot_form.num_bytes
    slots = f"{num_slots} slots x {spec.num_moe_layers} layers x {bytes_in_words(expert_bytes)}"
    yield Memory("expert slots", num_slots * spec.num_moe_layers * expert_bytes, slots)
    if config.eplb.mode == "dynamic" and config.parallel.num_ranks > 1:
        staging = config.eplb.staging_slots
        why = f"eplb.staging_slots {staging} x {bytes_in_words(expert_bytes)}, to send and to receive"
        yield Memory("experts that move", 2 * staging * expert_bytes, why)


def _cache(config: ServeConfig, plan: ModelPlan) -> Memory:
    block_size = config.cache.block_size
    num_bytes = plan.num_blocks * bytes_per_block(kv_layouts(plan.spec), block_size, plan.dtype)
    blocks = f"{plan.num_blocks} blocks of {block_size} tokens: {plan.num_blocks * block_size} tokens"
    return Memory("KV cache", num_bytes, blocks)


def _dispatch_buffers(config: ServeConfig, plan: ModelPlan, taken: BufferSizes | None) -> Iterator[Memory]:
    """Yields the largest memory of rows between ranks. taken: buffers that are allocated at the start"""
    spec = plan.spec
    if taken is not None:
        yield Memory("dispatch buffers", taken.total, f"for {taken.max_tokens} tokens per rank, allocated at the start")
    if config.parallel.num_ranks == 1 or (taken is not None and taken.max_tokens >= plan.max_tokens_per_rank):
        return
    tokens = _tokens_at_once(config, plan)
    row_bytes = spec.hidden * plan.dtype.itemsize
    sent_bytes = 2 * tokens * spec.topk * row_bytes
    worst_rows = config.parallel.num_ranks * tokens * min(spec.topk, plan.placement.slots_per_rank)
    rows = f"{tokens} tokens x top-{spec.topk} rows of {bytes_in_words(row_bytes)}, out and back"
    yield Memory("dispatch, sending", sent_bytes, rows)
    worst = f"if all tokens choose this rank's experts: {bytes_in_words(2 * worst_rows * row_bytes)}"
    yield Memory("dispatch, receiving (even load)", sent_bytes, worst)


def _working_memory(config: ServeConfig, plan: ModelPlan) -> Memory:
    """Returns what the largest step takes, apart from the rows between ranks."""
    sizes = StepSizes(
        rows=config.engine.max_batch_tokens,
        keys=min(plan.max_model_len, plan.num_blocks * config.cache.block_size),
        sequences=config.engine.max_running_requests,
        itemsize=plan.dtype.itemsize,
    )
    num_bytes, largest = working_memory(plan.spec, plan.numerics, sizes)
    return Memory("a step at its largest", num_bytes, f"{largest}, with even load of experts")


def _rotations(plan: ModelPlan) -> Memory:
    rope, max_position, attention = plan.spec.rope, plan.spec.max_position, plan.spec.attention
    has_temperature = isinstance(attention, GqaSpec) and attention.temperature is not None
    num_bytes = rope_table_bytes(rope, max_position, has_temperature)
    return Memory("rotations of positions", num_bytes, f"{max_position} positions x {rope.dim} dimensions, float32")


def _prompt_logits(config: ServeConfig, plan: ModelPlan) -> Memory:
    """Returns what log probabilities of prompts take beside a step."""
    rows = min(rows_at_once(plan.spec.vocab_size), config.engine.max_batch_tokens)
    why = f"{rows} rows x {plan.spec.vocab_size} words at a time, for requests with log probabilities of their prompts"
    return Memory("logits of prompts", rows * plan.spec.vocab_size * torch.float32.itemsize, why)


def _tokens_at_once(config: ServeConfig, plan: ModelPlan) -> int:
    """Returns the most tokens of one rank in one round of a step."""
    return min(plan.max_tokens_per_rank, config.engine.max_batch_tokens)
