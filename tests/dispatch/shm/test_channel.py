"""Waits for flags: they count for whom they wait, and lend the core meanwhile."""

import numpy as np
import pytest

from moe_serve.dispatch.shm.channel import FirstWait, FlagWait
from moe_serve.dispatch.shm.region import OWNER_WORDS
from moe_serve.dispatch.shm.row_copy_native import load_library
from moe_serve.dispatch.shm.shared_cores import WAITS, SharedCores
from moe_serve.errors import PeerError
from moe_serve.kernels.cpu.library import find_cpu_library

pytestmark = pytest.mark.skipif(find_cpu_library() is None, reason="needs a C compiler")
CORE = 7


def test_a_rank_lends_its_core_while_it_waits_and_takes_it_back_also_when_the_wait_fails() -> None:
    pages = [np.zeros(OWNER_WORDS, dtype=np.int64) for _ in range(3)]
    cores = SharedCores(0, pages)
    try:
        words = [page[16:17].view(np.uint32) for page in pages]
        words[0][0] = words[1][0] = CORE
        flags, seen = np.zeros(3, dtype=np.int64), []

        def check(missing: list[int], *_: object) -> None:
            seen.append(int(words[0][0]))
            if len(seen) == 2:
                raise PeerError("rank 1 is late", 1, "dispatch", 1)
            flags[1] = 1

        wait = FlagWait(3, 0.01, check, cores)
        wait(flags, 1, [1], "dispatch", 1)
        assert words[0][0] == CORE
        flags[1] = 0
        with pytest.raises(PeerError):
            wait(flags, 1, [1], "dispatch", 1)
        assert seen == [CORE | WAITS] * 2
        assert words[0][0] == CORE
        cores.give_all_but([0, 2])  # rank 1 was lost
        assert [int(word[0]) for word in words] == [CORE, CORE | WAITS, 0]
    finally:
        cores.close()


def test_the_first_milliseconds_of_a_wait_are_counted_for_the_rank_that_is_late() -> None:
    library, _ = load_library()
    assert library is not None
    waited_ns, flags = np.zeros(3, dtype=np.int64), np.zeros((3, 5), dtype=np.int64)
    first = FirstWait(library, 0, waited_ns, looks=10)
    flags[:, 2] = 7, 6, 5
    assert not first(flags[:, 2], 6, 0b110, or_more=True)
    assert waited_ns[2] >= 2_000_000
    assert waited_ns[0] == waited_ns[1] == 0
    flags[2, 2] = 6
    assert first(flags[:, 2], 6, 0b110)
    assert not first(flags[:, 2], 6, 0b001)
    assert first(flags[:, 2], 6, 0b001, or_more=True)
