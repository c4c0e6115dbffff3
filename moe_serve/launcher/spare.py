"""A process that has imported torch and the engine, and waits to become a rank in the place of a lost one.

    python -m moe_serve.launcher.spare MODULE ARGS…

Most of what a new rank takes to start beside those that serve is its imports. Its launcher keeps this process ready for
that, and writes one line to its standard input: the environment of the rank, as JSON. Then the module runs, as if it
had been started with it. Without a line it ends.
"""

import importlib
import json
import os
import runpy
import sys

from moe_serve.launcher.rank_start import import_engine


def main() -> None:
    """Waits, and becomes a rank."""
    module, sys.argv = sys.argv[1], sys.argv[1:]
    import_engine()
    importlib.import_module(module)
    del sys.modules[module]  # it runs as __main__; what it imports is there
    line = sys.stdin.readline()
    if not line:
        return
    os.environ.update(json.loads(line))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
