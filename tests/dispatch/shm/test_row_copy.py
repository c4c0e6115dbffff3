"""The C form of the row copier: where it is used, and the reason where it is not."""

import shutil
from pathlib import Path

import pytest

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.shm.row_copy_native import NativeRowCopier, load_library
from moe_serve.dispatch.shm.row_copy_plain import PlainRowCopier
from tests.dispatch.shm.test_transport import make
from tests.ranks import run_ranks


def check_form(rank: int, group: EpGroup) -> tuple[bool, bool]:
    return isinstance(make(group)._copier, NativeRowCopier), isinstance(
        make(group, compiled=False)._copier, PlainRowCopier
    )


def test_the_c_form_is_used_where_there_is_a_compiler_and_the_plain_one_where_it_is_not_wanted() -> None:
    assert run_ranks(1, check_form, timeout_s=60) == [(shutil.which("cc") is not None, True)]


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    library, note = load_library()
    assert library is None
    assert note.startswith("no C compiler")


def test_no_code_is_loaded_from_a_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "moe_serve").mkdir()
    (tmp_path / "moe_serve").chmod(0o777)
    library, note = load_library()
    assert library is None
    assert "written by others" in note or note.startswith("no C compiler")


def test_without_a_home_folder_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    library, note = load_library()
    assert library is None
    assert "set XDG_CACHE_HOME" in note or note.startswith("no C compiler")
