"""The C form of the row copier: where it is used, and the reason where it is not."""

import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_serve.c_library import ISA, processor_features
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.shm.row_copy_native import NativeRowCopier, load_library
from moe_serve.dispatch.shm.row_copy_plain import PlainRowCopier
from tests.dispatch.shm.test_transport import make
from tests.ranks import run_ranks
from tests.spills import spilling_loops


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


def added_up(library: object, dtype: torch.dtype, hidden: int) -> Tensor:
    """Returns weighted sums of rows, one of which is not finite, by row_copy.c."""
    draw = torch.Generator().manual_seed(hidden)
    rows, weights = torch.randn(40, hidden, generator=draw).to(dtype), torch.randn(9, 5, generator=draw)
    rows[7, -1] = torch.nan
    index = torch.randint(-1, 40, (9, 5), generator=draw)
    out = torch.empty(9, hidden, dtype=dtype)
    facts = np.array([0, 1, 1, 0, 0, hidden, int(dtype == torch.bfloat16)])
    at = [tensor.data_ptr() for tensor in (index, weights, rows, out)]
    library.weighted_rows(facts.ctypes.data, *at[:2], 9, 5, *at[2:])  # type: ignore[attr-defined]
    return out


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for parts of an x86-64")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_each_width_of_registers_has_the_same_bits_and_spills_no_sums(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa + ("f" if isa == "avx512" else "") not in processor_features().split():
        pytest.skip(f"this processor has no {isa}")
    whole, _ = load_library()
    monkeypatch.setenv(ISA, isa)
    part, note = load_library()
    assert whole is not None
    assert part is not None, note
    for dtype in (torch.float32, torch.bfloat16):
        for hidden in (1, 31, 64, 129, 1000):
            assert torch.equal(*(added_up(library, dtype, hidden).view(torch.uint8) for library in (whole, part))), (
                dtype,
                hidden,
            )
    assert spilling_loops(Path(part._name)) == {}
