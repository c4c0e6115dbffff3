"""`moe-serve serve` with torch-free processes in the ranks' place: `python -m tests.launcher.serve_fake key=value …`"""

import sys

from moe_serve.config import load_config
from moe_serve.errors import MoeServeError
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.system import serve_on_this_machine

if __name__ == "__main__":
    overrides = ["parallel.num_ranks=2", "server.port=0", "server.worker_port=0", *sys.argv[1:]]
    config = load_config(overrides=overrides)
    try:
        with StartDisplay(config.parallel.num_ranks) as display:
            sys.exit(serve_on_this_machine(config, display, "tests.launcher.fake_rank"))
    except MoeServeError as error:
        print(f"moe-serve: {error}", file=sys.stderr)
        sys.exit(2)
