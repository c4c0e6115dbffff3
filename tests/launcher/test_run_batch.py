"""`moe-serve run-batch`: OpenAI's files of requests, by the server's application. Ranks without torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_serve.config import load_config
from moe_serve.errors import ConfigError
from moe_serve.launcher.run_batch import run_batch

FAKE = "tests.launcher.fake_rank"


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def answers_of(path: Path) -> dict[str, dict[str, Any]]:
    found = {each["custom_id"]: each for each in map(json.loads, path.read_text().splitlines())}
    assert len(found) == len(path.read_text().splitlines())
    return found


def run(source: Path, target: Path) -> tuple[int, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    config = load_config(overrides=["parallel.num_ranks=2", "engine.max_running_requests=2"])
    return run_batch(config, source, target, None, lambda *counts: seen.append(counts), FAKE), seen


def test_lines_are_answered_as_the_server_would_and_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    lines = [line(f"id {i}", prompt=[5 + i, 6], max_tokens=3, temperature=0, seed=i) for i in range(12)]
    source = written(
        tmp_path / "in.jsonl",
        *lines,
        "",
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=2),
        line("wrong", prompt=[5], max_tokens=-1),
        line("other model", prompt=[5], model="gpt-4"),
        line("stream", prompt=[5], stream=True),
    )
    num_errors, seen = run(source, target)
    answers = answers_of(target)
    assert num_errors == 3
    assert seen[-1] == (16, 16)
    assert answers.keys() == {*(f"id {i}" for i in range(12)), "chat", "wrong", "other model", "stream"}
    assert {key: each["response"]["status_code"] for key, each in answers.items() if not key.startswith("id")} == {
        "chat": 200, "wrong": 400, "other model": 404, "stream": 400,
    }  # fmt: skip
    assert answers["chat"]["response"]["body"]["object"] == "chat.completion"
    assert "max_tokens" in answers["wrong"]["response"]["body"]["error"]["message"]
    whole = target.read_text().splitlines(keepends=True)
    texts = {key: each["response"]["body"].get("choices", [{}])[0].get("text") for key, each in answers.items()}
    assert len({texts[f"id {i}"] for i in range(12)}) > 1
    # Its process was killed in the middle of the fifth answer.
    target.write_text("".join(whole[:4]) + whole[4][:50])
    _, seen = run(source, target)
    assert target.read_text().startswith("".join(whole[:4]))
    assert seen[0] == (5, 16)
    again = answers_of(target)
    assert again.keys() == answers.keys()
    for key in (f"id {i}" for i in range(12)):
        assert again[key]["response"]["body"]["choices"] == answers[key]["response"]["body"]["choices"]
    kept = target.read_bytes()
    assert run(source, target) == (0, [(16, 16)]), "all is answered: no rank is started"
    assert target.read_bytes() == kept


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("{", r"in\.jsonl, line 2: .*a line is"),
        ({"custom_id": "b", "url": "/v1/completions"}, "line 2: .*`body`"),
        (line("a", prompt="x"), "line 2: custom_id 'a' is that of line 1"),
        (
            line("b", "/v1/embeddings", input="x"),
            "line 2: POST /v1/embeddings is not served in a batch; .*/v1/messages",
        ),
        (line("b") | {"method": "GET"}, "line 2: GET /v1/completions"),
        (line("b") | {"body": []}, "line 2: body is no object"),
    ],
)
def test_a_wrong_line_is_named_before_anything_starts(tmp_path: Path, wrong: Any, message: str) -> None:
    source = written(tmp_path / "in.jsonl", line("a", prompt=[5]), wrong)
    with pytest.raises(ConfigError, match=message):
        run(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_that_is_no_output_of_this_batch_is_not_written_to(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", line("a", prompt=[5]))
    for content, message in (
        ({"custom_id": "z"}, "has an answer to 'z', which is not in"),
        ("notes", "line 1: this is no"),
    ):
        target = written(tmp_path / "out.jsonl", content)
        kept = target.read_bytes()
        with pytest.raises(ConfigError, match=message):
            run(source, target)
        assert target.read_bytes() == kept
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl cannot be read"):
        run(tmp_path / "nowhere.jsonl", target)
    with pytest.raises(ConfigError, match="cannot be written"):
        run(source, tmp_path / "no folder" / "out.jsonl")
