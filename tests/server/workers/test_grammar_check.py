"""A constraint is tried in a process of its own: what explodes there is refused, and what is sound is not."""

import asyncio
import json

import msgspec
import pytest

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.config import load_config, model_dir
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import QueueFullError, RequestError
from moe_serve.server.workers import grammar_check
from moe_serve.server.workers.grammar_check import GrammarCheck
from moe_serve.server.workers.helper_process import HelperEnded, HelperProcess, TooLongError
from tests.server.served import in_event_loop

LIMITS = ModelLimits("demo", 2048, 1024, 1023, [1], 16)
FOLDER = str(model_dir(load_config().model))


def asking(kind: str, text: str) -> SamplingParams:
    return SamplingParams(constraint=Constraint(kind, text))


HOSTILE = {
    "deep": ("json_schema", '{"properties":{"a":' * 6000 + "{}" + "}}" * 6000),
    "repeats of repeats": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "a product of choices": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": {}}} for j in range(6)]} for i in range(9)]}),
    ),
    "seconds of arithmetic": ("json_schema", '{"type":"integer","multipleOf":9999991}'),
    "a reference to itself": ("json_schema", '{"$ref":"#"}'),
    "references in a circle": (
        "json_schema", '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'
    ),
}  # fmt: skip
# Sound for some tokens, at a bounded cost for each; a rank ends them where that bound is met.
COSTLY = {
    "a large enum": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(18_000)]})),
    "states that explode": ("regex", "(.*a.{20}){1,20}"),
    "ambiguity": ("grammar", 'start: s\ns: s s | s s s | "a" | ""'),
}


@in_event_loop
async def test_hostile_constraints_are_refused_and_sound_ones_after_them_are_not() -> None:
    check = GrammarCheck(FOLDER)
    try:
        for name, (kind, text) in HOSTILE.items():
            with pytest.raises(RequestError) as caught:
                await asyncio.wait_for(check.checked(asking(kind, text), LIMITS), 15)
            assert caught.value.field == kind, name
            assert len(str(caught.value)) < 500
        pid = check._process._process.pid
        for kind, text in COSTLY.values():
            await check.checked(asking(kind, text), LIMITS)
        params = await check.checked(asking("regex", "[a-z]+"), LIMITS)
        assert params.constraint.is_compiled
        assert check._process._process.pid == pid, "one process for all"
    finally:
        await check.close()


@in_event_loop
async def test_the_same_constraint_is_tried_once_and_a_bounded_number_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, asked = GrammarCheck(FOLDER), []

    async def ask(given: Constraint, model: object) -> grammar_check.Checked:
        asked.append(given)
        await asyncio.sleep(0)
        return grammar_check.Checked("grammar of " + given.text)

    monkeypatch.setattr(check, "_ask", ask)
    both = await asyncio.gather(*[check.checked(asking("regex", "a"), LIMITS) for _ in range(2)])
    assert both[0] == both[1] == SamplingParams(constraint=Constraint("regex", "grammar of a", is_compiled=True))
    assert len(asked) == 1
    for i in range(grammar_check._KEPT + 1):
        await check.checked(asking("regex", f"b{i}"), LIMITS)
    assert len(check._answers) == grammar_check._KEPT
    assert check._kept_chars == sum(len(each.grammar or "") for each in check._answers.values())


@in_event_loop
async def test_a_constraint_that_the_machine_has_no_time_for_is_not_held_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = GrammarCheck(FOLDER)
    answers = [grammar_check.Checked(None, "too busy", "regex", busy=True), grammar_check.Checked("grammar")]

    async def ask(given: Constraint, model: object) -> grammar_check.Checked:
        return answers.pop(0)

    monkeypatch.setattr(check, "_ask", ask)
    with pytest.raises(QueueFullError, match="too busy"):
        await check.checked(asking("regex", "a"), LIMITS)
    assert (await check.checked(asking("regex", "a"), LIMITS)).constraint.text == "grammar"


@pytest.mark.parametrize("problem", [HelperEnded, TooLongError, TimeoutError])
@in_event_loop
async def test_what_becomes_of_the_process_is_not_held_against_a_constraint(
    problem: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [problem(), msgspec.msgpack.encode(grammar_check.Checked("grammar"))]

    async def ask(process: object, client: str, job: bytes) -> bytes:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(HelperProcess, "ask", ask)
    check = GrammarCheck(FOLDER)
    with pytest.raises(QueueFullError, match="regex cannot be compiled now"):
        await check.checked(asking("regex", "a"), LIMITS)
    assert (await check.checked(asking("regex", "a"), LIMITS)).constraint.text == "grammar"


@in_event_loop
async def test_new_constraints_wait_in_a_bounded_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_WAITING", 2)
    check, go_on = GrammarCheck(FOLDER), asyncio.Event()

    async def ask(given: Constraint, model: object) -> grammar_check.Checked:
        await go_on.wait()
        return grammar_check.Checked("x")

    monkeypatch.setattr(check, "_ask", ask)
    waiting = [asyncio.ensure_future(check.checked(asking("regex", f"a{i}"), LIMITS)) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await check.checked(asking("regex", "b"), LIMITS)
    other = asyncio.ensure_future(check.checked(asking("regex", "b"), LIMITS, "another client"))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*waiting, other)


@in_event_loop
async def test_a_server_without_a_tokenizer_says_so() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        await GrammarCheck(None).checked(asking("regex", "a"), LIMITS)


@in_event_loop
async def test_a_caller_that_leaves_ends_the_process_and_the_next_one_gets_another() -> None:
    check = GrammarCheck(FOLDER)
    try:
        await check.checked(asking("regex", "a"), LIMITS)
        leaving = asyncio.ensure_future(check.checked(asking(*HOSTILE["seconds of arithmetic"]), LIMITS))
        await asyncio.sleep(0.1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await check.checked(asking("regex", "b"), LIMITS)).constraint.is_compiled
    finally:
        await check.close()
