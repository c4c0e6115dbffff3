"""A digest of the bits that the compiled kernels of this machine give, and torch for what they are given.

Ranks may run on different processors. Where digests are equal, so are the bits of the kernels: AVX-512 and AVX2
agree, while a build without fused multiply-add rounds otherwise. Inputs are made without torch's random numbers, which
are not the same everywhere. Takes about 20 ms.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_serve.kernels.causal_conv import ConvWeights
from moe_serve.kernels.compressed_attention import CompressedRows, CompressedWeights, EntryWeights
from moe_serve.kernels.cpu.attention import AttendRows
from moe_serve.kernels.cpu.experts import GroupedExperts, PackedExperts, packed_ffn
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.cpu.logprobs import row_logprobs
from moe_serve.kernels.cpu.operations import (
    EXAMPLE_ROWS,
    AnyOperation,
    Recorder,
    declared_operations,
    recorded_once,
)
from moe_serve.kernels.cpu.packed import (
    gate_up_size,
    group_packed_size,
    pack_groups,
    pack_groups_gate_up,
    packed_size,
    padded,
)
from moe_serve.kernels.cpu.rows import weighted_sum
from moe_serve.kernels.cpu.sampling import sample_rows
from moe_serve.kernels.delta_rule import DeltaWeights
from moe_serve.kernels.forms import (
    INT4,
    RELU2,
    Activation,
    AttendShape,
    CompressedShape,
    ConvShape,
    DeltaShape,
    GroupForm,
    MambaShape,
    RouterSpec,
    Seen,
    SelectiveShape,
)
from moe_serve.kernels.group_quantised import SCALE_DTYPES, Activations, GroupQuantised, quantise_groups
from moe_serve.kernels.indexed_attention import IndexerShape
from moe_serve.kernels.sampling import EDIT, SAMPLING_ROW, LogitChanges, SamplingRows, WantedLogprobs
from moe_serve.kernels.selective_space import SelectiveRows, SelectiveWeights, in_tiles
from moe_serve.kernels.sequence_states import SequenceStates
from moe_serve.kernels.state_space import StateSpaceWeights

ROWS, HIDDEN, WIDTH = 13, 150, 70


def kernel_digest() -> str:
    """Returns 16 hexadecimal digits. Call it only where there is a compiled library."""
    digest = blake2b(digest_size=8)
    for probe in PROBES:
        for tensor in probe():
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, which torch compares in every dtype, e4m3 too."""
    return tensor.flatten().contiguous().view(torch.uint8)


def _numbers(*shape: int, seed: int = 1) -> Tensor:
    """Returns float32 numbers from -1 to 1 that are the same on every machine."""
    count = torch.arange(torch.Size(shape).numel())
    return ((count * 7919 + seed * 104729) % 65537 / 32768.5 - 1).reshape(shape).float()


def _linear() -> list[Tensor]:
    weight, bias = _numbers(WIDTH, HIDDEN), _numbers(WIDTH, seed=2)
    x = _numbers(ROWS, HIDDEN, seed=3)
    of_channels, of_blocks = _numbers(WIDTH, seed=4) / 8, _numbers(1, 2, seed=5) / 8
    in_fp8 = [PackedLinear(weight.to(torch.float8_e4m3fn), bias, scale)(x) for scale in (of_channels, of_blocks)]
    return [PackedLinear(weight.to(dtype), bias)(x) for dtype in (torch.float32, torch.bfloat16)] + in_fp8


def _experts() -> list[Tensor]:
    counts = torch.tensor([1, ROWS - 1])
    sizes = 2, gate_up_size(WIDTH, HIDDEN), packed_size(HIDDEN, WIDTH)
    by_channel = _numbers(2, 2 * WIDTH, seed=2) / 1000, _numbers(2, HIDDEN, seed=3) / 1000
    by_block = _numbers(2, 2, 2, seed=4) / 8, _numbers(2, 2, 1, seed=5) / 8
    scaled = [(torch.int8, by_channel), (torch.float8_e4m3fn, by_block), (torch.float8_e4m3fn, by_channel)]
    results = []
    for dtype, scales in [(torch.float32, (None, None)), (torch.bfloat16, (None, None)), *scaled]:
        factor = 127 if dtype == torch.int8 else 1 / 8
        gate_up, down = (((_numbers(2, size, seed=6) * factor).to(dtype)) for size in sizes[1:])
        experts = PackedExperts(gate_up, down, HIDDEN, WIDTH, *scales)
        results.append(packed_ffn(_numbers(ROWS, HIDDEN, seed=7), counts, experts))
    results.append(packed_ffn(_numbers(ROWS, 160, seed=7), counts, _mxfp4_experts(160, 96)))
    biased: dict[str, Any] = {"gate_up_bias": _numbers(2, 2 * WIDTH, seed=8), "down_bias": _numbers(2, HIDDEN, seed=9)}
    gate_up, down = (_numbers(2, size, seed=6) / 8 for size in sizes[1:])
    experts = PackedExperts(
        gate_up, down, HIDDEN, WIDTH, **biased, activation=Activation("clamped_swiglu", alpha=1.7, limit=0.5)
    )
    results.append(packed_ffn(_numbers(ROWS, HIDDEN, seed=7), counts, experts))
    up = _numbers(2, packed_size(WIDTH, HIDDEN), seed=6) / 8
    ungated = PackedExperts(up, down, HIDDEN, WIDTH, activation=RELU2)
    results.append(packed_ffn(_numbers(ROWS, HIDDEN, seed=7), counts, ungated))
    return results


def _mxfp4_experts(hidden: int, width: int) -> PackedExperts:
    def drawn(size: int, seed: int, least: int, count: int) -> Tensor:
        return (_numbers(2, size, seed=seed) * count / 2 + count / 2 + least).to(torch.uint8)

    weights = drawn(gate_up_size(width, hidden // 2), 6, 0, 256), drawn(packed_size(hidden, width // 2), 7, 0, 256)
    scales = drawn(gate_up_size(width, hidden // 32), 8, 121, 4), drawn(packed_size(hidden, width // 32), 9, 121, 4)
    return PackedExperts(*weights, hidden, width, *scales)


def _groups() -> list[Tensor]:
    """Returns products with weights in groups, by activations in float and in int8."""
    forms = (
        GroupForm(4, 16, "float16", None),
        GroupForm(8, 64, "bfloat16", 128),
        GroupForm(4, 32, "two_levels", 0, has_minimum=True),
    )
    both: tuple[Activations, ...] = ("float", "int8")
    x, counts = _numbers(ROWS, HIDDEN, seed=7), torch.tensor([1, ROWS - 1])
    products = [PackedLinear.of_groups(_drawn_groups(form), None, each)(x) for form in forms for each in both]
    return products + [packed_ffn(x, counts, _int4_experts(each)) for each in both]


def _drawn_groups(form: GroupForm) -> GroupQuantised:
    """Returns a weight [WIDTH, HIDDEN]."""

    def drawn(columns: int, seed: int, count: int, dtype: torch.dtype) -> Tensor:
        return (_numbers(WIDTH, columns, seed=seed) * count / 2 + count / 2).to(dtype)

    groups, two, byte = form.num_groups(HIDDEN), form.is_two_level, torch.uint8

    def scales(seed: int, of_two: torch.dtype) -> Tensor:
        one = drawn(groups, seed, 1, torch.float32).to(SCALE_DTYPES[form.scale])
        return drawn(groups, seed, 63, of_two) if two else one

    return GroupQuantised(
        form,
        drawn(HIDDEN, 1, 1 << form.bits, byte),
        scales(2, torch.int8),
        drawn(groups, 3, 1 << form.bits, byte) if form.zero is None else None,
        scales(4, byte) if form.has_minimum else None,
        drawn(1, 5, 1, torch.float16) if two else None,
        drawn(1, 6, 1, torch.float16) if two and form.has_minimum else None,
    )


def _int4_experts(activations: Activations) -> PackedExperts:
    gate_up = torch.empty(2, group_packed_size(2 * padded(WIDTH), HIDDEN, INT4), dtype=torch.uint8)
    down = torch.empty(2, group_packed_size(HIDDEN, WIDTH, INT4), dtype=torch.uint8)
    for slot in range(2):
        pack_groups_gate_up(quantise_groups(_numbers(2 * WIDTH, HIDDEN, seed=slot + 1) / 8, INT4), gate_up[slot])
        pack_groups(quantise_groups(_numbers(HIDDEN, WIDTH, seed=slot + 3) / 8, INT4), down[slot])
    return PackedExperts(gate_up, down, HIDDEN, WIDTH, groups=GroupedExperts(INT4, INT4, activations))


def _attention() -> list[Tensor]:
    shapes = AttendShape(2, 3, 40, 0.2), AttendShape(1, 4, 72, 0.2, latent=56)
    return [result for shape in shapes for result in _attended(shape)]


def _attended(shape: AttendShape) -> list[Tensor]:
    cache, q = _numbers(96, *shape.row_shape), 4 * _numbers(4, shape.heads, shape.group, shape.width, seed=2)
    rows, sinks = _attend_rows(shape), _numbers(shape.heads * shape.group, seed=3)
    plain = recorded_once(4, lambda do: do.attend_rows(q, cache, shape), rows.address)
    results = [plain, recorded_once(4, lambda do: do.attend_rows(q, cache, shape, Seen(3, sinks=sinks)), rows.address)]
    scales = _numbers(96, shape.row_shape[0], 1 if shape.latent is None else 2, seed=4) / 100
    for dtype, factor in ((torch.int8, 127), (torch.float8_e4m3fn, 100)):
        stored = (cache * factor).to(dtype)
        record = partial(Recorder.attend_rows, q=q, cache=stored, shape=shape, scales=scales)
        results.append(recorded_once(4, record, rows.address))
    return results


def _indexed() -> list[Tensor]:
    shape, indexer = AttendShape(1, 4, 72, 0.2, latent=56), IndexerShape(3, 40, 9)
    index = _numbers(4, 3, 40, seed=3), _numbers(4, 3, seed=4), _numbers(96, 1, 40, seed=5)
    q, cache, rows = 4 * _numbers(4, 1, 4, 72, seed=2), _numbers(96, 1, 72), _attend_rows(shape)
    return [recorded_once(4, lambda do: do.attend_chosen(q, cache, shape, index, indexer), rows.address)]


def _compressed() -> list[Tensor]:
    """Returns what two sequences attend, and the rows and entries that they leave in the cache."""
    shape = CompressedShape(2, 24, 6, 5, 2, True, 3, 20, 3, scale=0.2, eps=1e-6)
    entries, index = (EntryWeights(_numbers(n), _numbers(2, 2 * n, seed=2)) for n in (24, 20))
    turns = torch.view_as_complex(_numbers(96, 3, 2, seed=3))
    weights = CompressedWeights(shape, _numbers(24, seed=4), _numbers(2, seed=5), entries, index, turns)
    given = (_numbers(4, *n, seed=6 + len(n)) for n in ((2, 24), (shape.row_width,), (3, 20), (3,)))
    rows, cache = CompressedRows(*given), _numbers(96, 1, shape.row_width, seed=9)
    slots = torch.tensor([80, 51, 52, 63])
    step = _attend_rows(AttendShape(1, 1, 1, 1.0))
    return [recorded_once(4, lambda do: do.attend_compressed(rows, weights, cache, slots), step.address), cache]


def _delta_rule() -> list[Tensor]:
    """Returns results and states of two sequences."""
    shape, results = DeltaShape(2, 4, 24, 40, 4), []
    for grouped in (False, True):
        shape = replace(shape, grouped=grouped)
        conv, decay, bias, norm = (_numbers(*n) for n in ((4, shape.channels), (4,), (4,), (40,)))
        weights = DeltaWeights(shape, conv, decay - 1.1, bias, norm, 1e-6)
        pools = [_numbers(4, *each, seed=5) for each in shape.state_shapes]
        sequences = _sequences()
        rows = _numbers(ROWS, shape.row_width, seed=6)
        record = partial(Recorder.delta_rule, x=rows, apart=None, weights=weights, pools=pools)
        results += [recorded_once(ROWS, record, sequences=sequences.address), *pools]
    return results


def _causal_conv() -> list[Tensor]:
    """Returns results and states of two sequences, of a convolution alone and of one between factors."""
    results = []
    for silu, before, after in ((True, None, None), (False, 21, 0)):
        shape = ConvShape(21, 3, 42, before, after, silu)
        weights = ConvWeights(shape, _numbers(3, 21, seed=2), _numbers(21, seed=3))
        rows, states, sequences = _numbers(ROWS, 63, seed=6), _numbers(4, *shape.state_shape, seed=5), _sequences()
        record = partial(Recorder.causal_conv, x=rows, weights=weights, states=states)
        results += [recorded_once(ROWS, record, sequences=sequences.address), states]
    return results


def _state_space() -> list[Tensor]:
    """Returns results and states of two sequences."""
    shape = MambaShape(2, 4, 9, 40, 3, conv_bias=True, bias=False)
    weights = StateSpaceWeights(shape, _numbers(4) - 1.1, _numbers(4, seed=2), _numbers(4, seed=3))
    mixed, steps = _numbers(ROWS, shape.conv.channels, seed=6), _numbers(ROWS, 4, seed=7)
    states, sequences = _numbers(4, *shape.state_shapes[1], seed=5), _sequences()
    out = recorded_once(ROWS, lambda do: do.state_space(mixed, steps, weights, states), sequences=sequences.address)
    return [out, states]


def _selective_space() -> list[Tensor]:
    """Returns results and states of two sequences."""
    shape = SelectiveShape(37, 9, 5, 3, conv_bias=True, bias=False)
    weights = SelectiveWeights(shape, in_tiles(_numbers(37, 9) - 1.1), _numbers(37, seed=2), _numbers(37, seed=3))
    rows = SelectiveRows(*(_numbers(ROWS, width, seed=6 + width) for width in (37, 37, 18, 37)))
    states, sequences = _numbers(4, *shape.state_shapes[1], seed=5), _sequences()
    out = recorded_once(ROWS, lambda do: do.selective_space(rows, weights, states), sequences=sequences.address)
    return [out, states]


def _sequences() -> SequenceStates:
    """Returns two sequences: one goes on with another state, and one keeps a copy of its own."""
    slots = torch.tensor([[2, 0, 0, 0], [-1, 1, 3, 3]])
    return SequenceStates(torch.tensor([0, 2, ROWS], dtype=torch.int32), slots)


def _attend_rows(shape: AttendShape) -> AttendRows:
    positions, starts = torch.tensor([80, 3, 4, 15]), torch.tensor([0, 1, 4], dtype=torch.int32)
    tables = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 0, 0, 0, 0, 0]], dtype=torch.int32)
    return AttendRows([shape], positions, starts, tables, 16)


def _operations() -> list[Tensor]:
    """Returns what every declared operation makes of its examples: its result, and what it has changed in place."""
    seeds = itertools.count(1)
    each = [declared for _, declared in declared_operations()]
    examples = ((one, given) for one in each for given in one.examples(lambda *n: _numbers(*n, seed=next(seeds))))
    return [result for declared, given in examples for result in _results(declared, given)]


def _results(declared: AnyOperation, given: tuple[object, ...]) -> list[Tensor]:
    tensors = [argument for argument in given if isinstance(argument, Tensor)]
    before = [_bytes(tensor).clone() for tensor in tensors]
    result = recorded_once(EXAMPLE_ROWS, lambda do: declared.record(do, *given))
    changed = [
        now.view(torch.uint8) if now.dtype == torch.float8_e4m3fn else now
        for now, then in zip(tensors, before, strict=True)
        if not torch.equal(_bytes(now), then)
    ]
    return [result, *changed] if isinstance(result, Tensor) else changed


def _sums() -> list[Tensor]:
    index = torch.arange(ROWS * 3).remainder(ROWS).view(ROWS, 3)
    return [weighted_sum(_numbers(ROWS, HIDDEN), index, _numbers(ROWS, 3, seed=8))]


def _gate() -> list[Tensor]:
    softmax, sigmoid, root = RouterSpec(24, 3), RouterSpec(24, 3, "sigmoid"), RouterSpec(24, 3, "sqrt_softplus")
    sparsemixer = RouterSpec(24, 2, "sparsemixer", norm_topk=False, jitter=0.2)
    return [*_gated(softmax), *_gated(sigmoid), *_gated(root), *_gated(sparsemixer)]


def _gated(spec: RouterSpec) -> list[Tensor]:
    logits, bias, load = 4 * _numbers(ROWS, 24), _numbers(24, seed=2), torch.zeros(24, dtype=torch.int64)
    return [*recorded_once(ROWS, lambda do: do.gate(logits, bias, spec, load)), load]


def _sampling() -> list[Tensor]:
    choices = (1.0, 1.0, 0.0, -1), (0.7, 0.9, 0.0, -1), (1.5, 1.0, 0.02, -1), (1.0, 0.8, 0.01, 40)
    rows = [(*choice, seed, seed + 3) for choice in choices for seed in range(8)]
    edits = np.array([(token, 0.1 * token, 1.3, 0.7, 0.2) for token in range(0, 300, 7)], EDIT)
    sampling = SamplingRows(np.array(rows, SAMPLING_ROW), [LogitChanges(edits)] * len(rows))
    logits = 4 * _numbers(len(rows), 300)
    return [torch.tensor(sample_rows(logits, sampling)), logits]


def _logprobs() -> list[Tensor]:
    ids, each = np.arange(2 * ROWS, dtype=np.int64), np.ones(ROWS, np.int64)
    wanted = WantedLogprobs(np.arange(0, 2 * ROWS + 1, 2, dtype=np.int64), ids, 5 * each)
    return [torch.from_numpy(numbers) for numbers in row_logprobs(4 * _numbers(ROWS, 300), wanted)]


def _turns() -> list[Tensor]:
    angles = torch.arange(64) * 0.37  # torch computes the tables of rotations on each rank
    return [angles.cos(), angles.sin()]


PROBES: tuple[Callable[[], list[Tensor]], ...] = (
    _linear,
    _experts,
    _groups,
    _attention,
    _indexed,
    _compressed,
    _delta_rule,
    _causal_conv,
    _state_space,
    _selective_space,
    _operations,
    _sums,
    _gate,
    _sampling,
    _logprobs,
    _turns,
)
