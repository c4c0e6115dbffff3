"""Log probabilities, and prompts that are echoed, in OpenAI's forms. The fake ranks say -t / 8 of token t."""

import pytest

from tests.server.api.calls import CHAT, COMPLETIONS, HI, TEXT, post, stream, with_template
from tests.server.served import in_event_loop, serving

FOUR = {"max_tokens": 4, "seed": 40}
OUTPUT = [42, 43, 44, 45]


def text(token: int) -> str:
    return TEXT.decode([token], False)


@in_event_loop
async def test_a_completion_has_the_tokens_their_numbers_and_their_places_in_the_text():
    async with serving(1) as served:
        choice = (await post(served, COMPLETIONS, prompt=[5], logprobs=2, **FOUR)).json()["choices"][0]
        events = await stream(served, COMPLETIONS, prompt=[5], logprobs=2, **FOUR)
        none = (await post(served, COMPLETIONS, prompt=[5], logprobs=0, **FOUR)).json()["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"] == [text(token) for token in OUTPUT]
    assert found["token_logprobs"] == [-token / 8 for token in OUTPUT]
    assert found["top_logprobs"] == [{text(token): -token / 8, text(token + 1): -(token + 1) / 8} for token in OUTPUT]
    assert [choice["text"][at : at + 1] for at in found["text_offset"]] == [text(token)[0] for token in OUTPUT]
    assert [list(top.values()) for top in none["logprobs"]["top_logprobs"]] == [[-token / 8] for token in OUTPUT]
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [item for part in parts for item in part[name]] for name in found} == found


@pytest.mark.parametrize("prompt", [[50, 51, 52], "def f"], ids=["ids", "text"])
@pytest.mark.parametrize("max_tokens", [0, 1])
@in_event_loop
async def test_an_echo_scores_a_prompt_as_evaluations_need_it(prompt, max_tokens):
    ids = prompt if isinstance(prompt, list) else TEXT.encode(prompt)
    fields = {"prompt": [prompt, prompt], "echo": True, "logprobs": 1, "seed": 40, "max_tokens": max_tokens}
    async with serving(1) as served:
        choices = (await post(served, COMPLETIONS, **fields)).json()["choices"]
        plain = (await post(served, COMPLETIONS, prompt=prompt, echo=True, max_tokens=1)).json()["choices"][0]
        events = await stream(served, COMPLETIONS, **fields)
    assert [choice["index"] for choice in choices] == [0, 1]
    known = [*ids, *OUTPUT[:max_tokens]]
    for choice in choices:
        assert choice["text"].startswith(TEXT.decode(ids))
        assert choice["finish_reason"] == "length"
        found = choice["logprobs"]
        assert found["tokens"] == [text(token) for token in known]
        assert found["token_logprobs"] == [None, *(-token / 8 for token in known[1:])]
        assert found["top_logprobs"][0] is None
        assert [max(top.values()) for top in found["top_logprobs"][1:]] == found["token_logprobs"][1:]
        assert [choice["text"][at] for at in found["text_offset"]] == [text(token)[0] for token in known]
        streamed = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in streamed) == choice["text"]
        assert [item for each in streamed for item in each["logprobs"]["token_logprobs"]] == found["token_logprobs"]
    assert plain["text"].startswith(TEXT.decode(ids))
    assert plain["logprobs"] is None


@in_event_loop
async def test_prompt_logprobs_have_vllms_form():
    async with serving(1) as served:
        answer = (await post(served, COMPLETIONS, prompt=[50, 51], prompt_logprobs=1, max_tokens=1)).json()
    assert answer["choices"][0]["prompt_logprobs"] == [
        None, {"51": {"logprob": -51 / 8, "rank": 1, "decoded_token": text(51)}}
    ]  # fmt: skip


def test_a_chat_has_the_bytes_of_each_token(tmp_path):
    @in_event_loop
    async def check():
        async with serving(1, with_template(tmp_path)) as served:
            asked = {"messages": HI, "logprobs": True, "top_logprobs": 2, **FOUR}
            choice = (await post(served, CHAT, **asked)).json()["choices"][0]
            events = await stream(served, CHAT, **asked)
            refused = await post(served, CHAT, messages=HI, top_logprobs=2)
            most = await post(served, CHAT, messages=HI, logprobs=True, top_logprobs=10**6)
        content = choice["logprobs"]["content"]
        for token, entry in zip(OUTPUT, content, strict=True):
            own = {"token": text(token), "logprob": -token / 8, "bytes": list(text(token).encode())}
            assert {key: entry[key] for key in own} == own
            assert [top["logprob"] for top in entry["top_logprobs"]] == [-token / 8, -(token + 1) / 8]
        parts = [event["choices"][0]["logprobs"] for event in events]
        assert [item for part in parts if part is not None for item in part["content"]] == content
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
        assert (most.status_code, most.json()["error"]["param"]) == (400, "top_logprobs")

    check()


@in_event_loop
async def test_the_best_of_several_completions_and_all_of_them_in_the_usage():
    async with serving() as served:
        five = (await post(served, COMPLETIONS, prompt=[5], n=5, logprobs=1, **FOUR)).json()["choices"]
        best = (await post(served, COMPLETIONS, prompt=[5], n=2, best_of=5, **FOUR)).json()
        refused = await post(served, COMPLETIONS, prompt=[5], best_of=5, stream=True, **FOUR)
    order = sorted(five, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in order[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 20
    assert best["usage"]["prompt_tokens"] == 1
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "best_of"


@in_event_loop
async def test_the_best_completion_of_each_prompt_follows_its_own_prompt():
    async with serving() as served:
        answer = await post(served, COMPLETIONS, prompt=["def f", "import os"], best_of=3, echo=True, **FOUR)
    first, second = answer.json()["choices"]
    assert first["text"].startswith("def f")
    assert second["text"].startswith("import os")
