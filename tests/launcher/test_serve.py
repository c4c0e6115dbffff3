"""What a rank imports at its start, what it leaves for its replacement, and what it says when its launch is lost."""

import os
import subprocess
import sys

import msgspec
import pytest
import torch.distributed as dist

from moe_serve.config import load_config
from moe_serve.dispatch.peer_calls import barrier
from moe_serve.dispatch.shared_files import FileMark, SharedFiles, weights_of
from moe_serve.dispatch.votes import LOG_NAME, Log
from moe_serve.engine.protocol.messages import Fatal, Message
from moe_serve.errors import ConfigError, LaunchError, LostConnectionError, PeerError
from moe_serve.launcher import serve
from moe_serve.launcher.facts import Fact
from moe_serve.launcher.rank_env import RankEnv
from moe_serve.launcher.rank_start import (
    Elsewhere,
    Handover,
    check_like,
    describe_memory,
    find_handover,
    keep_open,
    leave_handover,
    make_memory,
)
from moe_serve.launcher.serve import loss_message, run_worker
from moe_serve.process_facts import own_node

GLOO = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37298. Look at the remote worker."


class Said:
    """A mailbox that keeps what is sent."""

    def __init__(self, *_: str) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def close(self) -> None:
        pass


def last_words(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Fatal:
    """What rank 1 reports of an error while it starts."""
    mailbox = Said()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(serve, "ZmqMailbox", lambda *_: mailbox)
    monkeypatch.setattr(serve.RankStart, "run", fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_worker(load_config(), RankEnv(1, 2, 1, 2, "127.0.0.1", 0, 0, "test")) == 1
    (fatal,) = [message for message in mailbox.messages if isinstance(message, Fatal)]
    return fatal


def test_an_error_without_words_is_reported_by_its_name(monkeypatch):
    fatal = last_words(AssertionError(), monkeypatch)
    assert (fatal.message, fatal.lost_rank) == ("AssertionError: ", 1)


def test_a_peer_that_went_away_is_reported_without_library_text(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(GLOO)

    monkeypatch.setattr(dist, "barrier", fail)
    with pytest.raises(LostConnectionError) as caught:
        barrier(None)
    fatal = last_words(caught.value, monkeypatch)
    assert fatal.lost_rank == -1
    assert fatal.message.startswith("a rank went away while the ranks started (its connection was closed)")


def test_an_error_of_this_rank_is_its_own_whatever_its_words(monkeypatch):
    fatal = last_words(RuntimeError("the tokenizer Timed out"), monkeypatch)
    assert (fatal.message, fatal.lost_rank) == ("RuntimeError: the tokenizer Timed out", 1)


def test_a_loss_names_the_rank_and_the_step():
    error = LostConnectionError("Connection closed by peer", "an all-to-all")
    assert loss_message(0, 57, error).startswith("rank 0 went away in the middle of step 57 (Connection")


# A process of its own: what tests had imported and frozen before would hide that nothing is.
AN_IMPORT = """
import gc
from moe_serve.launcher.rank_start import import_engine

collections = []
gc.callbacks.append(lambda phase, facts: collections.append(phase))
import_engine()
assert not collections, f"{len(collections)} on the way"
assert gc.isenabled()
assert gc.get_freeze_count() > 50_000
assert len(gc.get_objects()) < 1000
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() > 0
"""


def test_what_was_imported_is_not_looked_through_again_and_later_garbage_is() -> None:
    subprocess.run([sys.executable, "-c", AN_IMPORT], check=True, timeout=120)


@pytest.fixture
def files():
    """The files of a launch of three ranks."""
    made = tuple(os.memfd_create("files of a launch") for _ in range(5))
    yield made
    for each in made:
        os.close(each)


def env(rank: int, launch_id: int = 7, files: tuple[int, ...] = ()) -> RankEnv:
    return RankEnv(rank, 3, rank, 3, "", 0, launch_id, "the launcher", launch_files=files, num_before=1)


def handover(launch_id: int = 7, pid: int | None = None, **files: FileMark) -> Handover:
    return Handover(launch_id, pid or os.getpid(), files, "kernels", [Fact("cache.block_size", "16")])


def test_a_new_process_finds_what_a_living_rank_of_its_launch_has_left(files: tuple[int, ...]):
    with pytest.raises(LaunchError, match="no other rank of its launch serves"):
        find_handover(env(1, files=files))
    leave_handover(files[1], handover(pid=2**22 + 1))
    leave_handover(files[2], handover())
    with pytest.raises(LaunchError, match="no other rank"):  # one has ended, the other was its own
        find_handover(env(1, files=files))
    left = handover(pages=FileMark(3, 4, 5))
    leave_handover(files[3], handover(pages=FileMark(3, 4, 5), longer_than_the_next=FileMark(6, 7, 8)))
    leave_handover(files[3], left)
    assert find_handover(env(1, files=files)) == left
    of_nodes = [handover(**{weights_of(node): FileMark(6, 7, 8)}) for node in (own_node() + 1, own_node())]
    for file, each in zip((files[1], files[3]), of_nodes, strict=True):
        leave_handover(file, each)
    assert find_handover(env(1, files=files)) == of_nodes[1], "the copy of the weights of its own NUMA node"
    leave_handover(files[1], handover(pid=2**22 + 1))
    leave_handover(files[3], left)
    with pytest.raises(LaunchError, match="no other rank"):
        find_handover(env(1, launch_id=8, files=files))
    os.ftruncate(files[3], 1)
    with pytest.raises(LaunchError, match="no other rank"):
        find_handover(env(1, files=files))


def test_a_new_process_with_another_setting_is_refused_by_name():
    check_like(handover(), [Fact("cache.block_size", "16")], env(1))
    with pytest.raises(ConfigError, match=r"cache\.block_size: 16 on ranks 0, 2; 32 on rank 1"):
        check_like(handover(), [Fact("cache.block_size", "32")], env(1))


def test_a_host_that_is_back_makes_memory_of_the_same_sizes_and_a_log_of_another_incarnation(files: tuple[int, ...]):
    made = SharedFiles()
    for name, size in (("pages", 4096), (f"pages {LOG_NAME}", 160)):
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, size)
        made.keep(name, descriptor)
        os.close(descriptor)
    for rank in (0, 1):
        elsewhere = Elsewhere([0, 0, 1], ["a", "b"], {rank: ("h", 10 + rank), 2: ("h", 12)}, ["a", "b", "c"])
        leave_handover(files[1 + rank], msgspec.structs.replace(handover(), elsewhere=elsewhere))
    memory = describe_memory(files, 7, made)
    assert memory.handover.elsewhere.addresses == {0: ("h", 10), 1: ("h", 11), 2: ("h", 12)}
    there = tuple(os.memfd_create("files of a launch") for _ in range(3))
    kept = make_memory(there, memory)
    place = RankEnv(2, 3, 0, 1, "h", 1, 7, "the launcher", launch_files=there, num_before=1)
    found = find_handover(place)
    assert found.pid == os.getpid()
    assert found.elsewhere.addresses[2] == ("h", 12)
    opened = SharedFiles(found.pid, found.files)
    pages, log = opened.open("pages", os.O_RDWR), opened.open(f"pages {LOG_NAME}", os.O_RDWR | os.O_APPEND)
    assert os.pread(pages, 5000, 0) == bytes(4096)
    assert Log(log, 2).incarnation > 0
    for each in (pages, *there):
        os.close(each)
    for each in (made, kept, opened):
        each.close()


def test_shared_files_are_opened_again_and_another_file_is_not():
    made = SharedFiles()
    descriptor = os.memfd_create("first")
    os.write(descriptor, b"bytes")
    made.keep("first", descriptor)
    os.close(descriptor)
    marks = made.marks()
    replacement = SharedFiles(os.getpid(), marks, "kernels")
    assert replacement.is_replacement
    assert not made.is_replacement
    opened = replacement.open("first", os.O_RDWR)
    assert os.pread(opened, 9, 0) == b"bytes"
    os.close(opened)
    assert replacement.marks()["first"][1:] == marks["first"][1:], "and handed on"
    wrong = marks["first"]._replace(inode=marks["first"].inode + 1)
    with pytest.raises(PeerError, match="it is another file now"):
        SharedFiles(os.getpid(), {"first": wrong}).open("first", os.O_RDWR)
    with pytest.raises(PeerError, match="cannot be opened"):
        SharedFiles(2**22 + 1, marks).open("first", os.O_RDWR)
    for files in (made, replacement):
        os.close(files.marks()["first"].descriptor)


def test_where_no_rank_of_a_host_is_left_a_new_one_finds_what_the_launcher_has_kept(files: tuple[int, ...]):
    elsewhere = Elsewhere([0, 0, 0, 1], ["a", "b"], {3: ("h", 1)}, ["a", "b", "c", "d"])
    assert keep_open(files, 7) is None
    held, weights = os.memfd_create("memory of a rank"), os.memfd_create("weights")
    os.write(held, b"bytes")
    rank = subprocess.Popen(["sleep", "60"], pass_fds=[held, weights])
    made = SharedFiles()
    made.keep("page", held)
    made.keep(weights_of(0), weights)
    marks = {
        name: mark._replace(descriptor=each)
        for (name, mark), each in zip(made.marks().items(), (held, weights), strict=True)
    }
    left = handover(pid=rank.pid, **marks)
    leave_handover(files[1], left)
    assert keep_open(files, 7) is None, "on one host no rank would be left to go on"
    leave_handover(files[1], msgspec.structs.replace(left, elsewhere=elsewhere))
    kept = keep_open(files, 7)
    rank.kill()
    rank.wait()
    made.close()
    os.close(held)
    os.close(weights)
    memory = describe_memory(files, 7, kept)
    assert memory is not None
    assert memory.sizes == {"page": 5}, "a host that joins has no copy of the weights to map"
    found = find_handover(env(1, files=files))
    assert (found.pid, found.elsewhere) == (os.getpid(), elsewhere)
    opened = SharedFiles(found.pid, found.files).open("page", os.O_RDWR)
    assert os.pread(opened, 9, 0) == b"bytes"
    os.close(opened)
    kept.close()
