"""The ranks of a host share one copy of the weights: the same bits as with their own, made once, refused if damaged."""

import ctypes
import errno
import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.real_shapes import write_model
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import barrier
from moe_serve.engine import rank_memory
from moe_serve.engine.build import build_served_model, pack_weights
from moe_serve.engine.engine import Engine
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.engine.model.shared_weights import open_shared_weights
from moe_serve.engine.rank_memory import bytes_in_words
from moe_serve.errors import ConfigError, ModelError, MoeServeError, PeerError
from moe_serve.kernels.cpu.library import find_cpu_library
from moe_serve.launcher.cli import app as cli
from moe_serve.launcher.examination.check import examine
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weights import dummy_weights
from tests.engine.offline import Served, serve, tiny_model
from tests.engine.test_identity import PLAIN, requests_for, same
from tests.models.families import make_random, save
from tests.models.gguf_checkpoint import as_q4_k_m, write_gguf
from tests.models.published import QWEN3_30B
from tests.models.test_gguf import WIDE
from tests.models.test_loading_memory import MALLOC_MMAP_THRESHOLD
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(find_cpu_library() is None, reason="no C compiler")
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")


def settings(folder: Path, family: str, cache: object) -> list[str]:
    model = folder / family
    if not model.exists():  # when it was written is a part of what a file of weights was made from
        tiny_model(folder, family)
    drawn = [f"model.path={model}", "model.load_format=dummy", "eplb.num_redundant_experts=2"]
    return [*PLAIN, *drawn, f"model.weight_cache={cache}"]


def answer(
    family: str, num_ranks: int, overrides: list[str], prepare: Callable[[Engine], None] | None = None
) -> Served:
    return serve(num_ranks, requests_for(family, "small")[:6], overrides, prepare=prepare)


def maps_all(engine: Engine) -> None:
    assert engine.served.names_experts
    assert all(store.slot(0)["down"].numel() for store in engine.served.decoder.experts)


def has_its_own(engine: Engine) -> None:
    assert not engine.served.names_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_have_the_same_bits_in_memory_in_a_new_file_and_in_one_that_was_there(
    family: str, tmp_path: Path
) -> None:
    alone = answer(family, 2, settings(tmp_path, family, "none"), has_its_own)
    same(answer(family, 2, settings(tmp_path, family, "memory"), maps_all), alone)
    cache = tmp_path / "cache"
    same(answer(family, 1, settings(tmp_path, family, cache), maps_all), alone)
    (made,) = cache.glob("*.weights")
    before = made.stat()
    assert before.st_mode & 0o777 == 0o600
    same(answer(family, 2, settings(tmp_path, family, cache), maps_all), alone)
    after = made.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert {path.suffix for path in cache.iterdir()} == {".weights", ".lock"}


def test_a_file_that_was_packed_beforehand_is_the_one_that_ranks_find(tmp_path: Path) -> None:
    cache, drawn = tmp_path / "cache", settings(tmp_path, "qwen3_moe", tmp_path / "cache")
    command = ["convert-weights", *(word for each in drawn for word in ("--set", each))]
    said = [CliRunner().invoke(cli.app, command, catch_exceptions=False).output for _ in range(2)]
    assert "weights: 0.00 GiB, once for all ranks of this host, in a file in" in said[0]
    assert "found there" in said[1]
    (made,) = cache.glob("*.weights")
    before = made.stat()
    alone = answer("qwen3_moe", 2, settings(tmp_path, "qwen3_moe", "none"))
    same(answer("qwen3_moe", 2, drawn, maps_all), alone)
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(ConfigError, match=r"set model.weight_cache: FOLDER"):
        pack_weights(load_config(overrides=settings(tmp_path, "qwen3_moe", "memory")), lambda phase, fraction: None)


def test_a_gguf_file_of_mixed_types_gives_the_same_bits_alone_and_from_a_copy(tmp_path: Path) -> None:
    save(make_random("qwen3_moe", WIDE), tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "mixed.gguf", as_q4_k_m)
    plan = ModelPlan.of(load_config(overrides=[*PLAIN, f"model.path={file}"]), read_spec(file), torch.device("cpu"))
    assert plan.activations == "int8"
    assert plan.stored is not None
    assert plan.stored.dense_groups.keys() == {"embed", "layers.0.qkv", "layers.0.o", "lm_head"}
    assert len(set(plan.stored.dense_groups["layers.0.qkv"])) == 2
    alone, *shared = (
        answer("qwen3_moe", num_ranks, [*PLAIN, f"model.path={file}", f"model.weight_cache={cache}"])
        for num_ranks, cache in ((1, "none"), (2, "memory"), (1, tmp_path / "cache"), (2, tmp_path / "cache"))
    )
    for each in shared:
        same(each, alone)


def open_to_others(path: Path) -> None:
    path.chmod(0o622)


def change_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_the_model(path: Path) -> None:
    config = path.parent.parent / "qwen3_moe" / "config.json"
    os.utime(config, ns=(1, 1))


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (open_to_others, "others can write to it"),
        (change_a_byte, "not those that were written"),
        (cut, "was not finished"),
        (change_the_model, "has changed"),
        (link_elsewhere, "cannot be used"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_made_anew(
    spoil: Callable[[Path], None], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    assert loads_anew(tmp_path, cache)
    (made,) = cache.glob("*.weights")
    wanted = made.read_bytes()
    spoil(made)
    with caplog.at_level("WARNING", logger="moe_serve"):
        assert loads_anew(tmp_path, cache)
    assert said in caplog.text
    assert not made.is_symlink()
    assert made.read_bytes()[4096 : 1 << 20] == wanted[4096 : 1 << 20]
    assert not loads_anew(tmp_path, cache)


def loads_anew(folder: Path, cache: object) -> bool:
    """Loads a model on one rank; returns whether its weights were not there packed."""
    served = build_served_model(load_config(overrides=settings(folder, "qwen3_moe", cache)), alone())
    return not served.info["shared_weights"]["was_there"]


@pytest.mark.parametrize(("how", "cache"), [("written", ""), ("added", "none"), ("removed", "none")])
def test_files_that_change_while_they_are_read_are_refused_and_their_weights_get_no_name(
    how: str, cache: str, tmp_path: Path
) -> None:
    """cache: model.weight_cache; "": a folder"""
    model = tmp_path / "model"
    save(make_random("qwen3_moe", WIDE), model)
    (model / "other.json").write_text("{}")
    overrides = [*PLAIN, f"model.path={model}", "cache.prefix_cache=true", "cache.host_gb=0.001"]
    config, plain = (
        load_config(overrides=[*overrides, f"model.weight_cache={each}"]) for each in (cache or tmp_path, "none")
    )
    changed = model / ("more.json" if how == "added" else "other.json")

    def read(phase: str, fraction: float) -> None:
        if phase == "loading weights" and changed.exists() != (how == "added"):
            changed.unlink() if how == "removed" else changed.write_text("[1, 2]")

    with pytest.raises(ModelError, match=rf"model: {changed.name} changed while this rank read the model; start again"):
        build_served_model(config, alone(), read)
    assert not list(tmp_path.glob("*.weights"))
    keys = [build_served_model(plain, alone()).kv_key for _ in range(2)]
    assert keys[0] == keys[1]
    changed.write_text("[1, 2, 3]")
    assert build_served_model(plain, alone()).kv_key != keys[0]


def test_ranks_of_both_roles_share_a_copy_in_memory_unless_the_checkpoint_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [*settings(tmp_path, "qwen3_moe", "memory"), "parallel.num_prefill_ranks=1"]
    file = os.memfd_create("moe_serve_weights")

    def load(role: Literal["prefill", "decode"]) -> tuple[bool, int]:
        """Returns whether the weights were there, and the size of the launcher's file."""
        config = load_config(overrides=overrides).of_role(role)
        served = build_served_model(config, alone(), weight_files=[file] * 9)
        assert served.names_experts
        return served.info["shared_weights"]["was_there"], os.fstat(file).st_size

    try:
        was_there, size = load("decode")
        assert not was_there
        assert size > 0
        assert load("prefill") == (True, size)
        config_file = tmp_path / "qwen3_moe" / "config.json"
        config_file.write_text(config_file.read_text() + " ")
        with caplog.at_level("WARNING", logger="moe_serve"):
            assert load("prefill") == (False, size)
        assert "of other files than when the launch began" in caplog.text
        os.ftruncate(file, 4096)  # as a leader leaves it that was killed
        assert load("decode") == (False, 4096)
    finally:
        os.close(file)


def alone() -> EpGroup:
    return EpGroup(0, 1, torch.device("cpu"))


def test_a_full_disk_leaves_the_weights_in_memory_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level("WARNING", logger="moe_serve"):
        assert loads_anew(tmp_path, tmp_path / "cache")
    assert caplog.text.count("No space left on device") == 1
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        loads_anew(tmp_path, tmp_path / "cache")


def fail_on_one_rank(rank: int, group: EpGroup, overrides: list[str], failing: int) -> str:
    config = load_config(overrides=[*overrides, "parallel.num_ranks=2"])
    plan = ModelPlan.of(config, read_spec(Path(config.model.path)), torch.device("cpu"))
    shared = open_shared_weights(config, plan, group, lambda phase, part: None)
    assert shared is not None

    def read(*args: object) -> object:
        if rank == failing:
            raise ConfigError("no such file")
        return dummy_weights(args[0], 0, args[1])  # type: ignore[arg-type]

    try:
        shared.load(plan.share(rank), read, lambda phase, part: None)  # type: ignore[arg-type]
        shared.finish(lambda phase, part: None)
    except MoeServeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_read_ends_the_wait_of_the_other(failing: int, tmp_path: Path) -> None:
    said = run_ranks(2, fail_on_one_rank, settings(tmp_path, "qwen3_moe", "memory"), failing, timeout_s=60)
    assert said[failing] == "ConfigError: no such file"
    assert said[1 - failing].startswith(f"{PeerError.__name__}: ")
    assert f"rank {failing} ended while it should" in said[1 - failing]


# ---- what is resident

SMAPS = Path("/proc/self/smaps")
SIZES = {"hidden_size": 512, "moe_intermediate_size": 128, "num_experts": 16, "vocab_size": 4096}
OF_30B = QWEN3_30B | {
    "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "moe_intermediate_size": 256,
    "vocab_size": 8192, "max_position_embeddings": 1024,
}  # fmt: skip
MIB = 1 << 20
CACHE_BYTES = 32 * MIB  # of keys and values of a rank, at least
BESIDE = 4 * MIB  # objects of a decoder, and pieces between those that the C library has given back


@dataclass(frozen=True)
class Resident:
    """Bytes of a process. What libraries and its other files take depends on who else runs, and is no part of it.

    weights: of the copy, this process' part;  own: without a name
    """

    weights: int
    own: int

    @classmethod
    def now(cls) -> "Resident":
        """Returns those of this process, without what it has freed."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        weights, is_copy = 0, False
        for line in SMAPS.read_text().splitlines():
            name, *values = line.split()
            is_copy = is_copy if name.endswith(":") else is_of_copy(line)
            weights += int(values[0]) * 1024 if name == "Pss:" and is_copy else 0
        rollup = SMAPS.with_name("smaps_rollup").read_text()
        return cls(weights, int(rollup.partition("Pss_Anon:")[2].split()[0]) * 1024)


def is_of_copy(line: str) -> bool:
    """Returns whether a line of /proc/PID/maps is of a copy of the weights."""
    return ".weights" in line or ("moe_serve_weights" in line and "_state" not in line)


def touch_weights() -> None:
    """Reads all bytes of the copy, as steps with every expert would."""
    for line in filter(is_of_copy, SMAPS.with_name("maps").read_text().splitlines()):
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        size = min(end - first, os.stat(f"/proc/self/map_files/{line.split()[0]}").st_size)
        assert line.split()[1] == "r--s", "a rank cannot write to what it shares"
        np.frombuffer((ctypes.c_uint8 * size).from_address(first), dtype=np.uint8).max()


def measure(rank: int, group: EpGroup, small: list[str], large: list[str]) -> tuple[int, int, int]:
    """Returns the bytes of the copy, this rank's part of it, and by how much serving makes its own memory larger.

    A small model is served before, and let go of: what a rank touches anew whatever it serves, such as objects of the
    process that it was forked from, is there then. Its part of those would depend on who else has them.
    """
    ctypes.CDLL(None).mallopt(MALLOC_MMAP_THRESHOLD, 1 << 16)
    sizes, num_bytes = [], 0
    for overrides in (small, large):
        barrier(group.process_group)
        sizes.append(Resident.now())
        barrier(group.process_group)
        served = build_served_model(load_config(overrides=[*overrides, "parallel.num_ranks=2"]), group)
        served.cache.touch()
        touch_weights()
        barrier(group.process_group)
        after, num_bytes = Resident.now(), served.info["shared_weights"]["num_bytes"]
        barrier(group.process_group)
        del served
    assert sizes[1].weights == 0, "the small model is gone"
    return num_bytes, after.weights, after.own - sizes[1].own


def in_float32(folder: Path, changes: dict[str, Any]) -> Path:
    """Returns a folder with the configuration of a model whose weights are drawn."""
    folder.mkdir()
    config = tiny_model(folder, "qwen3_moe") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return config.parent


def in_four_bits(folder: Path, changes: dict[str, Any]) -> Path:
    """Returns a GGUF file."""
    folder.mkdir()
    write_model(folder / "model.gguf", OF_30B | changes)
    return folder / "model.gguf"


def test_a_start_says_what_is_shared_and_what_a_rank_takes_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*args: object) -> tuple[int, str]:
        raise AssertionError("recording a step makes torch import 100 MiB, which a rank would keep")

    overrides = [*settings(tmp_path, "qwen3_moe", tmp_path / "cache"), "parallel.device=cpu"]
    with caplog.at_level("INFO", logger="moe_serve"), monkeypatch.context() as patched:
        patched.setattr(rank_memory, "working_memory", record)
        build_served_model(load_config(overrides=overrides), alone())
    memory = examine(load_config(overrides=overrides)).memory
    steps = ("a step at its largest", "logits of prompts")
    own = sum(each.num_bytes for each in memory if not each.shared and each.name not in steps)
    assert "once for all ranks of this host, in a file in" in caplog.text
    assert (
        f"each rank takes {bytes_in_words(own)} of its own beside its program and its steps: KV cache " in caplog.text
    )


@pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc/self/smaps")
@pytest.mark.parametrize(
    ("write", "sizes", "num_blocks", "in_folder"),
    [
        pytest.param(in_float32, ({}, SIZES), 2731, False, id="float32, in memory"),
        pytest.param(in_four_bits, ({"num_experts": 8}, {"num_experts": 64}), 256, False, id="four bits, in memory"),
        pytest.param(in_four_bits, ({"num_experts": 8}, {"num_experts": 64}), 256, True, id="four bits, in a file"),
    ],
)
def test_two_ranks_have_in_memory_what_check_says_and_the_weights_once(
    write: Callable[[Path, dict[str, Any]], Path],
    sizes: tuple[dict[str, Any], dict[str, Any]],
    num_blocks: int,
    in_folder: bool,
    tmp_path: Path,
) -> None:
    small, large = (
        [
            *PLAIN, f"model.path={model}", f"model.load_format={'auto' if model.is_file() else 'dummy'}",
            "engine.max_batch_tokens=64", "engine.max_running_requests=8", "parallel.device=cpu",
            f"model.weight_cache={tmp_path / 'cache' if in_folder else 'memory'}", f"cache.num_blocks={num_blocks}",
        ]
        for model in (write(tmp_path / name, each) for name, each in zip(("small", "large"), sizes, strict=True))
    )  # fmt: skip
    report = examine(load_config(overrides=[*large, "parallel.num_ranks=2"]))
    own_bytes = report.memory_bytes - report.shared_bytes
    measured = run_ranks(2, measure, small, large, timeout_s=240)
    said = f"check: {report.shared_bytes / MIB:.1f} MiB shared, {own_bytes / MIB:.1f} of each; {measured}"
    (num_bytes,) = {each[0] for each in measured}
    assert 40 * MIB < report.shared_bytes <= num_bytes < report.shared_bytes * 1.05, said
    assert abs(sum(part for _, part, _ in measured) - num_bytes) < MIB / 4, said
    assert all(0.95 * CACHE_BYTES < own < own_bytes + BESIDE for _, _, own in measured), said
