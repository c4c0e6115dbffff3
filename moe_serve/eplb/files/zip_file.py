"""What a zip file of unknown origin may fail with, and the names in one."""

import lzma
import struct
import zipfile
import zlib
from pathlib import Path

# A damaged directory, a damaged or encrypted member, a compression that Python does not know, sizes that are not true.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, RuntimeError,
    LookupError, OverflowError,
)  # fmt: skip


def zip_names(path: Path) -> list[str] | None:
    """Returns the names of a zip's members; None = the directory at its end is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except ZIP_ERRORS:
        return None
