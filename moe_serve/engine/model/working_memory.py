"""The memory that one step takes at its largest beside weights and KV cache.

With torch and Triton the phases of a layer follow each other, so a step takes its rows between layers and the largest
phase, whose sizes are worked out here. The compiled CPU kernels write to buffers that stay: those of a recording.
Tests compare both with the allocator's peak, and steps on GPUs with what recorded ones allocate.

Shape words: T = rows, K = keys of the longest sequence, H = hidden, n = sequences.
"""

from dataclasses import dataclass

import torch

from moe_serve.attention_dp.attention_plan import LARGEST_GATHER
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.dispatch.local import OneRank
from moe_serve.dispatch.wire import make_wire
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.forms import AttendShape, GatedConvShape, LightningShape, MambaShape, Seen, SelectiveShape
from moe_serve.kernels.linear import LARGEST_TILE
from moe_serve.kernels.numerics import COMPILED, Numerics
from moe_serve.models.decoder.mla import expand_from
from moe_serve.models.decoder.moe_decoder import build_decoder, kv_layouts, state_shapes
from moe_serve.models.decoder.runners import RecordedRunner
from moe_serve.models.spec import CompressedSpec, GqaSpec, IndexerSpec, MlaSpec, ModelSpec
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import no_weights

_INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class StepSizes:
    """The largest step of a rank.

    rows:     tokens;  keys: of the longest sequence;  sequences: that run at once
    itemsize: bytes of an activation
    in_halves: whether large steps run in halves that take turns
    on_gpu:    whether the Triton kernels attend
    """

    rows: int
    keys: int
    sequences: int
    itemsize: int
    in_halves: bool = False
    on_gpu: bool = False


def working_memory(spec: ModelSpec, numerics: Numerics, sizes: StepSizes) -> tuple[int, str]:
    """Returns the bytes of the largest step, and what takes most of them.

    All tokens' experts are on this rank, as on one rank, or as on each of several with even load.
    """
    phases = {f"buffers for {sizes.rows} tokens": _buffers(spec, sizes)} if numerics.compiled else {}
    name, largest = max((phases or _phases(spec, numerics, sizes)).items(), key=lambda phase: phase[1])
    return largest, name


def _buffers(spec: ModelSpec, sizes: StepSizes) -> int:
    """Returns the bytes of the buffers of a recorded step, and of its logits.

    The decoder is recorded on tensors without memory, as one rank that holds all experts.
    """
    experts = Placement.trivial(spec.num_moe_layers, spec.num_logical, 1, moe_layer_ids=spec.moe_layer_ids)
    share = WeightShare(spec, experts, 0, torch.float32, "meta", stored=StoredWeights.of(spec, None))
    one_rank = ExpertParallel(
        rank=0,
        router=spec.router,
        all_to_all=OneRank(spec.num_logical, make_wire("auto", torch.float32)),
        replica_map=ReplicaMap(experts),
        recorder=None,
        max_tokens_per_rank=sizes.rows,
        numerics=COMPILED,
    )
    decoder = build_decoder(spec, no_weights(share), one_rank, "meta")
    run, run_prediction = decoder.run, decoder.run_prediction
    assert isinstance(run, RecordedRunner)
    states = state_shapes(spec)
    cache = KvCache(kv_layouts(spec), 1, 1, torch.float32, "meta", states=states, num_states=1 if states else 0)
    recorded = [sizes.rows, (sizes.rows + 1) // 2][: 1 + sizes.in_halves]  # steps below those that run in halves
    buffers = sum(run.record(rows, cache).buffer_bytes for rows in recorded)
    logits = 2
    if isinstance(run_prediction, RecordedRunner):
        buffers += run_prediction.record(sizes.rows, cache).buffer_bytes
        logits += 1
    return buffers + sizes.rows * 8 * _INDEX + logits * sizes.sequences * spec.vocab_size * 4


def _phases(spec: ModelSpec, numerics: Numerics, sizes: StepSizes) -> dict[str, int]:
    """Returns the bytes of each phase of a step by name, the rows between layers included in each."""
    spec_bytes, rows = sizes.itemsize, sizes.rows
    between = 4 * rows * spec.hidden * spec_bytes  # residual, what is added to it, the normed sum, the phase's result
    if sizes.on_gpu:
        between += rows * sum(rope.dim // 2 for rope in spec.ropes) * torch.complex64.itemsize
    else:
        between += _plan(spec, numerics, sizes)
    if spec.streams is not None:  # the streams, mixed anew and widened, and their weights
        shape = spec.stream_shape(mixes=True)
        between += rows * 4 * (4 * shape.streams * shape.width + 3 * shape.num_weights)
    if spec.is_paired:
        between += rows * spec.hidden * spec_bytes  # what experts add behind the next layer
    phases = {
        f"attention of {rows} tokens over {sizes.keys} keys": _attention(spec, numerics, sizes),
        f"experts of {rows} tokens": _experts(spec, numerics, sizes),
        f"logits of {sizes.sequences} requests": sizes.sequences * spec.vocab_size * (4 + spec_bytes),
    }
    if spec.num_moe_layers < spec.num_layers:
        phases[f"dense MLP of {rows} tokens"] = 3 * rows * spec.dense_intermediate * spec_bytes
    if spec.predictor_id is not None:
        between += 2 * rows * spec.hidden * spec_bytes  # what the head projects, of the step and of that layer, stays
        joined = 2 * rows * spec.hidden * spec_bytes  # hidden rows and embeddings
        logits = sizes.sequences * spec.vocab_size * 4  # of the step
        most = max(_attention(spec, numerics, sizes), _experts(spec, numerics, sizes))
        phases[f"predictions of {rows} tokens"] = most + joined + logits
    return {name: between + num_bytes for name, num_bytes in phases.items()}


def _experts(spec: ModelSpec, numerics: Numerics, sizes: StepSizes) -> int:
    rows = sizes.rows * spec.topk
    hidden, width = spec.expert_hidden, spec.moe_intermediate
    if sizes.on_gpu:  # the products end with activation and biases
        routed = rows * (2 * hidden + width) * sizes.itemsize
    else:
        tiled = hidden + width if numerics.invariant else 0  # rows of an expert, copied to whole row tiles
        biases = max(hidden, width) if spec.expert_bias else 0  # repeated for the rows of either product
        routed = rows * (2 * hidden + 3 * width + tiled + biases) * sizes.itemsize
    shared = 3 * sizes.rows * spec.shared_intermediate * sizes.itemsize
    # Logits, scores and choice; ids and their orders.
    gate = sizes.rows * spec.router.num_choices * 3 * 4 + rows * 4 * _INDEX
    scaled = sizes.rows * hidden * sizes.itemsize if spec.router.scales_input else 0
    latent = sizes.rows * (hidden + spec.hidden) * sizes.itemsize if spec.latent is not None else 0
    given_back = 2 * sizes.rows * hidden * sizes.itemsize if spec.router.num_identity else 0
    return routed + shared + gate + scaled + latent + given_back


def _attention(spec: ModelSpec, numerics: Numerics, sizes: StepSizes) -> int:
    if sizes.on_gpu:
        if isinstance(spec.attention, GqaSpec):
            kinds = _kinds(spec, spec.attention)
            return max(_gqa_on_gpu(kind, spec.num_layers, sizes) for kind in kinds)
        assert isinstance(spec.attention, MlaSpec), "other attention is refused on GPUs"
        return _mla_on_gpu(spec.attention, numerics, sizes)
    if isinstance(spec.attention, GqaSpec):
        kinds = _kinds(spec, spec.attention)
        return max(*(_gqa(kind, numerics, sizes) for kind in kinds), _stateful(spec, sizes))
    if isinstance(spec.attention, CompressedSpec):
        return _compressed(spec, spec.attention, sizes)
    return max(_mla(spec.attention, numerics, sizes), _stateful(spec, sizes))


def _kinds(spec: ModelSpec, heads: GqaSpec) -> set[GqaSpec]:
    """Returns the attention of each kind of layer."""
    return {heads.in_layer(layer) for layer in spec.attention_layer_ids}


def _gqa(spec: GqaSpec, numerics: Numerics, sizes: StepSizes) -> int:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gates = 2 * q if spec.has_gate else 0  # projected, and their sigmoids
    rows = sizes.rows * (3 * q + 2 * kv + gates) * sizes.itemsize  # projected, attended, and put together from pieces
    group = spec.num_heads // spec.num_kv_heads
    copied = kv if spec.value_dim is not None else 0  # values, as wide as keys
    if spec.has_sinks and not numerics.invariant:  # one key more and one element more of each, for torch's kernel
        copied += 2 * (kv + spec.num_kv_heads)
        rows += sizes.rows * (q + spec.num_heads) * sizes.itemsize
    return rows + _attended(numerics, sizes, spec.num_kv_heads, group, spec.head_dim, 2 * kv, copied)


def _stateful(spec: ModelSpec, sizes: StepSizes) -> int:
    """Returns the bytes of the rows of a layer that keeps a state: projected, widened, and what it gives."""
    shape = spec.stateful
    if shape is None:
        return 0
    if isinstance(shape, GatedConvShape):
        # The input's columns, with the rows before them, sums, products, and what comes out, widened.
        return sizes.rows * (shape.row_width * (sizes.itemsize + 4) + 6 * 4 * shape.width)
    if isinstance(shape, MambaShape):
        conv, state = shape.conv.channels, 4 * shape.inner * shape.state_width
        return sizes.rows * (shape.row_width * (sizes.itemsize + 4) + 6 * 4 * conv + 4 * 4 * shape.inner) + 4 * state
    if isinstance(shape, SelectiveShape):
        widened = shape.row_width + 8 * shape.inner + 2 * shape.rank + 4 * shape.state_width
        projected = shape.row_width + 3 * shape.inner + shape.rank + 2 * shape.state_width
        return sizes.rows * (projected * sizes.itemsize + 4 * widened) + 16 * shape.inner * shape.state_width
    if isinstance(shape, LightningShape):
        state = 4 * shape.inner * shape.width
        return sizes.rows * (shape.row_width * (2 * sizes.itemsize + 4) + 6 * 4 * shape.inner) + 4 * state
    given = shape.value_heads * shape.value_width
    state = 4 * shape.value_heads * shape.key_width * shape.value_width  # of one token at a time
    apart = 0 if shape.rank is None else shape.num_steps + given  # steps and gates, in rows of their own
    return sizes.rows * (shape.row_width * (sizes.itemsize + 4) + (given + apart) * sizes.itemsize) + 4 * state


def _gqa_on_gpu(spec: GqaSpec, num_layers: int, sizes: StepSizes) -> int:
    """Returns the bytes of projections and results, and of the sums over parts of few decodes' keys."""
    from moe_serve.kernels.triton.attention import part_bytes  # loads triton

    shape = AttendShape(spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.softmax_scale)
    limits = {(spec.window_of(layer), spec.chunk_of(layer)) for layer in range(num_layers)}
    parts = [part_bytes(shape, sizes.itemsize, sizes.sequences, sizes.keys, Seen(*limit)) for limit in limits]
    row = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return sizes.rows * row * sizes.itemsize + max(parts)


def _mla(spec: MlaSpec, numerics: Numerics, sizes: StepSizes) -> int:
    heads, size, border = spec.num_heads, sizes.itemsize, expand_from(spec)
    first = spec.q_lora_rank or 0
    projected = sizes.rows * (first + spec.latent_dim + 2 * heads * spec.query_dim) * size
    if spec.gates_values:
        projected += sizes.rows * heads * (spec.query_dim + 3 * spec.value_dim) * size  # of the latent before its norm
    if spec.indexer is not None:
        return projected + _indexed(spec, spec.indexer, sizes)
    expands = border is not None and not numerics.invariant
    short = min(sizes.rows, sizes.sequences * border) if border is not None and expands else sizes.rows
    absorbed = short * heads * (2 * spec.latent_dim + spec.nope_dim + spec.kv_lora_rank + spec.value_dim) * size
    absorbed += _attended(numerics, sizes, 1, heads, spec.latent_dim, spec.latent_dim)
    expanded = 0
    if expands:
        # Keys, the part of them without rotation, values, and values padded to the width of keys.
        widths = spec.nope_dim + 2 * spec.query_dim + spec.value_dim
        expanded = sizes.keys * (heads * widths + spec.latent_dim) * size
    values = sizes.rows * heads * spec.value_dim * size
    return projected + values + max(absorbed, expanded)


def _mla_on_gpu(spec: MlaSpec, numerics: Numerics, sizes: StepSizes) -> int:
    from moe_serve.kernels.triton.attention import part_bytes  # loads triton
    from moe_serve.kernels.triton.indexed_attention import chosen_bytes

    heads, size, border = spec.num_heads, sizes.itemsize, expand_from(spec)
    shape = AttendShape(1, heads, spec.latent_dim, spec.softmax_scale, spec.kv_lora_rank)
    projected = sizes.rows * (2 * (spec.q_lora_rank or 0) + spec.latent_dim + heads * spec.query_dim) * size
    absorbed_row = heads * (spec.latent_dim + spec.kv_lora_rank) * size
    indexer, values = spec.indexer, sizes.rows * heads * spec.value_dim * size
    if indexer is not None:
        rows = indexer.num_heads * (indexer.width + 1) + 2 * indexer.width  # queries, weights, the key, and normed
        chosen = chosen_bytes(sizes.rows, sizes.keys, indexer.topk)
        parts = part_bytes(shape, size, sizes.rows, min(indexer.topk, sizes.keys))
        return projected + sizes.rows * (rows * size + absorbed_row) + max(chosen + parts, values)
    parts = part_bytes(shape, size, sizes.sequences, sizes.keys)
    if border is None or numerics.invariant:
        return projected + sizes.rows * absorbed_row + max(parts, values)
    short = min(sizes.rows, sizes.sequences * border)
    return (
        projected
        + values
        + max(short * (absorbed_row + heads * spec.value_dim * size) + parts, expanded_together(spec, sizes, border))
    )


def expanded_together(spec: MlaSpec, sizes: StepSizes, border: int) -> int:
    """Returns the most bytes of keys and values that the expanded form makes at a time on a GPU, of all sequences.

    border: as of expand_from
    """
    from moe_serve.kernels.triton.expanded_attention import MOST_BYTES, TILE  # loads triton

    def prefix(rows: int) -> int:  # the longest behind which so many rows are expanded (attention_plan.first_expanded)
        longest = sizes.keys - rows
        return longest if rows >= border else min(longest, rows * rows // (2 * (border - rows)))

    most_sequences = min(sizes.sequences, sizes.rows // 2)  # those of one row are decodes
    prefixes = max(
        (
            min(most_sequences, sizes.rows // rows) * prefix(rows)
            for rows in range(2, min(border, sizes.rows, sizes.keys) + 1)
        ),
        default=0,
    )
    keys = sizes.rows + prefixes + most_sequences * (TILE - 1)
    head = keys * (spec.nope_dim + spec.value_dim) * sizes.itemsize
    return keys * spec.rope_dim * sizes.itemsize + min(spec.num_heads * head, max(MOST_BYTES, head))


def _indexed(spec: MlaSpec, indexer: IndexerSpec, sizes: StepSizes) -> int:
    """Returns the bytes of sparse attention: its rows, those of one sequence, and what one token makes of them."""
    heads, width = indexer.num_heads, indexer.width
    rows = sizes.rows * (heads * (width + 1) + 2 * width)
    rows += sizes.rows * spec.num_heads * (spec.latent_dim + spec.kv_lora_rank + 2 * spec.value_dim)
    cached = sizes.keys * (spec.latent_dim + width + 2 * _INDEX // sizes.itemsize)
    chosen = min(indexer.topk, sizes.keys) * (spec.latent_dim + 2 * spec.num_heads)
    return (rows + cached + sizes.keys * (heads + 4) + chosen) * sizes.itemsize


def _compressed(spec: ModelSpec, attention: CompressedSpec, sizes: StepSizes) -> int:
    """Returns the bytes of attention to a window and entries: its rows, and what one token makes of those it sees."""
    shapes = [attention.in_layer(layer, spec.norm_eps) for layer in range(spec.num_layers)]
    heads, rank = attention.num_heads * attention.head_dim, attention.q_lora_rank
    widest = max(shape.row_width + shape.index_heads * (shape.index_width + 1) for shape in shapes)
    rows = sizes.rows * (2 * rank + 2 * heads + widest + attention.num_groups * attention.group_rank)
    seen = max(shape.window + sizes.keys // shape.every if shape.every else shape.window for shape in shapes)
    of_token = seen * (2 * attention.head_dim + 4 * attention.num_heads) + sizes.keys * (4 + attention.indexer.width)
    return (rows + of_token) * sizes.itemsize + sizes.keys * 4 * _INDEX


def _plan(spec: ModelSpec, numerics: Numerics, sizes: StepSizes) -> int:
    """Returns the bytes of attention_plan.py: rows of the cache and masks of all sequences, for all layers."""
    if not isinstance(spec.attention, GqaSpec) and spec.attention.indexer is not None:
        return 0  # rows are attended one by one
    heads, indices = [1], 1
    if isinstance(spec.attention, GqaSpec):
        heads, indices = [kind.num_kv_heads for kind in _kinds(spec, spec.attention)], 2
    mask_heads = len(heads) if numerics.invariant else sum(heads)
    decodes = sizes.sequences * sizes.keys * (indices * sum(heads) * _INDEX + mask_heads * sizes.itemsize)
    chunk_mask = sizes.rows * sizes.keys * (sizes.itemsize + 1)  # numbers, and for a moment their bools
    return decodes + chunk_mask


def _attended(
    numerics: Numerics, sizes: StepSizes, heads: int, group: int, width: int, per_key: int, copied: int = 0
) -> int:
    """Returns the bytes of gathered keys and values, and of scores, of one group of decodes or one chunk.

    heads: of keys;  per_key: elements of one key and its value, over all heads
    copied: elements of copies of both for torch's kernel of a chunk
    """
    gathered = max(sizes.keys * per_key, min(LARGEST_GATHER, sizes.sequences * sizes.keys * per_key))
    scores = 2 * (gathered // per_key) * heads * numerics.padded(group)
    if not numerics.invariant:
        return max(gathered + scores, (sizes.keys + 1) * (per_key + copied)) * sizes.itemsize
    # Rows of one GEMM of a chunk, in every tile of keys.
    tile_rows = numerics.padded(group) * min(sizes.rows, max(LARGEST_TILE // numerics.padded(group), 1))
    tiles = -(-sizes.keys // numerics.kv_tile)
    chunk = tile_rows * heads * (4 * sizes.keys + 2 * tiles * width)
    return (gathered + max(chunk, scores)) * sizes.itemsize
