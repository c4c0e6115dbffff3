"""Attention by FlashInfer and FlashMLA: what we ask of them, by doubles that do what their documentation says.

Calls are also held against the signatures in the sources of the packages, where these are installed: that needs no GPU.
"""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape, attention_reference
from moe_serve.attention_dp.attention_packages import FlashInferAttention, FlashMlaAttention
from moe_serve.kernels.numerics import FAST, Numerics
from tests.attention_dp.test_attention import CASES, LAYOUTS, run
from tests.tolerance import FLOAT32, relative_error

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
CALLS: list[Call] = []  # (class or module, function, positional and named arguments)


class Wrapper:
    """What FlashInfer's wrappers over a paged cache have in common."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.note("__init__", args, kwargs)

    def note(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        CALLS.append((type(self).__name__, function, args, kwargs))

    def plan_pages(self, row_starts: Tensor, starts: Tensor, ids: Tensor, lens: list[int], **how: Any) -> None:
        assert {starts.dtype, ids.dtype, row_starts.dtype} == {torch.int32}
        self.row_starts, self.starts, self.ids, self.lens, self.how = (
            row_starts.tolist(),
            starts.tolist(),
            ids,
            lens,
            how,
        )

    def fill(self, q: Tensor, keys: Tensor, values: Tensor, num_heads: int, out: Tensor) -> None:
        """q: [rows, query heads, D];  keys, values: [pages, page size, heads, D or Dv];  out: as q"""
        for seq, length in enumerate(self.lens):
            rows = slice(self.row_starts[seq], self.row_starts[seq + 1])
            ids = self.ids[self.starts[seq] : self.starts[seq + 1]].long()
            mine = [part[ids].flatten(0, 1)[:length].transpose(0, 1) for part in (keys, values)]
            queries = q[rows].unflatten(1, (num_heads, -1))
            left = self.how.get("window_left", -1)
            window = None if left < 0 else left + 1
            first = length - (rows.stop - rows.start)
            found = attention_reference(queries, *mine, self.how["sm_scale"], first, window)
            out[rows] = found.flatten(1, 2).to(out.dtype)


def lens_of(starts: Tensor, last: Tensor, size: int) -> list[int]:
    return [(end - start - 1) * size + rest for start, end, rest in zip(starts[:-1], starts[1:], last, strict=True)]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, qo: int, kv: int, dim: int, size: int, **how: Any
    ) -> None:
        self.note("_plan_impl", (indptr, indices, last, qo, kv, dim, size), how)
        self.heads = kv
        self.plan_pages(
            torch.arange(len(indptr), dtype=torch.int32), indptr, indices, lens_of(indptr, last, size), **how
        )

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        self.note("run", (q, cache), {"out": out})
        self.fill(q, *cache, self.heads, out)
        return out


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, qo: int, kv: int, dim: int,
             size: int, *, causal: bool, **how: Any) -> None:  # fmt: skip
        self.note("plan", (qo_indptr, indptr, indices, last, qo, kv, dim, size), {"causal": causal, **how})
        assert causal
        self.heads = kv
        self.plan_pages(qo_indptr, indptr, indices, lens_of(indptr, last, size), **how)

    run = BatchDecodeWithPagedKVCacheWrapper.run


class BatchMLAPagedAttentionWrapper(Wrapper):
    def plan(self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, lens: Tensor, heads: int, ckv: int, kpe: int,
             size: int, *, causal: bool, **how: Any) -> None:  # fmt: skip
        self.note("plan", (qo_indptr, indptr, indices, lens, heads, ckv, kpe, size), {"causal": causal, **how})
        assert causal
        self.plan_pages(qo_indptr, indptr, indices, lens.tolist(), **how)

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, *, out: Tensor) -> Tensor:
        self.note("run", (q_nope, q_pe, ckv, kpe), {"out": out})
        keys = torch.cat((ckv, kpe), dim=-1)[:, :, None]
        self.fill(torch.cat((q_nope, q_pe), dim=-1), keys, ckv[:, :, None], 1, out)
        return out


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, table: Tensor, lens: Tensor, width: int, schedule: object, **how: Any
) -> tuple[Tensor, None]:
    CALLS.append(("flash_mla", "flash_mla_with_kvcache", (q, k_cache, table, lens, width, schedule), how))
    assert lens.dtype == table.dtype == torch.int32
    out = torch.empty(*q.shape[:-1], width)
    for seq, length in enumerate(lens.tolist()):
        rows = k_cache[table[seq].long().clamp(min=0)].flatten(0, 1)[:length].transpose(0, 1)
        found = attention_reference(q[seq][:, None], rows, rows[..., :width], how["softmax_scale"], length - 1)
        out[seq] = found[:, 0]
    return out, None


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    flashinfer, mla, flash_mla = (ModuleType(name) for name in ("flashinfer", "mla", "flash_mla"))
    for each in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(flashinfer, each.__name__, each)
    mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper  # type: ignore[attr-defined]
    flashinfer.mla = mla  # type: ignore[attr-defined]
    flash_mla.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    flash_mla.get_mla_metadata = lambda: (object(), None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)


def flashinfer_attention(shape: AttentionShape, numerics: Numerics, dtype: torch.dtype, _: str) -> FlashInferAttention:
    return FlashInferAttention(shape, numerics, dtype, torch.device("cpu"))


def flashmla_attention(shape: AttentionShape, numerics: Numerics, dtype: torch.dtype, _: str) -> FlashMlaAttention:
    return FlashMlaAttention(shape, numerics, dtype, torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind, window", [("gqa", None), ("mha", 17), ("gqa", 1), ("mla", None)])
def test_flashinfer_is_asked_for_every_row(kind: str, window: int | None, case: str) -> None:
    got, wanted = run(*LAYOUTS[kind], FAST, CASES[case], stale=float("nan"), window=window, make=flashinfer_attention)
    assert relative_error(got, wanted) < FLOAT32


def test_flashmla_is_asked_for_decodes() -> None:
    got, wanted = run(*LAYOUTS["mla"], FAST, CASES["decodes"], stale=float("nan"), make=flashmla_attention)
    assert relative_error(got, wanted) < FLOAT32
    assert CALLS[-1][3]["use_legacy"]


def signature_of(path: Path, name: str, function: str) -> inspect.Signature:
    """Returns the signature of a function, or of a class's method, as a source has it; the last of overloads."""
    tree: Any = ast.parse(path.read_text(encoding="utf-8"))
    body = next((n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), tree.body)
    found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function][-1].args
    kind = inspect.Parameter
    plain = [*found.posonlyargs, *found.args]
    num_required = len(plain) - len(found.defaults)
    parameters = [
        kind(each.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if at < num_required else None)
        for at, each in enumerate(plain)
        if each.arg != "self"
    ]
    if found.vararg:
        parameters.append(kind(found.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        parameters.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    return inspect.Signature(parameters)  # without **kwargs, which would take any name


@pytest.mark.parametrize("module, sources", [
    ("flashinfer", {
        "BatchDecodeWithPagedKVCacheWrapper": "decode.py",
        "BatchPrefillWithPagedKVCacheWrapper": "prefill.py",
        "BatchMLAPagedAttentionWrapper": "mla/_batch_mla/_wrapper.py",
    }),
    ("flash_mla", {"flash_mla": "flash_mla_interface.py"}),
])  # fmt: skip
def test_the_packages_take_our_calls(module: str, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, case in (("gqa", "mixed"), ("mha", "mixed"), ("mla", "mixed"), ("mla", "decodes")):
        run(*LAYOUTS[kind], FAST, CASES[case], make=flashinfer_attention)
    run(*LAYOUTS["mla"], FAST, CASES["decodes"], make=flashmla_attention)
    monkeypatch.delitem(sys.modules, module)
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{module} is not installed; its sources are enough: pip install --no-deps")
    folder, seen = Path(spec.submodule_search_locations[0]), set()
    for name, function, args, kwargs in CALLS:
        if name in sources:
            signature_of(folder / sources[name], name, function).bind(*args, **kwargs)
            seen.add((name, function))
    assert {name for name, _ in seen} == set(sources)
