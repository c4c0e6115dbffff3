"""Records what a GPU would be asked to do, on a machine without one: tensors have device "cuda" and no memory.

torch's operations run on fake tensors, and where Triton would start a kernel the launch is written down instead. What
needs a value of the device on the host raises: `.item()`, boolean masks, `nonzero`, sizes from data, copies to the
host. So does a copy from the host, which a captured graph would repeat with the numbers of its capture. A copy to the
host for which nobody waits is a launch.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

# Operations that only make a tensor, or another view of one, beside those whose schema says so.
_NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh"}


_CUDA, _META = 1, 14  # numbers of the kinds of device in torch


class HostRead(AssertionError):
    """Numbers go from the device to the host inside a step."""


class HostCopy(AssertionError):
    """Numbers go from the host to the device inside a step."""


@dataclass(frozen=True)
class Launch:
    """One kernel. part: of the step, of part_clock.PARTS;  tensors: that it reads or writes, each once"""

    name: str
    part: int
    tensors: tuple[Tensor, ...]
    arguments: dict[str, Any] = field(default_factory=dict)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The launches, in order.

    part: of the step that runs
    """

    def __init__(self, takes_copies: bool, takes_reads: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._takes_copies, self._takes_reads = takes_copies, takes_reads
        self.launches: list[Launch] = []
        self.part = -1

    def turn(self, part: int) -> int:
        """Stands in for PartClock.turn."""
        self.part = part
        return 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(composite):
            with self:
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten._pin_memory.default:  # which fake tensors lack
            return args[0]
        out = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(out)
        reads = any(t.is_cuda for t in given) and any(not t.is_cuda for t in made)
        if reads and func is torch.ops.aten.copy_.default and args[2:] == (True,):  # non_blocking
            self.add("copy_", [*given, *made])
        elif reads and not self._takes_reads:
            raise HostRead(f"{func} reads the device back")
        if (
            func.name() != "aten::lift_fresh"
            and not self._takes_copies
            and any(t.is_cuda for t in made)
            and any(not t.is_cuda and t.dim() for t in given)
        ):
            raise HostCopy(f"{func} copies from the host")
        name = func.name().partition("::")[2].partition(".")[0]
        if any(t.is_cuda for t in made) and not (func.is_view or name in _NO_LAUNCH):
            self.add(name, [*given, *made])
        return out

    def add(self, name: str, tensors: Sequence[Tensor], **arguments: Any) -> None:
        """Records a launch."""
        once = {id(t): t for t in tensors}
        self.launches.append(Launch(name, self.part, tuple(once.values()), arguments))


def _guard_cuda_as_meta() -> None:
    """Lets a CPU build of torch index tensors of device "cuda": its guards of "meta" do nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_CUDA] or guards[_META]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Runs its body as on a machine with an H100, on tensors without memory. Name the device with its index."""
    gpu = SimpleNamespace(multi_processor_count=132)
    _guard_cuda_as_meta()
    with (
        _replaced(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        _replaced(torch.cuda, "get_device_properties", lambda *_: gpu),
        _replaced(torch.cuda, "current_device", lambda: 0),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        yield mode


@contextlib.contextmanager
def recorded(takes_copies: bool = False, takes_reads: bool = False) -> Iterator[Recording]:
    """Records the launches of its body, which runs in `fake_gpu`.

    takes_copies, takes_reads: it may copy from the host, and tensors to it. Single numbers are never read: nobody knows
    them.
    """
    recording = Recording(takes_copies, takes_reads)

    def write_down(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        bases = [getattr(value, "base", value) for value in arguments.values()]
        recording.add(kernel.__name__, [t for t in bases if isinstance(t, Tensor)], grid=grid, **arguments)

    with _replaced(JITFunction, "run", write_down), recording:
        yield recording
