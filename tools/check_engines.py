"""Holds the interfaces that our adapters fill against the newest packages of the engines, without their dependencies.

    python -m tools.check_engines            # downloads three wheels (about 400 MB) into a temporary folder
    python -m tools.check_engines FOLDER     # takes the wheels that are there

Nothing of an engine is run or installed: the functions and names that an adapter needs are read from the sources in the
wheels. Prints a line for each engine, and the row of docs/adapters.md where all fit; exit code 1 where one does not.
`.ci/engines` is the job that runs it.
"""

import ast
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from datetime import date
from inspect import signature
from pathlib import Path

from moe_serve.adapters.plugin import AdapterSettings
from moe_serve.adapters.sglang import LayerOrder, make_rebalance_experts
from moe_serve.adapters.vllm import make_policy_class
from moe_serve.adapters.vllm_ascend import MoeServePolicy

SETTINGS = AdapterSettings("incremental")


@dataclass(frozen=True)
class Engine:
    """What one adapter needs.

    package:    name of the wheel
    function:   (file, name in it, parameters of ours that takes its place)
    names:      file -> words that have to be in it
    """

    package: str
    function: tuple[str, str, tuple[str, ...]]
    names: dict[str, tuple[str, ...]]


def engines() -> tuple[Engine, ...]:
    """Returns the engines that have a plugin."""
    vllm, sglang = make_policy_class(SETTINGS).rebalance_experts, make_rebalance_experts(SETTINGS, LayerOrder())
    return (
        Engine(
            "vllm",
            ("vllm/distributed/eplb/policy/abstract.py", "AbstractEplbPolicy.rebalance_experts", _parameters(vllm)),
            {
                "vllm/distributed/eplb/policy/__init__.py": ("EPLB_POLICIES", "AbstractEplbPolicy"),
                "vllm/plugins/__init__.py": ("vllm.general_plugins",),
            },
        ),
        Engine(
            "sglang",
            ("sglang/srt/eplb/eplb_algorithms/__init__.py", "rebalance_experts", _parameters(sglang)),
            {
                "sglang/srt/plugins/hook_registry.py": ("class HookRegistry", "REPLACE", "AFTER", "def register"),
                "sglang/srt/plugins/__init__.py": ("sglang.srt.plugins", "SGLANG_PLUGINS"),
                "sglang/srt/eplb/expert_location.py": (
                    "def get_global_expert_location_metadata",
                    "physical_to_logical_map_cpu",
                ),
                "sglang/srt/eplb/eplb_manager.py": (
                    "class EPLBManager",
                    "self._compute_update_layer_ids_chunks()",
                    "update_layer_ids=update_layer_ids",
                ),
                "sglang/srt/elastic_ep/elastic_ep.py": ("class ElasticEPStateManager", "active_ranks", "def instance"),
            },
        ),
        Engine(
            "vllm-ascend",
            (
                "vllm_ascend/eplb/core/policy/policy_abstract.py",
                "EplbPolicy.rebalance_experts",
                _parameters(MoeServePolicy.rebalance_experts),
            ),
            {"vllm_ascend/eplb/core/policy/policy_factory.py": ("class PolicyFactory", "def generate_policy")},
        ),
    )


def main(folder: Path | None) -> int:
    """Returns the number of engines that do not fit."""
    wrong, versions = 0, []
    with tempfile.TemporaryDirectory() as temporary:
        for engine in engines():
            wheel = wheel_of(engine.package, folder or Path(temporary), download=folder is None)
            missing = missing_in(engine, wheel)
            versions.append(wheel.name.split("-")[1])
            print(f"{engine.package} {versions[-1]}: " + ("; ".join(missing) if missing else "fits"), flush=True)
            wrong += bool(missing)
    if not wrong:
        print(f"| {' | '.join(versions)} | {date.today():%-d %B %Y} |")
    return wrong


def wheel_of(package: str, folder: Path, download: bool) -> Path:
    """Returns the wheel of a package, the newest one where it has to be downloaded."""
    if download:
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)
    found = sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    if not found:
        raise SystemExit(f"{folder} has no wheel of {package}")
    return found[-1]


def missing_in(engine: Engine, wheel: Path) -> list[str]:
    """Returns what an adapter needs and a wheel does not have, in words."""
    file, name, ours = engine.function
    missing = []
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        if file not in members:
            missing.append(f"{file} is gone")
        else:
            theirs = parameters_in(archive.read(file).decode(), name)
            if theirs is None:
                missing.append(f"{name} is gone from {file}")
            elif theirs != ours:
                missing.append(f"{name} takes {', '.join(theirs)}, ours {', '.join(ours)}")
        for path, words in engine.names.items():
            text = archive.read(path).decode() if path in members else ""
            missing += [f"{path} has no {word!r}" for word in words if word not in text]
    return missing


def parameters_in(source: str, name: str) -> tuple[str, ...] | None:
    """Returns the parameters of a function, or of a method "Class.method" without self or cls; None = not there."""
    body: list[ast.stmt] = ast.parse(source).body
    *owners, function = name.split(".")
    for owner in owners:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner), [])
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            return tuple(name for name in names if name not in ("self", "cls"))
    return None


def _parameters(function: object) -> tuple[str, ...]:
    return tuple(name for name in signature(function).parameters if name not in ("self", "cls"))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None) > 0)
