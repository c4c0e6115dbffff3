"""Random calls of every POST route: a body that is served, with some of its values replaced by hostile ones."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from tests.launcher.answered import Answers, send_all

Body = dict[str, Any]
Path = tuple[str | int, ...]
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "finds",
        "parameters": {
            "type": "object",
            "properties": {"of": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["of"],
        },
    },
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}
CALLS = [{"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"of": "x"}'}}]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "def "}]},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
]
SAMPLING: Body = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 5, "frequency_penalty": 0.5,
    "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "stop": ["xyz"], "n": 1,
    "stop_token_ids": [5], "bad_words": ["self"], "ignore_eos": False, "stop_regex": "[0-9]{5}", "min_tokens": 1,
    "skip_special_tokens": True, "include_stop_str_in_output": True, "allowed_token_ids": None,
}  # fmt: skip
OPENAIS = ("seed", "min_tokens", "include_stop_str_in_output")  # names that /generate has not
COMMON: Body = {"stream": False, "model": "demo", "priority": 0, "rid": None, "timeout": 100.0, **SAMPLING}
BODIES: dict[str, Body] = {
    "/generate": {
        "text": "def ",
        "input_ids": None,
        "stream": False,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
        "token_ids_logprob": [5],
        "sampling_params": {
            "max_new_tokens": 4, "sampling_seed": 5, "json_schema": None, "regex": None, "ebnf": None,
            **{name: value for name, value in SAMPLING.items() if name not in OPENAIS},
        },
    },
    "/v1/completions": {
        "prompt": "def ", "max_tokens": 4, "logprobs": 1, "echo": False, "best_of": None, "suffix": None,
        "prompt_logprobs": None, "stream_options": None, "response_format": None, "guided_regex": None, **COMMON,
    },
    "/v1/chat/completions": {
        "messages": CHAT, "max_completion_tokens": 4, "tools": [TOOL], "tool_choice": "auto", "logprobs": True,
        "top_logprobs": 2, "response_format": None, "structured_outputs": None, "reasoning_effort": None,
        "chat_template_kwargs": {"a": 1}, "stream_options": None, "documents": None, **COMMON,
    },
    "/v1/responses": {
        "input": "def ", "max_output_tokens": 4, "instructions": "be brief", "tools": [{"name": "find", **TOOL}],
        "tool_choice": "auto", "text": None, "reasoning": None, "stream": False, "temperature": 0.5, "model": "demo",
        "metadata": {}, "store": False, "include": [], "truncation": "disabled",
    },
    "/tokenize": {"prompt": "def ", "return_token_strs": True, "add_special_tokens": True, "model": "demo"},
    "/detokenize": {"tokens": [5, 6], "model": "demo"},
    "/abort_request": {"rid": "a", "abort_all": False},
    "/pause_generation": {"mode": "retract"},
    "/flush_cache": {},
    "/eplb/rebalance": {},
    "/eplb/placement": {"physical_to_logical_map": [[0, 1], [0, 1]]},
    "/start_profile": {"duration_s": 0.1},
    "/stop_profile": {},
    "/start_expert_distribution_record": {},
    "/stop_expert_distribution_record": {},
}  # fmt: skip
# Bodies have these, but for their mutations: what is generated, and a short output.
KEPT = ("text", "prompt", "messages", "input", "tokens", "sampling_params")
KEPT += ("max_tokens", "max_completion_tokens", "max_output_tokens")
WEIGHTS = {"/generate": 20, "/v1/completions": 25, "/v1/chat/completions": 40, "/v1/responses": 25, "/tokenize": 10}
FORMS: list[Any] = [
    FORMAT,
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a|b"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"minItems": 10**9, "type": "array"}}},
    {"type": "structural_tag", "structures": [], "triggers": []},
    {"type": "function", "function": {"name": "find"}},
    {"json": {"enum": [1, "a", None]}}, {"regex": "[ab]{3}"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'},
    "required", "none", {"type": "file_search"}, {"format": FORMAT}, {"effort": "low"}, "[ab]+", "(", 'root ::= "x"',
]  # fmt: skip
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 128, 129, 1.5, -0.0, 1e-320, 1e300, 2**31, 2**53 + 1, 2**63 - 1, -(2**63),
    2**64, 10**400, "", " ", "a", "\x00", "\ufffd", "\U0001f600", "é" * 300, "a" * 20_000, "{{ 1/0 }}", "{% for",
    "<tool_call>", "<think>", "<|im_end|>", "../../etc/passwd", "NaN", [], [None], [[]], [{}], [1], [-1], [10**6],
    ["x"], ["x"] * 200, [5] * 2000, [[5], [6]], {}, {"": ""}, {"a": None}, {"type": None}, {"-1": 1}, {"5": "x"},
    {"9" * 40: 1}, {str(i): 0.5 for i in range(2000)},
]  # fmt: skip


def random_call(draw: random.Random) -> tuple[str, bytes]:
    """Returns a route and the body to send there."""
    routes = list(BODIES)
    (route,) = draw.choices(routes, [WEIGHTS.get(each, 1) for each in routes])
    body = copy.deepcopy(BODIES[route])
    for name in list(body):  # what is left of a body shows what hides behind what it is refused for
        if name not in KEPT and draw.random() < 0.4:
            del body[name]
    if "stream" in BODIES[route] and draw.random() < 0.4:
        body["stream"] = True
    for _ in range(draw.choice([0, 1, 1, 1, 1, 2, 3])):
        _mutate(draw, body)
    if draw.random() < 0.1 and "messages" not in body and route == "/tokenize":
        body["messages"] = CHAT
    data = json.dumps(body).encode()
    if draw.random() < 0.03:
        at = draw.randrange(len(data))
        data = data[:at] + draw.choice([b"", b"\xff", b"\\ud800", b'"', b"[" * 200, b"NaN"]) + data[at + 1 :]
    return route, data


def _mutate(draw: random.Random, body: Body) -> None:
    """Replaces, adds or drops one value, anywhere in a body."""
    if draw.random() < 0.15:
        body[draw.choice(["unknown", "messages", "prompt", "echo", "best_of", "user", "n", "logprobs"])] = _value(draw)
    places = list(_places(body))
    if places:
        path = draw.choice(places)
        holder: Any = body
        for key in path[:-1]:
            holder = holder[key]
        if draw.random() < 0.1:
            del holder[path[-1]]
        else:
            holder[path[-1]] = _value(draw)


def _value(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(FORMS if draw.random() < 0.15 else HOSTILE))


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        if len(path) < 6 and (not isinstance(item, list | dict) or len(item) < 20):
            yield from _places(item, (*path, key))


async def send_calls(address: str, seed: int, count: int, limit_s: float) -> Answers:
    """Sends `count` calls, and waits `limit_s` at most for each answer."""
    draw = random.Random(seed)
    return await send_all(address, (random_call(draw) for _ in range(count)), _ask, limit_s)


async def _ask(client: httpx.AsyncClient, call: tuple[str, bytes]) -> str:
    route, data = call
    answer = await client.post(route, content=data, headers={"content-type": "application/json"})
    if route == "/pause_generation":
        await client.post("/continue_generation")
    return _problem(answer)


def _problem(answer: httpx.Response) -> str:
    """Returns what is wrong with an answer, "" for nothing."""
    if answer.status_code == 503 and "the request was aborted" in answer.text:
        return ""  # by /abort_request or /pause_generation of another client
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:500]}"
    kind = answer.headers.get("content-type", "")
    if answer.status_code != 200:
        error = answer.json()["error"]
        return "" if error["message"] and error["code"] == answer.status_code else f"{error} in {answer.status_code}"
    if kind.startswith("text/event-stream"):
        events = [part for part in answer.text.split("\n\n") if part]
        datas = [json.loads(line[6:]) for part in events for line in part.split("\n") if line.startswith("data: {")]
        last = datas[-1] if datas else {}
        ends = events[-1] == "data: [DONE]" or last.get("type") in ("response.completed", "response.incomplete")
        return "" if ends else f"a stream that ends with {events[-1][:500]}"
    if kind.startswith("application/json"):
        answer.json()
    return ""
