"""aiperf: ten chats."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def profile():
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", "demo", "--url",
                   os.environ["BASE_URL"], "--endpoint-type", "chat", "--request-count", "10", "--streaming",
                   "--tokenizer", os.environ["TOKENIZER"], "--ui", "none", "--output-artifact-dir", folder]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, (done.stderr or done.stdout).strip()[-160:]
