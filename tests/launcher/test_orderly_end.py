"""SIGTERM of a process that uses an LLM: results are not lost, and the exit code is 0."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from moe_serve.launcher.background import OrderlyEnd
from moe_serve.server.requests.open_request import UnavailableError
from tests.launcher.running import Running, gone


@pytest.fixture(autouse=True)
def sigterm_is_as_in_a_new_process() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_between_calls_the_process_exits_at_once_with_0() -> None:
    end = OrderlyEnd(pytest.fail, 60.0)
    with end.call():
        pass
    with pytest.raises(SystemExit) as exit:
        terminate()
    assert exit.value.code == 0
    end.close()


def test_a_call_finishes_and_the_next_one_exits() -> None:
    end = OrderlyEnd(pytest.fail, 60.0)
    with end.call():
        terminate()
        result = "kept"
    assert result == "kept"
    refused: list[Exception] = []

    def elsewhere() -> None:
        try:
            with end.call():
                pass
        except UnavailableError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "asked to end" in str(refused[0])
    with pytest.raises(SystemExit), end.call():
        pass
    end.close()


def test_a_call_that_takes_longer_is_given_up() -> None:
    given_up = threading.Event()
    end = OrderlyEnd(given_up.set, 0.01)
    with end.call():
        terminate()
        assert given_up.wait(60)
    end.close()


def test_a_handler_of_the_process_stays_and_so_does_that_of_other_threads() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    end = OrderlyEnd(pytest.fail, 60.0)
    terminate()
    assert seen == [signal.SIGTERM]
    end.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=lambda: OrderlyEnd(pytest.fail, 60.0).close())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    end = OrderlyEnd(pytest.fail, 60.0)
    end.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SCRIPT = """
import sys
from moe_serve import SamplingParams
from moe_serve.config import load_config
from moe_serve.launcher import local
from moe_serve.launcher.llm import LLM
local.WORKER = "tests.launcher.fake_rank"
config = load_config(overrides=["parallel.num_ranks=2"])
with LLM.from_config(config) as llm:
    for number in range(1000):
        outputs = []
        for _, output in llm.stream([[7]], SamplingParams(max_new_tokens=40, seed=10)):
            if not outputs:
                print("running", flush=True)
            outputs.append(output)
        print("done", number, outputs[-1].token_ids == list(range(12, 52)), flush=True)
"""


def test_an_llm_that_is_asked_to_end_returns_what_runs_and_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setenv("FAKE_RANK", "all:slow")
    with Running.of([sys.executable, "-c", SCRIPT]) as running:
        running.wait_for("running")
        pids = running.descendants()
        assert running.end(signal.SIGTERM) == 0
        assert running.lines[-1] == "done 0 True"
        assert gone(pids)
