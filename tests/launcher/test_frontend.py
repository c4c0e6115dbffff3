"""A front end whose tokenizer is not that of its ranks ends with one line, and ends the ranks."""

import asyncio
import shutil
from pathlib import Path

import pytest

from moe_serve.config import ModelConfig, load_config, model_dir
from moe_serve.errors import ConfigError
from moe_serve.launcher.facts import front_end_facts
from moe_serve.launcher.frontend import share_of_front_end
from moe_serve.links.link import Link, check_front_ends
from tests.launcher.running import Running, eventually, quiet_port
from tests.server.fake_worker import FakeWorker


def test_a_front_end_with_another_tokenizer_than_its_ranks_ends(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir(ModelConfig()), tmp_path / "model"))
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b"\n")
    port = quiet_port()
    settings = ["--set=server.port=0", f"--set=server.worker_port={port}"]
    with Running("moe_serve", ["frontend", *settings]) as running:
        running.wait_for("HTTP on")
        worker = FakeWorker(0, 1, port)
        worker.info["shared_with_front_end"] = front_end_facts(load_config(overrides=[f"model.path={folder}"]))

        async def until_the_end() -> int:
            task = asyncio.create_task(worker.run())
            code = await asyncio.to_thread(running.wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return code

        assert asyncio.run(until_the_end()) == 2
        assert "moe-serve: tokenizer.json is " in running.lines[-1]
        assert "start the front end with the ranks' configuration" in running.lines[-1]


def test_helpers_for_chats_start_before_anybody_asks() -> None:
    """The first chat waited 2 s for two processes to start."""
    settings = ["--set=server.port=0", f"--set=server.worker_port={quiet_port()}"]
    with Running("moe_serve", ["frontend", *settings]) as running:
        running.wait_for("HTTP on")

        def helpers() -> list[str]:
            commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in running.descendants()]
            return sorted(
                word.rpartition(".")[2] for command in commands for word in command if word.endswith("_process")
            )

        assert eventually(lambda: helpers() == ["chat_template_process"] * 2), helpers()


def test_several_front_ends_share_what_one_may_hold() -> None:
    config = load_config(
        base={"server": {"api_workers": 3, "max_connections": 100, "max_waiting_tokens": 10, "max_bodies_mib": 30}},
        overrides=["engine.max_queued_requests=1"],
    )
    own = share_of_front_end(config)
    assert (own.server.max_connections, own.server.max_waiting_tokens) == (34, 4)
    assert own.engine.max_queued_requests == 1
    assert own.server.max_bodies_mib == 16, "one body fits everywhere"
    assert (own.server.max_connections_per_client, own.server.max_bodies_mib_per_client) == (None, None)
    each = load_config(overrides=["server.max_connections_per_client=7", "server.max_bodies_mib_per_client=40"])
    each = each.model_copy(update={"server": each.server.model_copy(update={"api_workers": 3})})
    own = share_of_front_end(each)
    assert (own.server.max_connections_per_client, own.server.max_bodies_mib_per_client) == (3, 16)
    alone = load_config()
    assert share_of_front_end(alone) == alone


def test_front_ends_of_several_hosts_share_what_waits_for_ranks_and_no_memory() -> None:
    hosts = ["nnodes=2", "dist_init_addr=h:1", "front_ends=every_host"]
    server = {"api_workers": 2, "max_connections": 100, "max_waiting_tokens": 100}
    base = {"server": server, "parallel": {"num_ranks": 2}}
    config = load_config(base=base, overrides=[f"launcher.{each}" for each in hosts])
    own = share_of_front_end(config)
    assert (own.server.max_connections, own.server.max_waiting_tokens) == (50, 25)


def test_several_front_ends_need_the_launcher_that_starts_them(tmp_path: Path) -> None:
    config = load_config(overrides=["server.api_workers=2"])
    check_front_ends(config, Link(folder=tmp_path))
    check_front_ends(load_config(), Link(host="127.0.0.1", port=1))
    with pytest.raises(ConfigError, match="`moe-serve serve` starts several front ends; set"):
        check_front_ends(config, Link(host="127.0.0.1", port=1))
