"""Plans which cached rows each query of a step reads: once per step, for all layers of one layout and window.

Shape words: n = sequences, K = num_keys, C = query rows of one chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvLayout
from moe_serve.kernels.numerics import Numerics

ALWAYS_TOGETHER = 256  # keys; sequences up to this length share a group
LARGEST_GATHER = 1 << 22  # elements gathered for one group, so that they stay in the processor's cache


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of similar length with one query row each, padded to the longest.

    tokens: [n] int64, row of each sequence; None: rows 0 .. n - 1
    rows:   int64, as KvLayout.gather_rows returns them; in tiles, for n * K / kv_tile sequences of kv_tile keys
    mask:   0 for keys that the sequence's last token sees, -inf for others: [n * heads, 1, K], in tiles
            [n, K / kv_tile, 1, 1, kv_tile]
    """

    tokens: Tensor | None
    num_seqs: int
    num_keys: int
    rows: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows start .. end of the batch: consecutive tokens of one sequence, which has seq_len tokens after them.

    first_key: position of the first of the K keys; 0 without a window
    rows: as in DecodeGroup with n = 1
    mask: [1, 1, C, K], or in tiles [C, K / kv_tile, kv_tile]: 0 for keys that the token sees, -inf for others; None:
          plain causal attention, since the chunk is the whole sequence. Outside of tiles with a column for sinks in
          front, if there are any.
    """

    start: int
    end: int
    seq_len: int
    first_key: int
    rows: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of one step. `decodes` and `chunks` cover the first num_rows rows, `expanded` the next ones."""

    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    expanded: tuple[Chunk, ...]
    num_rows: int

    @property
    def expanded_rows(self) -> range:
        """The rows that attend_expanded attends."""
        return range(self.num_rows, self.expanded[-1].end if self.expanded else self.num_rows)


@dataclass(frozen=True)
class Visible:
    """The keys that a query sees beside the causal mask.

    window:    the last keys up to its own; None: all of them
    has_sinks: every query head has a score beside those of the keys
    chunk:     the keys from the last multiple of it up to its own; None: from the first
    """

    window: int | None = None
    has_sinks: bool = False
    chunk: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether some keys before a query may be hidden from it."""
        return self.window is not None or self.chunk is not None

    def first(self, position: int) -> int:
        """Returns the first key that a query at a position sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(position - self.window + 1, 0)


def plan_attention(
    batch: ForwardBatch,
    layout: KvLayout,
    numerics: Numerics,
    dtype: torch.dtype,
    expand_from: int | None = None,
    visible: Visible = Visible(),
) -> AttentionPlan:
    """Returns the plan of a batch for layers of one layout that see alike. expand_from: as in AttentionShape"""
    builder = _Builder(batch, layout, numerics, dtype, visible)
    decodes = [builder.decode_group(seqs) for seqs in groups_of(batch, layout)]
    starts = [0, *accumulate(batch.host_query_lens)]
    first = first_expanded(batch, expand_from)
    chunks = [builder.chunk(seq, starts[seq], starts[seq + 1]) for seq in range(batch.num_decodes, len(starts) - 1)]
    num_short = first - batch.num_decodes
    return AttentionPlan(tuple(decodes), tuple(chunks[:num_short]), tuple(chunks[num_short:]), starts[first])


def first_expanded(batch: ForwardBatch, expand_from: int | None) -> int:
    """Returns the first of the sequences whose chunks are attended in the expanded form: all behind it are, too.

    expand_from: as in AttentionShape, which has the reason. Both forms have to make something of each new row; the
    expanded one of the rows before them as well, which pays where enough pairs of a row and a key that it sees are.
    """
    lens, seq_lens, first = batch.host_query_lens, batch.host_seq_lens, len(batch.host_query_lens)
    while expand_from is not None and first > batch.num_decodes:
        rows = lens[first - 1]
        before = seq_lens[first - 1] - rows
        if rows * (2 * before + rows) < 2 * expand_from * before:
            break
        first -= 1
    return first


def groups_of(batch: ForwardBatch, layout: KvLayout) -> list[Sequence[int]]:
    """Returns the decode sequences in groups of similar length, so that padding at most doubles the keys."""
    lens = batch.host_seq_lens
    num = batch.num_decodes
    per_key = layout.elements_per_token
    if num == 0:
        return []
    longest = max(lens[:num])
    if longest <= ALWAYS_TOGETHER and num * longest * per_key <= LARGEST_GATHER:
        return [range(num)]
    groups: list[Sequence[int]] = []
    group: list[int] = []
    for seq in sorted(range(num), key=lambda i: -lens[i]):
        top = lens[group[0]] if group else 0
        similar = 2 * lens[seq] >= top or top <= ALWAYS_TOGETHER
        if group and not (similar and (len(group) + 1) * top * per_key <= LARGEST_GATHER):
            groups.append(group)
            group = []
        group.append(seq)
    groups.append(group)
    return groups if len(groups) > 1 else [range(num)]


class _Builder:
    def __init__(self, batch: ForwardBatch, layout: KvLayout, numerics: Numerics, dtype: torch.dtype, visible: Visible):
        self._batch = batch
        self._layout = layout
        self._visible = visible
        self._has_sinks = visible.has_sinks
        self._tile = numerics.kv_tile if numerics.invariant else None
        self._dtype = dtype

    def decode_group(self, seqs: Sequence[int]) -> DecodeGroup:
        batch = self._batch
        lens = [batch.host_seq_lens[i] for i in seqs]
        num_seqs, num_keys = len(lens), max(self._padded(length - self._first_key(length)) for length in lens)
        # Decode rows come first, one per sequence, so the index of a sequence is its row.
        tokens = None if isinstance(seqs, range) else torch.tensor(seqs, dtype=torch.int64, device=batch.device)
        tables, seq_lens = batch.block_tables[:num_seqs], batch.seq_lens[:num_seqs]
        if tokens is not None:
            tables, seq_lens = batch.block_tables.index_select(0, tokens), batch.seq_lens.index_select(0, tokens)
        keys = torch.arange(num_keys, device=batch.device)[None]
        if self._visible.is_limited:
            first_keys = torch.tensor([self._first_key(length) for length in lens], device=batch.device)
            keys = keys + first_keys[:, None]
        hidden = keys >= seq_lens[:, None]
        mask = self._mask(hidden | self._before_window(keys, seq_lens[:, None] - 1))
        if self._tile is not None:
            mask = mask.view(num_seqs, -1, 1, 1, self._tile)
        elif self._layout.kind == "gqa":
            mask = mask.repeat_interleave(self._layout.num_heads, 0)[:, None]
        else:
            mask = mask[:, None]
        return DecodeGroup(tokens, num_seqs, num_keys, self._rows(tables, keys, hidden), mask)

    def chunk(self, seq: int, start: int, end: int) -> Chunk:
        batch = self._batch
        seq_len = batch.host_seq_lens[seq]
        first_key = self._first_key(seq_len - (end - start) + 1)
        keys = torch.arange(first_key, first_key + self._padded(seq_len - first_key), device=batch.device)
        mask = None
        is_windowed = self._visible.first(seq_len - 1) > 0
        if self._tile is not None or seq_len > end - start or is_windowed or self._has_sinks:
            positions = batch.positions[start:end, None]
            mask = self._mask((keys > positions) | self._before_window(keys, positions))
            if self._tile is None:
                mask = (functional.pad(mask, (1, 0)) if self._has_sinks else mask)[None, None]
            else:
                mask = mask.view(end - start, -1, self._tile)
        rows = self._rows(batch.block_tables[seq : seq + 1], keys[None], keys[None] >= seq_len)
        return Chunk(start, end, seq_len, first_key, rows, mask)

    def _first_key(self, seq_len: int) -> int:
        """Returns the first key that is gathered for the last of so many tokens: at the begin of a tile, if any."""
        first = self._visible.first(seq_len - 1)
        return first if self._tile is None else first // self._tile * self._tile

    def _before_window(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Returns which keys are too far before tokens at these positions, bool like keys and positions together."""
        if self._visible.chunk is not None:
            return keys < positions // self._visible.chunk * self._visible.chunk
        if self._visible.window is None:
            return torch.zeros((), dtype=torch.bool, device=keys.device)
        return keys <= positions - self._visible.window

    def _padded(self, num_keys: int) -> int:
        return num_keys if self._tile is None else -(-num_keys // self._tile) * self._tile

    def _mask(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

    def _rows(self, tables: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """Returns the cache rows of sequences with these block tables.

        keys: [n or 1, K] positions;  hidden: [n, K] bool, keys beyond their ends
        A hidden key reads the first key of its own sequence. Its weight is zero, but zero times NaN is NaN, and another
        sequence may have left NaN in a block.
        """
        block_size = self._batch.block_size
        places = (keys // block_size).clamp_(max=tables.shape[1] - 1)
        blocks = tables.gather(1, places.expand(tables.shape[0], -1)).long()
        slots = blocks * block_size + keys % block_size
        slots = torch.where(hidden, slots[:, :1], slots)
        return self._layout.gather_rows(slots if self._tile is None else slots.view(-1, self._tile))
