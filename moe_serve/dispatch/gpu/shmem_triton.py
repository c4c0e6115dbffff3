# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The calls of low-latency kernels on symmetric memory: signal, put and signal, wait. Nothing else knows the transport.

NVSHMEM=True calls NVSHMEM's device functions through torch's Triton bindings. NVSHMEM=False reaches peers by plain
addresses: virtual ranks on one GPU, GPUs that map each other's memory, and the interpreter on a CPU.
`peers` is an int64 array of every rank's region address; with NVSHMEM only the own entry is used.

Order: a signal is a release at system scope and follows a barrier of the program, so whatever any thread of the program
wrote before is visible to who reads the signal with acquire. Put-with-signal gives the same, row by row; nothing
assumes that two rows, or a row and another signal, arrive in order.
"""

import triton
import triton.language as tl

try:  # exists where torch sees a GPU; elsewhere NVSHMEM=True cannot be compiled, and is never asked for
    from torch.distributed._symmetric_memory._nvshmem_triton import putmem_signal_block, signal_op
except ImportError:
    putmem_signal_block = signal_op = None

HAS_NVSHMEM = putmem_signal_block is not None

_SET = tl.constexpr(0)  # NVSHMEM_SIGNAL_SET


@triton.jit
def values_of(at, HEADER_INTS: tl.constexpr, WIRE: tl.constexpr):
    """Returns a pointer to the values of the row at address `at`; both addresses are multiples of 16 bytes.

    The hint to the compiler stands on the row's address, not on the sum: Triton 3.9 turns int_to_ptr(at + header) into
    int_to_ptr(at) + header and drops a hint on the sum; values were then loaded 2 bytes at a time.
    """
    row = tl.multiple_of(at.to(tl.pointer_type(WIRE)), 16)
    return row + HEADER_INTS * 32 // WIRE.primitive_bitwidth


@triton.jit
def signal(peers, me, pe, flag_at, value, NVSHMEM: tl.constexpr):
    """Sets the flag at offset flag_at of rank pe's region to value (int64). Call tl.debug_barrier() before it.

    One thread of the program sends: Triton executes a call of another library in all of them.
    """
    if NVSHMEM:
        thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], tl.int32, is_pure=True, pack=1)
        if thread == 0:
            signal_op(tl.load(peers + me) + flag_at, value, _SET, pe)
    else:
        flag = (tl.load(peers + pe) + flag_at).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def signal_each(peers, pe, flag_at, value, mask):
    """Sets a block of flags at once, each in the region of its own rank. Plain addresses only."""
    flags = (tl.load(peers + pe, mask=mask, other=0) + flag_at).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flags, value, mask=mask, sem="release", scope="sys")


@triton.jit
def put_and_signal(
    peers, me, pe, to_at, from_at, num_bytes, flag_at, value, NVSHMEM: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies num_bytes of the own region at from_at to to_at of rank pe's region, then sets the flag there."""
    own = tl.load(peers + me)
    if NVSHMEM:
        putmem_signal_block(own + to_at, own + from_at, num_bytes.to(tl.int64), own + flag_at, value, _SET, pe)
    else:
        # 16-byte units, so that the emulation is also what moves rows between virtual ranks that stage.
        source = (own + from_at).to(tl.pointer_type(tl.int32))
        target = (tl.load(peers + pe) + to_at).to(tl.pointer_type(tl.int32))
        for start in range(0, num_bytes // 4, BLOCK):
            word = start + tl.arange(0, BLOCK)
            inside = word < num_bytes // 4
            tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)
        tl.debug_barrier()
        signal(peers, me, pe, flag_at, value, False)


@triton.jit
def wait_for(region, flag_at, round, max_spins):
    """Waits until the flag at that offset of the own region reaches `round`; returns whether it did within max_spins.

    A barrier follows, so that all threads of the program may read what the signal announced.
    """
    flag = (region + flag_at).to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    spins = 0
    while (seen < round) & (spins < max_spins):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        spins += 1
    tl.debug_barrier()
    return seen == round


@triton.jit
def wait_for_each(region, flag_at, least, mask, max_spins):
    """Waits until a block of flags reach `least`, or for max_spins; returns them, what is outside mask undefined."""
    flags = (region + flag_at).to(tl.pointer_type(tl.int64))
    nothing = tl.zeros_like(flag_at)
    seen = tl.atomic_add(flags, nothing, mask=mask, sem="acquire", scope="sys")
    spins = 0
    while (tl.min(tl.where(mask, seen, least)) < least) & (spins < max_spins):
        seen = tl.atomic_add(flags, nothing, mask=mask, sem="acquire", scope="sys")
        spins += 1
    tl.debug_barrier()
    return seen
