"""`moe-serve bench` as a command: its table, its files, its exit codes."""

import asyncio
import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from moe_serve.errors import ConfigError
from moe_serve.launcher.cli import app as cli
from tests.bench.fake_openai import Fake, running

pytest.importorskip("aiohttp")


def bench(*arguments: str):
    return CliRunner().invoke(cli.app, ["bench", *arguments], catch_exceptions=False)


def test_a_run_prints_a_table_and_writes_its_numbers_and_its_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_SERVE_API_KEY", "secret")
    with running(Fake(first_s=0.01, gap_s=0.001)) as fake:
        done = bench(
            "--base-url", fake.url, "--num-prompts", "4", "--max-concurrency", "2", "--output-len", "3", "--goodput",
            "ttft:60000", "tpot:60000", "--extra-body", '{"top_k": 3}', "--json", str(tmp_path / "run.json"),
            "--picture", str(tmp_path / "run.svg"),
        )  # fmt: skip
    assert done.exit_code == 0
    assert "requests complete / failed                         4 / 0" in done.stdout
    assert "time to first token" in done.stdout
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["completed"], found["total_output_tokens"], len(found["requests"])) == (4, 12, 4)
    assert found["request_goodput"] == found["request_throughput"]
    assert "secret" not in json.dumps(found)
    ElementTree.parse(tmp_path / "run.svg")
    assert {body["top_k"] for body in fake.bodies} == {3}
    assert len(fake.bodies) == 5  # with the warm-up
    assert set(fake.keys) == {"Bearer secret"}


def test_a_request_that_fails_is_exit_code_1():
    with running(Fake(first_s=0, refuses=frozenset({0}))) as fake:
        done = bench("--base-url", fake.url, "--num-prompts", "2", "--num-warmups", "0", "--output-len", "2")
    assert done.exit_code == 1
    assert "1 × HTTP 429" in done.stdout


class Ending(Fake):
    """Its metrics are there once."""

    async def _metrics(self, writer: asyncio.StreamWriter) -> None:
        await super()._metrics(writer)
        self.metrics = b""


def test_metrics_that_end_during_a_run_are_named(monkeypatch):
    """It was silent."""
    monkeypatch.setattr("moe_serve.bench.drafts.REPORTED_S", 0.0)
    metrics = b'moe_serve_rank_drafts_total{rank="0",source="own",outcome="right"} 3.0\n'
    with running(Ending(first_s=0, metrics=metrics)) as fake:
        done = bench("--base-url", fake.url, "--num-prompts", "2", "--max-concurrency", "1", "--output-len", "2")
    assert done.exit_code == 0
    assert "what drafts did is not known" in done.stderr
    assert "drafts" not in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--base-url", "http://127.0.0.1:1"], "nothing serves at"),
        (["--base-url", "localhost:1"], "expected http://"),
        (["--endpoint", "embeddings"], "expected completions, chat, generate"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--extra-body", "{"], "not JSON"),
        (["--duration", "1"], "has no end"),
        (["--json", "no/folder/run.json"], "--json: no/folder/run.json cannot be written"),
        (["--picture", "/"], "--picture: / cannot be written"),
        (["--picture", "run.png"], "ends in .svg"),
        (["--goodput", "ttft:500", "tpto:30"], "'tpto:30'"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    with pytest.raises(Exception, match=words) as raised:
        bench(*arguments)
    assert type(raised.value).__module__ == "moe_serve.errors"


def test_without_aiohttp_the_command_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-serve\[bench\]'"):
        bench("--num-prompts", "1")
