"""Attention on GPUs by the kernels of FlashInfer (Apache-2.0) and FlashMLA (MIT), as far as these cover a step.

Both read the paged cache where it lies, as pages of any stride. The rest goes by the Triton kernels: with FlashInfer
long chunks over latents, which are expanded; with FlashMLA everything but decodes. FlashInfer plans a step from numbers
of the host, which the batch has, so nothing is read back; only the list of pages is copied to the device. Plans
allocate, so such steps are not captured in graphs. None of this has been run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape, HeadProjections, IndexedRows
from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.triton_attention import LaunchPlan, TritonAttention
from moe_serve.kernels.numerics import Numerics

WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation recommends

Attend = Callable[[Tensor, Tensor, Tensor], None]  # queries, pages [blocks, block size, *row_shape], out


@dataclass(frozen=True)
class PackagePlan:
    """The attention of one step.

    launches: of what the Triton kernels attend
    parts:    rows, and what fills `out` for the queries of these rows
    """

    launches: LaunchPlan
    parts: tuple[tuple[slice, Attend], ...]

    @property
    def expanded_rows(self) -> range:
        """The rows that attend_expanded attends."""
        return self.launches.expanded_rows


class _OverTriton:
    """The attention of all layers; what a package leaves out goes by the Triton kernels."""

    def __init__(self, shape: AttentionShape, numerics: Numerics, dtype: torch.dtype, device: torch.device):
        self._shape, self._dtype = shape, dtype
        self._triton = TritonAttention(shape, numerics)

    def __call__(self, q: Tensor, cache: KvCache, layer: int, plan: PackagePlan, sinks: Tensor | None = None) -> Tensor:
        """Returns the attention of the rows, as PagedAttention does."""
        assert sinks is None, "sinks are refused"
        out = self._triton(q, cache, layer, plan.launches)
        pages = cache.layer(layer)[:-1].view(cache.num_blocks, cache.block_size, *self._shape.layout.row_shape)
        for rows, attend in plan.parts:
            attend(q[rows], pages, out[rows])
        return out

    def attend_expanded(
        self, q: Tensor, cache: KvCache, layer: int, plan: PackagePlan, heads: HeadProjections, out: Tensor
    ) -> None:
        """Fills plan.expanded_rows of `out`, as PagedAttention does."""
        self._triton.attend_expanded(q, cache, layer, plan.launches, heads, out)

    def attend_indexed(self, q: Tensor, cache: KvCache, layer: int, index: IndexedRows, batch: ForwardBatch) -> Tensor:
        """Returns the attention of the rows over the keys that the indexer chooses, as PagedAttention does."""
        return self._triton.attend_indexed(q, cache, layer, index, batch)


class FlashInferAttention(_OverTriton):
    """Decodes and chunks by FlashInfer's wrappers, one for each window and kind of rows, planned once a step."""

    def __init__(self, shape: AttentionShape, numerics: Numerics, dtype: torch.dtype, device: torch.device):
        super().__init__(shape, numerics, dtype, device)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[str, int | None], Any] = {}

    def plan(self, batch: ForwardBatch, window: int | None = None, chunk: int | None = None) -> PackagePlan:
        """Returns the plan of a step's attention, once for all layers with equal visibility."""
        assert chunk is None, "chunks of positions are refused"
        launches = self._triton.plan(batch, window)
        parts = []
        num_decodes = batch.num_decodes
        if launches.decodes is not None:
            parts.append((slice(0, num_decodes), self._planned("decodes", batch, 0, num_decodes, window)))
        if launches.chunks is not None:
            end = num_decodes + launches.chunks.seq_lens.shape[0]
            rows = slice(num_decodes, launches.num_rows)
            parts.append((rows, self._planned("chunks", batch, num_decodes, end, window)))
        return PackagePlan(replace(launches, decodes=None, chunks=None), tuple(parts))

    def _planned(self, kind: str, batch: ForwardBatch, first: int, end: int, window: int | None) -> Attend:
        """Returns what attends the rows of sequences first .. end."""
        import flashinfer

        size, lens = batch.block_size, batch.host_seq_lens[first:end]
        counts = [-(-length // size) for length in lens]
        starts, row_starts = [0, *accumulate(counts)], [0, *accumulate(batch.host_query_lens[first:end])]
        # Where each page stands in the block tables.
        seqs = np.repeat(np.arange(first, end), counts)
        where = torch.from_numpy(np.stack((seqs, np.arange(starts[-1]) - np.repeat(starts[:-1], counts))))
        if batch.device.type == "cuda":
            where = where.pin_memory().to(batch.device, non_blocking=True)
        pages = _ints(starts), batch.block_tables[where[0], where[1]]
        last = _ints([length - (count - 1) * size for length, count in zip(lens, counts, strict=True)])
        layout, scale = self._shape.layout, self._shape.scale
        latent, key = layout.value_width, (kind, window)
        if layout.kind == "mla":
            if key not in self._wrappers:
                self._wrappers[key] = flashinfer.mla.BatchMLAPagedAttentionWrapper(self._workspace)
            wrapper = self._wrappers[key]
            sizes = self._shape.group, latent, layout.width - latent, size
            wrapper.plan(
                _ints(row_starts), *pages, _ints(list(lens)), *sizes, causal=True, sm_scale=scale,
                q_data_type=self._dtype, kv_data_type=self._dtype,
            )  # fmt: skip

            def attend_latents(q: Tensor, pages: Tensor, out: Tensor) -> None:
                q, row = q[:, 0], pages[:, :, 0]
                parts = q[..., :latent], q[..., latent:], row[..., :latent], row[..., latent:]
                wrapper.run(*parts, out=out[:, 0])

            return attend_latents
        heads = layout.num_heads
        options = {"sm_scale": scale, "window_left": -1 if window is None else window - 1}
        types = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        sizes = heads * self._shape.group, heads, layout.width, size
        if kind == "decodes":
            if key not in self._wrappers:
                self._wrappers[key] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[key].plan(*pages, last, *sizes, **options, **types)
        else:
            if key not in self._wrappers:
                self._wrappers[key] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[key].plan(_ints(row_starts), *pages, last, *sizes, causal=True, **options, **types)
        wrapper = self._wrappers[key]

        def attend_heads(q: Tensor, pages: Tensor, out: Tensor) -> None:
            wrapper.run(q.flatten(1, 2).contiguous(), (pages[:, :, :heads], pages[:, :, heads:]), out=out.flatten(1, 2))

        return attend_heads


class FlashMlaAttention(_OverTriton):
    """Decodes over latents by FlashMLA, as SGLang packages it (sgl-flash-mla); chunks by the Triton kernels."""

    def plan(self, batch: ForwardBatch, window: int | None = None, chunk: int | None = None) -> PackagePlan:
        """Returns the plan of a step's attention, once for all layers."""
        launches = self._triton.plan(batch, window, chunk)
        if launches.decodes is None:
            return PackagePlan(launches, ())
        import flash_mla

        tables, num = launches.decodes.block_tables, batch.num_decodes
        seq_lens, schedule = launches.decodes.seq_lens.int(), flash_mla.get_mla_metadata()[0]
        latent, scale = self._shape.layout.value_width, self._shape.scale

        def attend(q: Tensor, pages: Tensor, out: Tensor) -> None:
            # q: [n, 1, heads, width], of one token each. The kernels for a dense cache are those called legacy.
            found = flash_mla.flash_mla_with_kvcache(
                q.contiguous(), pages, tables, seq_lens, latent, schedule, softmax_scale=scale, use_legacy=True
            )
            out.copy_(found[0])

        return PackagePlan(replace(launches, decodes=None), ((slice(0, num), attend),))


def _ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
