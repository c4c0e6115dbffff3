"""JSON schemas that packages ship, asked of a server: which are taken, and what of them is not held.

    python -m benchmarks.schemas [--folder FOLDER]

Downloads the packages, without installing them, and asks for one token in the form of each schema that they hold: once
leniently, as `response_format` is without `strict`, and once strictly. A minute on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.conditions import conditions, save
from benchmarks.server import Server
from moe_serve.server.api.generate import NOT_HELD_HEADER

PACKAGES = ("check-jsonschema", "nbformat", "openapi-spec-validator", "jsonschema-specifications", "altair")
_WORDS = {"properties", "items", "type", "anyOf", "oneOf", "allOf", "$ref"}  # one of which a schema has
_SETTINGS = {"model.path": "demo", "parallel.num_ranks": 1, "parallel.device": "cpu", "cache.memory_gib": 0.25,
             "server.max_body_mib": 16}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the packages; default: a temporary one")
    args = parser.parse_args()
    facts, rows = conditions("moe-serve"), []
    with tempfile.TemporaryDirectory() as temporary, Server(_SETTINGS) as server:
        folder = args.folder or Path(temporary)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *PACKAGES]
        subprocess.run(command, check=True)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60, trust_env=False) as client:
            for package, name, text in schemas(folder):
                lenient, strict = (asked(client, json.loads(text), is_strict) for is_strict in (False, True))
                rows.append({"package": package, "schema": name, "characters": len(text), "lenient": lenient[0],
                             "strict": strict[0], "not held, or why not": lenient[1]})  # fmt: skip
                print(rows[-1], flush=True)
    counts = {how: sum(row[how] == "yes" for row in rows) for how in ("lenient", "strict")}
    notes = f"Of {len(rows)} schemas {counts['lenient']} are taken leniently, {counts['strict']} strictly."
    print(save("schemas", "JSON schemas that packages ship", rows, facts, notes))


def schemas(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields package, file and text of each schema in the wheels of a folder."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for path in sorted(archive.namelist()):
                is_data = path.endswith(".json") or "/vocabularies/" in path
                text = archive.read(path).decode("utf-8", "replace") if is_data else ""
                if is_schema(text):
                    yield "-".join(wheel.name.split("-")[:2]), path.partition("/")[2], text


def is_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and ("$schema" in value or "$id" in value) and bool(_WORDS & set(value))


def asked(client: httpx.Client, schema: dict[str, Any], strict: bool) -> tuple[str, str]:
    """Returns whether a schema is taken, and what is said of it."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    body = {"prompt": "a", "max_tokens": 1, "response_format": form}
    response = client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return "no", response.json()["error"]["message"][:200]
    return "yes", response.headers.get(NOT_HELD_HEADER.decode(), "–")


if __name__ == "__main__":
    main()
