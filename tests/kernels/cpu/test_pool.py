"""The kernels' threads: forked children, several callers at once, more and fewer threads."""

import os
import threading

import torch

from moe_serve.kernels.cpu.linear import PackedLinear


def test_a_forked_child_of_a_parent_with_workers_computes_the_same_bits(library):
    linear, x = PackedLinear(torch.randn(1000, 300)), torch.randn(9, 300)
    library.set_threads(2)
    wanted = linear(x)
    child = os.fork()
    if child == 0:
        # No pytest in the child: it only tells its result by its exit code.
        os._exit(0 if all(torch.equal(linear(x), wanted) for _ in range(50)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(linear(x), wanted)


def test_several_python_threads_may_call_at_once(library):
    linear, x = PackedLinear(torch.randn(1000, 300)), torch.randn(4, 9, 300)
    wanted = [linear(rows) for rows in x]
    library.set_threads(3)
    wrong = []

    def call(nth: int) -> None:
        wrong.extend(nth for _ in range(100) if not torch.equal(linear(x[nth]), wanted[nth]))

    callers = [threading.Thread(target=call, args=(nth,)) for nth in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


def test_the_number_of_threads_can_change_between_calls(library):
    linear, x = PackedLinear(torch.randn(1000, 300)), torch.randn(9, 300)
    wanted = linear(x)
    for threads in (2, 4, 1, 3, 2, 1):
        library.set_threads(threads)
        assert all(torch.equal(linear(x), wanted) for _ in range(20)), threads
