"""A front end whose tokenizer is not that of its ranks ends with one line, and ends the ranks."""

import asyncio
import shutil
from pathlib import Path

from moe_serve.config import ModelConfig, load_config, model_dir
from moe_serve.launcher.facts import front_end_facts
from moe_serve.launcher.rank_env import free_port
from tests.launcher.running import Running
from tests.server.fake_worker import FakeWorker


def test_a_front_end_with_another_tokenizer_than_its_ranks_ends(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir(ModelConfig()), tmp_path / "model"))
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b"\n")
    port = free_port()
    settings = ["--set=server.port=0", f"--set=server.worker_port={port}"]
    with Running("moe_serve.launcher.cli", ["frontend", *settings]) as running:
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
