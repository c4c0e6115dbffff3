"""Random valid bodies of `/generate`, and clients that send them and wait for every answer."""

import json
import random
from typing import Any

import httpx

from tests.launcher.answered import Answers, send_all

VOCAB_SIZE, MODEL_LEN = 2048, 1024  # of the demo model
MAX_NEW = 770
WORDS = ("def ", "return ", "self", "(x, y)", "\n    ", "import os\n", "é", "0.5", "# ")
NAMES = ("one", "two", "three")


def random_body(draw: random.Random) -> dict[str, Any]:
    """Returns a body that is served: a few tokens as a rule, up to MAX_NEW at times."""
    body: dict[str, Any] = {}
    num_prompts = draw.choice([1, 1, 1, 1, 2, 3])
    field_name, one = draw.choice([("text", _text), ("input_ids", _ids)])
    prompts = [one(draw) for _ in range(num_prompts)]
    body[field_name] = prompts if num_prompts > 1 else prompts[0]
    params = [_params(draw) for _ in range(num_prompts)]
    body["sampling_params"] = params if num_prompts > 1 and draw.random() < 0.5 else params[0]
    for name, values in {
        "stream": (True, False),
        "priority": (-1, 0, 1),
        "session_id": NAMES,
        "cache_salt": NAMES,
        "extra_key": NAMES,
        "routed_dp_rank": (0, 1),
        "stream_options": ({"incremental": True}, {"incremental": False}),
        "return_logprob": (False, None, True),
        "timeout": (1000.0,),
    }.items():
        if draw.random() < 0.2:
            body[name] = draw.choice(values)
    if body.get("return_logprob"):
        body |= {"logprob_start_len": draw.choice([-1, 0]), "top_logprobs_num": draw.choice([0, 3])}
    return body


def _text(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 30)))


def _ids(draw: random.Random) -> list[int]:
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(draw.choice([1, 5, 15, 16, 17, 33, 100]))]


def _params(draw: random.Random) -> dict[str, Any]:
    most = draw.choices([8, 60, MAX_NEW], [95, 4, 1])[0]
    params: dict[str, Any] = {"max_new_tokens": draw.randrange(most + 1)}
    for name, value in {
        "temperature": draw.choice([0, 0.01, 0.7, 1.0, 3.0, 1e30]),
        "top_p": draw.choice([1.0, 0.95, 0.5, 1e-9]),
        "top_k": draw.choice([-1, 1, 20, 5000]),
        "min_p": draw.choice([0.0, 0.05, 1.0]),
        "sampling_seed": draw.randrange(2**63),
        "repetition_penalty": draw.choice([1.0, 1.3, 0.01, 100.0]),
        "frequency_penalty": draw.choice([0.0, 0.5, -2.0]),
        "presence_penalty": draw.choice([0.0, 2.0]),
        "logit_bias": {str(draw.randrange(VOCAB_SIZE)): draw.uniform(-100, 100) for _ in range(draw.randrange(9))},
        "bad_words": draw.choice(["self", [], ["def", "return x"]]),
        "bad_words_ids": [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 4))]],
        "allowed_token_ids": draw.choice([[], list(range(0, VOCAB_SIZE, 2))]),
        "no_stop_trim": draw.choice([True, False]),
        "min_new_tokens": draw.randrange(params["max_new_tokens"] + 1),
        "stop": draw.choice(["\n", ["x", "self", "é"], []]),
        "stop_regex": draw.choice(["", r"\d{3}", ["(?:self|cls)[.,]", r"\n\s*\n"]]),
        "stop_token_ids": [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(4))],
        "ignore_eos": draw.random() < 0.5,
        "skip_special_tokens": draw.random() < 0.5,
        "n": draw.choice([1, 2, 3]),
    }.items():
        if draw.random() < 0.3:
            params[name] = value
    return params


async def send_bodies(address: str, seed: int, count: int, limit_s: float) -> Answers:
    """Sends `count` bodies, and waits `limit_s` at most for each answer."""
    draw = random.Random(seed)
    return await send_all(address, (random_body(draw) for _ in range(count)), _ask, limit_s)


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    return _problem(body, await client.post("/generate", json=body))


def _problem(body: dict[str, Any], answer: httpx.Response) -> str:
    """Returns what is wrong with an answer, "" for nothing."""
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    prompts = body.get("text", body.get("input_ids"))
    is_list = isinstance(prompts, list) and isinstance(prompts[0], list | str)
    params = body["sampling_params"]
    each = params if isinstance(params, list) else [params] * (len(prompts) if is_list else 1)
    allowed = [one["max_new_tokens"] for one in each for _ in range(one.get("n", 1))]
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        if events.pop() != "[DONE]":
            return "the stream does not end with [DONE]"
        last = {event.get("index", 0): event for event in map(json.loads, events)}
        results = [last[index] for index in sorted(last)]
    else:
        content = answer.json()
        results = content if isinstance(content, list) else [content]
    if len(results) != len(allowed):
        return f"{len(results)} outputs for {len(allowed)} requests"
    for result, most in zip(results, allowed, strict=True):
        meta = result["meta_info"]
        count, reason = meta["completion_tokens"], meta["finish_reason"]
        if reason is None or count > most or (reason["type"] == "length" and count != most):
            return f"{count} of {most} tokens, ended by {reason}"
    return ""
