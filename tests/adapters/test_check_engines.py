"""The check of the engines' newest packages sees a changed interface. Real wheels are checked where asked."""

import os
import zipfile
from pathlib import Path

import pytest

from tools import check_engines

VLLM = check_engines.engines()[0]
SOURCE = """
class AbstractEplbPolicy:
    @classmethod
    def rebalance_experts(cls, {}): ...
"""


def wheel(path: Path, parameters: str) -> Path:
    file = path / "vllm-9.9-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(VLLM.function[0], SOURCE.format(parameters))
        for name, words in VLLM.names.items():
            archive.writestr(name, " ".join(words))
    return file


def test_the_interface_is_read_from_a_wheel(tmp_path: Path) -> None:
    assert check_engines.missing_in(VLLM, wheel(tmp_path, ", ".join(VLLM.function[2]))) == []
    (words,) = check_engines.missing_in(VLLM, wheel(tmp_path, "weight, placement=None"))
    assert words.startswith("AbstractEplbPolicy.rebalance_experts takes weight, placement, ours weight, num_replicas")


@pytest.mark.slow
@pytest.mark.skipif("MOE_SERVE_ENGINE_WHEELS" not in os.environ, reason="names a folder with the engines' wheels")
def test_the_newest_engines_fit() -> None:
    assert check_engines.main(Path(os.environ["MOE_SERVE_ENGINE_WHEELS"])) == 0
