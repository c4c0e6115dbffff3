"""The forms in which a rank keeps its expert weights (`model.expert_weights`), and the tensors of a slot in each form.

dense   gate_up and down in the compute dtype; for the compiled CPU kernels in bfloat16 where they are stored so
fp8     the e4m3 values of an FP8 checkpoint with its float32 scale for each 128 x 128 block, or each output channel,
        which a scale of a whole tensor becomes: half of bfloat16
int8    a float32 scale for each output channel, quantised at load, CPU only: a quarter of float32, with numbers that
        differ from the checkpoint's
mxfp4   the numbers of four bits of an MXFP4 checkpoint with a power of two for each 32, for the compiled CPU kernels
        and for GPUs: 4.25 bits where bfloat16 has 16
int4    numbers of four bits and a float16 scale for each 32, quantised at load, for the compiled CPU kernels only: 4.5
        bits, with numbers that differ from the checkpoint's
groups  the codes and scales of a checkpoint in groups (GGUF, GPTQ, AWQ), for the compiled CPU kernels only; the form
        of the groups may differ between layers

For the compiled CPU kernels matrices are packed (kernels/cpu/packed.py). They widen weights as they read them and leave
rows alone, unless `model.activations` says int8, as Triton does with MXFP4; torch and Triton quantise rows too before
they multiply them with FP8 or int8.

Shape words: H = hidden, I = width of an expert.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.packed import gate_up_size, group_packed_size, packed_size, padded
from moe_serve.kernels.forms import (
    FP8_GROUP,
    INT4,
    MXFP4_BLOCK,
    SILU,
    Activation,
    Fp8Block,
    GroupForm,
    num_groups,
    num_scale_rows,
)
from moe_serve.kernels.group_quantised import Activations
from moe_serve.kernels.quantised import has_vnni

ExpertForm = Literal["dense", "fp8", "int8", "mxfp4", "int4", "groups"]

MATRICES = ("gate_up", "down")  # of an expert


def choose_expert_form(
    wanted: str,
    fp8_block: Fp8Block | None,
    device_type: str,
    has_e4m3: bool,
    compiled: bool = False,
    in_mxfp4: bool = False,
    has_narrow_rows: bool = False,
    in_groups: bool = False,
) -> ExpertForm:
    """Returns the form that the setting selects for this checkpoint and device.

    wanted: model.expert_weights;  fp8_block: what shares a scale in the checkpoint, None where it is not FP8
    has_e4m3: whether the GPU multiplies e4m3 (sm_89 and later), or compiled kernels widen what is stored so
    compiled: whether the compiled CPU kernels compute
    in_mxfp4: whether the checkpoint has its experts in MXFP4
    has_narrow_rows: whether the compute dtype is bfloat16 or float16, with which GPUs multiply MXFP4
    in_groups: whether it has all of them in groups that the compiled kernels multiply
    Raises ConfigError for a form that is not possible, naming one that is.
    """
    on_gpu = device_type == "cuda"
    takes_mxfp4 = compiled or (on_gpu and has_narrow_rows)
    match wanted:
        case "auto":
            if in_mxfp4 and takes_mxfp4:
                return "mxfp4"
            if in_groups and compiled:
                return "groups"
            return "fp8" if has_e4m3 and fp8_block is not None and fp8_block.is_kept else "dense"
        case "dense":
            return "dense"
        case "fp8":
            if fp8_block is None:
                raise ConfigError(
                    "model.expert_weights is fp8 but the checkpoint is not FP8 (config.json has no FP8 "
                    "quantization_config); fp8 keeps the values of an FP8 checkpoint: set model.expert_weights: auto"
                )
            if not fp8_block.is_kept:
                raise ConfigError(
                    f"model.expert_weights is fp8 but the checkpoint has {fp8_block} and the kernels take "
                    f"{FP8_GROUP} x {FP8_GROUP}, or scales per channel or tensor; set model.expert_weights: dense"
                )
            if on_gpu and not has_e4m3:
                raise ConfigError(
                    "model.expert_weights is fp8 but this GPU has no e4m3 (sm_89 and later do); "
                    "set model.expert_weights: dense"
                )
            return "fp8"
        case "int8":
            if on_gpu:
                raise ConfigError(
                    "model.expert_weights is int8 but the ranks run on GPUs; int8 is for CPUs: "
                    "set model.expert_weights: auto"
                )
            if not compiled and not has_vnni():
                raise ConfigError(
                    "model.expert_weights is int8 but this CPU has no AVX-512 VNNI, and other int8 products of torch "
                    "saturate; set model.expert_weights: auto, or serve with the compiled kernels (docs/numerics.md)"
                )
            return "int8"
        case "mxfp4":
            if not in_mxfp4:
                raise ConfigError(
                    "model.expert_weights is mxfp4 but the checkpoint is not (config.json of gpt-oss "
                    "says so in quantization_config); mxfp4 keeps the values of an MXFP4 checkpoint: "
                    "set model.expert_weights: auto"
                )
            if not takes_mxfp4:
                raise ConfigError(
                    "model.expert_weights is mxfp4 but only the compiled CPU kernels, and GPUs with rows of bfloat16, "
                    "multiply it, and neither compute here (docs/numerics.md); set model.expert_weights: dense"
                )
            return "mxfp4"
        case "int4":
            if not compiled:
                raise ConfigError(
                    "model.expert_weights is int4 but only the compiled CPU kernels multiply it, and they do not "
                    f"compute here (docs/numerics.md); set model.expert_weights: {'dense' if on_gpu else 'int8'}"
                )
            return "int4"
        case _:
            raise ConfigError(f"model.expert_weights is {wanted!r}; choose one of auto, dense, fp8, int8, mxfp4, int4")


def choose_activations(wanted: str, form: ExpertForm, has_groups: bool = False) -> Activations:
    """Returns what weights in groups are multiplied with, experts of this form among them.

    wanted: model.activations;  has_groups: whether dense weights are in groups
    Raises ConfigError where no product takes int8.
    """
    if has_groups or form in ("int4", "groups"):
        return "float" if wanted == "float" else "int8"
    if wanted == "int8":
        raise ConfigError(
            f"model.activations is int8 but experts are kept as {form}, and no weights are in groups: the "
            "kernels multiply them with float32 alone; set model.activations: auto, or model.expert_weights: int4"
        )
    return "float"


def has_e4m3(device: torch.device | str) -> bool:
    """Returns whether the CUDA device multiplies e4m3; True where no GPU is present, as `check` then plans for one."""
    if torch.device(device).type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True)
class SlotForm:
    """The tensors of one slot: an expert of one layer.

    hidden, width: H and I;  dtype: of the values in form dense
    packed: whether matrices are packed for the compiled CPU kernels
    by_channel: whether form fp8 has a scale for each output channel, not for each 128 x 128
    has_bias: whether gate, up and down have biases, which are float32 in every form
    activation: between gate and up, and down
    activations: of forms int4 and groups: what goes into their products
    stored_groups: of form groups: the forms of gate_up and of down
    """

    form: ExpertForm
    hidden: int
    width: int
    dtype: torch.dtype
    packed: bool = False
    by_channel: bool = False
    has_bias: bool = False
    activation: Activation = SILU
    activations: Activations = "float"
    stored_groups: tuple[GroupForm, GroupForm] | None = None

    @property
    def groups(self) -> tuple[GroupForm, GroupForm] | None:
        """The forms of gate_up and of down where weights are in groups; None: they are not."""
        return (INT4, INT4) if self.form == "int4" else self.stored_groups

    @property
    def label(self) -> str:
        """The form in a few words, equal for stores that can exchange experts of one model, and give it equal bits."""
        dtype = f" {str(self.dtype).removeprefix('torch.')}" if self.form == "dense" else ""
        multiplied = "" if self.groups is None else f" by {self.activations}"
        return f"{self.form}{dtype}{multiplied}{', packed' if self.packed else ''}"

    @property
    def meaning(self) -> str:
        """A description of the form's numbers."""
        match self.form:
            case "dense":
                return f"the checkpoint's numbers in {str(self.dtype).removeprefix('torch.')}"
            case "fp8":
                rows = "widened exactly to float32" if self.packed else "rows are quantised 1 x 128 before each product"
                return f"the checkpoint's own FP8 values and scales; {rows}"
            case "int8":
                return f"not the checkpoint's numbers: {'weights' if self.packed else 'weights and rows'} are rounded"
            case "mxfp4":
                return "the checkpoint's own values of four bits and their powers of two; widened exactly"
            case "int4":
                rows = "are rounded to int8, too" if self.activations == "int8" else "are not"
                return f"not the checkpoint's numbers: weights are rounded to {INT4}; rows {rows}"
            case "groups":
                rows = "rows are rounded to int8" if self.activations == "int8" else "widened exactly to float32"
                return f"the checkpoint's own codes and scales ({self._kept_groups()}); {rows}"

    def _kept_groups(self) -> str:
        assert self.stored_groups is not None
        gate_up, down = self.stored_groups
        return str(gate_up) if gate_up == down else f"{gate_up}; down: {down}"

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, by name.

        gate_up: [2 I, H], gate rows first, or [I, H] where there is no gate;  down: [H, I];  packed ones: [elements];
        NAME_scale: fp8 [stacks x ceil(n / stacks / 128), ceil(k / 128)] for a matrix of n x k, by channel [n], int8
        [n], mxfp4 [n, k / 32], packed as the matrix is, which has two numbers in a byte, [n, k / 2];  int4, groups:
        bytes, with the scales among them;  NAME_bias: [n] float32
        """
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        sizes = (self.stacks("gate_up") * self.width, self.hidden), (self.hidden, self.width)
        for name, (n, k) in zip(MATRICES, sizes, strict=True):
            shape = self._shape(name, n, k)
            match self.form:
                case "dense":
                    tensors[name] = shape, self.dtype
                case "fp8":
                    tensors[name] = shape, torch.float8_e4m3fn
                    blocks = num_scale_rows(n, self.stacks(name)), num_groups(k)
                    tensors[scale_of(name)] = (n,) if self.by_channel else blocks, torch.float32
                case "int8":
                    tensors[name] = shape, torch.int8
                    tensors[scale_of(name)] = (n,), torch.float32
                case "mxfp4":
                    tensors[name] = self._shape(name, n, k // 2), torch.uint8
                    tensors[scale_of(name)] = self._shape(name, n, k // MXFP4_BLOCK), torch.uint8
                case "int4" | "groups":
                    assert self.packed, "only the compiled kernels multiply weights in groups"
                    assert self.groups is not None, "the form of the groups is not given"
                    up_rows = self.stacks("gate_up") * padded(self.width)
                    rows, form = (n, self.groups[1]) if name == "down" else (up_rows, self.groups[0])
                    tensors[name] = (group_packed_size(rows, k, form),), torch.uint8
            if self.has_bias:
                tensors[bias_of(name)] = (n,), torch.float32
        return tensors

    def stacks(self, name: str) -> int:
        """Returns how many matrices, one above the other, a matrix of MATRICES holds."""
        return self.activation.stacks if name == "gate_up" else 1

    def _shape(self, name: str, n: int, k: int) -> tuple[int, ...]:
        """Returns the shape of a matrix of n x k elements."""
        if not self.packed:
            return n, k
        return (packed_size(n, k) if name == "down" else gate_up_size(self.width, k, self.stacks(name)),)

    @property
    def num_bytes(self) -> int:
        """Size of one expert."""
        return sum(math.prod(shape) * kind.itemsize for shape, kind in self.tensors.values())


def scale_of(name: str) -> str:
    """Returns the name of a matrix's scales."""
    return name + "_scale"


def bias_of(name: str) -> str:
    """Returns the name of a matrix's biases."""
    return name + "_bias"
