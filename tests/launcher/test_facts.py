"""Ranks with different settings, files or versions: the first difference is named, whichever it is."""

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from moe_serve.config import ModelConfig, load_config, model_dir
from moe_serve.launcher import facts
from moe_serve.launcher.facts import (
    Fact,
    difference_of_roles,
    facts_of,
    facts_of_values,
    first_difference,
    front_end_difference,
    front_end_facts,
    samples,
    weight_digests,
)

DEMO = model_dir(ModelConfig())


def facts_with(*overrides: str, device: str = "cpu") -> list[Fact]:
    return facts_of(load_config(overrides=["parallel.num_ranks=2", *overrides]), device)


def difference(*overrides: str, device: str = "cpu") -> str | None:
    return first_difference([facts_with(), facts_with(), facts_with(*overrides, device=device)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


@pytest.mark.parametrize(
    "setting",
    [
        "cache.block_size=32", "cache.num_blocks=77", "cache.prefix_cache=false", "dispatch.backend=collective",
        "dispatch.combine=rank_sum", "dispatch.deadline_s=3", "dispatch.wire_dtype=bf16",
        "dispatch.max_tokens_per_rank=99", "eplb.num_redundant_experts=4", "eplb.split=exact", "eplb.mode=off",
        "engine.numerics=batch_invariant", "engine.cpu_kernels=torch", "engine.exchange=gloo",
        "engine.max_batch_tokens=512", "engine.step_deadline_s=9", "engine.on_lost_rank=end", "model.dtype=bfloat16",
        "model.seed=3", "model.load_format=dummy", "server.worker_deadline_s=7",
    ],
)  # fmt: skip
def test_another_setting_is_named_with_its_values_and_ranks(setting: str) -> None:
    key, _, value = setting.partition("=")
    message = difference(setting)
    assert message is not None
    assert message.startswith(f"ranks differ in {key}: ")
    assert "on ranks 0, 1; " in message
    assert value.lower() in message.lower()
    assert message.split(";")[1].endswith(" on rank 2") or " on rank 2" in message
    assert message.endswith("the same configuration file and options")


@pytest.mark.parametrize(
    "setting",
    ["parallel.threads_per_rank=1", "server.worker_host=10.0.0.7", "server.port=1", "eplb.record_path=/tmp/a.jsonl"],
)
def test_what_belongs_to_one_host_may_differ(setting: str) -> None:
    assert difference(setting) is None


def test_another_device_is_named() -> None:
    assert "cpu (parallel.device) on ranks 0, 1; cuda (parallel.device) on rank 2" in str(difference(device="cuda"))


def test_the_same_model_in_another_folder_is_the_same(folder: Path) -> None:
    assert difference(f"model.path={folder}") is None


def test_another_value_of_one_weight_is_named_with_its_folder(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    message = str(difference(f"model.path={folder}"))
    assert "ranks differ in the files of weights: their values" in message
    assert str(folder) in message
    assert "Give all ranks the same files" in message


def test_another_header_of_the_weights_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :])
    assert "the files of weights: their names, index and headers" in str(difference(f"model.path={folder}"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_another_file_of_the_model_is_named(name: str, folder: Path) -> None:
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    assert f"ranks differ in the file {name} of the model" in str(difference(f"model.path={folder}"))


def test_another_placement_file_of_the_same_name_is_named(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    rows = []
    for text in ("[0, 1]", "[1, 0]"):
        path.write_text(text)
        rows.append(facts_with(f"eplb.init_expert_location={path}"))
    assert "the file of eplb.init_expert_location" in str(first_difference(rows))


def test_another_token_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for token in ("a secret of rank 0", "a secret of rank 1"):
        monkeypatch.setenv("MOE_SERVE_TOKEN", token)
        rows.append(facts_with())
    message = str(first_difference(rows))
    assert message.startswith("ranks differ in the token ($MOE_SERVE_TOKEN, or server.token_file)")
    assert "secret" not in message


def test_another_version_comes_before_the_settings_it_brings() -> None:
    old = [Fact("the version of moe_serve", "0.1"), Fact("engine.old", "1")]
    new = [Fact("the version of moe_serve", "0.2"), Fact("engine.new", "1")]
    message = str(first_difference([old, new]))
    assert message.startswith("ranks differ in the version of moe_serve: 0.1 on rank 0; 0.2 on rank 1")
    assert "they also differ in engine.old, engine.new" in message


def of_role(*overrides: str, arithmetic: str = "float32", page_key: bytes = b"a") -> list[Fact]:
    return facts_of_values(facts_with(*overrides), arithmetic, page_key)


def test_roles_may_differ_in_numbers_of_ranks_placements_and_balancing() -> None:
    assert difference_of_roles(of_role(), of_role("parallel.num_ranks=3", "eplb.num_redundant_experts=1")) is None
    assert difference_of_roles([], of_role()) is None, "the others are not known yet"


@pytest.mark.parametrize(
    ("prefill", "named"),
    [
        ({"overrides": ["cache.dtype=int8"]}, "cache.dtype: auto on role decode; int8 on role prefill"),
        ({"overrides": ["engine.numerics=batch_invariant"]}, "engine.numerics: "),
        ({"overrides": ["model.seed=3"]}, "model.seed: 0 on role decode; 3 on role prefill"),
        ({"arithmetic": "bfloat16"}, "the arithmetic: float32 on role decode; bfloat16 on role prefill"),
        ({"page_key": b"other times of files"}, "the names of pages"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_roles_that_compute_other_values_are_named_with_the_fix(prefill: dict[str, Any], named: str) -> None:
    changed = dict(prefill)
    message = str(difference_of_roles(of_role(), of_role(*changed.pop("overrides", []), **changed)))
    assert message.startswith(f"roles differ in {named}")
    assert ". Give all roles the same files" in message or ". Start all roles with the same configuration" in message


def test_roles_with_another_value_of_one_weight_are_named(folder: Path) -> None:
    before = of_role(f"model.path={folder}")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    message = str(difference_of_roles(before, of_role(f"model.path={folder}")))
    assert message.startswith("roles differ in the files of weights: their values: ")
    assert message.endswith("Give all roles the same files")


def test_samples_of_a_large_file_reach_from_its_first_byte_to_its_last() -> None:
    pieces = list(samples(100, 10**9, 1 << 20))
    assert pieces[0][0] == 100
    assert sum(pieces[-1]) == 10**9
    assert sum(size for _, size in pieces) <= 1 << 20
    assert list(samples(8, 50, 100)) == [(8, 42)]


def test_other_weights_are_seen_in_samples_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_HASHED_BYTES", 1 << 18)
    before = weight_digests(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    data[8 + length :: 4096] = bytes(len(data[8 + length :: 4096]))  # a byte in each page: other weights differ more
    path.write_bytes(data)
    after = weight_digests(folder)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_front_end_with_another_tokenizer_or_version_is_told_so(folder: Path) -> None:
    own = front_end_facts(load_config())
    assert front_end_difference(own, 3, dict(own)) is None
    assert front_end_difference(own, 3, None) is None
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b"\n")
    theirs = front_end_facts(load_config(overrides=[f"model.path={folder}"]))
    message = str(front_end_difference(own, 3, theirs))
    assert message.startswith("tokenizer.json is ")
    assert "on rank 3; start the front end with the ranks' configuration" in message
    assert "version" in str(front_end_difference(own, 3, {}))
    assert "version" in str(front_end_difference(own, 3, ["?"]))
