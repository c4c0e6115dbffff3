"""The planner process: it plans beside its parent, survives nothing it need not, and leaves nothing behind.

Its bytes are whole in any pieces, and refused where they are not.
"""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_serve.eplb.migration.moves import RoundLimits
from moe_serve.eplb.migration.plan import migration_to
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planner_process import (
    PIECE_BYTES,
    Ask,
    MessageReader,
    PlanAnswer,
    PlannerProcess,
    PlanProblem,
    Reply,
    WireError,
    answer,
    pieces,
)
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest, RankCost
from moe_serve.topology import Topology

PATIENCE_S = 60.0


@pytest.fixture
def planners():
    """Makes planners, and checks that closing them leaves no process."""
    made = []

    def make(**more):
        made.append(PlannerProcess(**({"policy": "greedy", "deadline_s": PATIENCE_S} | more)))
        return made[-1]

    yield make
    for planner in made:
        pid = planner.pid
        planner.close()
        assert pid is None or is_gone(pid)


def is_gone(pid):
    """Waits; on a busy machine a killed process takes longer to end than closing waits for it."""
    give_up_s = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < give_up_s:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    return not os.path.exists(f"/proc/{pid}")


def wait(planner):
    """Polls until the open request ends."""
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        outcome = planner.poll()
        if outcome is not None:
            return outcome
        time.sleep(0.005)
    raise AssertionError("the planner neither answers nor fails")


def wait_for_process(planner):
    while planner.pid is None:
        assert planner.poll() is None
        time.sleep(0.005)
    return planner.pid


def python(code):
    """Returns a command that runs this code in place of a planner."""
    return (sys.executable, "-c", code)


def test_it_plans_what_the_policy_plans_and_stays_for_the_next_request(planners):
    planner = planners()
    assert planner.poll() is None
    assert planner.pid is None  # not before there is something to plan
    pids = set()
    for number in range(3):
        asked = request(seed=number)
        planner.submit(number, asked, RoundLimits(), "nodes")
        outcome = wait(planner)
        assert isinstance(outcome, PlanAnswer)
        assert outcome.request_id == number
        wanted = make_policy("greedy").plan(asked).placement.physical_to_logical
        assert outcome.plan.placement.physical_to_logical.tolist() == wanted.tolist()
        assert outcome.migration.rounds == migration_to(asked, outcome.plan, RoundLimits(), "nodes").rounds
        pids.add(planner.pid)
        assert planner.poll() is None
    assert len(pids) == 1


def test_it_runs_at_the_lowest_priority_with_one_thread_and_without_torch(planners):
    planner = planners()
    planner.submit(1, request(), RoundLimits(), "nodes")
    assert isinstance(wait(planner), PlanAnswer)
    assert os.getpriority(os.PRIO_PROCESS, planner.pid) == 19
    environ = Path(f"/proc/{planner.pid}/environ").read_bytes()
    assert b"OMP_NUM_THREADS=1\0" in environ
    assert b"MOE_SERVE_TOKEN" not in environ
    assert "torch" not in Path(f"/proc/{planner.pid}/maps").read_text()


def test_a_killed_planner_is_named_and_the_next_request_has_another_one(planners):
    planner = planners()
    planner.submit(1, request(), RoundLimits(), "nodes")
    pid = wait_for_process(planner)
    os.kill(pid, signal.SIGSTOP)  # so that it cannot have answered before
    os.kill(pid, signal.SIGKILL)
    outcome = wait(planner)
    assert outcome == PlanProblem(1, "the planner process was killed by SIGKILL")
    planner.submit(2, request(), RoundLimits(), "nodes")
    assert isinstance(wait(planner), PlanAnswer)
    assert planner.pid != pid


def test_a_planner_that_dies_between_requests_costs_nothing(planners):
    planner = planners()
    planner.start()
    pid = planner.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    planner.submit(1, request(), RoundLimits(), "nodes")
    assert isinstance(wait(planner), PlanAnswer)


def test_a_stopped_planner_is_given_up_at_the_deadline(planners):
    clock = [0.0]
    planner = planners(deadline_s=5.0, now=lambda: clock[0])
    planner.submit(1, request(), RoundLimits(), "nodes")
    pid = wait_for_process(planner)
    os.kill(pid, signal.SIGSTOP)
    clock[0] = 4.9
    assert planner.poll() is None
    clock[0] = 5.0
    outcome = planner.poll()
    assert isinstance(outcome, PlanProblem)
    assert "more than 5 s" in outcome.reason
    assert planner.pid is None
    planner.submit(2, request(), RoundLimits(), "nodes")
    assert planner.poll() is None
    assert planner.pid is None  # not at once after a failure
    clock[0] = 6.0
    assert isinstance(wait(planner), PlanAnswer)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.stdout.write('hello, this is not a plan' * 9); sys.stdout.flush(); input()", "nonsense"),
        ("raise SystemExit(3)", "exited with code 3"),
        ("import os, sys; os.close(1); sys.stdin.buffer.read()", "closed its output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ],
    ids=["garbage", "exit", "closed", "crash"],
)
def test_whatever_a_process_does_is_a_problem_in_words(planners, code, reason):
    planner = planners(command=python(code))
    planner.submit(1, request(), RoundLimits(), "nodes")
    outcome = wait(planner)
    assert isinstance(outcome, PlanProblem)
    assert reason in outcome.reason
    assert planner.pid is None


def test_an_answer_to_another_request_is_refused(planners):
    code = (
        "import sys\n"
        "from moe_serve.eplb.planner_process import Reply, pieces\n"
        "sys.stdout.buffer.write(b''.join(pieces(Reply(77, None, None, 'x')))); sys.stdout.flush(); input()"
    )
    planner = planners(command=python(code))
    planner.submit(1, request(), RoundLimits(), "nodes")
    outcome = wait(planner)
    assert "request 77" in outcome.reason


def test_a_new_request_takes_the_place_of_the_open_one(planners):
    planner = planners()
    planner.submit(1, request(), RoundLimits(), "nodes")
    first = wait_for_process(planner)
    os.kill(first, signal.SIGSTOP)
    planner.submit(2, request(), RoundLimits(), "nodes")
    outcome = wait(planner)
    assert isinstance(outcome, PlanAnswer)
    assert outcome.request_id == 2
    assert planner.pid != first


def test_a_program_that_cannot_be_started_is_a_problem(planners):
    planner = planners(command=("/no/such/program",))
    planner.start()
    planner.submit(1, request(), RoundLimits(), "nodes")
    assert "cannot be started" in wait(planner).reason


def test_a_request_larger_than_the_pipe_never_blocks(planners):
    planner = planners(command=python("import time; time.sleep(600)"))
    large = request(num_layers=60, num_logical=256, num_redundant=0, by_source=np.ones((60, 4, 256), dtype=np.int64))
    planner.submit(1, large, RoundLimits(), "nodes")
    for _ in range(200):
        assert planner.poll() is None


def test_a_small_request_is_sent_in_one_turn_since_an_idle_engine_turns_once_a_second(planners):
    planner = planners(command=python("import time; time.sleep(600)"))
    planner.submit(1, request(), RoundLimits(), "nodes")
    assert planner.poll() is None
    assert not planner.has_more_to_send


def test_a_request_of_many_pieces_asks_for_turns_until_it_is_sent_or_the_pipe_is_full(planners):
    large = request(num_layers=300, num_logical=256, num_redundant=0, by_source=np.ones((300, 4, 256), dtype=np.int64))
    planner = planners(command=python("import time; time.sleep(600)"))
    assert not planner.has_more_to_send
    planner.submit(1, large, RoundLimits(), "nodes")
    assert planner.poll() is None
    assert planner.has_more_to_send
    for _ in range(20):
        planner.poll()
    assert not planner.has_more_to_send  # nobody reads, so the engine may sleep between turns


def test_closing_does_not_wait_for_a_process_that_hangs_in_the_kernel(planners, monkeypatch):
    planner = planners(command=python("import time; time.sleep(600)"))
    waits, wait = [], subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", lambda child, timeout=0.0: waits.append(timeout) or wait(child, 60))
    for number in range(3):  # each takes the place of the one before, whose process is killed
        planner.submit(number, request(), RoundLimits(), "nodes")
        planner.poll()
    planner.close()
    assert waits
    assert sum(waits) < 1


def test_a_planner_that_was_given_up_leaves_no_zombie_while_nobody_asks(planners):
    planner = planners(deadline_s=0.0, command=python("import time; time.sleep(600)"))
    planner.start()
    pid = planner.pid
    planner.submit(1, request(), RoundLimits(), "nodes")
    assert isinstance(planner.poll(), PlanProblem)
    give_up_s = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{pid}"):
        assert planner.poll() is None
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def test_it_ends_with_its_parent():
    code = (
        "import os, signal, sys\n"
        "from moe_serve.eplb.planner_process import PlannerProcess\n"
        "planner = PlannerProcess('greedy', 60.0)\n"
        "planner.start()\n"
        "print(planner.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    give_up_s = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{pid}") and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < give_up_s, f"process {pid} outlives its parent"
        time.sleep(0.01)


TOPOLOGY = Topology(2, 2)


def request(num_layers=3, num_logical=8, num_redundant=4, **more):
    tokens = np.random.default_rng(1).random((num_layers, num_logical)) ** 4 * 1000
    placement = Placement.trivial(num_layers, num_logical, 4, num_redundant)
    return PlanRequest(tokens, TOPOLOGY, placement.num_slots, current=placement, **more)


def same(one, other):
    """Whether two requests or plans are equal, arrays and placements included."""
    for name, value in vars(one).items():
        theirs = vars(other)[name]
        if isinstance(value, Placement):
            assert value.physical_to_logical.tolist() == theirs.physical_to_logical.tolist()
            assert (value.moe_layer_ids, value.version) == (theirs.moe_layer_ids, theirs.version)
        elif isinstance(value, np.ndarray):
            assert value.dtype == theirs.dtype
            np.testing.assert_array_equal(value, theirs)
        else:
            assert value == theirs, name
    return True


def joined(message):
    return b"".join(pieces(message))


def test_requests_and_plans_come_back_as_they_were():
    asked = request(
        by_source=np.arange(3 * 4 * 8).reshape(3, 4, 8),
        activations=np.full((3, 8), 0.5),
        cost=RankCost(1e-6, 2e-6),
        objective={"tokens": 1.0, "step_time": 0.5},
        excluded_ranks=(3,),
        moe_layer_ids=(7, 8, 9),
        max_moves=2,
        max_total_moves=5,
        max_rank_moves=1,
        min_gain=0.001,
    )
    back = MessageReader(Ask).feed(joined(Ask(4, "greedy", asked, RoundLimits(), "nodes")))
    assert (back.request_id, back.policy) == (4, "greedy")
    assert same(asked, back.request)
    plan = make_policy("refined").plan(request())
    assert same(plan, MessageReader(Reply).feed(joined(Reply(5, plan, None))).plan)


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_bytes_may_arrive_in_any_pieces(size):
    data = b"".join(joined(Ask(number, "greedy", request(), RoundLimits(), "nodes")) for number in (1, 2))
    reader, seen = MessageReader(Ask), []
    for first in range(0, len(data), size):
        message = reader.feed(data[first : first + size])
        seen += [] if message is None else [message.request_id]
    while (message := reader.feed(b"")) is not None:
        seen.append(message.request_id)
    assert seen == [1, 2]


def test_a_large_request_is_made_piece_by_piece():
    large = request(num_layers=40, num_logical=256, num_redundant=0, by_source=np.ones((40, 4, 256), dtype=np.int64))
    parts = list(pieces(Ask(1, "greedy", large, RoundLimits(), "nodes")))
    assert len(parts) > 3
    assert max(map(len, parts)) <= PIECE_BYTES + 8
    assert same(large, MessageReader(Ask).feed(b"".join(parts)).request)


def test_every_flipped_byte_is_noticed():
    data = joined(Reply(1, make_policy("greedy").plan(request()), None))
    rng = np.random.default_rng(0)
    for at in [*range(40), *rng.integers(0, len(data), 100).tolist()]:
        wrong = bytearray(data)
        wrong[at] ^= 0x41
        reader = MessageReader(Reply)
        with contextlib.suppress(WireError):
            assert reader.feed(bytes(wrong)) is None, at  # a longer piece is announced: it never completes


@pytest.mark.parametrize("change", [{"request": {}}, {"request_id": "x"}, {"policy": 3}], ids=str)
def test_a_message_of_another_kind_is_refused(change):
    whole = msgspec.to_builtins({"request_id": 1, "policy": "greedy", "request": {"tokens": 3}} | change)

    class Other(msgspec.Struct):
        request_id: object
        policy: object
        request: object

    with pytest.raises(WireError, match="not a Ask"):
        MessageReader(Ask).feed(joined(Other(**whole)))


def test_a_message_that_claims_to_be_huge_is_refused():
    head = b"MSP1" + struct.pack("<IQ", 10, 1 << 50)
    with pytest.raises(WireError, match="at most"):
        MessageReader(Ask).feed(head + struct.pack("<I", zlib.crc32(head)))


def test_a_request_that_a_policy_refuses_is_answered_in_words():
    asked = request(num_groups=2, off_home=0.0)
    reply = answer(Ask(3, "no such policy", asked, RoundLimits(), "nodes"))
    assert reply.plan is None
    assert "no such policy" in reply.problem
