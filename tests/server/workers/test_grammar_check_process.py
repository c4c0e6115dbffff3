"""A form is tried before it is accepted: outputs are drawn by it, in a fork that may end as it likes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.server.workers import grammar_check_process
from moe_serve.server.workers.grammar_check_process import (
    Busy,
    Check,
    Checked,
    TooMuchMemory,
    TooMuchTime,
    Trials,
    Walks,
    check,
)
from moe_serve.structured.grammar import Matcher
from tests.structured.large_vocabulary import large_vocabulary

Schema = dict[str, Any]


@cache
def walks() -> Walks:
    return Walks(large_vocabulary())


def optional(num: int, **fields: Schema) -> Schema:
    """Returns the schema of an object with as many optional properties as these and `num` others."""
    others = {f"bade_{i}fo": {"type": "string"} for i in range(num)}
    return {"type": "object", "properties": {**others, **fields}}


def checked(schema: Any) -> Checked:
    return check(Constraint("json_schema", json.dumps(schema), path="guided_json"), walks())


HUGE = optional(600)
REQUIRED = {f"k{i}": {"type": "string"} for i in range(20)}
DIE_LATER: dict[str, Schema] = {
    "at once": HUGE,
    "in one of 40 optional properties": optional(40, rare=HUGE),
    "in two": optional(30, rare=optional(20, seldom=HUGE)),
    "in the last of 21 required ones": {
        "type": "object", "properties": {**REQUIRED, "last": HUGE}, "required": [*REQUIRED, "last"]
    },
    "in an alternative": {"anyOf": [{"type": "string"}, {"type": "integer"}, HUGE]},
    "in an array": {"type": "array", "items": HUGE},
    "by a reference": {**optional(40, rare={"$ref": "#/$defs/a~1b/items"}), "$defs": {"a/b": {"items": HUGE}}},
    "by references in a circle": {
        **optional(10, own={"$ref": "#"}, rare={"$ref": "#/definitions/a"}),
        "definitions": {"a": optional(2, b={"$ref": "#/definitions/b"}), "b": optional(600, a={"$ref": "#"})},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DIE_LATER)
def test_a_schema_that_would_end_in_mid_stream_is_refused_with_the_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check_process, "_WALKS_S", 10.0)  # a busy machine draws fewer outputs in its 0.15 s
    found = checked(DIE_LATER[name])
    assert found.grammar is None
    assert found.field == "guided_json"
    assert found.message.startswith("guided_json cannot be served: at one place")
    assert "limit max_items_in_row is 2000" in found.message


def test_a_tag_whose_schema_would_end_in_mid_stream_is_refused() -> None:
    structures = [{"begin": f"<{name}>", "schema": schema, "end": ""} for name, schema in (("a", {}), ("b", HUGE))]
    tag = json.dumps({"structures": structures, "triggers": ["<"]})
    found = check(Constraint("structural_tag", tag, path="response_format"), walks())
    assert found.grammar is None
    assert found.message.startswith("response_format cannot be served: at one place")


@pytest.mark.parametrize(
    "schema",
    [
        {**optional(3), "$defs": {"unused": HUGE}},
        {**optional(3), "examples": [HUGE], "x-guidance": {"lenient": True}},
        optional(3, never={"allOf": [{"type": "string"}, {**optional(60), "type": "object"}]}),
        optional(60, own={"$ref": "#"}),
        {"enum": [f"value {i}" for i in range(5000)]},
        {"type": "array", "items": {"anyOf": [{"const": i} for i in range(300)]}},
    ],
    ids=lambda schema: str(schema)[-60:],
)  # fmt: skip
def test_what_no_output_comes_to_is_not_held_against_a_schema(schema: Schema) -> None:
    found = checked(schema)
    assert found.grammar is not None, found.message


@pytest.mark.parametrize("num", [54, 200, 350, 498, 499])
@pytest.mark.parametrize("value", [{"type": "string"}, {}], ids=str)
@pytest.mark.parametrize("closed", [False, True])
def test_a_schema_that_is_accepted_does_not_end_in_mid_stream(num: int, value: Schema, closed: bool) -> None:
    names = [f"bade_{i}fo" for i in range(num)]
    schema: Schema = {"type": "object", "properties": dict.fromkeys(names, value)}
    found = checked({**schema, "additionalProperties": False} if closed else schema)
    assert found.grammar is not None or num > 200, found.message
    if found.grammar is None:
        return
    compiled = Matcher.compiled(Constraint("json_schema", found.grammar, is_compiled=True), large_vocabulary())
    for some in ([], names[:1], names[:4], names[num // 2 :: 40], names[-1:]):
        growing = compiled.copy()
        for token in large_vocabulary().tokenizer.tokenize_str(json.dumps(dict.fromkeys(some, "kuno"))):
            growing.mask()
            growing.advance([token])
        growing.mask()
        assert growing.may_end


def test_a_form_whose_masks_take_long_on_the_average_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Constraint("regex", "[a-z]*")
    assert check(form, walks()).grammar is not None
    monkeypatch.setattr(grammar_check_process, "_MOST_MASK_S", 0.0)
    assert "ms to say which tokens may come next, on the average" in check(form, walks()).message


def test_outputs_are_drawn_until_the_time_for_them_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check_process, "_WALKS_S", 0.0)
    drawn: list[int] = []
    monkeypatch.setattr(Matcher, "advance", lambda self, ids: drawn.extend(ids))
    assert check(Constraint("regex", "[a-z]*"), walks()).grammar is not None
    assert len(drawn) == grammar_check_process._FEWEST_MASKS


# Constraints are tried in a fork that may end as it likes: the next one is tried all the same.


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may hold all cores for longer than a client would wait."""
    monkeypatch.setattr(grammar_check_process, "_PATIENCE_S", 100.0)


@contextmanager
def trials_of(check: Check) -> Iterator[Trials]:
    trials = Trials(check)
    try:
        yield trials
    finally:
        trials.close()


def pid_unless(task: bytes) -> bytes:
    """Ends as the task says."""
    match task:
        case b"loop":
            while True:
                pass
        case b"raise":
            raise MemoryError
        case b"end":
            os._exit(0)
        case b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"sleep":
            time.sleep(30)
    return b"%d" % os.getpid()


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (b"loop", TooMuchTime), (b"raise", TooMuchMemory), (b"end", TooMuchMemory), (b"kill", TooMuchMemory),
        (b"sleep", Busy),
    ],
)  # fmt: skip
def test_a_fork_that_ends_over_a_constraint_says_why_and_the_next_one_goes_on(
    task: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check_process, "CPU_S", 0.03)
    monkeypatch.setattr(grammar_check_process, "_SOON_S", 0.05)
    monkeypatch.setattr(grammar_check_process, "_PATIENCE_S", 0.3 if error is Busy else 30.0)
    with trials_of(pid_unless) as trials:
        first = trials.answer(b"")
        with pytest.raises(error):
            trials.answer(task)
        assert trials.answer(b"") != first


def test_one_fork_tries_many_and_another_one_follows_it_where_it_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check_process, "_STARVED_S", 0.0)
    with trials_of(pid_unless) as trials:
        (first,) = {int(trials.answer(b"x" * size)) for size in (0, 1, 100_000, 5)}
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert int(trials.answer(b"")) != first


def test_a_fork_that_has_grown_ends_after_its_answer_so_that_the_next_one_has_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []

    def grow(task: bytes) -> bytes:
        kept.append(bytearray(2 * grammar_check_process._GROWN_BYTES))  # the heap of a large process may give back some
        return b"%d" % len(kept)

    monkeypatch.setattr(grammar_check_process, "_STARVED_S", 0.0)
    with trials_of(grow) as trials:
        assert [trials.answer(b"") for _ in range(3)] == [b"1"] * 3


def test_a_fork_that_gets_no_core_is_followed_by_one_of_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(task: bytes) -> bytes:
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            time.sleep(30)  # as where others take all cores
        return b"done"

    monkeypatch.setattr(grammar_check_process, "_SOON_S", 0.05)
    with trials_of(starve) as trials:
        assert trials.answer(b"") == b"done"


def test_a_fork_that_somebody_kills_over_a_constraint_is_followed_by_one_that_tries_it_again(tmp_path: Path) -> None:
    def killed_once(task: bytes) -> bytes:
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with trials_of(killed_once) as trials:
        assert trials.answer(b"sound" * 100_000) == b"sound" * 100_000


def test_a_machine_without_room_for_a_fork_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError

    with trials_of(pid_unless) as trials:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", no_fork)
            with pytest.raises(Busy):
                trials.answer(b"")
        assert trials.answer(b"")
