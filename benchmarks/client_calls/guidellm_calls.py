"""guidellm: ten requests, one after the other."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def benchmark():
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).parent / "guidellm"), "benchmark", "run", "--target", os.environ["BASE_URL"],
            "--model", "demo", "--rate-type", "synchronous", "--max-requests", "10",
            "--processor", os.environ["TOKENIZER"], "--data", "prompt_tokens=16,output_tokens=8",
            "--output-path", f"{folder}/out.json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr.strip()[-160:]
        (run,) = json.loads(Path(folder, "out.json").read_text())["benchmarks"]
        assert len(run["requests"]["successful"]) == 10
