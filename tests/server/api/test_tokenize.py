"""`/tokenize` and `/detokenize` answer as vLLM's do."""

import asyncio

import moe_serve
from tests.server.api.calls import HI, TEMPLATE, TEXT, post, with_template
from tests.server.served import in_event_loop, serving, until


def test_texts_and_chats_become_ids_and_ids_become_text(tmp_path):
    @in_event_loop
    async def check():
        async with serving(1, with_template(tmp_path)) as served:
            plain = (await post(served, "/tokenize", model="demo", prompt="def f — 漢", return_token_strs=True)).json()
            long = (await post(served, "/tokenize", prompt="word " * 1000)).json()
            chat = (await post(served, "/tokenize", messages=HI)).json()
            back = (await post(served, "/detokenize", tokens=[0, *plain["tokens"], 1])).json()
            empty = (await post(served, "/tokenize", prompt="")).json()
        ids = TEXT.encode("def f — 漢")
        assert plain == {
            "count": len(ids), "max_model_len": 256, "tokens": ids,
            "token_strs": [TEXT.token_of(token_id) for token_id in ids],
        }  # fmt: skip
        assert long["tokens"] == TEXT.encode("word " * 1000)
        assert chat["tokens"] == TEXT.encode("<user>hi\n<assistant>", add_special_tokens=False)
        assert chat["token_strs"] is None
        assert back == {"prompt": "<|bos|>def f — 漢<|eos|>"}
        assert empty["tokens"] == TEXT.encode("")

    check()


WRONG = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "messages"),
    ("/tokenize", {"prompt": "a", "strange": 1}, "strange"),
    ("/tokenize", {"prompt": "a" * 1_000_000}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [5, "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [5, 2048]}, "tokens"),
]


@in_event_loop
async def test_a_wrong_field_is_named():
    async with serving(1) as served:
        for path, fields, param in WRONG:
            response = await post(served, path, **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert (await post(served, "/tokenize", prompt="a", model="x")).status_code == 404


@in_event_loop
async def test_texts_to_tokenize_count_as_requests_of_their_client_and_long_ones_leave_the_loop():
    async with serving(1, "server.rpm_limit=4") as served:
        ids = TEXT.encode("word " * 1000)
        whole = {"tokens": ids}
        answers = [
            await post(served, "/tokenize", prompt="word " * 1000),
            await post(served, "/detokenize", **whole),
            await post(served, "/detokenize", tokens=[*ids, 2048]),
            await post(served, "/tokenize", prompt="a"),
            await post(served, "/tokenize", prompt="a"),
            await post(served, "/detokenize", tokens=[5]),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 200, 429, 429]
    assert answers[0].json()["tokens"] == ids
    assert answers[1].json()["prompt"].endswith("word " * 1000)
    assert "server.rpm_limit" in answers[4].json()["error"]["message"]


@in_event_loop
async def test_facts_about_tokenizer_version_and_load_are_there(tmp_path):
    async with serving(1, with_template(tmp_path)) as served:
        info = (await served.client.get("/tokenizer_info")).json()
        version = (await served.client.get("/version")).json()["version"]
        served.hold()
        open_call = asyncio.create_task(served.generate(text="hi"))
        await until(lambda: len(served.bridge.book) == 1)
        load = (await served.client.get("/load")).json()
        served.go_on()
        await open_call
    assert (info["bos_token"], info["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert info["chat_template"] == TEMPLATE
    assert version == moe_serve.__version__
    assert load == {"server_load": 1}
