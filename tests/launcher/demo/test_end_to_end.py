"""The main job with the real ranks: the demo model on two of them, by command, by HTTP and from Python."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from moe_serve.config import ModelConfig, model_dir
from moe_serve.eplb import read_trace
from moe_serve.models.checkpoint import all_tensors
from moe_serve.models.families.registry import read_spec
from tests.launcher.hostile_calls import send_calls
from tests.launcher.listening import listening, takes_connections
from tests.launcher.random_bodies import send_bodies
from tests.launcher.running import Running, eventually, gone, pid_of_rank
from tests.launcher.test_children import parent_of
from tests.server.served import demo_tokenizer as tokenizer_of_the_demo
from tests.server.test_app import BAD

ANY_PORT = ("--port", "0", "--set", "server.worker_port=0")
GREEDY = {"temperature": 0, "max_new_tokens": 24}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "max_new_tokens": 24, "sampling_seed": 42}


def serve(*arguments: str) -> Running:
    return Running("moe_serve", ["serve", *ANY_PORT, *arguments])


@pytest.fixture(scope="module")
def system(demo):
    return demo


@pytest.fixture(scope="module")
def client(system):
    with system.client(timeout_s=120) as made:
        yield made


def generate(client: httpx.Client, **fields) -> dict | list:
    response = client.post("/generate", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_one_screen_is_printed_and_the_effective_configuration_is_served(system, client):
    assert f"  server.port={client.base_url.port}" in system.output or "server.port=0" in system.output
    assert f"OpenAI clients: base_url {str(client.base_url).rstrip('/')}/v1, model demo" in system.output
    assert f"talk: {str(client.base_url).rstrip('/')}/chat" in system.output
    assert "expert_weights" not in system.output.partition("ready after")[0].partition("kernels:")[0]
    assert all(json.loads(line)["process"] for line in system.output.splitlines())  # --log-format json
    info = client.get("/server_info").json()
    assert info["config"]["model"]["path"] == "demo"
    assert [rank["info"]["slots_per_rank"] for rank in info["ranks"]] == [16, 16]


def test_the_transport_and_its_waits_are_reported(client):
    generate(client, text="x", sampling_params=GREEDY)
    for rank in client.get("/server_info").json()["ranks"]:
        assert rank["info"]["all_to_all"] == "ShmAllToAll"
        assert rank["info"]["all_to_all_note"].startswith("rows are moved by")
        assert rank["info"]["all_to_all_is_bitwise"] is True
    series = [f'moe_serve_all_to_all_wait_seconds_total{{peer="{1 - rank}",rank="{rank}"}}' for rank in (0, 1)]
    assert eventually(lambda: all(name in client.get("/metrics").text for name in series))


def test_a_profile_has_the_steps_of_both_ranks_and_the_requests_on_one_clock(system, client):
    assert client.post("/start_profile", json={"duration_s": 30}).status_code == 200
    assert client.post("/start_profile").status_code == 409, "one at a time"
    for rank in (0, 1):
        generate(client, text="profiled", sampling_params=GREEDY, routed_dp_rank=rank)
    answer = client.post("/stop_profile")
    assert answer.status_code == 200, answer.text
    folder = Path(client.get("/server_info").json()["config"]["server"]["profile_dir"])
    assert [path.name for path in folder.iterdir()] == [answer.json()["file"]]
    events = json.loads((folder / answer.json()["file"]).read_text())["traceEvents"]
    parts = {(event["pid"], event["name"]) for event in events if event.get("cat") == "part"}
    of_a_step = ("exchange", "attention", "gate", "dispatch", "experts", "combine", "sample")
    assert parts >= {(1 + rank, part) for rank in (0, 1) for part in of_a_step}
    steps = [event for event in events if event.get("cat") == "step" and event["name"] == "decode"]
    for begin in (event for event in events if event["ph"] == "b"):
        end = next(event for event in events if event["ph"] == "e" and event["id"] == begin["id"])
        own = [step for step in steps if step["pid"] == 1 + begin["args"]["rank"] and step["args"]["decode_rows"]]
        assert len([step for step in own if begin["ts"] < step["ts"] < end["ts"]]) >= GREEDY["max_new_tokens"] - 1


def test_steps_are_timed_by_part_and_requests_have_a_line_of_json(system, client):
    generate(client, text="logged", rid="a line", sampling_params=GREEDY)
    wanted = 'moe_serve_rank_step_part_seconds_total{part="experts",phase="decode",rank="1"}'
    assert eventually(lambda: wanted in client.get("/metrics").text)
    assert eventually(lambda: '"rid": "a line"' in system.output)
    line = json.loads(next(line for line in system.output.splitlines() if '"rid": "a line"' in line))
    assert (line["message"], line["finish"], line["output_tokens"]) == ("request ended", "length", 24)
    assert "logged" not in json.dumps(line)


def test_a_recording_holds_what_clients_were_served_and_nothing_else(client, dumps):
    def tell_recorder(command: str) -> list[str]:
        response = client.post(f"/{command}_expert_distribution_record")
        assert response.status_code == 200, response.text
        return response.text.splitlines()

    generate(client, text="before", sampling_params=GREEDY)
    assert tell_recorder("start") == ["Start recording expert distribution.", f"mode stat, into {dumps}"]
    metas = [
        generate(client, text=text, sampling_params=GREEDY, routed_dp_rank=rank)["meta_info"]
        for rank, text in enumerate(["one prompt", "another, longer prompt"])
    ]
    assert tell_recorder("stop")[0] == "Stop recording expert distribution."
    generate(client, text="after", sampling_params=GREEDY)
    said, text, path = tell_recorder("dump")
    assert said == "Dump expert distribution record."
    assert "window" in text
    assert list(map(str, dumps.iterdir())) == [path]
    rows = sum(meta["prompt_tokens"] - meta["cached_tokens"] + meta["completion_tokens"] - 1 for meta in metas)
    assert sum(record.tokens.sum(1) for record in read_trace(path)).tolist() == [4 * rows] * 4, "top 4 in 4 layers"
    refused = client.post("/dump_expert_distribution_record")
    assert refused.status_code == 409
    assert "start a recording first" in refused.json()["error"]["message"]


def test_text_comes_back_and_greedy_text_is_always_the_same(client):
    first = generate(client, text="def __init__(self", sampling_params=GREEDY)
    assert first["text"]
    assert first["meta_info"]["completion_tokens"] == len(first["output_ids"])
    assert first["text"] == tokenizer_of_the_demo().decode(first["output_ids"])
    assert generate(client, text="def __init__(self", sampling_params=GREEDY)["output_ids"] == first["output_ids"]


def test_both_ranks_serve_and_agree(client):
    answers = [generate(client, text="import os", sampling_params=GREEDY, routed_dp_rank=rank) for rank in (0, 1)]
    assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, 1]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


def test_sampling_follows_the_seed_alone(client):
    runs = [generate(client, text="The server", sampling_params=SAMPLED, routed_dp_rank=i % 2) for i in range(3)]
    assert len({tuple(run["output_ids"]) for run in runs}) == 1
    other = generate(client, text="The server", sampling_params=SAMPLED | {"sampling_seed": 43})
    assert other["output_ids"] != runs[0]["output_ids"]


def test_a_stream_ends_in_the_text_of_the_plain_answer(client):
    plain = generate(client, text="class ", sampling_params=GREEDY)
    with client.stream(
        "POST", "/generate", json={"text": "class ", "sampling_params": GREEDY, "stream": True}
    ) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert 2 < len(lines) <= plain["meta_info"]["completion_tokens"] + 1  # a slow reader gets several tokens at once
    assert json.loads(lines[-2][6:])["text"] == plain["text"]


def test_a_batch_gives_what_its_prompts_give_alone(client):
    prompts = ["def f(", "The ", "import ", "x = "]
    together = generate(client, text=prompts, sampling_params=GREEDY)
    alone = [generate(client, text=prompt, sampling_params=GREEDY) for prompt in prompts]
    assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in alone]


def test_a_stop_string_cuts_the_text(client):
    whole = generate(client, text="def __init__(self", sampling_params=GREEDY)["text"]
    stop = whole[10:13]
    answer = generate(client, text="def __init__(self", sampling_params=GREEDY | {"stop": stop})
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_outputs_have_the_form_that_was_asked_for_on_every_route_and_what_explodes_is_refused(client):
    form = {
        "type": "object",
        "properties": {"n": {"enum": [1, "two"]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form["x-guidance"] = {"whitespace_flexible": False}
    prompts = ["def f(", "class A"]
    sampled = {**SAMPLED, "json_schema": json.dumps(form)}
    answers = generate(client, text=prompts, sampling_params=sampled)
    assert all(json.loads(answer["text"])["n"] in (1, "two") for answer in answers)
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers)
    assert [answer["text"] for answer in generate(client, text=prompts, sampling_params=sampled)] == [
        answer["text"] for answer in answers
    ]
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": form}}
    for field in ({"response_format": format}, {"guided_json": form}, {"structured_outputs": {"json": form}}):
        body = {"model": "demo", "prompt": "def f(", "temperature": 0.9, "max_tokens": 24, **field}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert json.loads(response.json()["choices"][0]["text"])["n"] in (1, "two")
    choice = client.post("/v1/completions", json={"model": "demo", "prompt": "a", "guided_choice": ["x", "yy"]}).json()
    assert choice["choices"][0]["text"] in ("x", "yy")
    for fields in (
        {"json_schema": '{"type":"integer","multipleOf":9999991}'},
        {"regex": "(("},
        {"regex": "a", "ebnf": "b"},
    ):
        body = {"text": "a", "sampling_params": fields}
        # 429 asks for another try, where the machine is too busy to compile a form in time.
        assert eventually(lambda body=body: client.post("/generate", json=body).status_code == 400), body


def test_a_repeated_prompt_comes_from_the_cache(client):
    text = "A sentence that is long enough to fill several blocks of the cache, and then some more words. " * 2
    generate(client, text=text, sampling_params=GREEDY, routed_dp_rank=0)
    again = generate(client, text=text, sampling_params=GREEDY, routed_dp_rank=0)
    assert again["meta_info"]["cached_tokens"] >= 16
    salted = generate(client, text=text, sampling_params=GREEDY, routed_dp_rank=0, cache_salt="other tenant")
    assert salted["meta_info"]["cached_tokens"] == 0
    assert salted["output_ids"] == again["output_ids"]


def test_what_one_key_has_sent_another_finds_in_no_cache_by_any_route(monkeypatch):
    """`cached_tokens` told one key how much of its prompt another had sent. Two front ends: both must agree."""
    text = "a sentence that is long enough to fill several blocks of the cache, and then some more words. " * 2
    routes = {
        "/generate": {"text": f"First {text}", "sampling_params": GREEDY},
        "/v1/completions": {"prompt": f"Second {text}", "max_tokens": 4},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": f"Third {text}"}], "max_tokens": 4},
        "/v1/responses": {"input": f"Fourth {text}", "max_output_tokens": 16},
    }
    monkeypatch.setenv("MOE_SERVE_API_KEY", "first-key second-key")

    def cached(system: Running, route: str, key: str) -> int:
        with system.client(timeout_s=120) as client:  # a connection of its own: to any of the front ends
            body = {**routes[route], "routed_dp_rank": 0}
            answer = client.post(route, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        if route == "/generate":
            return answer.json()["meta_info"]["cached_tokens"]
        usage = answer.json()["usage"]
        details = usage["input_tokens_details"] if route == "/v1/responses" else usage["prompt_tokens_details"]
        return details["cached_tokens"]

    with serve("--api-workers", "2", "--ep-size", "1") as system:
        for route in routes:
            own = [cached(system, route, "first-key") for _ in range(5)]
            other = [cached(system, route, "second-key") for _ in range(5)]
            assert own[0] == 0, route
            assert own[1:] == [own[1]] * 4, route
            assert own[1] >= 32, route
            assert other == own, f"{route}: as if nobody had sent it before"


def test_bad_input_is_refused_by_name_and_the_server_goes_on(client):
    for fields, field in BAD:
        if fields in ({"input_ids": [5] * 201}, {"text": "a", "sampling_params": {"max_new_tokens": 256}}):
            continue  # what is too long depends on the model
        response = client.post("/generate", json=fields)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == field
    for fields in ({"input_ids": [5] * 1024}, {"input_ids": [5] * 1000, "sampling_params": {"max_new_tokens": 25}}):
        assert client.post("/generate", json=fields).status_code == 400
    assert generate(client, text="still here", sampling_params=GREEDY)["text"]


def test_a_client_that_leaves_frees_its_rank(client):
    endless = {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "stream": True}
    with client.stream("POST", "/generate", json=endless) as stream:
        next(stream.iter_lines())

    def idle() -> bool:
        info = client.get("/server_info").json()
        running = [rank["status"]["num_running"] + rank["status"]["num_waiting"] for rank in info["ranks"]]
        return info["requests"]["open"] == 0 and running == [0, 0]

    assert eventually(idle)
    assert client.get("/server_info").json()["requests"]["num_aborted"] >= 3


def test_many_clients_at_once(client):
    alone = generate(client, text="The ", sampling_params=SAMPLED)["output_ids"]
    found: list[list[int]] = []

    def one() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60, trust_env=False) as own:
            found.append(generate(own, text="The ", sampling_params=SAMPLED)["output_ids"])

    threads = [threading.Thread(target=one) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    assert sum(ids == alone for ids in found) >= 23  # fast numerics: a near tie may fall the other way


def test_a_checkpoint_with_one_nan_in_one_expert_does_not_become_ready(tmp_path):
    folder = Path(shutil.copytree(model_dir(ModelConfig()), tmp_path / "model"))
    last = read_spec(folder).num_logical - 1  # on rank 1
    name = f"model.layers.3.mlp.experts.{last}.down_proj.weight"
    tensor = all_tensors(folder)[name]
    assert tensor.dtype_name == "BF16"
    with tensor.path.open("r+b") as file:
        file.seek(tensor.start + tensor.num_bytes - 2)
        file.write(b"\xc0\x7f")
    with serve("--model-path", str(folder), "--ep-size", "2") as system:
        assert system.wait() == 2
        # What the other rank says of it may come last.
        wanted = f"exited with code 2: rank 1 on {socket.gethostname()} failed: {tensor.path}: tensor {name}"
        (said,) = (line for line in system.lines if wanted in line)
        assert said.endswith("download the file again, or convert the model again")
        assert "Traceback" not in system.output
        assert " ready" not in system.output


HOURS = [pytest.mark.slow, pytest.mark.timeout(7200)]  # about 35 random bodies a second on two busy cores


@pytest.mark.parametrize("count", [40, pytest.param(100_000, marks=HOURS)])
def test_every_random_valid_body_gets_its_answer(client, count):
    outcome = asyncio.run(send_bodies(str(client.base_url), seed=count, count=count, limit_s=60))
    assert (outcome.wrong, outcome.number) == ([], count)
    assert client.get("/server_info").json()["requests"]["open"] == 0


@pytest.mark.parametrize("count", [30, pytest.param(50_000, marks=HOURS)])
def test_hostile_calls_of_every_route_are_answered(system, client, count):
    answers = asyncio.run(send_calls(str(client.base_url), seed=count, count=count, limit_s=60))
    assert (answers.wrong, answers.number) == ([], count)
    assert "Traceback" not in system.output
    assert client.get("/server_info").json()["requests"]["open"] == 0


def test_generate_prints_the_text_of_the_server_and_ends(client):
    text = generate(client, text="def __init__(self", sampling_params=GREEDY)["text"]
    command = [sys.executable, "-m", "moe_serve", "generate", "def __init__(self", "--ep-size", "1"]
    result = subprocess.run(
        [*command, "--max-new-tokens", str(GREEDY["max_new_tokens"])], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"def __init__(self{text}\n"


def test_no_port_but_that_of_http_takes_an_unauthenticated_peer(system, client):
    ports = {address for pid in system.descendants() for address in listening(pid)}
    assert {host for host, _ in ports} == {"127.0.0.1"}
    assert [port for host, port in ports if takes_connections((host, port))] == [client.base_url.port]
    assert len(generate(client, text="x", sampling_params=GREEDY)["output_ids"]) == 24


def test_a_killed_rank_comes_back_alone_while_every_call_keeps_its_tokens(system, client):
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "bad_words": ["self"]}
    params = {"max_new_tokens": 300, "ignore_eos": True, "sampling_seed": 3, **penalties}
    body = {"text": "a", "sampling_params": params}
    answers: list[httpx.Response] = []

    def one(number: int) -> None:
        with httpx.Client(base_url=client.base_url, timeout=60, trust_env=False) as own:
            fields = body | {"stream": number == 0, "routed_dp_rank": number % 2}
            answers.append(own.post("/generate", json=fields))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: client.get("/server_info").json()["requests"]["open"] == 3)
    other, victim = pid_of_rank(client, 0), pid_of_rank(client, 1)
    os.kill(victim, signal.SIGKILL)
    system.wait_for(r"rank 1 (is masked|\(process \d+\) was killed by SIGKILL).*; rank 0 waits for it")
    system.wait_for(r"rank 1 is started again, alone \(restart 1 of 3 within 600 s\)")
    for thread in threads:
        thread.join(60)
    assert len(answers) == 3, "nothing hangs"
    assert all('"type":"length","length":300' in answer.text for answer in answers), [a.text[-300:] for a in answers]
    system.wait_for("rank 1 rejoined; ranks 0, 1 serve")
    assert pid_of_rank(client, 0) == other
    assert pid_of_rank(client, 1) != victim
    parents = {parent_of(pid_of_rank(client, rank)) for rank in (0, 1)}
    (parent,) = parents  # which both were forked from, and which other threads would leave locked for them
    assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1
    right = client.post("/generate", json=body).json()["output_ids"]
    told = [answer.text.split("data: ")[-2] if "data: " in answer.text else answer.text for answer in answers]
    assert [json.loads(text)["output_ids"] for text in told] == [right] * 3
    info = client.get("/server_info").json()
    assert info["requests"]["num_failed"] == 0
    assert info["requests"]["num_moved"] > 0
    assert info["ranks_out"] == {}


@pytest.mark.slow  # by default test_lost_rank.py compares what one rank of LLM makes with what three serve
def test_batch_invariant_from_python_gives_the_same_on_one_rank_and_two():
    from moe_serve import LLM, SamplingParams

    prompts = [[5, 6, 7], [300, 20], [9] * 40]
    params = SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)
    outputs = []
    for num_ranks in (1, 2):
        with LLM("demo", num_ranks=num_ranks, numerics="batch_invariant") as llm:
            outputs.append([output.token_ids for output in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]
    assert all(len(ids) == 16 for ids in outputs[0])


@pytest.mark.slow
def test_a_killed_rank_is_started_again_alone_and_no_token_changes():
    from moe_serve import LLM, SamplingParams

    with LLM("demo", num_ranks=2, numerics="batch_invariant", threads_per_rank=1) as llm:
        prompts = [[5, 6, 7 + i] for i in range(8)]
        params = SamplingParams(max_new_tokens=300, temperature=0.9, seed=10, ignore_eos=True)
        right = [output.token_ids for output in llm.generate(prompts, params)]
        before = [child.pid for child in llm._ranks.ranks.children]
        outputs = llm.stream(prompts, params)
        next(outputs)
        os.kill(before[1], signal.SIGKILL)
        last = dict(outputs)
        assert [last[index].token_ids for index in range(8)] == right
        after = [child.pid for child in llm._ranks.ranks.children]
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert eventually(lambda: not llm._bridge.workers.masked)
    assert gone([*before, *after])
