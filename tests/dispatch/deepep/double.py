"""A double of DeepEP whose signatures are read from DeepEP's source; it moves rows in plain torch between gloo ranks.

Set DEEPEP_SOURCE to a checkout of DeepEP, or to a git directory of it.
"""

import ast
import inspect
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SOURCE = os.environ.get("DEEPEP_SOURCE", "")


def source(path: str) -> str:
    if (Path(SOURCE) / path).exists():
        return (Path(SOURCE) / path).read_text()
    command = ["git", "--git-dir", SOURCE, "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def signatures(path: str, name: str) -> dict[str, inspect.Signature]:
    """Returns the signature of each method of a class in DeepEP's source, without importing it."""
    tree = ast.parse(source(path))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    result = {}
    for method in found.body:
        if isinstance(method, ast.FunctionDef):
            static = any(ast.unparse(d) == "staticmethod" for d in method.decorator_list)
            arguments = method.args.args[0 if static else 1 :]
            first_default = len(arguments) - len(method.args.defaults)
            result[method.name] = inspect.Signature(
                [
                    inspect.Parameter(
                        argument.arg,
                        inspect.Parameter.POSITIONAL_OR_KEYWORD,
                        default=None if i >= first_default else inspect.Parameter.empty,
                    )
                    for i, argument in enumerate(arguments)
                ]
            )
    return result


def double(path: str, name: str, behaviour: dict[str, Callable[..., Any]]) -> type:
    """Returns a class with DeepEP's signatures; a call that does not fit one raises TypeError as DeepEP would."""
    known = signatures(path, name)

    def method(method_name: str, static: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = known[method_name].bind(*(args if static else args[1:]), **kwargs)
            bound.apply_defaults()
            own = {} if static else {"group": args[0].group}
            return behaviour[method_name](SimpleNamespace(**own, **bound.arguments))

        call.__signature__ = known[method_name]  # type: ignore[attr-defined]
        return staticmethod(call) if static else call

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.group = known["__init__"].bind(*args, **kwargs).arguments["group"]

    return type(name, (), {key: method(key, key.startswith("get_") and "layout" not in key) for key in behaviour}
                | {"__init__": init})  # fmt: skip


EVENT = SimpleNamespace(current_stream_wait=lambda: None)


def gather(a: SimpleNamespace, value: Any) -> list[Any]:
    values = [None] * a.group.size()
    dist.all_gather_object(values, value, a.group)
    return values


def local_slots(a: SimpleNamespace, num_slots: int) -> range:
    per_rank = num_slots // a.group.size()
    return range(a.group.rank() * per_rank, (a.group.rank() + 1) * per_rank)


def low_latency_dispatch(a: SimpleNamespace) -> Any:
    sent, slots = gather(a, (a.x, a.topk_idx)), local_slots(a, a.num_experts)
    capacity = a.num_max_dispatch_tokens_per_rank * len(sent)
    x = torch.full((len(slots), capacity, a.x.shape[1]), float("nan"), dtype=a.x.dtype)
    counts = torch.zeros(len(slots), dtype=torch.int32)
    origin: dict[tuple[int, int, int], tuple[int, int]] = {}
    for here, slot in enumerate(slots):
        for source, (rows, ids) in enumerate(sent):
            for token in (ids == slot).any(1).nonzero()[:, 0].tolist():
                x[here, counts[here]] = rows[token]
                origin[source, token, slot] = (here, int(counts[here]))
                counts[here] += 1
    received: Any = x
    if a.use_fp8:
        blocks = torch.nan_to_num(x.float()).unflatten(2, (-1, 128))
        scale = blocks.abs().amax(3).clamp(min=1e-4) / 448
        received = ((blocks / scale[..., None]).clamp(-448, 448).flatten(2).to(torch.float8_e4m3fn), scale)
    return received, counts, origin, EVENT, lambda: None


def low_latency_combine(a: SimpleNamespace) -> Any:
    assert a.topk_weights.isfinite().all(), "the weight of -1 is ours to hide"
    results: dict[tuple[int, int, int], Tensor] = {}
    for part in gather(a, {key: a.x[at].clone() for key, at in a.handle.items()}):
        results |= part
    out = torch.zeros(a.topk_idx.shape[0], a.x.shape[2])
    for token, k in (a.topk_idx >= 0).nonzero().tolist()[::-1]:  # an order of its own
        out[token] += a.topk_weights[token, k] * results[a.group.rank(), token, int(a.topk_idx[token, k])].float()
    return out.to(torch.bfloat16), EVENT, lambda: None


def arrivals(a: SimpleNamespace, num_slots: int) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Returns one row for each (source, token) that wants this rank, its local ids, and which it is."""
    slots = local_slots(a, num_slots)
    rows, ids, origin = [a.x[:0]], [a.topk_idx[:0]], []
    for source, (x, wanted) in enumerate(gather(a, (a.x, a.topk_idx))):
        local = torch.where((wanted >= slots.start) & (wanted < slots.stop), wanted - slots.start, -1)
        tokens = (local >= 0).any(1).nonzero()[:, 0]
        rows.append(x[tokens])
        ids.append(local[tokens])
        origin += [(source, token) for token in tokens.tolist()]
    return torch.cat(rows), torch.cat(ids), origin


def layout(a: SimpleNamespace) -> Any:
    return a.num_experts, None, a.num_experts, a.num_experts, EVENT


def normal_dispatch(a: SimpleNamespace) -> Any:
    assert (a.num_tokens_per_rank, a.is_token_in_rank) == (a.num_tokens_per_expert,) * 2, "the layout is handed on"
    num_slots = a.num_tokens_per_expert
    x, ids, origin = arrivals(a, num_slots)
    counts = torch.bincount(ids[ids >= 0], minlength=num_slots // a.group.size()).tolist()
    return x, ids, torch.ones(ids.shape), counts, (origin, a.x.shape[0]), EVENT


def elastic_dispatch(a: SimpleNamespace) -> Any:
    assert a.do_expand
    assert a.expert_alignment == 1
    x, ids, origin = arrivals(a, a.num_experts)
    pairs = sorted((slot, row) for row, mine in enumerate(ids.tolist()) for slot in mine if slot >= 0)
    counts = torch.bincount(ids[ids >= 0], minlength=a.num_experts // a.group.size()).tolist()
    handle = SimpleNamespace(num_recv_tokens_per_expert_list=counts, sent=([origin[r] for _, r in pairs], len(a.x)))
    return x[[r for _, r in pairs]], None, None, handle, EVENT


def plain_combine(a: SimpleNamespace) -> Any:
    origin, num_tokens = a.handle if isinstance(a.handle, tuple) else a.handle.sent
    assert len(origin) == len(a.x)
    out = torch.zeros(num_tokens, a.x.shape[1])
    for rows, origins in gather(a, (a.x, origin)):
        for row, (source, token) in zip(rows, origins, strict=True):
            if source == a.group.rank():
                out[token] += row.float()
    return out.to(a.x.dtype), None, EVENT


def tuned(a: SimpleNamespace) -> Any:
    return SimpleNamespace(get_nvl_buffer_size_hint=lambda b, r: b * r, get_rdma_buffer_size_hint=lambda b, r: 0)


def library() -> Any:
    legacy = {
        "get_low_latency_rdma_size_hint": lambda a: a.num_experts * a.hidden,
        "low_latency_dispatch": low_latency_dispatch,
        "low_latency_combine": low_latency_combine,
        "get_dispatch_config": tuned,
        "get_combine_config": tuned,
        "get_dispatch_layout": layout,
        "dispatch": normal_dispatch,
        "combine": plain_combine,
        "destroy": lambda a: None,
    }
    elastic = {"dispatch": elastic_dispatch, "combine": plain_combine, "destroy": lambda a: None}
    return SimpleNamespace(
        Buffer=double("deep_ep/buffers/legacy.py", "Buffer", legacy),
        ElasticBuffer=double("deep_ep/buffers/elastic.py", "ElasticBuffer", elastic),
        __version__="2.1.0",
    )
