"""A file of packed weights gives back what was put in, and refuses what is damaged or was not finished."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_serve.ep.expert_form import SlotForm
from moe_serve.errors import ModelError
from moe_serve.models.weight_file import HEAD_BYTES, ExpertPlaces, WeightReader, WeightWriter, map_file

FORM = SlotForm("int8", 40, 24, torch.float32, packed=True, has_bias=True)
LAYERS, NUM_LOGICAL, ROOM = (1, 4), 3, 16 << 20
VECTORS = {"norm": torch.arange(5.0), "layers.0.qkv_scale": torch.full((2, 3), 0.5)}
QKV, EMBED = torch.arange(12.0).view(3, 4), torch.arange(6.0).bfloat16().view(2, 3)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """Gives a finished file."""
    opened = os.open(tmp_path / "weights", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(opened, ROOM)
    places = ExpertPlaces.of(dict.fromkeys(LAYERS, FORM), NUM_LOGICAL)
    for layer, tensors in places.views(map_file(opened, places.end, writable=True)).items():
        for tensor in tensors.values():
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 99 + layer)
    writer = WeightWriter(opened, ROOM, places)
    writer.add_vectors(VECTORS)
    assert torch.equal(writer.pack((2, 12), QKV, doubled), torch.stack((QKV.flatten(), -QKV.flatten())))
    assert torch.equal(writer.keep(EMBED), EMBED)
    writer.finish("key", with_sums=True)
    yield opened
    os.close(opened)


def doubled(out: Tensor) -> None:
    out[0], out[1] = QKV.flatten(), -QKV.flatten()


def never(out: Tensor) -> None:
    raise AssertionError("it is packed already")


def test_a_reader_gets_what_was_written_and_packs_nothing(descriptor: int) -> None:
    reader = WeightReader(descriptor)
    reader.check()
    vectors = reader.vectors()
    assert reader.key == "key"
    assert vectors.keys() == VECTORS.keys()
    assert all(torch.equal(vectors[name], tensor) for name, tensor in VECTORS.items())
    assert torch.equal(reader.pack((2, 12), QKV.to("meta"), never)[1], -QKV.flatten())
    assert torch.equal(reader.keep(EMBED.to("meta")), EMBED)
    experts = reader.experts.views(reader.data)
    assert {name: tuple(tensor.shape[1:]) for name, tensor in experts[4].items()} == {
        name: shape for name, (shape, _) in FORM.tensors.items()
    }
    for layer, tensors in experts.items():
        for tensor in tensors.values():
            assert torch.equal(tensor, (torch.arange(tensor.numel()).view(tensor.shape) % 99 + layer).to(tensor.dtype))


def test_a_decoder_that_is_built_in_another_order_is_our_mistake(descriptor: int) -> None:
    reader = WeightReader(descriptor)
    with pytest.raises(AssertionError):
        reader.pack((2, 13), QKV.to("meta"), never)


@pytest.mark.parametrize("place", ["first byte", "an expert", "last byte"])
def test_a_changed_byte_is_found(descriptor: int, place: str) -> None:
    end = WeightReader(descriptor)._end
    at = {"first byte": HEAD_BYTES, "an expert": HEAD_BYTES + 70, "last byte": end - 1}[place]
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 4]), at)
    with pytest.raises(ModelError, match="not those that were written"):
        WeightReader(descriptor).check()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: os.ftruncate(file, 0), "no head"),
        (lambda file: os.pwrite(file, bytes(HEAD_BYTES), 0), "not finished"),
        (lambda file: os.ftruncate(file, os.fstat(file).st_size - 1), "not finished"),
        (lambda file: os.ftruncate(file, os.fstat(file).st_size + 1), "not finished"),
        (lambda file: os.pwrite(file, b"[", os.fstat(file).st_size - 5), "table is damaged"),
        (lambda file: os.pwrite(file, b"moe_serve weights, 0", 0), "not finished"),
    ],
)
def test_a_file_that_is_torn_is_refused(descriptor: int, damage: object, said: str) -> None:
    damage(descriptor)  # type: ignore[operator]
    with pytest.raises(ModelError, match=said):
        WeightReader(descriptor)


def test_a_model_without_experts_in_the_file_has_its_dense_weights_there(tmp_path: Path) -> None:
    opened = os.open(tmp_path / "weights", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(opened, ROOM)
    writer = WeightWriter(opened, ROOM, ExpertPlaces.of({}, NUM_LOGICAL))
    writer.add_vectors({"norm": VECTORS["norm"]})
    writer.finish("", with_sums=False)
    reader = WeightReader(opened)
    assert not reader.experts.layers
    assert torch.equal(reader.vectors()["norm"], VECTORS["norm"])
    os.close(opened)
