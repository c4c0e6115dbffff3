"""The folder of a system: nobody else's, and gone once nobody holds it."""

import os
import threading
from pathlib import Path

import pytest

from moe_serve.errors import FolderError
from moe_serve.links.folder import OwnFolder, remove_left_behind


def left_behind(parent: Path, name: str) -> Path:
    """A folder of which the launcher is gone."""
    path = parent / name
    path.mkdir(mode=0o700)
    (path / "lock").touch()
    (path / "effective.yaml").write_text("model: {}")
    return path


def test_the_next_start_removes_what_nobody_holds_and_leaves_what_lives(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, no_folder_of_ours = left_behind(tmp_path, "moe_serve-left"), tmp_path / "moe_serve-results"
    no_folder_of_ours.mkdir()
    with OwnFolder() as first, OwnFolder() as second:
        assert not left.exists()
        assert {first, second, no_folder_of_ours} == set(tmp_path.iterdir())
        assert (first / "lock").exists()
    assert list(tmp_path.iterdir()) == [no_folder_of_ours]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else")
def test_a_folder_of_somebody_else_and_a_link_are_left_alone(tmp_path: Path):
    theirs, target = left_behind(tmp_path, "moe_serve-theirs"), left_behind(tmp_path, "target")
    os.chown(theirs, 12345, 12345)
    (tmp_path / "moe_serve-link").symlink_to(target)
    remove_left_behind(tmp_path)
    assert (theirs / "lock").exists()
    assert (target / "lock").exists()


def test_starts_at_the_same_time_do_not_remove_each_others_folders(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    errors: list[BaseException] = []

    def start_often() -> None:
        try:
            for _ in range(50):
                with OwnFolder() as path:
                    assert (path / "lock").exists()
                    (path / "effective.yaml").write_text("model: {}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(FolderError, match=r"folder .*/gone cannot be written to \(No such file or directory\); make"):
        OwnFolder()
