"""How long a newcomer waits: the README's first command in a fresh clone, until the first text is generated.

    python -m benchmarks.newcomer

Clones the commit that is checked out, sets up a new virtual environment, serves, and asks for one text.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.conditions import conditions, save

ROOT = Path(__file__).parents[1]
PORT = 30320


def main() -> None:
    facts = conditions("moe-serve")
    command = first_command()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "moe_serve"
        started = time.perf_counter()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        set_up, _, serve = command.rpartition(" && ")
        subprocess.run(set_up, shell=True, cwd=clone, check=True, stdout=subprocess.DEVNULL)
        installed = time.perf_counter()
        server = subprocess.Popen(
            ["bash", "-c", f"exec {serve} --port {PORT}"],
            cwd=clone,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            text = first_text(server)
            ended = time.perf_counter()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    rows = [
        {"what": "clone, virtual environment, pip", "s": round(installed - started, 1)},
        {"what": "serve, to the first text", "s": round(ended - installed, 1)},
        {"what": "together", "s": round(ended - started, 1)},
    ]
    notes = (
        f"`{command}` in a fresh clone, pip's downloads included (its cache and mirrors as they were); first text: "
        f"`{text[:40]!r}`. Load average at the end {os.getloadavg()[0]:.2f}."
    )
    print(save("newcomer", "The newcomer's first command", rows, facts, notes))


def first_command() -> str:
    """Returns the README's command that sets up and serves."""
    found = re.search(r"^python3 -m venv .*moe-serve serve$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert found, "README.md has no line that sets up and serves"
    return found[0]


def first_text(server: "subprocess.Popen[bytes]") -> str:
    body = json.dumps({"text": "def read(self, size=-1):", "sampling_params": {"max_new_tokens": 16}}).encode()
    deadline = time.perf_counter() + 180
    while time.perf_counter() < deadline:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/generate", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                text: str = json.load(reply)["text"]
                return text
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError("no text within 180 s")


if __name__ == "__main__":
    main()
