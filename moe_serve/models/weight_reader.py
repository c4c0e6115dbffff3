"""Reads the planned tensors of one checkpoint: compares the whole checkpoint with the plan, then reads one rank's part.

FP8 tensors are stored as e4m3 with a scale for every square block (128 x 128; the last of a row or column may be
partial), for every row or for the whole tensor. Dense tensors are dequantised as they are read, to float32 for the
compiled CPU kernels; experts are converted to the form of their slots.

Whatever is read is looked through for NaN and Inf, in one pass over what has just come into the cache of the CPU: one
bad number in an expert that few requests choose would fail those requests much later.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_serve.ep.expert_form import scale_of
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import FP8_GROUP, Fp8Block
from moe_serve.kernels.int8 import quantize_int8
from moe_serve.kernels.mxfp4 import dequantise_mxfp4
from moe_serve.models.checkpoint import Checkpoint
from moe_serve.models.checkpoint_parts import CheckpointParts
from moe_serve.models.expert_slots import copy_to_replicas, empty_slots, filling, put_matrix, put_mxfp4, put_rows
from moe_serve.models.model_files import shown
from moe_serve.models.stored_weights import mixes_gate_and_up
from moe_serve.models.weight_plan import DenseTensor, ExpertTensor, Part, dense_tensors, expert_tensors
from moe_serve.models.weight_share import WeightShare

_MXFP4_NAN = 255  # of scales; blocks have no such values
_FIRST_NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # without the sign

Progress = Callable[[int, int], None]  # (bytes read so far, bytes to read)


class WeightReader:
    """Reads the planned tensors of one checkpoint, with experts stored one by one or fused."""

    def __init__(self, checkpoint: Checkpoint, share: WeightShare):
        self._checkpoint = checkpoint
        self._share = share
        self._spec = share.spec
        self._parts = CheckpointParts(share.spec, checkpoint.tensors)
        self._progress: Progress | None = None
        self._total = 0

    def report_to(self, progress: Progress) -> None:
        """Calls `progress` from now on, with the bytes that the rank reads as the total."""
        self._progress, self._total = progress, self.num_bytes()
        progress(0, self._total)

    def check(self) -> None:
        """Compares the whole checkpoint with the plan, including what other ranks read.

        Raises ModelError with all missing, unknown, mis-shaped and unreadable tensors.
        """
        not_kept = self._not_kept_in_fp8() if self._share.form == "fp8" else ()
        self._parts.check(self._checkpoint.folder, not_kept)

    def _not_kept_in_fp8(self) -> Iterator[str]:
        """Yields each reason why experts cannot keep their stored FP8 values."""
        instead = "set model.expert_weights: dense"
        for plan in expert_tensors(self._spec):
            if self._parts.is_fused(plan) and mixes_gate_and_up(self._spec, plan):
                yield (
                    f"{plan.fused.source} (blocks of {FP8_GROUP} rows hold both gate and up of width "
                    f"{self._spec.moe_intermediate}; {instead})"
                )
            for part in self._parts.parts(plan, range(self._spec.num_logical)):
                stored = self._checkpoint.tensors.get(part.source)
                if stored is not None and stored.dtype_name != "F8_E4M3":
                    yield f"{part.source} ({stored.dtype_name}, and only F8_E4M3 is kept in fp8; {instead})"

    def num_bytes(self) -> int:
        """Returns how many bytes the rank reads."""
        total = sum(self._parts.num_bytes(part) for plan in dense_tensors(self._spec) for part in plan.parts)
        for plan in expert_tensors(self._spec):
            experts = self._share.slots[plan.layer_id]
            if self._parts.is_fused(plan):
                num_bytes = sum(self._parts.num_bytes(part) for part in self._parts.parts(plan, ()))
                total += num_bytes // self._spec.num_logical * len(experts)
            else:
                total += sum(self._parts.num_bytes(part) for expert in experts for part in plan.parts_of(expert))
        return total

    def dense(self, plan: DenseTensor) -> dict[str, Tensor]:
        """Returns a dense tensor on the device, and the scales of one that is kept in FP8, by name."""
        out = torch.empty(plan.shape, dtype=self._share.dense_dtype(plan), device=self._share.device)
        scales, row = [], 0
        for part in plan.parts:
            rows = out[row : row + part.shape[0]]
            row += part.shape[0]
            if out.dtype != torch.float8_e4m3fn:
                self._read(part, rows)
                continue
            values, of_part = self._stored_fp8(part, None)
            rows.copy_(values)
            scales.append(of_part)
            self._report()
        return {plan.name: out, scale_of(plan.name): torch.cat(scales)} if scales else {plan.name: out}

    def experts(self, plan: ExpertTensor) -> dict[str, Tensor]:
        """Returns the slots of one matrix, and of its scales where the form has them, by name.

        Each is [num_slots, ...]. Every expert is read once, in ascending order, so that files are read forward.
        """
        out = empty_slots(plan, self._share)
        slots = self._share.slots[plan.layer_id]
        for expert in sorted(slots):
            first, *replicas = slots[expert]
            self._put_expert(plan, expert, out, first)
            copy_to_replicas(out, first, replicas)
        return out

    def expert(self, plan: ExpertTensor, expert: int) -> dict[str, Tensor]:
        """Returns one expert of a matrix, and its scales where the form has them, by name: [1, ...]."""
        out = empty_slots(plan, self._share, num_slots=1)
        self._put_expert(plan, expert, out, 0)
        return out

    def _put_expert(self, plan: ExpertTensor, expert: int, slots: dict[str, Tensor], slot: int) -> None:
        row = 0
        with filling(plan, self._share, slots, slot) as (tensors, at):
            if self._parts.is_fused(plan) and not plan.is_own_form:
                if plan.mxfp4_scale is not None and self._share.form == "mxfp4":
                    put_mxfp4(tensors, at, plan.name, *self._stored_mxfp4(plan, plan.mxfp4_scale, expert))
                else:
                    put_matrix(tensors, at, plan.name, self._share.form, self._brought_into_form(plan, expert))
                self._report()
                return
            for part in self._parts.parts(plan, (expert,)):
                self._put(part, expert if self._parts.is_fused(plan) else None, tensors, at, plan.name, row)
                row += part.shape[-2]

    def _brought_into_form(self, plan: ExpertTensor, expert: int) -> Tensor:
        """Returns one expert of a fused tensor in another form than ours: [n, k], or biases [n]."""
        if plan.mxfp4_scale is not None:
            return dequantise_mxfp4(*self._stored_mxfp4(plan, plan.mxfp4_scale, expert))
        values = self._rows(plan.fused.source, expert)
        return _gate_above_up(plan, values.t() if plan.turned else values)

    def _stored_mxfp4(self, plan: ExpertTensor, scale: Part, expert: int) -> tuple[Tensor, Tensor]:
        """Returns the blocks and scales of one expert as they are stored, rows of gate before those of up."""
        blocks, scales = self._rows(plan.fused.source, expert), self._rows(scale.source, expert)
        if int(scales.max()) == _MXFP4_NAN:
            raise self._not_finite(scale.source, expert)
        return _gate_above_up(plan, blocks), _gate_above_up(plan, scales)

    def _put(self, part: Part, expert: int | None, slots: dict[str, Tensor], slot: int, name: str, row: int) -> None:
        """Writes stored rows of one expert into its slot from `row` on, in the form of the slots."""
        match self._share.form:
            case "dense":
                self._read(part, slots[name][slot, row : row + part.shape[-2]], expert)
            case "int8":
                values = torch.empty(part.shape[-2:])
                self._read(part, values, expert)
                put_rows(slots, slot, name, row, *quantize_int8(values))
            case "fp8":
                put_rows(slots, slot, name, row, *self._stored_fp8(part, expert))
                self._report()
            case "mxfp4":
                raise AssertionError(f"{part.source} is not in MXFP4")

    def _read(self, part: Part, out: Tensor, expert: int | None = None) -> None:
        """Fills `out` with a stored tensor, or with one expert of a fused one."""
        name = self._parts.stored_name(part)
        assert name is not None
        values = self._rows(name, expert)
        if values.dtype.itemsize == 1 and values.is_floating_point():
            values = dequantise(values, self._scales(name, values, expert), self._fp8_block)
        out.copy_(values)
        self._report()

    def _stored_fp8(self, part: Part, expert: int | None) -> tuple[Tensor, Tensor]:
        """Returns the values of an FP8 tensor and its scales as slots have them: [block rows, block columns] or [n]."""
        name = self._parts.stored_name(part)
        assert name is not None
        values = self._rows(name, expert)
        scales = self._scales(name, values, expert)
        return values, scales.expand(len(values), 1).flatten() if self._fp8_block.by_channel else scales

    @property
    def _fp8_block(self) -> Fp8Block:
        assert self._spec.fp8_block is not None
        return self._spec.fp8_block

    def _scales(self, name: str, values: Tensor, expert: int | None) -> Tensor:
        """Returns the scales of FP8 values [rows, columns] as float32, [block rows, block columns]."""
        return self._rows(self._parts.scale_name(name), expert).float().view(self._fp8_block.num_scales(*values.shape))

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._checkpoint.bytes_read, self._total)

    def _rows(self, name: str, expert: int | None) -> Tensor:
        """Returns a stored tensor, or one expert of a fused one. Raises ModelError for numbers that are not finite."""
        rows = self._checkpoint.read(name) if expert is None else self._checkpoint.read(name, expert, 1)[0]
        if not all_finite(rows, self._share.dtype):
            raise self._not_finite(name, expert)
        return rows

    def _not_finite(self, name: str, expert: int | None) -> ModelError:
        of_expert = "" if expert is None else f" of expert {expert}"
        return ModelError(
            f"{self._checkpoint.tensors[name].path}: tensor {shown(name)[1:-1]} holds numbers{of_expert} that are not "
            f"finite in {str(self._share.dtype).removeprefix('torch.')} (NaN or Inf), so no answer could be computed; "
            "download the file again, or convert the model again"
        )


def all_finite(values: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether all stored numbers are finite in a dtype. Takes one pass, and no memory beside the values."""
    if not values.is_floating_point() or not values.numel():
        return True
    if values.dtype.itemsize == 1:  # of which each sign's numbers are in the order of their bytes, with NaN last
        first = _FIRST_NOT_FINITE[values.dtype]
        as_signed, as_unsigned = values.view(torch.int8), values.view(torch.uint8)
        return int(as_signed.max()) < first and int(as_unsigned.max()) < first + 128
    low, high = (float(edge) for edge in torch.aminmax(values))  # NaN where there is one
    largest = torch.finfo(dtype).max
    return -largest <= low and high <= largest


def _gate_above_up(plan: ExpertTensor, rows: Tensor) -> Tensor:
    """Returns the rows of a matrix, those of gate before those of up where they alternate in the checkpoint."""
    return torch.cat((rows[0::2], rows[1::2])) if plan.interleaved else rows


def dequantise(values: Tensor, scales: Tensor, block: Fp8Block) -> Tensor:
    """Returns the float32 weight of an FP8 checkpoint: each block times its scale.

    values: [rows, columns] fp8;  scales: float32, block.num_scales(rows, columns), for partial blocks too
    """
    for dim, edge in enumerate((block.rows, block.columns)):
        if edge is not None:  # else there is one scale, which multiplies all
            scales = scales.repeat_interleave(edge, dim)
    return values.float() * scales[: values.shape[0], : values.shape[1]]
