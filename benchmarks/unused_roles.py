"""What prefill ranks and tiers of the cache cost where neither is used: a step, a first token, and the front end.

    python -m benchmarks.unused_roles [--steps 2000] [--prompts 300] [--models demo,bench]

"Without them" is the same source, whose syntax tree has lost what serves them alone: what is always None, empty or 0
here stands there as such, and branches and calls that then do nothing are gone. One engine in this process is of both
kinds by turns, step by step or prompt by prompt, in the order ABBA, with its logits made up, since the model is the
same; the difference is set against a whole step. The front end's book of requests likewise, against itself. Times are
those of a core that the thread used, so that other programs disturb little.
"""

import argparse
import ast
import asyncio
import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.bench_model import draw_prompts, write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import Submit, TokenEvent, Tokens
from moe_serve.engine.step.exchange import OneRankExchange
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.requests.open_request import Changes, RequestSpec
from tests.engine.queue_mailbox import QueueMailbox

Floats = np.ndarray[Any, np.dtype[np.float64]]

# What these attributes are, what these calls return, and calls that do nothing, where neither is used.
ATTRIBUTES: dict[str, Any] = {
    "tiers": None, "sender": None, "receiver": None, "handover": None, "hand_over_from": None, "handed_over_s": None,
    "hand_over_to": None, "pages_at": None, "holder": None,
    "prefill_launch": None, "expected": (), "awaits_pages": False, "num_handed_over": 0, "num_prefill_ranks": 0,
}  # fmt: skip
RETURNED: dict[str, Any] = {
    "bring": False,
    "end_expected": 0,
    "is_prefill": False,
    "_coming.get": None,
    "went_elsewhere": False,
}
NOTHING = {
    "take_early", "make_room", "end_expected", "fetch", "hand_over", "keep", "_end_fetch", "_note_speed", "_unexpect",
    "count_handover", "forget_pages",
}  # fmt: skip


class Folder(ast.NodeTransformer):
    """Takes from code what does nothing here. num_gone: statements"""

    def __init__(self) -> None:
        self.num_gone = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.FunctionDef) and not node.body:
            node.body = [ast.Pass()]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        is_known = isinstance(node.ctx, ast.Load) and node.attr in ATTRIBUTES
        return ast.Constant(ATTRIBUTES[node.attr]) if is_known else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = _called(node)
        return ast.Constant(RETURNED[name]) if name in RETURNED else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        parts = [node.left, *node.comparators]
        if len(parts) == 2 and all(isinstance(each, ast.Constant) for each in parts):
            left, right = (each.value for each in parts)  # type: ignore[attr-defined]
            if isinstance(node.ops[0], ast.Is | ast.IsNot):
                return ast.Constant((left is right) == isinstance(node.ops[0], ast.Is))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        is_known = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant)
        return ast.Constant(not node.operand.value) if is_known else node  # type: ignore[attr-defined]

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        adds = isinstance(node.op, ast.Add | ast.Sub)
        return node.left if adds and isinstance(node.right, ast.Constant) and node.right.value == 0 else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        ends = isinstance(node.op, ast.Or)  # the value that ends it
        kept: list[ast.expr] = []
        for each in node.values:
            if isinstance(each, ast.Constant) and bool(each.value) != ends:
                continue
            kept.append(each)
            if isinstance(each, ast.Constant):
                break
        if not kept:
            return ast.Constant(not ends)
        return kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            self.num_gone += 1
            return node.body if node.test.value else node.orelse
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        if isinstance(node.iter, ast.Constant):
            self.num_gone += 1
            return None
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Call) and _called(node.value) in NOTHING:
            self.num_gone += 1
            return None
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        return self._assign(node, node.targets[0])

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        return self._assign(node, node.target)

    def _assign(self, node: ast.Assign | ast.AugAssign, target: ast.expr) -> Any:
        self.generic_visit(node)
        if isinstance(target, ast.Attribute) and target.attr in ATTRIBUTES:
            self.num_gone += 1
            return None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        while known := _constants_of(node):
            _Names(known).visit(node)
            self.generic_visit(node)
        return node


class _Names(ast.NodeTransformer):
    """Puts constants in the place of names, whose assignments are gone."""

    def __init__(self, known: dict[str, ast.Constant]):
        self._known = known

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        target = node.targets[0]
        return None if isinstance(target, ast.Name) and target.id in self._known else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._known.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _called(node: ast.Call) -> str:
    if not isinstance(node.func, ast.Attribute):
        return ""
    of = node.func.value
    name = f"{of.attr}.{node.func.attr}" if isinstance(of, ast.Attribute) else ""
    return name if name in RETURNED else node.func.attr


def _constants_of(function: ast.FunctionDef) -> dict[str, ast.Constant]:
    """Returns the names of a function that are constants: assigned once, as such."""
    stores = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            target = node.targets[0]
            if isinstance(target, ast.Name) and stores.count(target.id) == 1:
                found[target.id] = node.value
    return found


def without(kind: type) -> tuple[type, int]:
    """Returns a class like another one, but for what serves roles and tiers, and how many statements have gone."""
    module: ModuleType = sys.modules[kind.__module__]
    (defined,) = (
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    folder = Folder()
    methods = [node for node in defined.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    made = ast.ClassDef(
        kind.__name__, [ast.Name("_whole", ast.Load())], [], [folder.visit(each) for each in methods], []
    )
    names = vars(module) | {"_whole": kind}
    exec(compile(ast.fix_missing_locations(ast.Module([made], [])), str(module.__file__), "exec"), names)
    found: type = names[kind.__name__]
    return found, folder.num_gone


class Both:
    """Objects that are of either kind. num_gone: statements that one kind lacks"""

    def __init__(self, *objects: Any):
        self._objects = objects
        self._whole = [type(each) for each in objects]
        folded = [without(kind) for kind in self._whole]
        self._less, self.num_gone = [kind for kind, _ in folded], sum(number for _, number in folded)

    def use(self, is_whole: bool) -> None:
        for each, kind in zip(self._objects, self._whole if is_whole else self._less, strict=True):
            each.__class__ = kind

    def differences(self, run: Callable[[], Any], number: int) -> Floats:
        """Returns by how many microseconds of a core a run takes longer whole than without, of each turn of four."""
        taken = np.zeros((number, 4))
        for turn in range(4 * number):
            self.use(turn % 4 in (0, 3))
            taken[turn // 4, turn % 4] = core_us(run)
        self.use(True)
        differences: Floats = (taken[:, 0] + taken[:, 3] - taken[:, 1] - taken[:, 2]) / 2
        return differences


def core_us(run: Callable[[], Any]) -> float:
    """Returns the microseconds of a core that this thread takes for a run."""
    began_ns = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - began_ns) / 1e3


def row_of(what: str, whole_us: Sequence[float], differences: Floats, num_gone: int) -> dict[str, Any]:
    whole, picks = (
        statistics.median(whole_us),
        np.random.default_rng(0).integers(0, len(differences), (500, len(differences))),
    )
    low, high = np.quantile(np.median(differences[picks], axis=1), (0.025, 0.975))
    more = float(np.median(differences))
    return {
        "what": what,
        "whole, us of a core": f"{whole:.1f}",
        "of which for them, us": f"{more:.2f} ({low:.2f} to {high:.2f})",
        "speed, over that without them": f"{1 - more / whole:.4f}",
        "statements that go": num_gone,
    }


class Rank:
    """An engine of one rank in this process."""

    def __init__(self, settings: Sequence[str]):
        self._mailbox = QueueMailbox(end_when_idle=False)
        config = load_config(overrides=["parallel.device=cpu", "parallel.threads_per_rank=1", *settings])
        group = EpGroup(0, 1, torch.device("cpu"))
        self.engine: Engine = build_engine(config, group, OneRankExchange(), self._mailbox)
        engine = self.engine
        self.both = Both(engine, engine.requests, engine.scheduler, engine.scheduler.blocks)
        self._number = 0

    def submit(self, prompt: list[int], num_output: int) -> None:
        self._number += 1
        params = SamplingParams(max_new_tokens=num_output, temperature=0, ignore_eos=True)
        self.engine._receive([Submit(str(self._number), 0, prompt, params, seed=0)])

    def step(self) -> None:
        self.engine._receive(self._mailbox.poll(0.0))
        self.engine.run_step()
        self._mailbox.sent.clear()

    def made_up(self, run: Callable[[], Any], number: int) -> Floats:
        """Returns the differences of runs whose logits are those of the last forward."""
        served, forward = self.engine.served, self.engine.served.forward
        last: list[torch.Tensor] = []
        served.forward = lambda *args: last.append(forward(*args)) or last[-1]  # type: ignore
        run()
        logits = last[-1].clone()
        served.forward = lambda *args: logits  # type: ignore
        differences = self.both.differences(run, number)
        served.forward = forward  # type: ignore
        return differences

    def decode_steps(self, num_requests: int, number: int) -> tuple[list[float], Floats]:
        """Returns the times of steps in which so many requests decode, and the differences."""
        for prompt in draw_prompts(num_requests, seed=1, length=32):
            self.submit([each % 1000 + 3 for each in prompt], 5 * number + 100)
        while len(self.engine.scheduler.propose().decodes) < num_requests:
            self.step()
        for _ in range(20):
            self.step()
        whole = [core_us(self.step) for _ in range(number // 2)]
        differences = self.made_up(self.step, number)
        self.engine.requests.drop_all()
        return whole, differences

    def first_tokens(self, length: int, number: int) -> tuple[list[float], Floats]:
        """Returns the times from a new prompt to its first and only token, and the differences."""
        prompts = iter(draw_prompts(5 * number + 9, seed=2, length=length))

        def run() -> None:
            self.submit([each % 1000 + 3 for each in next(prompts)], 1)
            while self.engine.scheduler.has_work:
                self.step()

        for _ in range(8):
            run()
        whole = [core_us(run) for _ in range(number // 2)]
        return whole, self.made_up(run, number)


async def front_end(number: int) -> list[dict[str, Any]]:
    """Returns rows: a request of one token that is opened, sent and ended, and messages with a token of each of 8."""
    config = load_config(overrides=["model.skip_tokenizer=true"])
    book = RequestBook(config, None, lambda rank, message: None)
    book.begin_launch(16, ())
    both = Both(book, book._capacity, book.stats)
    long = SamplingParams(max_new_tokens=1 << 19, ignore_eos=True)
    opened = [book.open("0", RequestSpec([5] * 64, long, 0), (1,), Changes()) for _ in range(8)]
    index = 0

    def tokens() -> None:
        nonlocal index
        events = [TokenEvent(each.request_id, each.attempt, index, [7], None, None, 0) for each in opened]
        index += 1
        book.take(Tokens(0, 0, events))

    one = SamplingParams(max_new_tokens=1, ignore_eos=True)

    def request() -> None:
        made = book.open("0", RequestSpec([5] * 64, one, 0), (1,), Changes())
        book.take(Tokens(0, 0, [TokenEvent(made.request_id, made.attempt, 0, [7], "length", None, 0)]))

    rows = []
    for what, run in (("front end: a message with 8 tokens", tokens), ("front end: a request of one token", request)):
        for _ in range(200):
            run()
        whole = [core_us(run) for _ in range(number)]
        rows.append(row_of(what, whole, both.differences(run, number), both.num_gone))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--models", default="demo,bench")
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(1)
    rows = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            settings = ["cache.memory_gib=1"]
            if name == "bench":
                path = write_bench_model(Path(scratch), max_position_embeddings=5 * args.steps + 4096)
                settings += [f"model.path={path}"]
            rank = Rank([*settings, "model.skip_tokenizer=true"])
            number = args.steps if name == "bench" else min(args.steps, 160)  # of the demo model's 1,024 tokens
            for num_requests in (1, 8):
                what = f"{name}: a step of {num_requests} decode{'s' * (num_requests > 1)}"
                rows.append(row_of(what, *rank.decode_steps(num_requests, number), rank.both.num_gone))
            what = f"{name}: the first token of a prompt of 64"
            rows.append(row_of(what, *rank.first_tokens(64, args.prompts), rank.both.num_gone))
            rank.engine.close()
    least = min(float(row["speed, over that without them"]) for row in rows)
    rows += asyncio.run(front_end(args.steps))
    notes = (
        "Medians; in brackets 95 % of bootstrap resamples. Without them: the same source, without the branches and "
        f"calls that serve prefill ranks and tiers alone. The least of steps and first tokens is {least:.3f}; the goal "
        "is 0.99. Front end: its book of requests alone, without the HTTP of a token or request."
    )
    print(save("unused_roles", "What roles and tiers cost where they are not used", rows, facts, notes, per_cpu=True))


if __name__ == "__main__":
    main()
