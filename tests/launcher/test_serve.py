"""What a rank imports at its start, and what it says when its launch is lost."""

import gc

import pytest
import torch.distributed as dist

from moe_serve.config import load_config
from moe_serve.dispatch.peer_calls import barrier
from moe_serve.engine.protocol.messages import Fatal, Message
from moe_serve.errors import LostConnectionError
from moe_serve.launcher import serve
from moe_serve.launcher.rank_env import RankEnv
from moe_serve.launcher.rank_start import import_engine
from moe_serve.launcher.serve import loss_message, run_worker

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


def test_what_was_imported_is_not_looked_through_again_and_later_garbage_is() -> None:
    try:
        import_engine()
        assert gc.get_freeze_count() > 50_000
        assert gc.isenabled()
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()
