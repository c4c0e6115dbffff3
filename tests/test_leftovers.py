"""The session itself fails when a test leaves something behind: tried in a session of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = {
    "process": "import subprocess\nsubprocess.Popen(['sleep', '30'])",
    "orphan": "import subprocess\nsubprocess.run(['sh', '-c', 'sleep 30 & exit 0'])",
    "listening port": "import socket\nglobal kept\nkept = socket.create_server(('127.0.0.1', 0))",
    "shared-memory segment": "open(f'/dev/shm/moe_serve_left_{os.getpid()}', 'w').close()",
    "nothing": "pass",
}


@pytest.mark.parametrize("what", LEAVES)
def test_a_session_that_leaves_something_behind_fails_and_names_it(what: str, tmp_path: Path) -> None:
    body = LEAVES[what].replace("\n", "\n    ")
    (tmp_path / "test_leaves.py").write_text(f"import os\n\n\ndef test_it():\n    {body}\n")
    # The waiting time is for real sessions; this one knows what it left.
    code = (
        "import sys, pytest, tests.conftest as c\nc.LEAVE_S = 0.2\n"
        "status = pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir', sys.argv[1], sys.argv[1]], plugins=[c])\n"
        "import os\nfor pid in c._descendants(os.getpid()): os.kill(pid, 9)\nsys.exit(status)"
    )
    # Without plugins a session starts in half the time.
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    for left in Path("/dev/shm").glob("moe_serve_left_*"):
        left.unlink()
    if what == "nothing":
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"LEFT BEHIND: {what.replace('orphan', 'process')}" in done.stdout
