"""Outputs have the form that was asked for, the same tokens however they are served; others are not changed."""

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from moe_serve.attention_dp.constraint import Constraint, FormStart
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.config import load_config, model_dir
from moe_serve.engine.engine import Engine
from moe_serve.engine.output import grammars
from moe_serve.engine.protocol.messages import Submit
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.structured.grammar import to_grammar
from moe_serve.structured.vocabulary import Vocabulary
from tests.engine.offline import Served, prompts_with_shared_beginnings, serve, submits_of
from tests.engine.test_identity import BY_TORCH, PLAIN, SEEDS, WAYS_TO_SAMPLE, same

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 22, None]}},
    "required": ["name", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.9, top_p=0.95)
FORMS = [
    Constraint("json_schema", json.dumps(SCHEMA)),
    Constraint("regex", "[a-c]{2,4}-[0-9]{1,3}"),
    Constraint("choice", '["yes", "no", "maybe so"]'),
]


EOS = 1
LINE, SPACE, OPEN = 200, 222, 84  # often written by the demo model, in the place of tokens around a reasoning
Starts = list[tuple[FormStart | None, dict[int, float]]]
STARTS: Starts = [  # with biases, so that they come soon
    (None, {}),
    (FormStart(((LINE,),)), {LINE: 3.0}),
    (FormStart(((LINE, LINE), (SPACE,))), {LINE: 3.0, SPACE: 4.0}),
    (FormStart(((LINE,),), opens=OPEN), {LINE: 3.0, OPEN: -3.0}),
]


def compile_at_once(engine: Engine) -> None:
    """Requests are scheduled with their step, as where the grammar is kept: a script says when they arrive."""
    own = engine.requests.grammars

    def prepare(request: Request) -> bool:
        if not type(own).prepare(own, request):
            while not (compiled := own.compiled()):
                time.sleep(0.001)
            ((_, failure),) = compiled
            if failure is not None:
                raise failure
        return True

    own.prepare = prepare  # type: ignore[method-assign]


serve_at_once = partial(serve, prepare=compile_at_once)


def submits_with_forms(num: int, starts: Starts = STARTS[:1], **fields: Any) -> list[Submit]:
    """Three of four requests have a form, beside plain neighbours. starts: of the forms, in turn"""
    submits = submits_of(prompts_with_shared_beginnings(num, 2048, max_len=30), SAMPLED, SEEDS[:num])
    every = [[*FORMS, None][i % 4] for i in range(num)]
    start_of_each = [starts[i // 4 % len(starts)] for i in range(num)]
    return [
        msgspec.structs.replace(
            submit,
            params=replace(SAMPLED, constraint=replace(form, start=start), logit_bias=bias, **fields)
            if form
            else SAMPLED,
        )
        for submit, form, (start, bias) in zip(submits, every, start_of_each, strict=True)
    ]


def text_of(served: Served, name: str) -> str:
    return text_of_ids(served.tokens[name])


def text_of_ids(ids: list[int]) -> str:
    return Tokenizer.from_folder(model_dir(load_config().model)).decode(ids)


def start_of(start: FormStart | None, output: list[int]) -> int | None:
    """Returns the index of the first token of the form, worked out plainly; None: it has not begun."""
    if start is None or (start.opens is not None and output[0] != start.opens):
        return 0
    position = 0
    for wanted in map(list, start.after):
        found = [i for i in range(position, len(output)) if output[i : i + len(wanted)] == wanted]
        if not found:
            return None
        position = found[0] + len(wanted)
    return position


def has_form(index: int, text: str) -> bool:
    if index % 4 == 0:
        value = json.loads(text)
        return set(value) == {"name", "n"} and len(value["name"]) <= 5 and value["n"] in (1, 22, None)
    if index % 4 == 1:
        head, _, tail = text.partition("-")
        return 2 <= len(head) <= 4 and set(head) <= set("abc") and tail.isdigit()
    return text in ("yes", "no", "maybe so") if index % 4 == 2 else True


def test_outputs_have_their_form_and_are_the_same_however_they_are_served() -> None:
    submits = submits_with_forms(30, STARTS)
    expected = serve_at_once(1, submits, PLAIN)
    begins = check_forms(submits, expected)
    assert 0 < begins[3].count(0) < len(begins[3]), "some outputs open their reasoning, others do not"
    assert len(begins[1]) + len(begins[2]) > 5
    for num_ranks, overrides, stagger in WAYS_TO_SAMPLE:
        served = serve_at_once(num_ranks, submits, [*PLAIN, *overrides], stagger)
        same(served, expected)
        assert served.stats["num_preempted"] > 0 or "cache.num_blocks=16" not in overrides
    plain = serve(1, [msgspec.structs.replace(submit, params=SAMPLED) for submit in submits[3::4]], PLAIN)
    assert all(plain.tokens[str(i)] == expected.tokens[str(i)] for i in range(3, 30, 4)), "neighbours are not changed"


def check_forms(submits: list[Submit], served: Served) -> list[list[int]]:
    """Checks every output that has begun its form; returns where they did so, by their kind of start."""
    begins: list[list[int]] = [[] for _ in STARTS]
    for index, submit in enumerate(submits):
        output, constraint = served.tokens[str(index)], submit.params.constraint
        if constraint is None:
            continue
        begin = start_of(constraint.start, output)
        if served.finish[str(index)] == "length":
            assert constraint.start is not None, served.messages
            assert EOS not in output
            continue
        assert begin is not None, "an output without its form does not end"
        text = text_of_ids(output[begin:])
        assert has_form(index, text), text
        begins[index // 4 % len(STARTS)].append(begin)
    return begins


def test_torch_and_the_compiled_sampler_mask_alike() -> None:
    submits = submits_with_forms(16, STARTS)
    by_torch = serve_at_once(1, submits, [*PLAIN, *BY_TORCH])
    same(serve_at_once(2, submits, [*PLAIN, *BY_TORCH], stagger=1), by_torch)
    assert sum(map(len, check_forms(submits, by_torch))) > 8


def test_an_output_that_goes_on_elsewhere_is_the_one_that_it_would_have_been() -> None:
    submits = submits_with_forms(30, STARTS)
    expected = serve_at_once(1, submits, PLAIN)
    cut = [
        msgspec.structs.replace(
            submit, attempt=1, output_ids=expected.tokens[submit.request_id][: i % len(expected.tokens[str(i)])]
        )
        for i, submit in enumerate(submits)
    ]
    assert serve_at_once(2, cut, PLAIN, stagger=1).tokens == expected.tokens


def test_min_new_tokens_holds_the_end_off_while_something_else_may_come() -> None:
    served = serve_at_once(1, submits_with_forms(12, min_new_tokens=30), PLAIN)
    for index in range(12):
        assert has_form(index, text_of(served, str(index)))
        if index % 4 != 3:
            assert served.finish[str(index)] == "stop", "an output that can only end ends, whatever min_new_tokens says"
    longest = [text_of(served, str(index)) for index in range(1, 12, 4)]
    assert all(len(text.partition("-")[2]) == 3 for text in longest), longest


def test_a_stop_token_may_come_where_the_output_is_complete() -> None:
    prompt, stop = [[5, 6, 7]], 700
    form = Constraint("regex", "[0-9]+")
    params = replace(SAMPLED, constraint=form, stop_token_ids=(stop,), logit_bias={stop: 100.0})
    served = serve_at_once(1, submits_of(prompt, params), PLAIN)
    assert served.tokens["0"][-1] == stop
    assert len(served.tokens["0"]) == 2, "not as the first token, where nothing is complete"


TOO_MANY_WAYS = 'start: "go" way\nway: ' + " | ".join(f'"{i}x" way' for i in range(600))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Constraint("regex", "(("), "regex cannot be served"),
        (Constraint("grammar", TOO_MANY_WAYS, path="guided_grammar"), "guided_grammar cannot be served: at one place"),
    ],
    ids=["wrong", "too complex for its masks"],
)
def test_a_form_that_cannot_be_served_ends_its_request_alone(form: Constraint, says: str) -> None:
    plain, wrong = submits_of([[5, 6], [7, 8]], replace(SAMPLED, max_new_tokens=300))
    wrong = msgspec.structs.replace(wrong, params=replace(wrong.params, constraint=form, logit_bias={1: -100}))
    served = serve_at_once(1, [plain, wrong], PLAIN)
    assert served.finish["1"] == "error"
    assert says in served.messages["1"]
    assert bool(served.tokens["1"]) == (form.kind == "grammar"), "it ends after its first tokens"
    assert ("limit max_items_in_row is 500" in served.messages["1"]) == (form.kind == "grammar")
    assert served.tokens["0"] == serve(1, [plain], PLAIN).tokens["0"]


def test_a_rank_takes_what_a_front_end_has_compiled() -> None:
    given = FORMS[0]
    compiled = replace(given, text=to_grammar(given), is_compiled=True)
    submits = [submits_of([[5, 6, 7]], replace(SAMPLED, constraint=form), SEEDS[:1])[0] for form in (given, compiled)]
    first, second = (serve_at_once(1, [submit], PLAIN).tokens for submit in submits)
    assert first == second


def test_a_compiler_that_panics_ends_its_request_and_the_next_one_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = grammars.Matcher.compiled
    given = iter([True, False])

    def panics_once(*args: Any) -> Any:
        if next(given):
            raise KeyboardInterrupt  # not an Exception either
        return compiled(*args)

    monkeypatch.setattr(grammars.Matcher, "compiled", panics_once)
    tokens = Tokenizer.from_folder(model_dir(load_config().model)).token_bytes(2048)
    made = grammars.Grammars(Vocabulary(tokens, [1]))
    first, second = (submit.to_request() for submit in submits_with_forms(2))
    assert not made.prepare(first)
    assert not made.prepare(second)
    ready: list[tuple[Request, Any]] = []
    while made.has_work:
        ready += made.compiled()
    assert [request for request, _ in ready] == [first, second]
    assert "cannot be compiled" in str(ready[0][1])
    assert ready[1][1] is None
    assert second.matcher is not None
