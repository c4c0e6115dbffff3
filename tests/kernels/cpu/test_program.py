"""Programs of kernel calls, and the operations that write them, against the kernels called one by one."""

import ctypes
import itertools

import pytest
import torch

from moe_serve.dispatch.layout import count_slots
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import PackedHeads, PackedLinear, RowTable
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.cpu.packed import gate_up_size, packed_size
from moe_serve.kernels.cpu.rows import pack_rows, weighted_sum
from moe_serve.kernels.cpu.tape import Input, Program, RecordedRun, RowInputs
from moe_serve.kernels.forms import INT4, SILU, GroupForm
from moe_serve.kernels.group_quantised import GroupRows
from moe_serve.kernels.numerics import COMPILED
from moe_serve.kernels.packed_memory import OWN_MEMORY
from moe_serve.kernels.part_clock import OTHER, PartClock
from moe_serve.models.decoder.weight_forms import WeightForms
from tests.kernels.test_group_quantised import FORMS, random_groups

NUM_ROWS = [0, 1, 3, 5]


def a_step(num_rows: int) -> RecordedRun:
    return RecordedRun(RowInputs(num_rows), 1, False)


def recorder(capacity: int = 5) -> Recorder:
    return Recorder(cpu_library(), capacity, PartClock())


def test_a_program_fills_in_what_changes_and_makes_its_calls_in_order() -> None:
    program, rows = Program(cpu_library(), PartClock()), Input(1)
    total, x, y = torch.zeros(3, 2), torch.ones(3, 2), torch.full((3, 2), 10.0)
    program.add(OTHER, "add_rows", total.data_ptr(), x.data_ptr(), rows, 2)
    program.add(OTHER, "add_rows", total.data_ptr(), y.data_ptr(), 1, 2)
    program.run((ctypes.c_int64 * 2)(7, 2))
    assert total.tolist() == [[11, 11], [1, 1], [0, 0]]
    program.run((ctypes.c_int64 * 2)(7, 3))
    assert total.tolist() == [[22, 22], [2, 2], [1, 1]]


def test_a_kernel_that_fails_ends_the_program_and_is_named() -> None:
    program, total, x = Program(cpu_library(), PartClock()), torch.zeros(1, 2), torch.ones(1, 2)
    table, ids, out = torch.tensor([5, 6]), torch.tensor([[1, 2]]), torch.zeros(1, 2, dtype=torch.int64)
    program.add(OTHER, "look_up", table.data_ptr(), 2, ids.data_ptr(), 1, 2, out.data_ptr())
    program.add(OTHER, "add_rows", total.data_ptr(), x.data_ptr(), 1, 2)
    with pytest.raises(RuntimeError, match="call 0 of 2 failed: look_up"):
        program.run((ctypes.c_int64 * 0)())
    assert not total.any()


def test_python_runs_between_the_kernels_also_where_there_are_no_rows() -> None:
    record, seen = recorder(), []
    x = record.buffer("x", 2)
    total = record.buffer("total", 2)
    record.add_gated_(total, x, None)
    record.call_python(lambda step: seen.append((step.rows.num_rows, total[0].tolist())))
    record.add_gated_(total, x, None)
    x.fill_(1)
    total.zero_()
    record.run(a_step(2))
    record.run(a_step(0))
    assert seen == [(2, [1, 1]), (0, [2, 2])]
    assert total.tolist() == [[2, 2], [2, 2], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_recorded_products_are_those_of_the_kernels(num_rows: int) -> None:
    linear = PackedLinear(torch.randn(37, 19), torch.randn(37))
    heads = PackedHeads(torch.randn(3, 6, 11))
    record = recorder()
    x, per_head = torch.randn(5, 19), torch.randn(5, 3, 8)
    y = record.linear("y", linear, x)
    latents = record.absorb(heads, per_head, 6)
    values = record.expand(heads, per_head[..., 2:])
    record.run(a_step(num_rows))
    assert torch.equal(y[:num_rows], linear(x[:num_rows]))
    assert torch.equal(latents[:num_rows, :, :11], heads(per_head[:num_rows, :, :6]))
    assert torch.equal(latents[:num_rows, :, 11:], per_head[:num_rows, :, 6:])
    assert torch.equal(values[:num_rows], heads(per_head[:num_rows, :, 2:]))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_recorded_experts_are_packed_computed_and_added_as_by_the_kernels(num_rows: int) -> None:
    slots, hidden, width, topk = 4, 18, 7, 2
    experts = PackedExperts(
        torch.randn(slots, gate_up_size(width, hidden)) / 4,
        torch.randn(slots, packed_size(hidden, width)),
        hidden,
        width,
    )
    record = recorder()
    x, weights = record.buffer("x", hidden), record.buffer("weights", topk)
    ids = record.buffer("ids", topk, dtype=torch.int64)
    x.normal_()
    weights.uniform_()
    ids.copy_(torch.tensor([[0, 4], [3, 1], [4, 4], [-1, 2], [2, 0]]))
    table = torch.tensor([3, 2, 1, 0, -1])  # expert 4 has no slot
    out = record.experts(x, record.look_up(table, ids), weights, experts)
    record.run(a_step(num_rows))
    rows, counts, index = pack_rows(x[:num_rows], table[ids[:num_rows]], slots)
    wanted = weighted_sum(packed_ffn(rows, counts, experts), index, weights[:num_rows])
    assert torch.equal(out[:num_rows], wanted)


@pytest.mark.parametrize("num_rows", NUM_ROWS[1:])
def test_ids_are_counted(num_rows: int) -> None:
    record = recorder()
    ids = record.buffer("ids", 2, dtype=torch.int64)
    ids.copy_(torch.tensor([[0, 3], [3, 1], [-1, 3], [-1, -1], [0, 2]]))
    counts = record.count(ids, 5)
    for _ in range(2):
        record.run(a_step(num_rows))
        assert torch.equal(counts, count_slots(ids[:num_rows], 5))
    ids[0, 0] = 5
    with pytest.raises(RuntimeError, match="count_ids"):
        record.run(a_step(num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_gathered_and_widened_and_some_of_them_projected(dtype: torch.dtype) -> None:
    table, linear = torch.randn(7, 19).to(dtype), PackedLinear(torch.randn(37, 19))
    ids, wanted, logits = torch.tensor([6, 0, 3]), torch.tensor([2, 0]), torch.zeros(2, 37)
    record = recorder()
    rows = record.gather("rows", RowTable.of(table), record.ids)
    record.project_rows(linear, rows)
    inputs = RowInputs(3, ids=ids.data_ptr(), num_logits=2, logit_rows=wanted.data_ptr(), logits=logits.data_ptr())
    record.run(RecordedRun(inputs, 1, False))
    assert torch.equal(rows[:3], table[ids].float())
    assert torch.equal(logits, linear(rows[:3][wanted]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_packed_weight_are_gathered_bit_for_bit(dtype: torch.dtype) -> None:
    for num_rows, width, threads in itertools.product((1, 31, 33, 64, 65, 200), (1, 7, 130), (1, 2)):
        weight = torch.randn(num_rows, width).to(dtype)
        table, record, ids = PackedLinear(weight).rows, recorder(num_rows), torch.randperm(num_rows)
        cpu_library().set_threads(threads)
        rows = record.gather("rows", table, record.ids)
        record.run(RecordedRun(RowInputs(num_rows, ids=ids.data_ptr()), 1, False))
        assert torch.equal(rows, weight[ids].float()), (num_rows, width)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_of_a_weight_in_groups_are_gathered_as_its_values(form: GroupForm) -> None:
    for num_rows, width in ((1, 16), (33, 300), (200, 136)):
        weight, record, ids = random_groups(form, num_rows, width), recorder(num_rows), torch.randperm(num_rows)
        rows = record.gather("rows", PackedLinear.of_groups(weight, None, "int8").rows, record.ids)
        record.run(RecordedRun(RowInputs(num_rows, ids=ids.data_ptr()), 1, False))
        assert torch.equal(rows, weight.values()[ids]), (num_rows, width)


def test_columns_of_weights_in_other_forms_lie_side_by_side() -> None:
    forms = WeightForms(COMPILED, OWN_MEMORY, SILU, "float")
    weight, bias, x = (
        GroupRows.of([random_groups(form, 37, 130) for form in FORMS[:3]]),
        torch.randn(111),
        torch.randn(3, 130),
    )
    linear, record = forms.linear(weight, bias), recorder()
    got = record.linear("y", linear, x)
    record.run(a_step(3))
    values = torch.cat([part.values() for part in weight.parts])
    assert torch.equal(got[:3], PackedLinear(values, bias)(x))
    assert torch.equal(linear(x), got[:3])


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_id_beyond_the_table_fails(bad: int) -> None:
    in_groups = PackedLinear.of_groups(random_groups(INT4, 7, 19), None, "float")
    for table in (RowTable.of(torch.randn(7, 19)), PackedLinear(torch.randn(7, 19)).rows, in_groups.rows):
        record, ids = recorder(), torch.tensor([bad])
        record.gather("rows", table, record.ids)
        with pytest.raises(RuntimeError, match="gather_rows"):
            record.run(RecordedRun(RowInputs(1, ids=ids.data_ptr()), 1, False))
