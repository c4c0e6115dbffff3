"""GGUF files: their values against the `gguf` package, models against the same values in safetensors.

The files are written by that package as llama.cpp's converter writes them (gguf_checkpoint.py). Logits of both loads
have the same bits, so names, orders of rows and all numbers of the configuration are those of the Hugging Face folder.
"""

import itertools
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.errors import ModelError
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics
from moe_serve.models.checkpoint import BLOCK_DTYPES, all_tensors
from moe_serve.models.decoder.moe_decoder import MoeDecoder
from moe_serve.models.families.registry import read_spec
from moe_serve.models.gguf_blocks import dequantise_blocks
from moe_serve.models.gguf_file import read_gguf
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import load_weights
from tests.models.families import (
    COMMON,
    ERNIE,
    FAMILIES,
    GPT_OSS,
    LLAMA4,
    MLA,
    QWEN,
    SIGMOID,
    YARN,
    make_random,
    save,
)
from tests.models.gguf_checkpoint import Kind, float32, matrices_in, random_blocks, write_gguf, write_header
from tests.models.runner import Runner, decoder_with, load_decoder, one_rank, share_in_groups
from tests.tolerance import GROUPS_BY_INT8, relative_error

# ---- values


@pytest.mark.parametrize("name", BLOCK_DTYPES)
def test_blocks_have_the_values_of_the_gguf_package(name: str) -> None:
    kind, num_bytes = Kind[name], BLOCK_DTYPES[name][1]
    for rows, blocks in ((1, 1), (7, 3), (2, 33)):
        raw = np.random.default_rng(rows).integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
        if name == "MXFP4":
            raw[..., 0] %= 255  # NaN, which no file has
        with np.errstate(invalid="ignore"):
            wanted = gguf.quants.dequantize(raw.reshape(rows, -1), kind)
        found = dequantise_blocks(torch.from_numpy(raw.reshape(rows, -1)), name).numpy()
        assert np.array_equal(found, wanted, equal_nan=True)  # scales of random bytes may be NaN


# ---- models of each architecture

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: FAMILIES[name]
    for name in (
        "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoe-bias-tied", "granitemoeshared",
        "deepseek_v3", "deepseek_v3-no-q-lora", "glm4_moe", "gpt_oss", "minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe",
    )
}  # fmt: skip
MODELS |= {
    "qwen3_moe-tied-linear": (
        "qwen3_moe",
        QWEN
        | {"num_hidden_layers": 3, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        MLA
        | {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.5}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "kv_lora_rank": 24},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        MLA
        | {"topk_method": "greedy", "norm_topk_prob": False, "q_lora_rank": None, "n_shared_experts": 2}
        | {"n_group": 1, "topk_group": 1},
    ),
    "glm4_moe-quarter": (
        "glm4_moe",
        SIGMOID
        | {"num_key_value_heads": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.375}},
    ),
    "dots1": ("dots1", SIGMOID | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "gpt_oss-plain": (
        "gpt_oss",
        GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "swiglu_limit": 7.0},
    ),
    "llama4": (  # what no file says is as llama.cpp has it
        "llama4_text",
        LLAMA4 | {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    ),
    "ernie4_5_moe-by-turns": (
        "ernie4_5_moe",
        ERNIE
        | {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_start_index": 0}
        | {"moe_num_shared_experts": 0, "tie_word_embeddings": True},
    ),
}  # fmt: skip
MODELS["gpt_oss"] = ("gpt_oss", GPT_OSS | {"swiglu_limit": 7.0})
WIDE = QWEN | {
    "hidden_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_experts": 4,
}

Written = Callable[..., Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Returns (model, types of its tensors, name of the file) -> its GGUF file."""
    folders: dict[str, Path] = {}

    def write(
        name: str, types: Callable[[str], Kind] = float32, keys: dict[str, Any] | None = None, **how: Any
    ) -> Path:
        if name not in folders:
            model = make_random(*(MODELS[name] if keys is None else ("qwen3_moe", keys)))
            folders[name] = save(model, tmp_path_factory.mktemp("models") / name)
        return write_gguf(folders[name], tmp_path_factory.mktemp("gguf") / f"{name}.gguf", types, **how)

    return write


def logits(path: Path, numerics: Numerics, decoder: MoeDecoder | None = None) -> torch.Tensor:
    """Returns those of random tokens under the layers that are served. decoder: None: the one of the path"""
    ids = torch.randint(3, 256, (70,), generator=torch.Generator().manual_seed(7)).tolist()
    runner = Runner(decoder or load_decoder(path, numerics, moe_layer=MoeLayer), numerics)
    request = runner.request("one", ids)
    runner.prefill([request], chunk=50)
    return runner.stacked(request)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_bits_of_its_values_in_safetensors(name: str, written: Written) -> None:
    path = written(name, matrices_in(Kind.Q8_0))
    assert torch.equal(logits(path, COMPILED), logits(path.with_suffix(""), COMPILED))


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1], ids=lambda kind: kind.name
)
def test_a_model_of_each_type_has_the_bits_of_its_values_in_safetensors(kind: Kind, written: Written) -> None:
    for name, numerics in (("mixtral", COMPILED), ("qwen2_moe", FAST)):
        path = written(name, matrices_in(kind))
        assert torch.equal(logits(path, numerics), logits(path.with_suffix(""), numerics))


def test_a_file_of_mixed_types_has_the_bits_of_its_values_in_safetensors(written: Written) -> None:
    kinds = itertools.cycle((Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.Q8_0, Kind.F16, Kind.Q4_K, Kind.Q6_K))
    of_matrix = matrices_in(Kind.Q8_0)

    def choose(name: str) -> Kind:
        return next(kinds) if of_matrix(name) is Kind.Q8_0 and name != "token_embd.weight" else of_matrix(name)

    path = written("wide", choose, WIDE)
    stored = {tensor.dtype_name for tensor in all_tensors(path).values()}
    assert {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16", "F32"} <= stored
    assert torch.equal(logits(path, COMPILED), logits(path.with_suffix(""), COMPILED))


def of_experts(name: str) -> Kind:
    """Returns Q4_K for experts, but Q6_K for the down projections of the second layer; Q8_0 for other matrices."""
    if "exps" not in name:
        return matrices_in(Kind.Q8_0)(name)
    return Kind.Q6_K if name.startswith("blk.1.ffn_down") else Kind.Q4_K


def test_experts_keep_their_codes_and_scales_layer_by_layer(written: Written) -> None:
    # All experts work on each token: a near-tie of the gate would let one rounding choose another.
    path = written("two layers", of_experts, WIDE | {"num_hidden_layers": 2, "num_experts_per_tok": 4})
    found = {}
    for activations in ("float", "int8"):
        share = share_in_groups(path, activations)
        weights = load_weights(path, share)
        sizes = [form.num_bytes for form in share.slot_forms.values()]
        assert sizes[1] > sizes[0]
        assert share.slot_form.num_bytes == sizes[1]
        assert [weights.experts[layer]["down"].nbytes for layer in (0, 1)] == [
            share.num_slots * share.slot_forms[layer].tensors["down"][0][0] for layer in (0, 1)
        ]
        found[activations] = logits(path, COMPILED, decoder_with(MoeLayer, share.spec, weights, COMPILED))
    wanted = logits(path.with_suffix(""), COMPILED)
    assert torch.equal(found["float"], wanted)
    assert 0 < relative_error(found["int8"], wanted) < GROUPS_BY_INT8


def test_experts_that_differ_within_a_matrix_are_dequantised(written: Written) -> None:
    path = written(
        "two layers",
        lambda name: Kind.Q5_K if "ffn_up_exps" in name else of_experts(name),
        WIDE | {"num_hidden_layers": 2},
    )
    assert not StoredWeights.of(read_spec(path), path).groups


def test_experts_in_mxfp4_keep_their_blocks(written: Written) -> None:
    path = written("gpt_oss", lambda name: Kind.MXFP4 if name.endswith("exps.weight") else Kind.F32)
    spec = read_spec(path)
    assert spec.experts_in_mxfp4
    wanted = logits(path.with_suffix(""), COMPILED)
    assert torch.equal(logits(path, COMPILED), wanted)
    share = WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", "mxfp4", StoredWeights.of(spec, path))
    weights = load_weights(path, share)
    assert weights.experts[0]["gate_up"].dtype == torch.uint8
    decoder = decoder_with(MoeLayer, spec, weights, COMPILED)
    assert torch.equal(logits(path, COMPILED, decoder), wanted)


def test_a_model_in_several_files_is_read_by_its_first_and_refused_where_one_is_missing(written: Written) -> None:
    path = written("mixtral", matrices_in(Kind.Q8_0), parts=4)
    whole = written("mixtral", matrices_in(Kind.Q8_0))
    parts = sorted(path.parent.glob("*.gguf"))
    assert len(parts) > 2
    assert torch.equal(logits(path, FAST), logits(whole, FAST))
    with pytest.raises(ModelError, match=r"is part 2 of \d; give the first, mixtral-00001-of-"):
        read_spec(parts[1])
    parts[-1].unlink()
    with pytest.raises(ModelError, match=f"1 of its parts are missing .{parts[-1].name}.*download"):
        read_spec(path)


def test_the_header_is_that_of_the_gguf_package(written: Written) -> None:
    path = written("deepseek_v3", matrices_in(Kind.Q8_0))
    reader, header = gguf.GGUFReader(path), read_gguf(path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert header.metadata[name] == field.contents()
    assert list(header.tensors) == [each.name for each in reader.tensors]
    for each in reader.tensors:
        found = header.tensors[each.name]
        assert found.shape == tuple(reversed(each.shape.tolist()))
        assert (found.dtype_name, found.num_bytes) == (each.tensor_type.name, each.n_bytes)
        assert found.start == each.data_offset


# ---- files that are refused


def small_file(path: Path, **tensors: tuple[np.ndarray, Kind]) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    blocks = random_blocks(Kind.Q4_K, (3, 512))
    return small_file(tmp_path / "small.gguf", one=(np.ones((2, 32), np.float32), Kind.F32), two=(blocks, Kind.Q4_K))


def changed(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def entry(name: str, *sizes: int, kind: int, offset: int) -> bytes:
    """The entry of a tensor in the header; sizes innermost first."""
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    )


def test_a_file_that_ends_early_is_refused_wherever_it_ends(small: Path) -> None:
    data = small.read_bytes()
    for end in [*range(0, 300, 7), len(data) // 2, len(data) - 1]:
        small.write_bytes(data[:end])
        with pytest.raises(ModelError, match=r"small.gguf: (is \d+ bytes|has a damaged|is not a GGUF)"):
            read_gguf(small)


BAD_ENTRIES = {
    "rows of 513 in blocks of 256": (513, 3, Kind.Q4_K, 256),
    "needs": (512, 4, Kind.Q4_K, 256),
    "share bytes": (512, 3, Kind.Q4_K, 0),
    "which is no multiple of 32": (512, 3, Kind.Q4_K, 257),
    "IQ2_XS .17., which is not read": (512, 3, 17, 256),
    "the unknown type 99, which is not read": (512, 3, 99, 256),
    "of shape .0, 512.": (512, 0, Kind.Q4_K, 256),
    "of shape .4611686018427387904, 512.": (512, 1 << 62, Kind.Q4_K, 256),
}


@pytest.mark.parametrize("message", BAD_ENTRIES)
def test_a_tensor_that_does_not_fit_is_refused_by_name(message: str, small: Path) -> None:
    row, rows, kind, offset = BAD_ENTRIES[message]
    changed(small, entry("two", 512, 3, kind=Kind.Q4_K, offset=256), entry("two", row, rows, kind=kind, offset=offset))
    with pytest.raises(ModelError, match=f"'two'.*{message}|{message}.*'two'|'two' {message}"):
        read_gguf(small)


def test_counts_beyond_the_file_are_refused_before_anything_is_made_of_them(small: Path) -> None:
    data = small.read_bytes()
    for at, what in ((8, "tensors"), (16, "key/value pairs")):
        small.write_bytes(data[:at] + struct.pack("<Q", 1 << 40) + data[at + 8 :])
        with pytest.raises(ModelError, match=f"damaged GGUF header .{1 << 40} {what}"):
            read_gguf(small)
    small.write_bytes(data)
    tokens = b"tokenizer.ggml.tokens" + struct.pack("<IIQ", 9, 8, 2)
    changed(small, tokens, tokens[:-8] + struct.pack("<Q", 1 << 50))
    for lists in ((), ("tokenizer.ggml.tokens",)):
        with pytest.raises(ModelError, match=f"a list of {1 << 50} texts"):
            read_gguf(small, lists)


def test_other_kinds_of_files_are_named(tmp_path: Path, small: Path) -> None:
    (tmp_path / "other").write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match="other: is not a GGUF file; give one, or the folder"):
        read_spec(tmp_path / "other")
    data = small.read_bytes()
    for version, said in ((1, "version 1 of GGUF"), (3 << 24, "big-endian numbers")):
        small.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
        with pytest.raises(ModelError, match=said):
            read_gguf(small)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 360), new=st.binary(min_size=1, max_size=9))
def test_bytes_that_were_changed_are_read_or_refused(small: Path, at: int, new: bytes) -> None:
    data = small.read_bytes()
    small.write_bytes(data[:at] + new + data[at + len(new) :])
    with suppress(ModelError):
        read_gguf(small)
    small.write_bytes(data)


def test_models_that_are_not_served_are_named(tmp_path: Path, written: Written) -> None:
    def with_metadata(**values: Any) -> Path:
        architecture = values.pop("arch")
        path = tmp_path / "x.gguf"
        path.unlink(missing_ok=True)

        def metadata(writer: gguf.GGUFWriter) -> None:
            for key, value in values.items():
                writer.add_uint32(key.replace("__", "."), value)

        return write_header(path, metadata, architecture)

    with pytest.raises(
        ModelError, match="architecture 'gemma3', which is not served from GGUF; served are llama, qwen2"
    ):
        read_spec(with_metadata(arch="gemma3"))
    with pytest.raises(ModelError, match=r"metadata attention\.head_count is None, expected a whole number"):
        read_spec(with_metadata(arch="qwen3moe"))
    path = written("mixtral")
    data = path.read_bytes()
    count = b"llama.expert_count" + struct.pack("<II", 4, 4)
    assert count in data
    path.write_bytes(data.replace(count, count[:-4] + struct.pack("<I", 0)))
    with pytest.raises(ModelError, match=r"holds a model without experts .expert_count 0."):
        read_spec(path)


def test_missing_and_unknown_tensors_are_named(written: Written) -> None:
    path = written("qwen3_moe", float32, QWEN)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_x_norm.weight"))
    with pytest.raises(
        ModelError, match=r"1 missing: model.layers.1.self_attn.q_norm.weight.*1 unknown: .*attn_x_norm"
    ):
        logits(path, FAST)


def test_numbers_that_are_not_finite_are_refused(written: Written) -> None:
    path = written("mixtral", matrices_in(Kind.Q8_0))
    tensor = all_tensors(path)["model.layers.1.mlp.experts.2.down_proj.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.start + 34 : tensor.start + 36] = struct.pack("<e", float("nan"))
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"experts.2.down_proj.weight holds numbers that are not finite"):
        logits(path, FAST)


def test_config_of_a_folder_is_the_config_of_its_file(written: Written) -> None:
    """Apart from what only says how files are laid out."""
    path = written("glm4_moe", matrices_in(Kind.BF16))
    of_file, of_folder = read_spec(path), read_spec(path.with_suffix(""))
    assert json.dumps(vars(of_file.router), default=str) == json.dumps(vars(of_folder.router), default=str)
    for name in ("vocab_size", "hidden", "num_layers", "max_position", "norm_eps", "rope", "moe_layer_ids"):
        assert getattr(of_file, name) == getattr(of_folder, name), name
    assert COMMON["vocab_size"] == of_file.vocab_size
