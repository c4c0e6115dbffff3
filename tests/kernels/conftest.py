"""Runs one kernel check in two places: in Triton's interpreter on the CPU, and on a GPU where there is one."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RunCheck = Callable[..., None]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[RunCheck]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed; pip install triton, and this runs its kernels on the CPU")
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.interpreter_worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        # The kernels of OpenBLAS for Haswell and Zen give rows of a product other bits by their place in it.
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Sandybridge"},
    )  # fmt: skip
    assert worker.stdin is not None
    assert worker.stdout is not None

    def run(check: Callable[..., None], *arguments: object) -> None:
        worker.stdin.write(json.dumps([check.__module__, check.__name__, arguments]) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        assert answer, "the interpreter process ended; run the check in it by hand to see why"
        failure = json.loads(answer)
        assert failure is None, f"in the interpreter:\n{failure}"

    yield run
    worker.stdin.close()
    worker.terminate()  # ranks that were forked meanwhile hold the pipe open too, so its end may not be seen
    worker.wait(timeout=60)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_device(request: pytest.FixtureRequest) -> RunCheck:
    """Returns run(check, *arguments), which calls check(device, *arguments); arguments are JSON values."""
    if request.param == "interpreter":
        run: RunCheck = request.getfixturevalue("interpreter")
        return run
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return lambda check, *arguments: check("cuda", *arguments)
