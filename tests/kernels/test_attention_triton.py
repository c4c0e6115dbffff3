"""Attention over the paged cache in Triton: right on every shape, and a row's bits are its own."""

import random

import pytest
import torch
from torch import Tensor

from moe_serve.attention_dp.attention import (
    AttentionShape,
    HeadProjections,
    IndexedRows,
    PagedAttention,
    attention_reference,
)
from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.kernels.forms import AttendShape, Seen
from moe_serve.kernels.indexed_attention import chosen_keys
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.quantised import widen_cached, write_cached
from tests.attention_dp.steps import tables_of
from tests.attention_dp.test_attention import CASES as BATCHES
from tests.attention_dp.test_attention import LAYOUTS, MODES, run
from tests.kernels.conftest import RunCheck
from tests.kernels.cpu.paged import Sequences, sequences
from tests.kernels.data import relative_error
from tests.tolerance import BFLOAT16, FLOAT32

# Of the sum of weight times |value|: weights and results are rounded once each. float16 has three more bits.
LIMITS = {"float32": FLOAT32, "bfloat16": 2 * BFLOAT16, "float16": BFLOAT16 / 4}
Chunk = tuple[int, int, int]  # sequence, first position, end
PART = 32  # keys of a part, so that short sequences have several

# form -> (shapes to draw from, window, sinks, chunk)
FORMS = {
    "heads": ([AttendShape(2, 4, 64, 0.125), AttendShape(1, 5, 80, 0.1), AttendShape(1, 3, 192, 0.07)], False),
    "limited": ([AttendShape(2, 3, 16, 0.25), AttendShape(1, 1, 7, 0.4)], True),
    "latent": ([AttendShape(1, 20, 64, 0.125, 48), AttendShape(1, 3, 37, 0.2, 21)], False),
    "wide latent": ([AttendShape(1, 17, 576, 0.05, 512), AttendShape(1, 40, 576, 0.05, 512)], False),
    "limited latent": ([AttendShape(1, 3, 37, 0.2, 21)], True),
}
# Rows of a chunk, around the borders of tiles. The interpreter takes half a minute for 40 of 40 wide heads.
LENGTHS = {form: [1, 2, 3] if form == "wide latent" else [1, 2, 5, 8, 9, 16, 17] for form in FORMS}


def attend(cached: Sequences, chunks: list[Chunk], device: str = "cpu", **options: object) -> list[Tensor]:
    """Returns the attention of chunks in one call; chunks of one row each go the way of decodes."""
    from moe_serve.kernels.triton import attention

    attention.PART_KEYS = attention.LATENT_PART_KEYS = PART
    q, _, starts, tables = cached.batch(chunks)
    longest = max([end for _, _, end in chunks], default=0)
    seq_lens = torch.tensor([end for _, _, end in chunks], dtype=torch.int64)
    if all(end - first == 1 for _, first, end in chunks):
        starts = None
    parts = [None if part is None else part.to(device) for part in (starts, seq_lens, tables)]
    rows = attention.PagedRows(*parts, cached.block_size, len(q), longest)
    out = torch.full((*q.shape[:-1], cached.shape.value_width), float("nan"), dtype=q.dtype, device=device)
    seen = Seen(cached.window, cached.chunk, None if cached.sinks is None else cached.sinks.to(device))
    if cached.scales is not None:
        options["scales"] = cached.scales.to(device)
    attention.attend_triton(q.to(device), cached.cache.to(device), out, cached.shape, rows, seen, **options)
    return list(out.cpu().split([end - first for _, first, end in chunks]))


def check_random_batches(device: str, form: str, first_seed: int, end_seed: int) -> None:
    from moe_serve.kernels.triton import attention

    shapes, limited = FORMS[form]
    most = attention.ENOUGH_PROGRAMS
    for seed in range(first_seed, end_seed):
        draw = random.Random(f"{form} {seed}")
        dtype, shape = draw.choice(list(LIMITS)), draw.choice(shapes)
        window = draw.choice([None, 1, 5, 33, 70]) if limited else None
        chunk = draw.choice([None, 1, 17, 64]) if limited and window is None else None
        decodes = draw.random() < 0.5
        ends = [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, draw.randint(1, 150)]
        lengths = [draw.choice(ends) for _ in range(draw.randint(1, 3))]
        if not decodes and draw.random() < 0.3:
            lengths[draw.randrange(len(lengths))] = 0  # a sequence without rows among others
        case = shape, window, limited and draw.random() < 0.7, chunk
        cached = sequences(case, lengths, draw.choice([1, 7, 16, 64]), getattr(torch, dtype))
        rows = [1 if decodes else min(end, draw.choice(LENGTHS[form])) for end in lengths]
        chunks = [(seq, end - rows[seq], end) for seq, end in enumerate(lengths)]
        # Parts are added up by programs of their own, or where they are made.
        attention.ENOUGH_PROGRAMS = draw.choice([0, most])
        attended = attend(cached, chunks, device=device, invariant=draw.random() < 0.3)
        attention.ENOUGH_PROGRAMS = most
        for got, each in zip(attended, chunks, strict=True):
            error = relative_error(got, cached.reference(*each))
            assert error < LIMITS[dtype], f"{form}, seed {seed}: {error:.1e} of {each} in {dtype}, {case}"


def check_8_bits(device: str, form: str, kind: str, first_seed: int, end_seed: int) -> None:
    shapes, limited = FORMS[form]
    for seed in range(first_seed, end_seed):
        draw = random.Random(f"{form} {kind} {seed}")
        dtype, shape = draw.choice(["float32", "bfloat16"]), draw.choice(shapes)
        lengths = [draw.choice([1, 16, 33, 65, draw.randint(1, 120)]) for _ in range(draw.randint(1, 2))]
        window = draw.choice([None, 1, 40]) if limited else None
        chunk = draw.choice([None, 17]) if limited and window is None else None
        case = shape, window, limited, chunk
        cached = sequences(case, lengths, draw.choice([1, 7, 16]), getattr(torch, dtype))
        stored, read = cached.in_8_bits(getattr(torch, kind))
        decodes = draw.random() < 0.5
        rows = [1 if decodes else min(end, draw.choice(LENGTHS[form])) for end in lengths]
        chunks = [(seq, end - rows[seq], end) for seq, end in enumerate(lengths)]
        attended = attend(stored, chunks, device=device, invariant=draw.random() < 0.3)
        for got, each in zip(attended, chunks, strict=True):
            error = relative_error(got, read.reference(*each))
            assert error < LIMITS[dtype], f"{form}, {kind}, seed {seed}: {error:.1e} of {each} in {dtype}, {case}"


@pytest.mark.parametrize("form, kind", [("heads", "int8"), ("limited", "float8_e4m3fn"), ("latent", "float8_e4m3fn"),
                                        ("limited latent", "int8")])  # fmt: skip
def test_keys_and_values_in_8_bits_are_read_times_their_scales(on_device: RunCheck, form: str, kind: str) -> None:
    on_device(check_8_bits, form, kind, 0, 2)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("form", FORMS)
def test_many_batches_in_8_bits_are_read_times_their_scales(on_device: RunCheck, form: str, kind: str) -> None:
    on_device(check_8_bits, form, kind, 2, 152)  # 300 of a form in both kinds


@pytest.mark.parametrize("form", FORMS)
def test_random_batches_match_plain_attention(on_device: RunCheck, form: str) -> None:
    on_device(check_random_batches, form, 0, 1 if form == "wide latent" else 2)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("form", FORMS)
def test_many_random_batches_match_plain_attention(on_device: RunCheck, form: str) -> None:
    on_device(check_random_batches, form, 2, 302)


def check_neighbours(device: str, limited: bool) -> None:
    case = (AttendShape(1, 3, 16, 0.25), 40 if limited else None, limited, None)
    cached = sequences(case, [1, 33, 100, 65], 16)
    decodes = [(0, 0, 1), (1, 32, 33), (2, 99, 100), (3, 64, 65)]
    together = attend(cached, decodes, device=device)
    for got, each in zip(together, decodes, strict=True):
        assert torch.equal(got, attend(cached, [each], device=device)[0]), each
    from moe_serve.kernels.triton import attention

    enough, attention.ENOUGH_PROGRAMS = attention.ENOUGH_PROGRAMS, 0  # parts are added up where they are made
    assert all(map(torch.equal, together, attend(cached, decodes, device=device)))
    attention.ENOUGH_PROGRAMS = enough
    whole = attend(cached, [(2, 70, 100)], invariant=True, device=device)[0]
    assert torch.equal(whole[-1:], together[2])
    cut = [(1, 30, 33), (2, 83, 100), (0, 0, 1)]
    assert torch.equal(attend(cached, cut, invariant=True, device=device)[1], whole[13:])


@pytest.mark.parametrize("limited", [False, True])
def test_neighbours_and_cuts_change_no_bit(on_device: RunCheck, limited: bool) -> None:
    on_device(check_neighbours, limited)


def check_nothing_to_attend(device: str) -> None:
    from moe_serve.kernels.triton.attention import PagedRows, attend_triton

    cached = sequences((AttendShape(2, 4, 16, 0.25), None, False, None), [40], 16)
    assert attend(cached, [], device=device) == []
    tables = torch.zeros(2, 4, dtype=torch.int32, device=device)
    q, out = (torch.ones(2, 2, 4, 16, device=device) for _ in range(2))
    for max_keys in (40, 200):  # in one part, and in several
        rows = PagedRows(None, torch.tensor([0, 0], device=device), tables, 16, 2, max_keys)
        attend_triton(q, cached.cache.to(device), out.fill_(1), cached.shape, rows)
        assert not out.any()


def test_rows_without_keys_get_zeros(on_device: RunCheck) -> None:
    on_device(check_nothing_to_attend)


def check_chosen(device: str, topk: int, lens: list[int], ends: list[int]) -> None:
    from moe_serve.kernels.triton import indexed_attention
    from moe_serve.kernels.triton.attention import PagedRows

    indexed_attention.MOST_SCORES = 5 * max(ends)  # several passes
    indexed_attention.SELECT_KEYS = 64
    draw = torch.Generator().manual_seed(topk)
    block_size, heads, width = 16, 3, 8
    blocks = torch.randperm(30, generator=draw)
    cache = torch.full((30 * block_size, 1, width), float("nan"))
    # Small integers have exact sums, and many equal ones.
    q = torch.randint(-2, 3, (sum(lens), heads, width), generator=draw).float()
    weights = torch.randint(-2, 4, (sum(lens), heads), generator=draw).float()
    tables = torch.full((len(lens), max(-(-end // block_size) for end in ends)), -1, dtype=torch.int32)
    wanted = []
    row = 0
    for seq, (length, end) in enumerate(zip(lens, ends, strict=True)):
        count = -(-end // block_size)
        tables[seq, :count], blocks = blocks[:count].int(), blocks[count:]
        keys = torch.randint(-2, 3, (end, width), generator=draw).float()
        keys[end // 3] = float("nan")
        slots = (tables[seq, torch.arange(end) // block_size] * block_size + torch.arange(end) % block_size).long()
        cache[slots, 0] = keys
        for seen in range(end - length + 1, end + 1):
            wanted.append(slots[chosen_keys(q[row], weights[row], keys[:seen], topk)].tolist())
            row += 1
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    parts = [part.to(device) for part in (starts, torch.tensor(ends), tables)]
    rows = PagedRows(*parts, block_size, sum(lens), max(ends))
    index = q.to(device), weights.to(device), cache.to(device)
    slots, counts = indexed_attention.choose_triton(*index, topk, rows)
    got = [slots[row, :count].tolist() for row, count in enumerate(counts.tolist())]
    assert got == wanted


@pytest.mark.parametrize("topk, lens, ends", [(5, [1, 1], [3, 90]), (20, [4, 2], [23, 70]), (64, [3], [60])])
def test_the_indexer_chooses_what_plain_torch_chooses(on_device: RunCheck, topk: int, lens: list[int],
                                                      ends: list[int]) -> None:  # fmt: skip
    on_device(check_chosen, topk, lens, ends)


# heads, nope, rope, latent, value width
EXPANDED = {
    "DeepSeek": (2, 128, 64, 512, 128),
    "wide keys": (2, 48, 16, 40, 21),
    "wide values": (5, 16, 0, 24, 96),
    "odd": (1, 7, 6, 33, 9),
}


def in_8_bits(rows: Tensor, dtype: torch.dtype, latent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns latents' rows in 8 bits, their scales, and what is read from them."""
    parts = 1 if rows.shape[2] == latent else 2
    cache, scales = torch.zeros(rows.shape, dtype=dtype), torch.zeros(len(rows), 1, parts)
    write_cached(cache, scales, torch.arange(len(rows)), rows, latent)
    return cache, scales, widen_cached(cache, scales, latent)


def check_expanded(device: str, form: str, first_seed: int, end_seed: int) -> None:
    from moe_serve.kernels.triton import expanded_attention
    from moe_serve.kernels.triton.attention import PagedRows

    num_heads, nope, rope, latent, value = EXPANDED[form]
    for seed in range(first_seed, end_seed):
        draw = random.Random(f"{form} {seed}")
        generator = torch.Generator().manual_seed(seed)
        dtype = draw.choice(list(LIMITS))
        block_size = draw.choice([1, 16, 64])
        # The interpreter takes ten seconds for three sequences of DeepSeek's widths.
        lens = [draw.choice([1, 2, 15, 17, 33]) for _ in range(draw.randint(1, 2 if latent > 64 else 3))]
        ends = [length + draw.choice([0, 0, 1, 60, 111, 128, 129]) for length in lens]
        blocks = [-(-end // block_size) for end in ends]
        order = torch.randperm(sum(blocks) + 2, generator=generator).int()
        tables = torch.full((len(lens), max(blocks)), -1, dtype=torch.int32)
        cache = torch.full((len(order) * block_size, 1, latent + rope), float("nan"), dtype=getattr(torch, dtype))
        q = torch.randn(2 + sum(lens) + 1, num_heads, nope + rope, generator=generator).to(cache)
        keys = (torch.randn(num_heads, nope, latent, generator=generator) / latent**0.5).to(cache)
        values = (torch.randn(num_heads, latent, value, generator=generator) / latent**0.5).to(cache)
        scale, row, wanted, magnitude = (nope + rope) ** -0.5, 2, [], []
        kept = draw.choice([None, torch.int8, torch.float8_e4m3fn])
        for seq, (length, end) in enumerate(zip(lens, ends, strict=True)):
            tables[seq, : blocks[seq]], order = order[: blocks[seq]], order[blocks[seq] :]
            at = torch.arange(end)
            slots = (tables[seq, at // block_size] * block_size + at % block_size).long()
            cache[slots] = torch.randn(end, 1, latent + rope, generator=generator).to(cache)
            read = cache[slots] if kept is None else in_8_bits(cache[slots], kept, latent)[2]
            latents, rotated = read[:, 0].double().split([latent, rope], dim=1)
            made = latents @ keys.double().transpose(1, 2)
            made = torch.cat((made, rotated.expand(num_heads, -1, -1)), dim=2)
            both = latents @ values.double()
            for name, each in ((wanted, both), (magnitude, both.abs())):
                name.append(
                    attention_reference(q[row : row + length, :, None], made, each, scale, end - length)[:, :, 0]
                )
            row += length
        per_key = num_heads * (nope + value) * cache.element_size()
        expanded_attention.MOST_BYTES = draw.choice([1, per_key * 200, 1 << 28])  # heads one by one, some, all
        starts = torch.tensor([0, *lens]).cumsum(0).int() + 2
        parts = [part.to(device) for part in (starts, torch.tensor(ends), tables)]
        rows = PagedRows(*parts, block_size, sum(lens), max(ends))
        out = torch.full((len(q), num_heads, value), float("nan")).to(cache).to(device)
        of, scales = expanded_attention.ExpandedRows.of(rows, tuple(ends)), None
        if kept is not None:
            cache, scales, _ = in_8_bits(cache, kept, latent)
            scales = scales.to(device)
        operands = [each.to(device) for each in (q, cache)], [each.to(device) for each in (keys, values)]
        expanded_attention.attend_expanded_triton(*operands[0], out, *operands[1], scale, of, scales)
        assert out[:2].isnan().all()
        assert out[-1:].isnan().all()
        # Keys and values are rounded, too.
        error = (out[2:-1].cpu().double() - torch.cat(wanted)).abs().max() / torch.cat(magnitude).max()
        assert error < 3 * LIMITS[dtype], f"{form}, seed {seed}: {error:.1e} in {dtype}, {lens} rows, {ends} keys"


@pytest.mark.parametrize("form", EXPANDED)
def test_expanded_keys_and_values_give_the_attention_of_the_formula(on_device: RunCheck, form: str) -> None:
    on_device(check_expanded, form, 0, 1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("form", EXPANDED)
def test_many_expanded_batches_give_the_attention_of_the_formula(on_device: RunCheck, form: str) -> None:
    on_device(check_expanded, form, 1, 301)


def check_steps(device: str, kind: str, mode: str, case: str, seeing: dict[str, object]) -> None:
    from moe_serve.attention_dp.triton_attention import TritonAttention

    def make(shape: AttentionShape, numerics: Numerics, dtype: torch.dtype, _: str) -> TritonAttention:
        return TritonAttention(shape, numerics)

    got, wanted = run(*LAYOUTS[kind], MODES[mode], BATCHES[case], stale=float("nan"), make=make, **seeing)
    assert relative_error(got, wanted) < FLOAT32


@pytest.mark.parametrize("kind, mode, case, seeing", [
    ("gqa", "fast", "mixed", {"window": 6, "has_sinks": True}),
    ("gqa", "invariant", "mixed", {}),
    ("mla", "fast", "mixed", {}),
    ("mla", "invariant", "decodes", {}),
])  # fmt: skip
def test_a_step_of_decodes_and_chunks_matches_the_formula(interpreter: RunCheck, kind: str, mode: str, case: str,
                                                          seeing: dict[str, object]) -> None:  # fmt: skip
    interpreter(check_steps, kind, mode, case, seeing)


def check_expanded_steps(device: str) -> None:
    from moe_serve.attention_dp.triton_attention import TritonAttention

    draw = torch.Generator().manual_seed(0)
    layout, num_heads = KvLayout.mla(12, 4), 3
    cache = KvCache([layout], 40, 4, torch.float32, "cpu")
    cache.layer(0).normal_(generator=draw)
    free = torch.randperm(40, generator=draw).tolist()
    chunks = []
    for i, (start, length) in enumerate([(9, 1), (30, 2), (0, 7), (21, 12)]):
        blocks = [free.pop() for _ in range(-(-(start + length) // 4))]
        request = Request(str(i), 0, [0] * (start + length), [], SamplingParams(), 0, block_ids=blocks)
        chunks.append(ScheduledChunk(request, start, length, False))
    batch = ForwardBatch.build(chunks, tables_of(4, [chunk.request for chunk in chunks]), "cpu", FAST)
    q = torch.randn(batch.num_padded, num_heads, 9, generator=draw)
    heads = HeadProjections(*(torch.randn(num_heads, *of, generator=draw) for of in ((5, 12), (12, 6))))
    shape = AttentionShape(layout, num_heads, 0.3, expand_from=10)
    results = []
    for attention in (TritonAttention(shape, FAST), PagedAttention(shape, FAST, torch.float32, "cpu")):
        plan = attention.plan(batch)
        assert plan.expanded_rows == range(3, 22)  # of the whole prompt and the long chunk
        results.append(torch.zeros(batch.num_padded, num_heads, 6))
        attention.attend_expanded(q, cache, 0, plan, heads, results[-1])
    assert relative_error(*results) < FLOAT32
    assert not results[0][:3].any()


def test_long_chunks_of_latents_match_plain_torch(interpreter: RunCheck) -> None:
    interpreter(check_expanded_steps)


def check_indexed_steps(device: str) -> None:
    from moe_serve.attention_dp.triton_attention import TritonAttention
    from moe_serve.kernels.triton import indexed_attention

    indexed_attention.SELECT_KEYS = 64
    draw = torch.Generator().manual_seed(0)
    layouts = [KvLayout.mla(12, 4), KvLayout.mla(8, 0)]
    cache = KvCache(layouts, 16, 4, torch.float32, "cpu")
    for layer in range(2):
        cache.layer(layer).copy_(torch.randint(-3, 4, cache.layer(layer).shape, generator=draw))
    free = torch.randperm(16, generator=draw).tolist()
    chunks = []
    for i, (start, length) in enumerate([(3, 1), (20, 1), (9, 6)]):
        blocks = [free.pop() for _ in range(-(-(start + length) // 4))]
        request = Request(str(i), 0, [0] * (start + length), [], SamplingParams(), 0, block_ids=blocks)
        chunks.append(ScheduledChunk(request, start, length, False))
    batch = ForwardBatch.build(chunks, tables_of(4, [chunk.request for chunk in chunks]), "cpu", MODES["invariant"])
    rows = batch.num_padded
    q = torch.randn(rows, 1, 5, 16, generator=draw)
    index = (torch.randint(-2, 3, shape, generator=draw).float() for shape in ((rows, 3, 8), (rows, 3)))
    chosen = IndexedRows(*index, layer=1, topk=6)
    shape, invariant = AttentionShape(layouts[0], 5, 0.3), MODES["invariant"]
    ours, plain = (
        attention.attend_indexed(q, cache, 0, chosen, batch)
        for attention in (TritonAttention(shape, invariant), PagedAttention(shape, invariant, torch.float32, "cpu"))
    )
    assert relative_error(ours, plain) < FLOAT32
    assert not ours[batch.num_tokens :].any()


def test_a_step_of_sparse_attention_matches_plain_torch(interpreter: RunCheck) -> None:
    interpreter(check_indexed_steps)
