"""Memory of large bodies goes back to the kernel."""

import platform
import subprocess
import sys

import pytest

WHERE_A_LARGE_BLOCK_IS = """
import ctypes, sys
from moe_serve.server.edge.body import give_large_blocks_back
if sys.argv[1] == "bounded":
    assert give_large_blocks_back()
largest = bytearray(20 << 20)
del largest
block = bytearray(8 << 20)
address = ctypes.addressof((ctypes.c_char * 1).from_buffer(block))
for line in open("/proc/self/maps"):
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    if first <= address < last:
        print("heap" if "[heap]" in line else "its own")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the bound is glibc's")
@pytest.mark.parametrize(("mode", "place"), [("bounded", "its own"), ("as it is", "heap")])
def test_a_large_block_is_outside_the_heap_after_a_larger_one_was_freed(mode, place):
    command = [sys.executable, "-c", WHERE_A_LARGE_BLOCK_IS, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == place
