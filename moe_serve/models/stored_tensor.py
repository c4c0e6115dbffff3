"""The place of a tensor in a file of weights, of whichever format."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoredTensor:
    """start: its first byte, counted from the beginning of the file

    dtype_name: by the names of safetensors, or a type of blocks of GGUF;  shape: outermost first
    """

    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
