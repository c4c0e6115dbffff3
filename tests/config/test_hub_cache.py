"""A name of the Hugging Face Hub means the files that its tools have left on this machine."""

from pathlib import Path

import pytest

from moe_serve.config import load_config, model_dir, served_name
from moe_serve.errors import ModelError
from moe_serve.launcher.preflight import look_for_files

NAME = "Qwen/Qwen3-30B-A3B"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def downloaded(cache: Path, revision: str) -> Path:
    folder = cache / "models--Qwen--Qwen3-30B-A3B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    snapshot = folder / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_name_is_the_snapshot_of_its_main_revision_and_the_model_is_called_by_it(cache: Path):
    snapshot = downloaded(cache, "abc123\n")
    model = load_config(overrides=[f"model.path={NAME}"]).model
    assert model_dir(model) == snapshot
    assert served_name(model) == NAME


def test_a_folder_of_that_name_comes_first(cache: Path):
    downloaded(cache, "abc123")
    (cache / NAME).mkdir(parents=True)
    model = load_config(overrides=[f"model.path={NAME}"]).model
    assert model_dir(model) == Path(NAME)
    assert served_name(model) == "Qwen3-30B-A3B"


@pytest.mark.parametrize("revision", ["gone", "../snapshots/abc123", ""])
def test_what_was_not_downloaded_is_refused_with_the_command_that_does_it(cache: Path, revision: str):
    downloaded(cache, revision)
    with pytest.raises(ModelError, match=f"hf download {NAME}"):
        look_for_files(load_config(overrides=[f"model.path={NAME}"]))


def test_paths_are_no_names(cache: Path):
    for path in ("no/such/folder", "no/model.gguf", "/no/model", "./model", "~/model"):
        with pytest.raises(ModelError, match="no such folder or file"):
            look_for_files(load_config(overrides=[f"model.path={path}"]))
