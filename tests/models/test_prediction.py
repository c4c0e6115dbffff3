"""The layer for multi-token prediction gives the logits of a plain implementation, however its rows come."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.attention_dp.batch import ForwardBatch, first_rows
from moe_serve.attention_dp.request import Request
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.errors import ModelError
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import load_weights
from tests.models.predicting import PREDICTING, make_predicting
from tests.models.runner import INVARIANT, Runner, decoder_with, one_rank
from tests.tolerance import LOGITS, relative_error


class PredictingRunner(Runner):
    """Runs the layer behind each step, with the token behind each row, and keeps what it predicts."""

    def run(self, chunks: list[tuple[Request, int]]) -> dict[str, torch.Tensor]:
        """Returns what is predicted at the rows of each chunk, [length, vocab]."""
        scheduled = self.schedule(chunks)
        batch = ForwardBatch.build(scheduled, self.tables, "cpu", self.numerics)
        self.decoder.forward(batch, self.cache, 1, self.overlap)
        ids = [0] * batch.num_padded
        for chunk, row in zip(scheduled, first_rows(scheduled), strict=True):
            ids[row : row + chunk.length] = chunk.request.token_ids(chunk.start + 1, chunk.start + 1 + chunk.length)
        behind = batch._replace(input_ids=torch.tensor(ids), logit_rows=torch.arange(batch.num_tokens))
        logits = self.decoder.predict(behind, self.cache, 1)
        assert self.decoder.predicted_rows(behind.logit_rows).shape == (batch.num_tokens, self.decoder.spec.hidden)
        found = {}
        for chunk, row in zip(scheduled, first_rows(scheduled), strict=True):
            found[chunk.request.request_id] = logits[row : row + chunk.length].clone()
            chunk.request.num_computed += chunk.length
        return found


@pytest.mark.parametrize("numerics", [FAST, INVARIANT, COMPILED], ids=["fast", "invariant", "compiled"])
@pytest.mark.parametrize("name", PREDICTING)
def test_predictions_are_those_of_a_plain_layer_in_pieces_and_behind_a_prefix(
    name: str, numerics: Numerics, tmp_path
) -> None:
    oracle, folder = make_predicting(name, tmp_path)
    spec = read_spec(folder).with_predictor()
    stored = StoredWeights.of(spec, folder) if numerics.compiled else None
    weights = load_weights(folder, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", stored=stored))
    decoder = decoder_with(MoeLayer, spec, weights, numerics)
    assert len(decoder.experts) == spec.num_moe_layers
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 256, (50,), generator=generator).tolist()
    wanted = oracle.logits(ids)
    for overlap in (False, True):
        runner = PredictingRunner(decoder, numerics, overlap=overlap)
        whole, pieces = runner.request("whole", ids), runner.request("pieces", ids)
        found = [runner.run([(whole, 49), (pieces, 11)])]
        assert relative_error(found[0]["whole"], wanted) < LOGITS
        for length in (1, 20, 17):
            found.append(runner.run([(pieces, length)]))
        assert relative_error(torch.cat([each["pieces"] for each in found]), wanted) < LOGITS
        behind = runner.request("behind", ids, whole.block_ids[:4])
        assert relative_error(runner.run([(behind, 17)])["behind"], wanted[32:]) < LOGITS


def test_a_head_that_is_not_stored_again_is_that_of_the_model(tmp_path) -> None:
    _, folder = make_predicting("deepseek_v3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spec = read_spec(folder)
    del tensors[f"model.layers.{spec.num_layers}.shared_head.head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    spec = spec.with_predictor()
    dense = load_weights(folder, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu")).dense
    assert torch.equal(dense[f"layers.{spec.predictor_id}.head"], dense["lm_head"])


def test_missing_tensors_of_the_layer_are_named(tmp_path) -> None:
    _, folder = make_predicting("glm4_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spec = read_spec(folder)
    prefix = f"model.layers.{spec.num_layers}."
    del tensors[prefix + "hnorm.weight"], tensors[prefix + "mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    without = WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu")
    load_weights(folder, without)  # which ignores the layer
    spec = spec.with_predictor()
    with pytest.raises(ModelError, match=r"hnorm\.weight.*experts\.3\.up_proj"):
        load_weights(folder, WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu"))


def test_config_json_names_the_layers(tmp_path) -> None:
    _, folder = make_predicting("deepseek_v3", tmp_path)
    spec = read_spec(folder)
    assert (spec.num_predictors, spec.predictor_id, spec.num_layers) == (1, None, 3)
    served = spec.with_predictor()
    assert (served.predictor_id, served.num_layers, served.moe_layer_ids) == (3, 4, (*spec.moe_layer_ids, 3))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": -1}))
    with pytest.raises(ModelError, match="num_nextn_predict_layers"):
        read_spec(folder)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_the_plain_layer_is_that_of_transformers(name: str, tmp_path) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    oracle, _ = make_predicting(name, tmp_path)
    config = oracle.model.config
    config.num_mtp_layers = 1
    theirs = MtpModel(oracle.model, 1)
    layer = theirs.layers[0]
    layer.mtp_block.load_state_dict(oracle.layer.model.layers[0].state_dict())
    layer.post_norm.load_state_dict(oracle.layer.model.norm.state_dict())
    with torch.no_grad():
        for part, weight in oracle.extra.items():
            getattr(layer, part).weight.copy_(weight)
        theirs.shared_head = oracle.layer.lm_head
        ids = torch.arange(5, 45)[None] * 7 % 256
        hidden = oracle.model.model(ids).last_hidden_state[:, :-1]
        positions = torch.arange(1, 40)[None]
        cache = MtpCache(config=config.get_mtp_config())
        rows = theirs.forward_layer(0, hidden, positions, cache, input_ids=ids[:, 1:])
        logits = theirs.shared_head(rows)[0]
    assert relative_error(oracle.logits(ids[0].tolist()), logits) < LOGITS
