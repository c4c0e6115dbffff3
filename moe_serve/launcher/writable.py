"""Whether a file can be written, asked before the work whose result goes there. Torch-free."""

import os
from pathlib import Path


def why_not_writable(path: Path) -> str | None:
    """Returns what keeps this process from writing a file; None: nothing does."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.exists() and not path.is_file():
        return "it is not a regular file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "Permission denied"
    return None
