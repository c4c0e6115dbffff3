"""guidellm: ten requests, one after the other."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def run():
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={os.environ['BASE_URL']},model=demo",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=10",
        "--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # where it leaves its reports
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stderr.strip()[-160:]
    assert "successful=10 errored=0" in done.stderr + done.stdout, (done.stderr + done.stdout)[-160:]
