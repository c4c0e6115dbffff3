"""Calls each public function of a file of calls, in the client's own environment, and prints what failed as JSON."""

import contextlib
import importlib
import importlib.metadata
import inspect
import json
import re
import sys


def main(file: str, package: str) -> None:
    """package: as pip is told, with extras or a bound"""
    found: dict[str, str | None] = {}
    with contextlib.redirect_stdout(sys.stderr):
        module = importlib.import_module(file)
        for name, call in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("_") or call.__module__ != file:
                continue
            try:
                call()
                found[name] = None
            except Exception as error:
                found[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    version = importlib.metadata.version(re.split(r"[\[<>=]", package)[0])
    print(json.dumps({"version": version, "calls": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
