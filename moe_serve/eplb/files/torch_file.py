"""Reading `.pt` files that others wrote, without running anything in them.

The only place of this package that imports torch, and only when a `.pt` file is really read. A file that wants to call
code while it is loaded is refused by name; so is one too large to hold in memory, because a `.pt` cannot be streamed.
"""

import zipfile
from pathlib import Path
from typing import Any

from moe_serve.eplb.files.zip_file import ZIP_ERRORS, zip_names
from moe_serve.errors import MoeServeError

MAX_TORCH_BYTES = 1 << 30  # 1 GiB: what a `.pt` may weigh before it has to be converted first


def is_torch_file(path: Path) -> bool:
    """Returns whether a file is one that `torch.save` wrote, by content: a zip with a data.pkl, or the older format."""
    with path.open("rb") as file:
        head = file.read(16)
    if head[:4] == b"PK\x03\x04":
        names = zip_names(path)
        if names is None:
            return path.suffix in (".pt", ".pth", ".bin")
        return any(name.endswith("/data.pkl") or name == "data.pkl" for name in names)
    # The older format begins with its magic number as protocol 2: PROTO 2, LONG1 of 10 bytes.
    return head[:4] == b"\x80\x02\x8a\x0a"


def load_torch_file(
    path: Path, error: type[MoeServeError], max_bytes: int = MAX_TORCH_BYTES
) -> Any:  # tensors in plain containers
    """Returns the content of a `.pt` file: tensors on the CPU in dicts, lists and numbers.

    Raises `error`: too large, truncated, torch not installed, or a file that carries code.
    """
    size = max(path.stat().st_size, _unpacked_bytes(path))
    if size > max_bytes:
        raise error(
            f"{path} has {size / 2**30:.2f} GiB and a .pt is read whole, up to {max_bytes / 2**30:.2f} GiB; "
            f"convert it once on a machine with that much memory: "
            f"moe-serve convert {path} {path.with_suffix('.npz').name} --max-pt-gib {-(-size // 2**30)}"
        )
    try:
        import torch
    except ImportError:
        raise error(
            f"{path} is a torch file and torch is not installed here; install torch, or convert it where torch is: "
            f"moe-serve convert {path} {path.with_suffix('.npz').name}"
        ) from None
    # The name of an exception, nothing more: what weights_only=True raises when a file asks for a call.
    from pickle import UnpicklingError

    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UnpicklingError as problem:
        reason = str(problem)
        if "GLOBAL" in reason or "Unsupported" in reason or "allowed global" in reason:
            wanted = next((word.rstrip(".,") for word in reason.split() if "." in word and word[0].isalpha()), "a call")
            raise error(
                f"{path} carries code (it asks for {wanted}) and is refused; only tensors in dicts, lists and numbers "
                f"are read; write the dump again with the engine's own recorder"
            ) from None
        raise error(f"{path} is not a complete torch file ({_first_line(reason)}); copy or dump it again") from None
    except (*ZIP_ERRORS, TypeError, AttributeError, AssertionError, RecursionError, MemoryError) as problem:
        raise error(
            f"{path} is not a complete torch file ({_first_line(str(problem))}); copy or dump it again"
        ) from None
    _refuse_stretched(content, path, error)
    return content


def _refuse_stretched(content: Any, path: Path, error: type[MoeServeError]) -> None:
    """Refuses tensors that repeat few stored values over a large shape: they would unfold in memory."""
    left, seen = [content], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif hasattr(value, "untyped_storage") and str(value.layout) == "torch.strided":
            claimed, held = value.numel() * value.element_size(), value.untyped_storage().nbytes()
            if claimed > held:
                raise error(
                    f"{path}: a tensor of shape {list(value.shape)} claims {claimed} bytes and holds {held}; save it "
                    f"with .contiguous()"
                )


def _unpacked_bytes(path: Path) -> int:
    """Returns what the members of a zip weigh unpacked; 0 for the older format. torch.save does not compress."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())
    except ZIP_ERRORS:
        return 0


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:160] if text.strip() else "nothing readable"
