"""How this process gives memory of large bodies back. Torch-free."""

import ctypes

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20


def give_large_blocks_back() -> bool:
    """Makes malloc take each block of a megabyte or more from the kernel, to which it returns when it is freed.

    glibc raises that bound to the largest block that was freed, so after one body of 16 MiB later ones come from the
    heap, and four at a time left 50 MiB there. Returns False where malloc has no such bound (not glibc).
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except (AttributeError, OSError):
        return False
