"""How long `moe-serve serve` takes to be ready: the demo model, 2 ranks, a new process each time.

python -m benchmarks.start_up [--rounds 5]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.conditions import conditions, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    facts = conditions("moe-serve")
    ready_s, end_s = [], []
    for _ in range(args.rounds):
        ready, end = start_and_end()
        ready_s.append(ready)
        end_s.append(end)
        print(f"ready after {ready:.1f} s, ended {end:.1f} s after Ctrl-C", flush=True)
    rows = [
        {"what": name, "median s": round(statistics.median(values), 1), "max s": round(max(values), 1)}
        for name, values in (("`moe-serve serve` to /ready 200", ready_s), ("Ctrl-C to the last process gone", end_s))
    ]
    notes = f"Demo model, 2 ranks, {args.rounds} starts; load average at the end {os.getloadavg()[0]:.2f}."
    print(save("start_up", "Time to start and to end", rows, facts, notes))


def start_and_end() -> tuple[float, float]:
    """Returns the seconds until /ready answers 200 and a request is served, and those to end by Ctrl-C."""
    command = [str(Path(sys.executable).parent / "moe-serve"), "serve", "--port", "30310"]
    started = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not answers("http://127.0.0.1:30310/ready"):
            assert server.poll() is None, f"moe-serve serve ended with {server.returncode}"
            assert time.perf_counter() - started < 120, "not ready after 120 s"
            time.sleep(0.02)
        ready = time.perf_counter() - started
        body = json.dumps({"text": "def ", "sampling_params": {"max_new_tokens": 4}}).encode()
        request = urllib.request.Request("http://127.0.0.1:30310/generate", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["output_ids"]
    finally:
        ended = time.perf_counter()
        server.send_signal(signal.SIGINT)
        server.wait(30)
    return ready, time.perf_counter() - ended


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    main()
