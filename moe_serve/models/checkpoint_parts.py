"""Finds the planned tensors of a model among those of a checkpoint, and compares both."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import FP8_GROUP, GroupForm
from moe_serve.models.checkpoint import BLOCK_DTYPES, DTYPES, all_tensors, has_weights
from moe_serve.models.model_files import shown
from moe_serve.models.packed_integers import packed_matrices
from moe_serve.models.spec import ModelSpec
from moe_serve.models.stored_tensor import StoredTensor
from moe_serve.models.weight_plan import (
    HEAD,
    ExpertTensor,
    Part,
    dense_tensors,
    embedding_of,
    expert_tensors,
    is_ignored,
    stored_name,
)

PACKED = "integers"  # in place of a dtype's name
SCALE_DTYPES = ("F32", "BF16", "F16")
NAMED_IN_A_MESSAGE = 8  # tensors of each kind; a wrong folder would name thousands
_COMPARED_BYTES = 1 << 24  # at a time


def as_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Returns the spec in the form of its checkpoint, where that is not what config.json or the family says.

    A projection to logits that differs from the embedding is kept by transformers, too, whatever tie_word_embeddings
    says; both are read only where both are stored. Experts that a family publishes as [E, k, n] transformers writes as
    [E, n, k], and reads by their shape. A router's bias that a family may leave out is one of zeros.
    DeepSeek-V4's authors write no "model." in front of names.
    """
    depends = spec.tie_embeddings or spec.expert_names.form == "transposed" or spec.may_lack_router_bias
    depends |= spec.streams is not None
    if not depends or not has_weights(folder):
        return spec
    tensors = all_tensors(folder)
    if spec.streams is not None and "embed.weight" in tensors:
        spec = replace(spec, body_prefix="", embedding_name="embed")
    if spec.may_lack_router_bias and not any(name.endswith(spec.expert_names.router_bias) for name in tensors):
        spec = replace(spec, router=replace(spec.router, has_bias=False))
    embedding, head = (tensors.get(stored_name(spec, name)) for name in (embedding_of(spec), HEAD))
    if embedding is not None and head is not None and not _is_copy(head, embedding):
        spec = replace(spec, tie_embeddings=False)
    down = next((each for each in expert_tensors(spec) if each.transposed and each.name == "down"), None)
    stored = None if down is None else tensors.get(down.fused[0].source)
    if down is not None and stored is not None and stored.shape[1:] == down.shape != down.fused[0].shape[1:]:
        spec = replace(spec, expert_names=replace(spec.expert_names, form="apart"))
    return spec


def _is_copy(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype_name, one.shape) != (other.dtype_name, other.shape):
        return False
    with one.path.open("rb") as a, other.path.open("rb") as b:
        a.seek(one.start)
        b.seek(other.start)
        for done in range(0, one.num_bytes, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, one.num_bytes - done)
            if a.read(size) != b.read(size):
                return False
    return True


class CheckpointParts:
    """The tensors of one checkpoint, with experts stored one by one or fused.

    tensors: by name, as `checkpoint.all_tensors` returns them
    packed:  matrices of whole numbers in several tensors, by the names that others have
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, StoredTensor]):
        self._spec = spec
        self._tensors = tensors
        self.packed = {} if spec.integers is None else packed_matrices(spec.integers, tensors)
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._unreadable: list[str] = []

    def check(self, folder: Path, keeps_fp8: bool = False) -> None:
        """Compares the whole checkpoint with the plan, including what other ranks read.

        keeps_fp8: whether experts keep their stored FP8 values, which not every checkpoint allows
        Raises ModelError with all missing, unknown, mis-shaped and unreadable tensors.
        """
        self._missing, self._misshaped, self._unreadable = [], [], []
        known: set[str] = set()
        for part in self._all_parts():
            name = self.stored_name(part)
            if name is None:
                self._missing.append(part.source)
                continue
            if (packed := self.packed.get(name)) is not None:
                known |= set(packed.tensors)
                self._misshaped += packed.problems(part.shape)
                continue
            known |= {name, self.scale_name(name)}
            self._check_part(name, part)
        self._check_order_of_fp8()
        if keeps_fp8:
            self._unreadable += self._not_kept_in_fp8()
        extra = (name for name in self._tensors if name not in known and not is_ignored(self._spec, name))
        problems = [
            f"{len(names)} {what}: {', '.join(names[:NAMED_IN_A_MESSAGE])}{', ..' * (len(names) > NAMED_IN_A_MESSAGE)}"
            for what, names in (
                ("missing", self._missing),
                ("of another shape", self._misshaped),
                ("of a dtype that is not supported", self._unreadable),
                ("unknown", [shown(name)[1:-1] for name in extra]),
            )
            if names
        ]
        if problems:
            raise ModelError(
                f"{folder}: the tensors do not fit config.json ({self._spec.model_type}): "
                f"{'; '.join(problems)}. Use the config.json and weights of one model"
            )

    def _check_part(self, name: str, part: Part) -> None:
        tensor = self._tensors[name]
        if tensor.shape != part.stored_shape:
            self._misshaped.append(f"{name} {list(tensor.shape)}, expected {list(part.stored_shape)}")
        is_known = tensor.dtype_name in DTYPES or tensor.dtype_name in BLOCK_DTYPES
        if not is_known or part.dtype_name not in (None, tensor.dtype_name):
            self._unreadable.append(f"{name} ({shown(tensor.dtype_name)[1:-1]})")
        if not tensor.dtype_name.startswith("F8"):
            return
        block, scale = self._spec.fp8_block, self.scale_name(name)
        if block is None:
            self._unreadable.append(f"{name} (FP8, but config.json has no quantization_config)")
            return
        if len(part.shape) < 2:
            self._unreadable.append(f"{name} (FP8, which only matrices are)")
            return
        stored = self._tensors.get(scale)
        wanted = (*part.shape[:-2], *block.num_scales(*part.shape[-2:]))
        if stored is None:
            self._missing.append(f"{name}_scale_inv or {name}_scale")
            return
        # The last ones may be left out where they are 1: [] or [1] for a whole tensor, [n] for channels.
        short = stored.shape[len(part.shape) - 2 :]
        if stored.shape[: len(part.shape) - 2] != wanted[:-2] or _without_last_ones(short) != _without_last_ones(
            wanted[-2:]
        ):
            self._misshaped.append(
                f"{scale} {list(stored.shape)} in {stored.path.name}, expected {list(wanted)}, as config.json says "
                f"{block}"
            )
        if stored.dtype_name not in SCALE_DTYPES:
            self._unreadable.append(f"{scale} ({shown(stored.dtype_name)[1:-1]}, expected one of {SCALE_DTYPES})")

    def _check_order_of_fp8(self) -> None:
        for plan in expert_tensors(self._spec):
            for part in () if plan.is_own_form else plan.fused:
                stored = self._tensors.get(part.source)
                if stored is not None and stored.dtype_name.startswith("F8"):
                    self._unreadable.append(f"{part.source} (FP8; only a tensor for each expert is read in FP8)")

    def _not_kept_in_fp8(self) -> Iterator[str]:
        """Yields each reason why experts cannot keep their stored FP8 values."""
        instead = "set model.expert_weights: dense"
        for plan in expert_tensors(self._spec):
            if self.is_fused(plan) and self.mixes_gate_and_up(plan):
                yield (
                    f"{plan.fused[0].source} (blocks of {FP8_GROUP} rows hold both gate and up of width "
                    f"{self._spec.moe_intermediate}; {instead})"
                )
            for part in self.parts(plan, range(self._spec.num_logical)):
                stored = self._tensors.get(part.source)
                if stored is not None and stored.dtype_name != "F8_E4M3":
                    yield f"{part.source} ({stored.dtype_name}, and only F8_E4M3 is kept in fp8; {instead})"

    def _all_parts(self) -> Iterator[Part]:
        for dense in dense_tensors(self._spec):
            yield from dense.parts
        for plan in expert_tensors(self._spec):
            yield from self.parts(plan, range(self._spec.num_logical))

    def parts(self, plan: ExpertTensor, experts: Iterable[int]) -> Iterator[Part]:
        """Yields the checkpoint tensors of these experts: the fused ones with their scales, or their own parts."""
        if self.is_fused(plan):
            yield from plan.fused
            if plan.mxfp4_scale is not None:
                yield plan.mxfp4_scale
        else:
            for expert in experts:
                yield from plan.parts_of(expert)

    def is_fused(self, plan: ExpertTensor) -> bool:
        """Returns whether all experts of a matrix are stored together."""
        return not plan.templates or plan.fused[0].source in self._tensors

    def mixes_gate_and_up(self, plan: ExpertTensor) -> bool:
        """Returns whether a block of scales of the fused tensor would hold rows of both gate and up."""
        by_channel = self._spec.fp8_block is not None and self._spec.fp8_block.by_channel
        has_both = plan.name == "gate_up" and self._spec.activation.stacks == 2
        return has_both and len(plan.fused) == 1 and not by_channel and self._spec.moe_intermediate % FP8_GROUP > 0

    def dtype_names(self, parts: Iterable[Part]) -> set[str]:
        """Returns the stored dtypes of those parts that are there."""
        names = (self.stored_name(part) for part in parts)
        return {PACKED if name in self.packed else self._tensors[name].dtype_name for name in names if name is not None}

    def group_form(self, part: Part) -> GroupForm | None:
        """Returns the form of groups in which a part is stored; None where it is stored otherwise."""
        from moe_serve.models.gguf_blocks import group_form  # which loads torch

        name = self.stored_name(part)
        if name is not None and name in self.packed:
            return self.packed[name].form(part.shape[1])
        dtype_name = "" if name is None else self._tensors[name].dtype_name
        return group_form(dtype_name) if dtype_name in BLOCK_DTYPES else None

    def stored_name(self, part: Part) -> str | None:
        """Returns the name under which a part is stored; None where it is missing."""
        names = (part.source, *part.aliases)
        return next((name for name in names if name in self._tensors or name in self.packed), None)

    def num_bytes(self, part: Part) -> int:
        """Returns the stored bytes of a part and of its scales. The checkpoint has been checked."""
        name = self.stored_name(part)
        assert name is not None
        if name in self.packed:
            return self.packed[name].num_bytes
        scale = self._tensors.get(self.scale_name(name))
        return self._tensors[name].num_bytes + (scale.num_bytes if scale else 0)

    def scale_name(self, name: str) -> str:
        """Returns the name of the scales of an FP8 tensor: DeepSeek's, or that of compressed-tensors and AutoFP8."""
        other = name + "_scale"
        return other if other in self._tensors else name + "_scale_inv"


def _without_last_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
