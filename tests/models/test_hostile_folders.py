"""Hostile model folders: each is one clear line, before any process starts, in bounded time and memory."""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_serve.config import ModelConfig, ServeConfig, load_config, model_dir
from moe_serve.eplb.files.placements import read_placement
from moe_serve.errors import CapacityError, ConfigError, ModelError, PlacementError
from moe_serve.launcher.preflight import look_for_files
from moe_serve.models.checkpoint import INDEX
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import dense_parameters
from tests.models.families import FAMILIES
from tests.models.published import PUBLISHED

DEMO = model_dir(ModelConfig())
CPU = ["parallel.device=cpu"]
NESTED = "[" * 200_000
NAN, HUGE = float("nan"), 10**400
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def configured(**changes: Any) -> Change:
    """Returns what changes entries of config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def rope(**values: Any) -> Change:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    return configured(rope_parameters=yarn | values)


def with_text(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def as_pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def as_folder(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def index_of(*names: object) -> Change:
    return with_text(INDEX, json.dumps({"weight_map": {f"tensor {i}": name for i, name in enumerate(names)}}))


def outside(folder: Path) -> None:
    """Moves the weights out of the folder, and points the index at them."""
    (folder / "model.safetensors").rename(folder.parent / "away.safetensors")
    index_of("../away.safetensors")(folder)


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Returns what changes the header of the weights."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + length])
        change(values)
        text = json.dumps(values).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return rewrite


def overlap(values: dict[str, Any]) -> None:
    names = [name for name in values if name != "__metadata__"]
    first = values[names[0]]
    twin = next(n for n in names[1:] if values[n]["shape"] == first["shape"] and values[n]["dtype"] == first["dtype"])
    values[twin]["data_offsets"] = first["data_offsets"]


def raw_header(text: bytes, length: int | None = None) -> Change:
    def change(folder: Path) -> None:
        size = len(text) if length is None else length
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text)

    return change


def sparse(name: str, size: int) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", size - 8))
            file.truncate(size)

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "an index that points out of the folder": (outside, r"names '../away.safetensors'.*own folder"),
    "an index with an absolute path": (index_of("/etc/passwd"), r"names '/etc/passwd'"),
    "an index that names no safetensors": (index_of("config.json"), "names 'config.json'"),
    "an index that names a number": (index_of(7), "names 7"),
    "an index that names lists": (index_of([1]), "is not a safetensors index"),
    "an index of nested lists": (with_text(INDEX, NESTED), "is not a safetensors index"),
    "an index that is a pipe": (as_pipe(INDEX), "is not a regular file"),
    "an index that names a pipe": (
        lambda folder: (index_of("a.safetensors")(folder), as_pipe("a.safetensors")(folder)),
        "is not a regular file",
    ),
    "tensors that share bytes": (header(overlap), "share bytes"),
    "a tensor of 99 dimensions": (
        header(lambda values: values[sorted(values)[-1]].update(shape=[1] * 99)),
        "corrupt safetensors header",
    ),
    "an offset beyond 64 bits": (
        header(lambda values: values[sorted(values)[-1]].update(data_offsets=[0, 2**80])),
        "corrupt safetensors header",
    ),
    "a header of nested lists": (raw_header(NESTED.encode()), "corrupt safetensors header"),
    "a header that claims 4 GB": (raw_header(b"{}", 4 << 30), "not a complete safetensors file"),
    "a header of 1 GB in a sparse file": (sparse("model.safetensors", 1 << 30), "corrupt safetensors header"),
    "weights that are a pipe": (as_pipe("model.safetensors"), "is not a regular file"),
    "weights that are a folder": (as_folder("model.safetensors"), "is not a regular file"),
    "a config that is a pipe": (as_pipe("config.json"), "is not a regular file"),
    "a config that is a folder": (as_folder("config.json"), "is not a regular file"),
    "a config of nested lists": (with_text("config.json", NESTED), "nested too deeply"),
    "a config of 1 TB": (sparse("config.json", 1 << 40), "more than the"),
    "a config that is not UTF-8": (lambda folder: (folder / "config.json").write_bytes(b"\xff{"), "not valid"),
    "rope_theta NaN": (configured(rope_parameters=None, rope_theta=NAN), "rope_theta of the rotary embedding is nan"),
    "rope_theta 1": (configured(rope_parameters=None, rope_theta=1), "above 1"),
    "rope_theta without a float": (configured(rope_parameters=None, rope_theta=10**390), "rope_theta"),
    "a rotation that is a list": (configured(rope_parameters=[1]), "rope_parameters is"),
    "a kind of rotation that is an object": (rope(rope_type={"a": 1}), "rope_type"),
    "a factor below 1": (rope(factor=0.25), "factor 0.25"),
    "an original length below 1": (rope(original_max_position_embeddings=0.5), "original_max_position_embeddings 0.5"),
    "a beta that is a text": (rope(beta_fast="32"), "beta_fast"),
    "an infinite attention factor": (rope(attention_factor=float("inf")), "attention_factor"),
    "mscale that is a list": (rope(mscale=[1], mscale_all_dim=1), "mscale"),
    "rms_norm_eps -1": (configured(rms_norm_eps=-1), "rms_norm_eps is -1, expected a number above 0"),
    "rms_norm_eps infinite": (configured(rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
    "a billion layers": (configured(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, expected at most"),
    "a billion experts": (configured(n_routed_experts=10**9), "n_routed_experts is 1000000000, expected at most"),
    "a million experts in thousands of layers": (
        configured(n_routed_experts=10**6, num_hidden_layers=4000),
        "experts, expected at most",
    ),
    "sizes that make too many parameters": (
        configured(hidden_size=1 << 20, moe_intermediate_size=1 << 20),
        "parameters, expected at most",
    ),
    "a context of five million": (configured(max_position_embeddings=5_000_000), "max_position_embeddings is 5000000"),
    "a context of 10^12": (configured(max_position_embeddings=10**12), "max_position_embeddings is 1000000000000"),
    "an end id of 10^18": (configured(eos_token_id=10**18), "eos_token_id is 1000000000000000000"),
    "an end id of -1": (configured(eos_token_id=[2, -1]), r"eos_token_id is \[2, -1\]"),
    "an end id of a generation config": (
        with_text("generation_config.json", '{"eos_token_id": "x"}'),
        r"generation_config.json: eos_token_id is 'x'",
    ),
    "a size of 400 digits": (configured(vocab_size=HUGE), "vocab_size is 1000"),
    "a flag that is a text": (configured(tie_word_embeddings="false"), "tie_word_embeddings is 'false'"),
    "layers that are objects": (
        configured(model_type="qwen3_moe", num_experts=8, mlp_only_layers=[{}]),
        "mlp_only_layers is",
    ),
    "blocks of nothing": (
        configured(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 0]}),
        "only fp8 with square blocks",
    ),
    "a dtype that is a list": (configured(dtype=["float32"]), "dtype is"),
    "a model type of a megabyte": (configured(model_type="x" * 2**20), "is not supported"),
    "a generation config that is a pipe": (as_pipe("generation_config.json"), "is not a regular file"),
    "a tokenizer that is a pipe": (as_pipe("tokenizer.json"), "is not a regular file"),
    "a tokenizer of nested lists": (with_text("tokenizer.json", NESTED), "cannot be read as a tokenizer"),
    "a tokenizer that is cut off": (with_text("tokenizer.json", '{"model": {'), "cannot be read as a tokenizer"),
    "a tokenizer config of nested lists": (with_text("tokenizer_config.json", NESTED), "nested too deeply"),
    "a tokenizer config that is a list": (with_text("tokenizer_config.json", "[]"), "expected an object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_one_line_in_bounded_memory(name: str, folder: Path) -> None:
    change, words = HOSTILE[name]
    change(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=words) as caught:
        look_for_files(load_config(overrides=[f"model.path={folder}"]))
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000, "KiB that the process grew"


def test_the_folder_is_fine_as_it_is(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    look_for_files(load_config(overrides=[f"model.path={folder}"]))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert read_spec(folder) == read_spec(DEMO)


def test_random_weights_that_no_machine_holds_are_refused_before_a_start(folder: Path) -> None:
    configured(num_hidden_layers=1000, n_routed_experts=1000, hidden_size=8192)(folder)
    with pytest.raises(CapacityError, match=r"one rank take at least \d+ GiB and this machine has"):
        look_for_files(load_config(overrides=[f"model.path={folder}", "model.load_format=dummy", *CPU]))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"physical_to_logical_map":' + "[" * 100_000, "a: " + "[" * 50_000])
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_placement_file_that_is_nested_too_deeply_is_one_line(text: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"placement.{suffix}"
    path.write_text(text)
    with pytest.raises(PlacementError, match=r"placement\.\w+.*give a placement file|is the file complete") as caught:
        read_placement(path, 2, 4, ())
    assert "\n" not in str(caught.value)


def recording_to(path: Path) -> ServeConfig:
    return load_config(overrides=[f"eplb.record_path={path}"])


def test_a_trace_that_cannot_be_written_is_found_before_a_start(tmp_path: Path) -> None:
    look_for_files(recording_to(tmp_path / "load.jsonl"))
    with pytest.raises(ConfigError, match=r"record_path: .*no folder .*nowhere.*in a folder that exists"):
        look_for_files(recording_to(tmp_path / "nowhere" / "load.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        look_for_files(recording_to(tmp_path / "folder.jsonl"))


# ---- config.json: any value under any key is read, or refused in one line

EXTREMES: list[Any] = [-1, 0, 2, 1e308, 10**400, float("nan"), True, "x", [], [[]], [1, 2], {"a": 1}]
ROPES: list[Any] = [
    {"alpha": -1}, {"alpha": 1e300, "rope_theta": 1e300}, {"alpha": 1e9, "rope_theta": 1e300}, {"rope_type": []},
    {"rope_type": "yarn"}, {"partial_rotary_factor": 1e-9}, {"partial_rotary_factor": []}, {"rope_theta": True},
]  # fmt: skip
MORE = ("layer_types", "sliding_window", "use_sliding_window", "rotary_dim", "head_dim", "quantization_config")
OF_FAMILIES = {config["model_type"]: config for config, _ in PUBLISHED.values()}
OF_FAMILIES["llama4_text"] = OF_FAMILIES["llama4"]["text_config"]


def within(config: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Returns the part of a configuration that describes its text model, and what puts another one in its place."""
    key = next((key for key in ("thinker_config", "text_config") if key in config), None)
    if key is None:
        return lambda text: text, config
    inner, part = within(config[key])
    return lambda text: config | {key: inner(text)}, part


# By default each key meets a third of the values: which third differs from key to key and from family to family.
@pytest.mark.parametrize("third", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))])
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=[] if each in FAMILIES else pytest.mark.slow) for each in OF_FAMILIES],
)
def test_any_value_is_read_or_refused_in_one_line(model_type: str, third: int, tmp_path: Path) -> None:
    whole = OF_FAMILIES[model_type]
    outer, base = within(whole)
    keys = enumerate(sorted({*base, *MORE}), third + [*OF_FAMILIES].index(model_type))
    changes = [{key: value} for number, key in keys for value in EXTREMES[number % 3 :: 3]]
    if third == 0:
        changes += [{key: value} for key in ("rope_parameters", "rope_scaling") for value in ROPES]
    rope = base.get("rope_scaling") or {}
    rope_values = (*EXTREMES, 1e-308, 1e308)[third::3]
    changes += [{"rope_scaling": rope | {key: value}} for key in rope for value in rope_values]
    messages: list[str] = []
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(outer(base | change)))
        try:
            spec = read_spec(tmp_path)
        except ModelError as error:
            messages.append(str(error))
        else:
            assert dense_parameters(spec) > 0, change
            assert spec.attention.softmax_scale > 0, change
    assert not [message for message in messages if "\n" in message]
    assert len(messages) > len(changes) // 4
