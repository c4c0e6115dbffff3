"""Models of protocols hold under every schedule, and the checker sees the mistakes that are sown into them."""

import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="SPIN checks the models of protocols: apt-get install --no-install-recommends spin gcc",
)


def check(model: str, folder: Path, *defined: str) -> str:
    """Returns what SPIN says after it has looked at all states of a model."""
    words = [f"-D{each}" for each in defined]
    subprocess.run(["spin", *words, "-a", MODELS / model], cwd=folder, check=True, capture_output=True)
    subprocess.run(["gcc", "-w", "-O1", "-DSAFETY", "-o", "pan", "pan.c"], cwd=folder, check=True, capture_output=True)
    found = subprocess.run(["./pan", "-E", "-m100000"], cwd=folder, check=True, capture_output=True, text=True)
    return found.stdout


@pytest.mark.parametrize(
    "ranks", [("W0=1", "W1=1", "W2=0"), ("W0=1", "W1=1", "W2=1"), ("W0=2", "W1=1", "W2=1", "LOST=2")], ids=" ".join
)
def test_two_hosts_or_more_never_decide_twice(ranks: tuple[str, ...], tmp_path: Path) -> None:
    said = check("votes.pml", tmp_path, *ranks)
    assert "errors: 0" in said
    assert "Search not completed" not in said


@pytest.mark.parametrize(
    "mistake", [("HALF", "W0=1", "W1=1", "W2=0"), ("FORGETFUL", "W0=1", "W1=1", "W2=1")], ids=lambda words: words[0]
)
def test_a_seeded_mistake_is_caught(mistake: tuple[str, ...], tmp_path: Path) -> None:
    assert "assertion violated" in check("votes.pml", tmp_path, *mistake)
