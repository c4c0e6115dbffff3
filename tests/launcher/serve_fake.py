"""`moe-serve serve` with torch-free processes in the ranks' place: `python -m tests.launcher.serve_fake key=value …`

$END_GRACE_S: how long one Ctrl-C waits for the ranks. Real ranks end when they lose a peer; fake ones are not waited
for then. Pauses before starts are short.
"""

import os
import sys

from moe_serve.config import load_config
from moe_serve.errors import MoeServeError
from moe_serve.launcher import local, system
from moe_serve.launcher.display import StartDisplay

if __name__ == "__main__":
    overrides = ["parallel.num_ranks=2", "server.port=0", "server.worker_port=0", *sys.argv[1:]]
    system._END_GRACE_S = float(os.environ.get("END_GRACE_S", 2.0))
    system._LOSS_GRACE_S = 0.1
    local._FIRST_PAUSE_S, local.WORKER = 0.1, "tests.launcher.fake_rank"
    config = load_config(overrides=overrides)
    try:
        with StartDisplay(config.parallel.num_ranks + config.parallel.num_prefill_ranks) as display:
            if config.launcher.nnodes == 1:
                sys.exit(system.serve_on_this_machine(config, display))
            sys.exit(system.serve_with_other_hosts(config, display, lambda config: None))
    except MoeServeError as error:
        print(f"moe-serve: {error}", file=sys.stderr)
        sys.exit(2)
