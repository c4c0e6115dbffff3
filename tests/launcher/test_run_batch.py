"""`moe-serve run-batch`: OpenAI's files of requests, by the server's application. Ranks without torch."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_serve.config import load_config
from moe_serve.errors import ConfigError, LaunchError
from moe_serve.launcher import run_batch as batches
from moe_serve.launcher.run_batch import run_batch
from tests.launcher.running import fake_ranks


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def answers_of(path: Path) -> dict[str, dict[str, Any]]:
    texts = [text for text in path.read_text().split("\n") if text]
    found = {each["custom_id"]: each for each in map(json.loads, texts)}
    assert len(found) == len(texts)
    return found


def run(source: Path, target: Path) -> tuple[int, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    config = load_config(overrides=["parallel.num_ranks=2", "engine.max_running_requests=2"])
    with fake_ranks():
        return run_batch(config, source, target, None, lambda *counts: seen.append(counts)), seen


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
    # Its process was killed in the middle of the fifth answer; somebody has looked at the file, and left an empty line.
    target.write_text("".join(whole[:2]) + "\n" + "".join(whole[2:4]) + whole[4][:50])
    _, seen = run(source, target)
    assert target.read_text().startswith("".join(whole[:2]) + "\n" + "".join(whole[2:4]))
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
            line("b", "/v1/moderations", input="x"),
            "line 2: POST /v1/moderations is not served in a batch; .*/v1/messages",
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
        ({"id": "1", "custom_id": "z", "response": {}}, "has an answer to 'z', which is not in"),
        ("notes", "line 1: this is no answer"),
        (line("a", prompt=[5]), "line 1: this is no answer"),
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


def test_a_line_that_no_rank_can_serve_gets_its_answer_and_is_asked_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "in.jsonl", *(line(f"id {i}", prompt=[5, 6], max_tokens=2) for i in range(6)))
    monkeypatch.setattr(batches, "_BUSY_PAUSE_S", 0.001)
    asked: list[str] = []

    async def never(app: Any, path: str, body: bytes, headers: Any) -> batches.Answer:
        asked.append(path)
        return batches.Answer(503, b'{"error":{"message":"too late"}}')

    with monkeypatch.context() as patch:
        patch.setattr(batches, "ask", never)
        num_errors, _ = run(source, tmp_path / "never.jsonl")
    assert num_errors == 6
    assert len(asked) == 6 * 3
    target = tmp_path / "never.jsonl"
    assert all(each["response"]["status_code"] == 503 for each in answers_of(target).values())
    kept = {"id": "x", "custom_id": "id 2", "response": {"status_code": 200, "body": {}}, "error": None}
    lines = [
        json.dumps(kept) if json.loads(text)["custom_id"] == "id 2" else text
        for text in target.read_text().splitlines()
    ]
    written(target, *lines, next(text for text in target.read_text().splitlines() if "id 2" in text))
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    num_errors, seen = run(source, link)
    assert target.read_text().count("id 2") == 1, "its refusal is gone"
    assert link.is_symlink()
    assert (num_errors, seen[0], seen[-1]) == (0, (2, 6), (6, 6)), "they are asked again, and their answers replaced"
    answers = answers_of(target)
    assert answers["id 2"] == kept
    assert all(each["response"]["status_code"] == 200 for each in answers.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "link.jsonl", "never.jsonl"]


class FullDisk(io.RawIOBase):
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_message() -> None:
    batch = batches._Batch(None, None, iter(()), FullDisk(), None, None)  # type: ignore[arg-type]
    one = batches.Line("1", "/v1/completions", msgspec.Raw(b"{}"))
    with pytest.raises(LaunchError, match=r"cannot be written \(No space left on device\); what is answered is kept"):
        batch._write(one, batches.Answer(200, b"{}"))
