"""A module that a fork server forks: says what it was told, and ends as $ENDS says: with a code, killed, or never."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moe_serve.launcher.rank_env import LAUNCH_FILES


def prepare(arguments: Sequence[str]) -> None:
    """Fails, or waits for ever, where the arguments say so."""
    print(f"prepare {' '.join(arguments)}, {len(os.listdir('/proc/self/task'))} thread", flush=True)
    if "fail" in arguments:
        raise OSError("no such library")
    while "wait" in arguments:
        time.sleep(60)


if __name__ == "__main__":
    texts = [os.pread(int(each), 100, 0).decode() for each in os.environ[LAUNCH_FILES].split(",") if each]
    name = Path("/proc/self/comm").read_text().strip()
    print(f"{name}: {os.environ['RANK']}, {' '.join(texts)}, {sys.argv[1:]}", flush=True)
    ends = os.environ.get("ENDS", "waits")
    if ends == "killed":
        os.abort()
    while ends == "waits":
        time.sleep(60)
    sys.exit(int(ends))
