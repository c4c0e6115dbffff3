"""What a rank reads of a checkpoint: its own bytes, the right values, and clear messages for what does not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_serve.config import load_config
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ModelError
from moe_serve.kernels.numerics import COMPILED, FAST
from moe_serve.models.checkpoint_parts import as_stored
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import dense_parameters
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import LoadedWeights, dummy_weights, load_weights
from tests.models.families import FAMILIES, Oracle, oracle_logits
from tests.models.reference_moe import ReferenceMoe
from tests.models.runner import Runner, load_decoder, one_rank
from tests.tolerance import LOGITS, relative_error


def placed(spec: ModelSpec, num_ranks: int, num_redundant: int = 0) -> Placement:
    return Placement.trivial(
        spec.num_moe_layers, spec.num_logical, num_ranks, num_redundant, moe_layer_ids=spec.moe_layer_ids
    )


def share_of(spec: ModelSpec, placement: Placement, rank: int = 0) -> WeightShare:
    return WeightShare(spec, placement, rank, torch.float32, "cpu")


def load(folder: Path, placement: Placement, rank: int = 0, **options: Any) -> LoadedWeights:
    return load_weights(folder, share_of(read_spec(folder), placement, rank), **options)


def rewritten(
    source: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any
) -> Path:
    """Copies a model folder with other tensors and config entries."""
    folder.mkdir()
    tensors = change(load_file(source / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def fuse_experts(spec: ModelSpec) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Returns a change to the form that transformers 5 has in memory: one tensor for all experts of a layer."""
    names = spec.expert_names

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in spec.moe_layer_ids:
            block = f"model.layers.{layer}.{names.block}."
            gate, up, down = (
                torch.stack([tensors.pop(f"{block}experts.{e}.{n}.weight") for e in range(spec.num_logical)])
                for n in (names.gate, names.up, names.down)
            )
            fused = f"model.layers.{layer}.mlp."
            tensors[fused + "experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[fused + "experts.down_proj"] = down
            tensors[fused + "gate.weight"] = tensors.pop(block + "gate.weight")
        return tensors

    return change


def assert_equal(a: LoadedWeights, b: LoadedWeights) -> None:
    assert a.dense.keys() == b.dense.keys()
    for name in a.dense:
        assert torch.equal(a.dense[name], b.dense[name]), name
    for layer, tensors in a.experts.items():
        for name in tensors:
            assert torch.equal(tensors[name], b.experts[layer][name]), (layer, name)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_fused_sharded_and_per_expert_files_load_alike(name: str, oracle: Oracle, tmp_path: Path) -> None:
    model, folder = oracle(name)
    placement = one_rank(read_spec(folder))
    plain = load(folder, placement)
    fused = load(rewritten(folder, tmp_path / "fused", fuse_experts(read_spec(folder))), placement)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    assert_equal(plain, fused)
    assert_equal(plain, load(tmp_path / "sharded", placement))
    assert plain.bytes_read == fused.bytes_read


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_a_rank_reads_its_own_bytes_only(num_ranks: int, fused: bool, oracle: Oracle, tmp_path: Path) -> None:
    folder = oracle("deepseek_v3")[1]
    spec = read_spec(folder)
    if fused:
        folder = rewritten(folder, tmp_path / "fused", fuse_experts(spec))
    stored = load_file(folder / "model.safetensors")
    num_bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()}
    of_experts = sum(size for name, size in num_bytes.items() if ".experts." in name)
    placement = placed(spec, num_ranks)
    seen: list[tuple[int, int]] = []
    for rank in range(num_ranks):
        loaded = load(folder, placement, rank, progress=lambda done, total: seen.append((done, total)))
        assert loaded.bytes_read == sum(num_bytes.values()) - of_experts + of_experts // num_ranks
        assert seen[-1] == (loaded.bytes_read, loaded.bytes_read)
    assert all(done <= total for done, total in seen)


def test_replicas_hold_equal_bytes_read_once_and_empty_slots_hold_zeros(oracle: Oracle) -> None:
    folder = oracle("qwen3_moe")[1]
    spec = read_spec(folder)
    table = [[3, 0, 3, -1, 5, 1, 2, 4, 6, 7, 0, -1]] * spec.num_moe_layers
    placement = Placement(table, spec.num_logical, 2, spec.moe_layer_ids)
    everything = load(folder, one_rank(spec))
    halves = [load(folder, placement, rank) for rank in range(2)]
    for layer in spec.moe_layer_ids:
        for name, whole in everything.experts[layer].items():
            got = torch.cat([half.experts[layer][name] for half in halves])
            for slot, expert in enumerate(table[0]):
                assert torch.equal(got[slot], whole[expert] if expert >= 0 else torch.zeros_like(whole[0]))
    once = load(folder, Placement([[3, 0, 5] + [1, 2, 4, 6, 7] + [-1] * 2] * 2, 8, 2, spec.moe_layer_ids), 0)
    assert halves[0].bytes_read < everything.bytes_read
    # Experts 1 and 2 of two layers, less one of them.
    assert once.bytes_read - halves[0].bytes_read == 2 * 4 * spec.expert_parameters


# A variant of a family ("-" in its name) has its weights listed by the same plan.
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * ("-" in each)) for each in FAMILIES])
def test_dummy_weights_have_the_form_of_loaded_ones_and_follow_the_expert(name: str, oracle: Oracle) -> None:
    folder = oracle(name)[1]
    spec = read_spec(folder)
    loaded = load(folder, one_rank(spec))
    whole = dummy_weights(share_of(spec, one_rank(spec)), seed=1)
    assert {k: v.shape for k, v in whole.dense.items()} == {k: v.shape for k, v in loaded.dense.items()}
    assert sum(t.numel() for t in loaded.dense.values()) == dense_parameters(spec)
    width = spec.num_logical // 2
    for rank in range(2):
        half = dummy_weights(share_of(spec, placed(spec, 2), rank), seed=1)
        for layer, tensors in half.experts.items():
            for key, tensor in tensors.items():
                assert tensor.shape[1:] == loaded.experts[layer][key].shape[1:]
                assert torch.equal(tensor, whole.experts[layer][key][rank * width : (rank + 1) * width])
    assert sum(t[0].numel() for t in whole.experts[spec.moe_layer_ids[0]].values()) == spec.expert_parameters
    other = dummy_weights(share_of(spec, one_rank(spec)), seed=2)
    assert not torch.equal(other.dense["embed"], whole.dense["embed"])


def test_all_that_does_not_fit_is_named_at_once(oracle: Oracle, tmp_path: Path) -> None:
    folder = oracle("qwen3_moe")[1]

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 64)
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.complex64)
        return tensors

    broken = rewritten(folder, tmp_path / "broken", spoil)
    spec = read_spec(broken)
    for rank in range(2):  # also the rank that would not read the missing expert says so
        with pytest.raises(ModelError) as error:
            load(broken, placed(spec, 2), rank)
        text = str(error.value)
        for word in (
            "2 missing: model.norm.weight, model.layers.1.mlp.experts.5.up_proj.weight",
            "1 of another shape: model.layers.0.self_attn.q_proj.weight [3, 64], expected [64, 64]",
            "1 unknown: model.layers.0.self_attn.sinks",
            "lm_head.weight (C64)",
        ):
            assert word in text


def test_layers_for_multi_token_prediction_and_computed_buffers_are_ignored(oracle: Oracle, tmp_path: Path) -> None:
    folder = oracle("deepseek_v3")[1]

    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["model.mtp_linear_proj.0.weight"] = torch.zeros(2, 4)
        return tensors

    more = rewritten(folder, tmp_path / "more", add)
    assert_equal(load(folder, one_rank(read_spec(folder))), load(more, one_rank(read_spec(more))))


def test_the_text_model_of_a_checkpoint_that_also_sees_images_is_read(oracle: Oracle, tmp_path: Path) -> None:
    folder = oracle("llama4_text")[1]
    text = json.loads((folder / "config.json").read_text())

    def put_inside(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        images = {
            "vision_model.class_embedding": torch.zeros(4),
            "multi_modal_projector.linear_1.weight": torch.ones(2),
        }
        return images | {f"language_model.{name}": tensor for name, tensor in tensors.items()}

    whole = rewritten(folder, tmp_path / "whole", put_inside)
    outer = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 8}}
    (whole / "config.json").write_text(json.dumps(outer))
    assert_equal(load(folder, one_rank(read_spec(folder))), load(whole, one_rank(read_spec(whole))))


def test_experts_that_transformers_has_written_anew_are_read_by_their_shape(oracle: Oracle, tmp_path: Path) -> None:
    def write_anew(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
            for name, tensor in tensors.items()
        }

    published = oracle("qwen3_vl_moe-text")[1]
    written = rewritten(published, tmp_path / "written", write_anew)
    spec = as_stored(read_spec(written), written)
    assert spec.expert_names.form == "apart"
    assert_equal(load_weights(written, share_of(spec, one_rank(spec))), load(published, one_rank(spec)))


def test_a_router_without_a_bias_is_read_where_it_is_published_so_and_so_are_norms_that_nothing_uses(
    oracle: Oracle, tmp_path: Path
) -> None:
    """A.X-K1: transformers takes zeros for the bias, and leaves out such norms of dense layers."""

    def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        norms = {"model.layers.1.post_mlp_layernorm.weight": torch.ones(64)}  # of a dense layer
        return norms | {name: tensor for name, tensor in tensors.items() if not name.endswith("correction_bias")}

    def zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each * 0 if name.endswith("correction_bias") else each for name, each in tensors.items()}

    source = oracle("axk1")[1]
    logits = []
    for folder in (rewritten(source, tmp_path / "a", as_published), rewritten(source, tmp_path / "b", zeros)):
        decoder = load_decoder(folder, COMPILED, moe_layer=MoeLayer)
        runner = Runner(decoder, COMPILED)
        request = runner.request("a", [5, 9, 200, 3])
        runner.prefill([request])
        logits.append(runner.stacked(request))
    assert torch.equal(*logits)
    lacking = rewritten(oracle("deepseek_v3")[1], tmp_path / "c", as_published)
    with pytest.raises(ModelError, match=r"missing: .*e_score_correction_bias"):
        load_decoder(lacking)


def as_v4_is_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of DeepSeek-V4's authors in place of those of transformers, beside a layer that predicts tokens."""
    renamed = {"model.embed_tokens.": "embed.", ".attn.norm.": ".attn.kv_norm.", "model.hc_head.hc_": "hc_head_"}
    found = {"mtp.0.attn_norm.weight": torch.ones(64)}
    for name, tensor in tensors.items():
        for theirs, published in renamed.items():
            name = name.replace(theirs, published)
        found[name.removeprefix("model.")] = tensor
    return found


def test_deepseek_v4_is_read_in_the_names_of_its_authors(oracle: Oracle, tmp_path: Path) -> None:
    source = oracle("deepseek_v4")[1]
    spec, written = read_spec(source), rewritten(source, tmp_path / "a", as_v4_is_published)
    renamed = as_stored(read_spec(written), written)
    assert_equal(load_weights(written, share_of(renamed, one_rank(spec))), load(source, one_rank(spec)))


def test_a_table_of_the_experts_of_tokens_that_names_others_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    for number, value in enumerate((8, -1, None)):  # None: the expert beside it

        def change(tensors: dict[str, Tensor], value: int | None = value) -> dict[str, Tensor]:
            table = tensors["model.layers.1.ffn.gate.tid2eid"].clone()
            table[255, 2] = table[255, 1] if value is None else value
            return tensors | {"model.layers.1.ffn.gate.tid2eid": table}

        written = rewritten(oracle("deepseek_v4")[1], tmp_path / str(number), change)
        with pytest.raises(ModelError, match=r"table of layer 1 .* than 3 different ones below 8 for each; download"):
            load_decoder(written)


def head_of(model: Any, kind: str) -> Tensor | None:
    embedding: Tensor = model.get_input_embeddings().weight.detach()
    other = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5)) * embedding.shape[1] ** -0.5
    return {"own": other, "the same": embedding.clone(), "none": None}[kind]


NEVER_TIED = ("nemotron_h", "kimi_linear", "bailing_hybrid")  # in transformers, whatever config.json says
TIES_REFUSED = ("dbrx",)  # by transformers, too
# Each family says in config.json whether it ties; what is stored then, and by which kernels a head computes, is the
# same for all.
OF_FAMILIES = [name for name in FAMILIES if name in {kind for kind, _ in FAMILIES.values()}]
HEADS = [(name, "own") for name in OF_FAMILIES] + [(name, "none") for name in OF_FAMILIES]
HEADS += [(name, "the same") for name in ("mixtral", "deepseek_v3", "qwen3_next", "nemotron_h")]


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize(("name", "kind"), sorted(HEADS))
def test_logits_come_from_the_head_that_transformers_takes(
    name: str, kind: str, ties: bool, oracle: Oracle, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model, folder = oracle(name)
    head, stored = head_of(model, kind), f"{read_spec(folder).head_name}.weight"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rest = {key: tensor for key, tensor in tensors.items() if key != stored}
        return rest if head is None else rest | {stored: head}

    written = rewritten(folder, tmp_path / "written", change, tie_word_embeddings=ties)
    if ties and name in TIES_REFUSED:
        with pytest.raises(ModelError, match="tie_word_embeddings True"):
            load_decoder(written)
        return
    ties = ties and name not in NEVER_TIED
    if head is None and not ties:  # transformers draws one at random
        with pytest.raises(ModelError, match=f"1 missing: {re.escape(stored)}"):
            load_decoder(written)
        return
    theirs = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32, attn_implementation="eager").eval()
    ways = [(COMPILED, MoeLayer)] + [(FAST, ReferenceMoe)] * (name == "mixtral")
    for numerics, moe_layer in ways:
        decoder = load_decoder(written, numerics, moe_layer=moe_layer)
        assert decoder.spec.tie_embeddings == (ties and kind != "own"), "held once where it is the embedding"
        runner = Runner(decoder, numerics)
        request = runner.request("a", [5, 9, 200, 3])
        runner.prefill([request])
        assert relative_error(runner.stacked(request), oracle_logits(theirs, [5, 9, 200, 3])) < LOGITS


def test_a_rank_plans_memory_for_a_head_of_its_own(oracle: Oracle, tmp_path: Path) -> None:
    source = oracle("qwen3_moe")[1]
    own = rewritten(source, tmp_path / "own", lambda tensors: tensors, tie_word_embeddings=True)
    for overrides, has_head in ((), True), (("model.load_format=dummy",), False):
        config = load_config(overrides=[f"model.path={own}", *overrides])
        plan = ModelPlan.of(config, read_spec(own), torch.device("cpu"))
        assert ("lm_head" in plan.share(0).dense_bytes) == has_head


def test_a_head_of_another_shape_is_refused_under_tied_embeddings_too(oracle: Oracle, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"lm_head.weight": torch.zeros(8, 64)}

    written = rewritten(oracle("qwen3_moe")[1], tmp_path / "written", change, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"of another shape: lm_head\.weight \[8, 64\], expected \[256, 64\]"):
        load_decoder(written)
