"""The house keeps its shape: imports run downwards, and rooms that promise not to load torch do not."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moe_serve"
BASE = {"errors", "log", "c_library", "child_process", "process_facts", "socket_bytes"}  # may be used anywhere

# room -> what it may import of the package, beside itself and BASE
ALLOWED = {
    "__init__": {"launcher", "attention_dp"},
    "__main__": {"launcher"},
    "errors": set(),
    "log": set(),
    "topology": set(),
    "c_library": set(),
    "child_process": set(),
    "process_facts": set(),
    "socket_bytes": set(),
    "config": {"dispatch.capabilities", "eplb.policies.names"},  # plain data: each list stands once
    "structured": {"models.tokenizer", "attention_dp.constraint"},
    "kernels": set(),
    "dispatch": {"kernels"},
    "attention_dp": {"kernels"},
    "eplb": {"topology"},
    "ep": {"dispatch", "eplb", "kernels", "topology"},
    "models": {"ep", "attention_dp", "eplb.placement", "kernels"},
    "roofline": {"models", "ep", "attention_dp", "dispatch", "eplb", "kernels", "topology"},
    "links": {"config"},
    "engine": {"links", "models", "ep", "attention_dp", "dispatch", "eplb", "kernels", "config", "topology",
               "structured"},
    "server": {
        "engine.protocol.messages", "engine.output.incremental_decoder",
        "engine.output.logprobs", "engine.output.routed_experts", "engine.output.stop_matcher",
        "engine.output.stop_regex",
        "models.tokenizer", "models.model_files",
        "attention_dp.request", "attention_dp.sampling_params", "attention_dp.request_router",
        "attention_dp.constraint", "config", "links", "structured",
    },
    "adapters": {"eplb", "topology"},
    "bench": {"models.tokenizer"},
    "launcher": {
        "bench", "server", "links", "engine", "roofline", "models", "ep", "attention_dp", "dispatch", "eplb", "kernels",
        "config", "topology",
    },
}  # fmt: skip

TORCH_FREE = [
    "moe_serve", "moe_serve.config", "moe_serve.topology", "moe_serve.c_library", "moe_serve.child_process",
    "moe_serve.process_facts",
    "moe_serve.dispatch.capabilities", "moe_serve.roofline.table",
    "moe_serve.engine.protocol.messages", "moe_serve.engine.output.logprobs", "moe_serve.engine.protocol.mailbox",
    "moe_serve.engine.output.routed_experts",
    "moe_serve.engine.output.incremental_decoder", "moe_serve.engine.output.stop_matcher", "moe_serve.engine.step.plan",
    "moe_serve.engine.balancing.balancer", "moe_serve.engine.model.predictor_plan",
    "moe_serve.models.tokenizer", "moe_serve.models.families.registry", "moe_serve.models.checkpoint_parts",
    "moe_serve.launcher.cli.app", "moe_serve.launcher.serve",
    "moe_serve.launcher.rank_env", "moe_serve.launcher.preflight", "moe_serve.launcher.facts",
    "moe_serve.launcher.page_listener",
    *(f"moe_serve.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}"
      for room in ("adapters", "bench", "eplb", "server", "links", "structured")
      for path in sorted((PACKAGE / room).rglob("*.py"))),
    *(f"moe_serve.attention_dp.{name}"
      for name in (
          "request", "sampling_params", "scheduler", "request_blocks", "prefix_cache", "request_router",
          "page_ring", "page_stream",
      )),
]  # fmt: skip

# What a bare GPU machine lacks: these rooms must not need it. (models/ reads files with two of them, inside functions.)
GPU_MACHINE_LACKS = ("pydantic", "yaml", "msgspec", "zmq", "fastapi", "uvicorn", "scipy", "pulp", "highspy", "typer",
"rich",
                     "safetensors", "tokenizers", "mpi4py", "nvshmem")  # fmt: skip


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Returns (line, dotted name below moe_serve) of every import of the package, also those inside functions."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "moe_serve" else [f"moe_serve.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [(node.lineno, name.removeprefix("moe_serve.")) for name in names if name.startswith("moe_serve.")]
    return found


def test_imports_run_downwards() -> None:
    faults = []
    for path in modules():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = ALLOWED[room] | BASE
        for line, name in imports_of(path):
            first = name.split(".")[0]
            if first != room and not any(name == door or name.startswith(f"{door}.") for door in allowed):
                where = f"{path.relative_to(PACKAGE)}:{line}"
                faults.append(f"{where} imports moe_serve.{name}; {room}/ may use {sorted(allowed)}")
    assert not faults, "\n".join(faults)


def test_the_docs_show_this_table() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.partition("## Layers")[2].split("```")[1]
    shown = {}
    for line in re.sub(r"\([^)]*\)", "", re.sub(r",\n +", ", ", block)).splitlines():
        rooms, arrow, names = line.partition("<-")
        if arrow:
            allowed = set(re.split(r",\s*", names.strip())) - {"nothing"}
            shown |= {room.strip().removesuffix("/"): allowed for room in rooms.split(",")}
    assert shown == {room: allowed for room, allowed in ALLOWED.items() if not room.startswith("__")}


# The eplb library decides; its workbench (files/, replay/) studies decisions. Arrows run from the workbench to the
# library only: part -> what it may import of eplb beside itself.
EPLB_LIBRARY = {
    "placement": set(),
    "load": {"placement"},
    "repair": {"placement"},
    "relabel": {"placement"},
    "policies": {"placement", "load", "split", "repair", "relabel"},
    "split": {"placement", "load"},
    "migration": {"placement", "policies.policy", "relabel"},
    "cost": {"placement", "load", "migration", "split.time"},
    "planner_process": {"policies", "migration", "relabel"},
    "rebalance": {"placement", "load", "policies.policy", "migration", "cost", "repair", "relabel", "split"},
}
EPLB_WORKBENCH = {
    "files": {"placement", "load"},
    "replay": {"files", *EPLB_LIBRARY},
}


@pytest.mark.parametrize("path", sorted((PACKAGE / "eplb").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_eplb_library_never_imports_its_workbench_and_readers_run_no_policy(path: Path) -> None:
    part = path.relative_to(PACKAGE / "eplb").parts[0].removesuffix(".py")
    if part == "__init__":  # hands names of both on, when they are asked for
        return
    allowed = (EPLB_LIBRARY | EPLB_WORKBENCH)[part]
    for line, name in imports_of(path):
        if name.startswith("eplb."):
            inner = name.removeprefix("eplb.")
            fits = inner.split(".")[0] == part or any(inner == door or inner.startswith(f"{door}.") for door in allowed)
            assert fits, f"{path.relative_to(PACKAGE)}:{line} imports {name}; eplb/{part} may use {sorted(allowed)}"


# Front end and engine stand on floors: floor -> the floors that it may import beside itself. Files on no floor,
# such as app.py and build.py, wire the floors and may import all of them.
FLOORS = {
    "server": {
        "workers": set(),  # helper processes, and the fair queue before them
        "requests": {"workers"},  # what is asked for, and what may wait
        "ranks": {"requests", "workers"},  # who serves it
        "edge": {"ranks", "requests"},  # who may ask, over HTTP
        "api": {"edge", "ranks", "requests", "workers"},  # what can be asked, and the answers
        "observe": {"edge", "ranks", "requests"},  # what operators see and set
    },
    "engine": {
        "protocol": set(),  # messages between front end and ranks
        "step": set(),  # how ranks agree on a step
        "output": {"protocol"},  # tokens and text
        "model": {"protocol", "step"},  # what one rank computes with, and the load that it counts
        "recovery": {"model", "protocol", "step"},  # lost ranks
        "balancing": {"recovery", "model", "protocol", "step"},  # where experts live
    },
    "models": {
        "families": {"gguf_model", "hf_config", "model_files", "spec", "weight_plan"},  # what a config.json says
        "decoder": {"spec", "weights"},  # the arithmetic of all families
    },
}


@pytest.mark.parametrize("room", FLOORS)
def test_the_floors_of_a_room_import_downwards(room: str) -> None:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        floor = path.relative_to(PACKAGE / room).with_suffix("").parts[0]
        check_floor(path, room, floor)


def check_floor(path: Path, room: str, floor: str) -> None:
    floors = FLOORS[room]
    for line, name in imports_of(path):
        if floor in floors and name.startswith(f"{room}."):
            other = name.split(".")[1]
            assert other == floor or other in floors[floor], (
                f"{path.relative_to(PACKAGE)}:{line} imports {name}; {floor} may use {sorted(floors[floor])}"
            )


def test_no_import_circles() -> None:
    # Imports inside functions count: they hide a circle, they do not break it.
    files = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in modules()
    }
    graph = {name: imported_files(path, files) - {name} for name, path in files.items()}
    while leaves := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - leaves for name, needs in graph.items() if name not in leaves}
    assert not graph, f"these files import each other, or lead to files that do: {sorted(graph)}"


def imported_files(path: Path, files: dict[str, Path]) -> set[str]:
    """Returns the modules of the package that a file imports; `from a import b` names a.b where that is a file."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.removeprefix("moe_serve.")
            found |= {name for alias in node.names if (name := f"{module}.{alias.name}") in files} or {module}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("moe_serve.") for alias in node.names}
    return found & set(files)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_free_rooms_do_not_load_torch() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} loads torch'\n"
    )
    run_python(code)


def test_a_rank_starts_without_what_only_the_front_end_and_the_tools_need() -> None:
    """Each costs the start of every rank 0.1 to 1 s."""
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in modules()}
    todo, seen, others = ["launcher.serve", "launcher.rendezvous", "engine.build"], set(), set()
    while todo:
        name = todo.pop()
        path = files.get(name) or files.get(f"{name}.__init__")
        if name in seen or path is None:
            continue
        seen.add(name)
        for module in imported_at_once(path):
            if module.startswith("moe_serve."):
                todo.append(module.removeprefix("moe_serve."))
            else:
                others.add(module.split(".")[0])
    assert {"torch", "zmq", "pydantic"} < others
    assert not others & {
        "fastapi",
        "starlette",
        "uvicorn",
        "aiohttp",
        "scipy",
        "pulp",
        "highspy",
        "tokenizers",
        "rich",
        "httpx",
    }


def imported_at_once(path: Path) -> list[str]:
    """Returns the modules that a file imports when it is imported, and `a.b` for `from a import b`."""
    found, todo = [], list(tree_of(path).body)
    while todo:
        node = todo.pop()
        match node:
            case ast.Import():
                found += [alias.name for alias in node.names]
            case ast.ImportFrom() if node.module:
                found += [node.module, *[f"{node.module}.{alias.name}" for alias in node.names]]
            case ast.If() if ast.unparse(node.test) == "TYPE_CHECKING":
                todo += node.orelse
            case ast.If() | ast.Try() | ast.With():
                todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def test_rooms_of_the_forward_import_with_torch_numpy_and_triton_alone() -> None:
    rooms = ("kernels", "dispatch", "ep", "models", "attention_dp")
    names = [
        "moe_serve." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for room in rooms
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.name != "__init__.py" and not path.name.endswith("_triton.py") and path.parent.name != "triton"
    ]
    code = (
        "import sys, importlib\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {GPU_MACHINE_LACKS!r}:\n"
        "            raise ImportError(f'{name} is not on this machine')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"for name in {[*names, 'moe_serve.engine.step.plan']!r}:\n"
        "    importlib.import_module(name)\n"
    )
    run_python(code)


def test_no_file_unpickles() -> None:
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                if names != ["UnpicklingError"]:  # what torch.load(weights_only=True) raises
                    names.append(getattr(node, "module", "") or "")
                assert not {"pickle", "cPickle", "dill", "cloudpickle", "shelve"} & set(names), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert keywords.get("weights_only") == "True", f"{path}:{node.lineno} loads with pickle"
            if isinstance(node, ast.Attribute) and node.attr != "json_object":  # a field of vLLM's
                assert not node.attr.endswith(("_object", "_object_list")), f"{path}:{node.lineno} pickles"


def test_the_forward_never_reads_a_tensor_back() -> None:
    # Sized receives need host numbers, and loaders work on host data; everything else must stay capturable in a graph.
    exempt = {"dispatch/local.py", "dispatch/collective.py", "models/weight_share.py"}
    for room in ("ep", "dispatch", "models"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            name = str(path.relative_to(PACKAGE))
            if name in exempt or "checkpoint" in name:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_reference"):
                    node.body = []  # walked later as an empty function
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    assert node.func.attr not in ("item", "tolist"), f"{name}:{node.lineno} reads a tensor back"
