"""Reads the planned tensors of one checkpoint: compares the whole checkpoint with the plan, then reads one rank's part.

FP8 tensors are stored as e4m3 with a scale for every square block (128 x 128; the last of a row or column may be
partial). Dense tensors are dequantised as they are read, to float32 for the compiled CPU kernels; experts are converted
to the form of their slots.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from moe_serve.errors import ModelError
from moe_serve.kernels.block_scales import GROUP
from moe_serve.kernels.grouped_gemm_int8 import quantize_int8
from moe_serve.models.checkpoint import DTYPES, Checkpoint
from moe_serve.models.expert_slots import copy_to_replicas, empty_slots, filling, put_rows
from moe_serve.models.weight_plan import DenseTensor, ExpertTensor, Part, dense_tensors, expert_tensors, is_ignored
from moe_serve.models.weight_share import WeightShare

Progress = Callable[[int, int], None]  # (bytes read so far, bytes to read)

NAMED_IN_A_MESSAGE = 8  # tensors of each kind; a wrong folder would name thousands


class WeightReader:
    """Reads the planned tensors of one checkpoint, with experts stored one by one or fused."""

    def __init__(self, checkpoint: Checkpoint, share: WeightShare):
        self._checkpoint = checkpoint
        self._share = share
        self._spec = share.spec
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
        stored = self._checkpoint.tensors
        missing: list[str] = []
        misshaped: list[str] = []
        unreadable: list[str] = []
        known: set[str] = set()
        for part in self._all_parts():
            name = self._stored_name(part)
            if name is None:
                missing.append(part.source)
                continue
            tensor = stored[name]
            scale = self._scale_name(name)
            known |= {name, scale}
            if tensor.shape != part.shape:
                misshaped.append(f"{name} {list(tensor.shape)}, expected {list(part.shape)}")
            if tensor.dtype_name not in DTYPES:
                unreadable.append(f"{name} ({tensor.dtype_name})")
            if tensor.dtype_name.startswith("F8"):
                self._check_scale(name, scale, part, missing, misshaped, unreadable)
        if self._share.form == "fp8":
            unreadable += self._not_kept_in_fp8()
        extra = [name for name in stored if name not in known and not is_ignored(self._spec, name)]
        problems = [
            f"{len(names)} {what}: {', '.join(names[:NAMED_IN_A_MESSAGE])}{', ..' * (len(names) > NAMED_IN_A_MESSAGE)}"
            for what, names in (
                ("missing", missing),
                ("of another shape", misshaped),
                ("of a dtype that is not supported", unreadable),
                ("unknown", extra),
            )
            if names
        ]
        if problems:
            raise ModelError(
                f"{self._checkpoint.folder}: the tensors do not fit config.json ({self._spec.model_type}): "
                f"{'; '.join(problems)}. Use the config.json and weights of one model"
            )

    def _check_scale(
        self, name: str, scale: str, part: Part, missing: list[str], misshaped: list[str], unreadable: list[str]
    ) -> None:
        block = self._spec.fp8_block
        if block is None:
            unreadable.append(f"{name} (FP8, but config.json has no quantization_config)")
            return
        stored = self._checkpoint.tensors.get(scale)
        wanted = (*part.shape[:-2], -(-part.shape[-2] // block), -(-part.shape[-1] // block))
        if stored is None:
            missing.append(scale)
        elif stored.shape != wanted:
            misshaped.append(f"{scale} {list(stored.shape)}, expected {list(wanted)}")

    def _not_kept_in_fp8(self) -> Iterator[str]:
        """Yields each reason why experts cannot keep their stored FP8 values."""
        instead = "set model.expert_weights: dense"
        for plan in expert_tensors(self._spec):
            if self._is_fused(plan) and plan.name == "gate_up" and self._spec.moe_intermediate % GROUP:
                yield (
                    f"{plan.fused.source} (blocks of {GROUP} rows hold both gate and up of width "
                    f"{self._spec.moe_intermediate}; {instead})"
                )
            for part in self._parts(plan, range(self._spec.num_logical)):
                stored = self._checkpoint.tensors.get(part.source)
                if stored is not None and stored.dtype_name != "F8_E4M3":
                    yield f"{part.source} ({stored.dtype_name}, and only F8_E4M3 is kept in fp8; {instead})"

    def _all_parts(self) -> Iterator[Part]:
        for dense in dense_tensors(self._spec):
            yield from dense.parts
        for plan in expert_tensors(self._spec):
            yield from self._parts(plan, range(self._spec.num_logical))

    def _parts(self, plan: ExpertTensor, experts: Iterable[int]) -> Iterator[Part]:
        """Yields the checkpoint tensors of these experts: the fused one, or their own parts."""
        if self._is_fused(plan):
            yield plan.fused
        else:
            for expert in experts:
                yield from plan.parts_of(expert)

    def _is_fused(self, plan: ExpertTensor) -> bool:
        return plan.fused.source in self._checkpoint.tensors

    def _stored_name(self, part: Part) -> str | None:
        return next((name for name in (part.source, *part.aliases) if name in self._checkpoint.tensors), None)

    @staticmethod
    def _scale_name(name: str) -> str:
        return name + "_scale_inv"

    def num_bytes(self) -> int:
        """Returns how many bytes the rank reads."""
        total = sum(self._part_bytes(part) for plan in dense_tensors(self._spec) for part in plan.parts)
        for plan in expert_tensors(self._spec):
            experts = self._share.slots[plan.layer_id]
            if self._is_fused(plan):
                total += self._part_bytes(plan.fused) // self._spec.num_logical * len(experts)
            else:
                total += sum(self._part_bytes(part) for expert in experts for part in plan.parts_of(expert))
        return total

    def _part_bytes(self, part: Part) -> int:
        name = self._stored_name(part)
        assert name is not None
        scale = self._checkpoint.tensors.get(self._scale_name(name))
        return self._checkpoint.tensors[name].num_bytes + (scale.num_bytes if scale else 0)

    def dense(self, plan: DenseTensor) -> Tensor:
        """Returns a dense tensor on the device."""
        out = torch.empty(plan.shape, dtype=self._share.dense_dtype(plan), device=self._share.device)
        row = 0
        for part in plan.parts:
            self._read(part, out[row : row + part.shape[0]])
            row += part.shape[0]
        return out

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
            for part in self._parts(plan, (expert,)):
                self._put(part, expert if self._is_fused(plan) else None, tensors, at, plan.name, row)
                row += part.shape[-2]

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

    def _read(self, part: Part, out: Tensor, expert: int | None = None) -> None:
        """Fills `out` with a stored tensor, or with one expert of a fused one."""
        name = self._stored_name(part)
        assert name is not None
        values = self._rows(name, expert)
        if values.dtype.itemsize == 1 and values.is_floating_point():
            assert self._spec.fp8_block is not None
            values = dequantise(values, self._rows(self._scale_name(name), expert), self._spec.fp8_block)
        out.copy_(values)
        self._report()

    def _stored_fp8(self, part: Part, expert: int | None) -> tuple[Tensor, Tensor]:
        """Returns the values and block scales of an FP8 tensor as they are stored."""
        name = self._stored_name(part)
        assert name is not None
        return self._rows(name, expert), self._rows(self._scale_name(name), expert)

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._checkpoint.bytes_read, self._total)

    def _rows(self, name: str, expert: int | None) -> Tensor:
        return self._checkpoint.read(name) if expert is None else self._checkpoint.read(name, expert, 1)[0]


def dequantise(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Returns the float32 weight of an FP8 checkpoint: each `block` x `block` square times its scale.

    values: [rows, columns] fp8;  scales: [ceil(rows / block), ceil(columns / block)], for partial blocks too
    """
    wide = scales.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]
