"""Codecs: what comes back, how much of it is lost, and how large a row is on the wire."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_serve.dispatch.base import BufferLimits, EpGroup, Pending, Ready, TransportRequest
from moe_serve.dispatch.collective import CollectiveAllToAll
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import ConfigError
from moe_serve.kernels.quantised import dequantize_reference, quantize_reference

SIZES = [(0, 128), (1, 1), (3, 127), (5, 128), (4, 129), (2, 384)]


@pytest.mark.parametrize("rows, hidden", SIZES)
@pytest.mark.parametrize("wire, dtype", [("auto", torch.float32), ("auto", torch.bfloat16), ("bf16", torch.bfloat16)])
def test_the_compute_dtype_travels_unchanged(rows: int, hidden: int, wire: str, dtype: torch.dtype) -> None:
    x = torch.randn(rows, hidden).to(dtype)
    for codec in (make_wire(wire, dtype).dispatch, make_wire(wire, dtype).combine):
        data = codec.encode(x)
        assert data.dtype == torch.uint8
        assert data.shape == (rows, codec.row_bytes(hidden)) == (rows, hidden * dtype.itemsize)
        assert torch.equal(codec.decode(data, hidden), x)


@pytest.mark.parametrize("rows, hidden", SIZES)
def test_bf16_rounds_float32_to_nearest(rows: int, hidden: int) -> None:
    x = torch.randn(rows, hidden)
    codec = make_wire("bf16", torch.float32).dispatch
    assert codec.row_bytes(hidden) == 2 * hidden
    assert torch.equal(codec.decode(codec.encode(x), hidden), x.bfloat16().float())


class _ToItself(CollectiveAllToAll):
    """One rank, whose messages come back to it."""

    def _all_to_all(self, phase: str, out: torch.Tensor, data: torch.Tensor, *_: Any) -> Pending[torch.Tensor]:
        return Ready(out.copy_(data))


@pytest.mark.parametrize("rows, hidden", [(0, 128), (5, 128), (4, 130), (7, 384)])
def test_rows_of_an_fp8_wire_are_handed_on_as_they_are(rows: int, hidden: int) -> None:
    group: Any = object()
    x, ids = torch.randn(rows, hidden).bfloat16(), torch.randint(-1, 6, (rows, 2))
    weights, wire = torch.rand(rows, 2), make_wire("fp8", torch.bfloat16)
    kept, widened = (
        _ToItself(EpGroup(0, 1, torch.device("cpu"), group), 6, wire, keep_fp8=keep) for keep in (True, False)
    )
    as_sent, wide = kept.dispatch(x, ids).wait(), widened.dispatch(x, ids).wait()
    assert as_sent.rows.scale is not None
    assert as_sent.rows.x.dtype == torch.float8_e4m3fn
    assert as_sent.rows.scale.shape == (len(wide.rows.x), -(-hidden // 128))
    assert torch.equal(dequantize_reference(as_sent.rows.x, as_sent.rows.scale, torch.bfloat16), wide.rows.x)
    assert torch.equal(as_sent.rows.rows_per_slot, wide.rows.rows_per_slot)
    results = torch.randn_like(wide.rows.x)
    sums = [
        transport.combine(results, weights, arrived.handle).wait()
        for transport, arrived in ((kept, as_sent), (widened, wide))
    ]
    assert torch.equal(*sums)


@pytest.mark.parametrize("rows, hidden", SIZES)
def test_fp8_loses_at_most_a_sixteenth_of_each_value(rows: int, hidden: int) -> None:
    x = torch.randn(rows, hidden) * torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    codec = make_wire("fp8", torch.float32).dispatch
    data = codec.encode(x)
    assert data.shape == (rows, codec.row_bytes(hidden)) == (rows, hidden + 4 * -(-hidden // 128))
    back = codec.decode(data, hidden)
    # e4m3 has 3 mantissa bits: half a step is 1/16 of a normal value; below, steps are 2^-9 of the scale.
    blocks = torch.nn.functional.pad(x, (0, -hidden % 128)).unflatten(1, (-1, 128))
    step = (blocks.abs().amax(2) / 448 / 2**10).repeat_interleave(128, 1)[:, :hidden]
    assert ((back - x).abs() <= x.abs() / 16 + step + 1e-12).all()


def test_fp8_scales_are_those_of_the_recipe() -> None:
    x = torch.zeros(2, 256)
    x[0, 3], x[0, 200] = -896.0, 224.0
    values, scales = quantize_reference(x)
    assert scales.tolist() == [[2.0, 0.5], pytest.approx([1e-4 / 448] * 2)]
    assert values[0, 3].item() == -448
    assert torch.equal(dequantize_reference(values, scales, torch.float32), x)


def test_fp8_results_return_in_bf16() -> None:
    wire = make_wire("fp8", torch.float32)
    x = torch.randn(3, 40)
    assert torch.equal(wire.combine.decode(wire.combine.encode(x), 40), x.bfloat16().float())


def test_what_does_not_exist_is_refused_with_the_known_names() -> None:
    group = EpGroup(0, 2, torch.device("cpu"))
    with pytest.raises(ConfigError, match="auto, float32, bf16, fp8"):
        make_wire("int4", torch.float32)
    request = TransportRequest("pigeon", BufferLimits(8, 16, 2, 4), torch.float32)
    with pytest.raises(ConfigError, match="'pigeon'; choose one of auto, local, collective, low_latency"):
        make_all_to_all(group, request)
    with pytest.raises(ConfigError, match="num_ranks is 2; local serves one rank"):
        make_all_to_all(group, replace(request, backend="local"))


def test_fp8_rows_have_the_bits_of_the_kernels_on_every_transport() -> None:
    x = (torch.randn(40, 300) * torch.logspace(-4, 4, 40)[:, None]).bfloat16().float()  # often half-way between two
    data = make_wire("fp8", torch.float32).dispatch.encode(x)
    values, scales = quantize_reference(x)
    assert torch.equal(data[:, :300], values.view(torch.uint8))
    assert torch.equal(data[:, 300:].contiguous().view(torch.float32), scales)
