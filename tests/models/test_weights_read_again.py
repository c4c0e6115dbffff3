"""An expert that is read again has the bytes that it would have had from the start, in any form, in its slot alone."""

from pathlib import Path

import pytest
import torch

from moe_serve.ep.expert_form import ExpertForm
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import PER_CHANNEL
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import dense_tensors
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import ExpertReloader, ExpertToRead, dummy_weights, load_weights
from tests.models.fp8_checkpoint import BLOCKS, write_fp8_checkpoint
from tests.models.test_weights_of_experts import fused, rewritten, same_bytes

ROW = [3, 0, -1, 5, 1, 2, 4, 6, 7, -1]  # of two ranks; the first one's slots change
READ = [ExpertToRead(1, 7, 0), ExpertToRead(0, 4, 2), ExpertToRead(1, 7, 3)]


@pytest.fixture(scope="module", params=["per expert", "fused", "by channel"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reload")
    block = PER_CHANNEL if request.param == "by channel" else BLOCKS
    plain = write_fp8_checkpoint(path / "plain", block, moe_intermediate_size=128, num_hidden_layers=3)
    return plain if request.param != "fused" else rewritten(plain, path / "fused", fused(plain, read_spec(plain)))


def share_of(
    folder: Path, form: ExpertForm, dtype: torch.dtype, rows: list[list[int]], packed: bool = False
) -> WeightShare:
    spec = read_spec(folder)
    placement = Placement(rows, spec.num_logical, 2, spec.moe_layer_ids, allow_lost=True)
    stored = StoredWeights({plan.name: dtype for plan in dense_tensors(spec)}, dtype, keeps_fp8=True)
    return WeightShare(spec, placement, 0, dtype, "cpu", form, stored if packed else None)


def stores_of(share: WeightShare, folder: Path | None) -> list[ExpertStore]:
    weights = dummy_weights(share, 3) if folder is None else load_weights(folder, share)
    return [weights.store(layer) for layer in share.spec.moe_layer_ids]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("is_dummy", [False, True], ids=["checkpoint", "dummy"])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("dense", torch.float32), ("dense", torch.bfloat16), ("fp8", torch.float32),
                        ("int8", torch.float32)],
)  # fmt: skip
def test_experts_read_again_have_the_bytes_of_the_first_load(
    folder: Path, form: ExpertForm, dtype: torch.dtype, is_dummy: bool, packed: bool
) -> None:
    source = None if is_dummy else folder
    before = share_of(folder, form, dtype, [ROW, ROW], packed)
    stores = stores_of(before, source)
    addresses = [store.slot(0)["down"].data_ptr() for store in stores]
    ExpertReloader(before, source, seed=3).read(READ, stores)
    rows = [ROW.copy(), ROW.copy()]
    for each in READ:
        rows[each.layer_row][each.slot] = each.expert
    wanted = stores_of(share_of(folder, form, dtype, rows, packed), source)
    for store, right in zip(stores, wanted, strict=True):
        for slot in range(store.num_slots):
            for name, tensor in right.slot(slot).items():
                assert same_bytes(store.slot(slot)[name], tensor), (slot, name)
    assert [store.slot(0)["down"].data_ptr() for store in stores] == addresses


def test_a_checkpoint_that_went_away_is_named(folder: Path, tmp_path: Path) -> None:
    share = share_of(folder, "dense", torch.float32, [ROW, ROW])
    stores = stores_of(share, folder)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])
    for where in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ModelError, match=str(where)):
            ExpertReloader(share, where).read(READ, stores)
