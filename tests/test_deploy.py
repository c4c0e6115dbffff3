"""What deploy/ and the page on operations name exists: settings, flags, commands, routes, metrics, files."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from moe_serve.config import ServeConfig, load_config
from moe_serve.launcher.cli import app as cli
from moe_serve.launcher.cli.app import add_balancer_commands
from moe_serve.server.edge.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
OPERATIONS = ROOT / "docs" / "operate.md"
FILES = sorted(path for path in [*DEPLOY.rglob("*"), OPERATIONS] if path.is_file())
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "moe_serve").rglob("*.py"))
SECTIONS = "|".join(ServeConfig.model_fields)


def settings_in(text: str) -> set[str]:
    return set(re.findall(rf"(?:--set[ \"\n-]+|`)((?:{SECTIONS})\.[a-z_]+)\b(?!\.)(?:[=:`]|: )", text))


def is_known(setting: str) -> bool:
    section, name = setting.split(".")
    kind: Any = ServeConfig.model_fields[section].annotation
    return name in kind.model_fields


@pytest.fixture(scope="module")
def commands() -> dict[str, set[str]]:
    """The options of each subcommand."""
    app = typer.Typer()
    app.registered_commands += cli.app.registered_commands
    add_balancer_commands(app)
    group: Any = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in group.commands.items()
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_settings_commands_flags_and_files_exist(path: Path, commands: dict[str, set[str]]) -> None:
    text = re.sub(r"\\\n#? *", " ", path.read_text(encoding="utf-8"))  # continued lines
    assert {setting for setting in settings_in(text) if not is_known(setting)} == set()
    for name, rest in re.findall(r"(?<![\w/.-])moe-serve ([a-z-]+)\b([^\n`|;]*)", text):
        assert name in commands or path.suffix == ".yaml", f"moe-serve {name}"
        assert set(re.findall(r"(?<=\s)--[a-z][a-z-]+", rest)) <= commands.get(name, set()), f"moe-serve {name} {rest}"
    for named in re.findall(r"\b(?:configs|deploy|docs)/[\w./-]*\w\.(?:yaml|md|sbatch|service)\b", text):
        assert (ROOT / named).is_file() or (named.startswith("docs/") and (ROOT / named).exists()), named
    for module in re.findall(r"-m\s*\n?\s*-?\s*(moe_serve(?:\.\w+)+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    if path.suffix == ".json":
        return  # a board: tests/server/observe/test_metric_names.py holds it against a front end
    for metric in re.findall(r"\bmoe_serve_(?:rank|eplb|all)[a-z_]+", text):
        assert is_metric(metric), metric


def is_metric(name: str) -> bool:
    plain = re.sub("_(total|bucket|sum|count)$", "", name)
    return f'"{plain}"' in SOURCES or f'"{plain.removeprefix("moe_serve_eplb_")}"' in SOURCES


def test_the_pattern_of_settings_finds_them() -> None:
    text = "--set model.path=/x\n`server.port` (30000), `engine.no_such: 3` --set parallel.num_ranks=2"
    assert settings_in(text) == {"model.path", "server.port", "engine.no_such", "parallel.num_ranks"}
    assert not is_known("engine.no_such")
    assert len(settings_in(OPERATIONS.read_text(encoding="utf-8"))) > 10


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "leaderworkerset.yaml").read_text(encoding="utf-8")))


def test_the_kubernetes_manifests_fit_each_other(tmp_path: Path) -> None:
    found = {document["kind"]: document for document in documents()}
    path = tmp_path / "config.yaml"
    path.write_text(found["ConfigMap"]["data"]["config.yaml"], encoding="utf-8")
    config = load_config(path)
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
    ranks, front_end = leader["containers"]
    assert worker["containers"] == [ranks]
    (per_node,) = (int(word.partition("=")[2]) for word in ranks["args"] if word.startswith("--nproc-per-node"))
    assert template["size"] * per_node == config.parallel.num_ranks
    assert ranks["resources"]["limits"]["nvidia.com/gpu"] == str(per_node)
    assert front_end["ports"][0]["containerPort"] == config.server.port
    for container in (ranks, front_end):
        volumes = {volume["name"] for volume in leader["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    names = {variable["name"] for variable in front_end["env"]}
    assert {"MOE_SERVE_TOKEN", API_KEY_VARIABLE, ADMIN_KEY_VARIABLE} <= names
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    paths = {front_end[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert all(f'"{route}"' in SOURCES for route in paths)


def test_routes_of_the_page_exist() -> None:
    table = OPERATIONS.read_text(encoding="utf-8").partition("## Watch")[2].partition("## Alerts")[0]
    routes = re.findall(r"^\| `(/\w+)`", table, flags=re.M)
    assert len(routes) >= 5
    assert [route for route in routes if f'"{route}"' not in SOURCES] == []


def test_each_alert_has_a_row_that_says_what_to_do() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    rows = re.findall(r"^\| (MoeServe\w+) \|", OPERATIONS.read_text(encoding="utf-8"), flags=re.M)
    assert sorted(alerts) == sorted(rows)


def test_the_slurm_script_is_sound_shell() -> None:
    script = str(DEPLOY / "slurm" / "moe_serve.sbatch")
    shellcheck = shutil.which("shellcheck")
    command = [shellcheck, script] if shellcheck else ["bash", "-n", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "moe-serve.service").read_text(encoding="utf-8")
    path = tmp_path / "moe-serve.service"
    path.write_text(unit.replace("/opt/moe_serve/bin/moe-serve", "/bin/true"), encoding="utf-8")
    result = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    ours = [line for line in result.stderr.splitlines() if "moe-serve.service" in line]
    assert ours == []


def test_the_image_copies_what_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (.*)", text, flags=re.M) for name in line.split()[:-1]}
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{name}" for name in copied} <= set(allowed)
