"""Experts come from the source that is the fastest now, and from any that has them."""

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest

from moe_serve.engine.model import expert_sources
from moe_serve.engine.model.expert_sources import _read_part, _Source
from moe_serve.errors import ModelError
from moe_serve.models.weights import ExpertToRead

EXPERTS = [ExpertToRead(0, expert, expert) for expert in range(4)]
UNREADABLE = ModelError("model.safetensors: cannot be read again")


class Clock:
    """Time that passes only where a source takes it, whatever else the machine does."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


clock = Clock()


@pytest.fixture(autouse=True)
def _own_clock() -> Iterator[None]:
    with mock.patch.object(expert_sources, "time", clock):
        yield


def source(name: str, has: Sequence[int], seconds: float = 0.0, error: ModelError | None = None) -> _Source:
    def put(experts: Sequence[ExpertToRead]) -> list[ExpertToRead]:
        clock.sleep(seconds)
        if error is not None:
            raise error
        return [each for each in experts if each.expert not in has]

    return _Source(name, put)


def test_each_source_is_tried_once_and_then_the_fastest_has_all() -> None:
    slow, fast = source("peers", range(4), 0.05), source("checkpoint", range(4), 0.001)
    for _ in range(5):
        _read_part(EXPERTS, [slow, fast], 100)
    assert (slow.num_experts, fast.num_experts) == (4, 16)


def test_a_source_whose_first_part_was_slow_is_tried_again_and_has_the_rest() -> None:
    """As a checkpoint whose files are not in the page cache yet, beside memory that other ranks are busy with."""
    delays_s = iter([0.04])

    def put(experts: Sequence[ExpertToRead]) -> list[ExpertToRead]:
        clock.sleep(next(delays_s, 0.0))
        return []

    steady, opening = source("peers", range(4), 0.02), _Source("checkpoint", put)
    for _ in range(60):
        _read_part(EXPERTS, [steady, opening], 100)
    assert opening.num_experts > steady.num_experts
    assert opening.per_byte_s < steady.per_byte_s


def test_what_a_source_lacks_the_next_one_has() -> None:
    near, far, checkpoint = source("near", [1]), source("far", [1, 2]), source("checkpoint", range(4))
    _read_part(EXPERTS, [near, far, checkpoint], 100)
    assert [each.num_experts for each in (near, far, checkpoint)] == [1, 1, 2]


def test_a_checkpoint_that_went_away_matters_only_for_experts_that_nobody_holds() -> None:
    near, gone = source("near", [0, 1, 2], 0.001), source("checkpoint", range(4), error=UNREADABLE)
    for _ in range(3):
        _read_part(EXPERTS[:3], [gone, near], 100)
    assert near.num_experts == 9
    with pytest.raises(ModelError, match="cannot be read again"):
        _read_part(EXPERTS, [gone, near], 100)
