"""The check of the engines' newest packages sees a changed interface, and prints what fits as a row."""

import re
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


def test_versions_that_fit_are_printed_as_a_row_and_one_that_does_not_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_engines, "engines", lambda: (VLLM,))
    wheel(tmp_path, ", ".join(VLLM.function[2]))
    assert check_engines.main(tmp_path) == 0
    assert re.fullmatch(r"vllm 9\.9: fits\n\| 9\.9 \| \d+ \w+ \d{4} \|\n", capsys.readouterr().out)
    wheel(tmp_path, "weight")
    assert check_engines.main(tmp_path) == 1
    assert "|" not in capsys.readouterr().out
