"""What a capacity for each expert saves, against how far it moves log probabilities: the demo model reads texts.

    python -m benchmarks.expert_capacity [--rounds 5] [--rows 16,64,256] [--ranks 2,8]

Texts are read in chunks of as many rows as a rank computes in a step. Shift: the mean of |log p - log p'| of the tokens
that follow. Time: of the experts of the slowest rank, summed over layers, on the choices that the gates made of these
texts, in CPU time of one thread; ranks hold experts in order, run alone, one after the other, and each limits its own
rows, which is counted too. Rounds take all settings in turn. Takes two minutes.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.quantised_quality import demo_texts
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_served_model
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.ep import gate as gate_module
from moe_serve.kernels.capacity import ExpertCapacity, limit_experts
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.cpu.tape import RecordedRun, RowInputs
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.part_clock import PartClock
from tests.models.runner import Runner

SETTINGS = [(factor, over) for over in ("next", "drop") for factor in (1.0, 1.25, 1.5, 2.0, 3.0)]
FREE = (1e9, "next")
TOKENS = 1024  # of each of two texts
Choices = tuple[Tensor, Tensor | None, Tensor, Tensor]  # logits, bias, ids and weights of one layer's rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="16,64,256", help="that a rank computes in a step")
    parser.add_argument("--ranks", default="2,8")
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(1)
    rows = []
    for num_rows in map(int, args.rows.split(",")):
        compared = Compared(num_rows)
        for num_ranks in map(int, args.ranks.split(",")):
            rows += compared.table(num_ranks, args.rounds)
    notes = (
        f"Demo model, {args.rounds} rounds: medians of the ratios within a round, in brackets the "
        "lowest and the highest. Busiest: rows of the busiest rank over the mean, mean over layers. Choices beyond the "
        "capacity are of one step."
    )
    print(save("expert_capacity", "A capacity for each expert: time against log probabilities", rows, facts, notes))


def served_with(capacity: tuple[float, str], *more: str) -> ServedModel:
    factor, over = capacity
    limit = [f"engine.expert_capacity={factor}", f"engine.over_capacity={over}"]
    config = load_config(overrides=["cache.memory_gib=0.05", "parallel.device=cpu", *limit, *more])
    return build_served_model(config, EpGroup(0, 1, torch.device("cpu")))


class Compared:
    """All settings on chunks of one size."""

    def __init__(self, num_rows: int):
        self._rows = num_rows
        self._texts = [ids for _, ids in demo_texts(TOKENS)]
        assert all(len(ids) == TOKENS for ids in self._texts), f"texts are shorter than {TOKENS} tokens"
        self._served = served_with(FREE)
        self._layers = self._choices()
        self._found = {each: self._read(served_with(each)).log_softmax(-1) for each in (FREE, *SETTINGS)}

    def table(self, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
        """Returns a row for each setting."""
        free = self._found[FREE]
        following = torch.cat([torch.tensor(ids[1:]) for ids in self._texts])
        at = torch.arange(len(following)), following
        times: dict[tuple[float, str], list[float]] = {each: [] for each in (FREE, *SETTINGS)}
        for number in range(rounds + 1):
            for setting, used in times.items():
                seconds = self._seconds(setting, num_ranks)
                if number:  # the first warms up
                    used.append(seconds)
        rows = []
        for setting, used in times.items():
            found = self._found[setting]
            beyond, busiest = self._beyond(setting, num_ranks)
            saved = sorted(1 - own / other for own, other in zip(used, times[FREE], strict=True))
            rows.append({
                "rows": self._rows,
                "ranks": num_ranks,
                "capacity": "none" if setting == FREE else f"{setting[0]:g}, {setting[1]}",
                "choices beyond": f"{beyond:.1%}",
                "busiest": round(busiest, 2),
                "ms": round(1e3 * median(used), 2),
                "time saved": f"{median(saved):+.1%} ({saved[0]:+.1%} to {saved[-1]:+.1%})",
                "shift": round(float((found[at] - free[at]).abs().mean()), 4),
                "loss": round(float(-found[at].mean()), 4),
            })  # fmt: skip
            print(*rows[-1].values(), sep=" | ", flush=True)
        return rows

    def _read(self, served: ServedModel) -> Tensor:
        runner, found = Runner(served.decoder, served.numerics), []
        for number, ids in enumerate(self._texts):
            request = runner.request(str(number), ids)
            runner.prefill([request], chunk=self._rows)
            found.append(runner.stacked(request)[:-1])
        return torch.cat(found)

    def _choices(self) -> list[list[Choices]]:
        """Returns what the gates chose for each step of one rank, by layer."""
        steps: list[Choices] = []

        def note(logits: Tensor, bias: Tensor | None, spec: RouterSpec, ids: Tensor, weights: Tensor, _: Any) -> Tensor:
            steps.append((logits.clone(), bias, ids.clone(), weights.clone()))
            return torch.zeros(len(ids), 2, dtype=torch.int64)

        with mock.patch.object(gate_module, "limit_experts", note):
            self._read(served_with(FREE, "engine.cpu_kernels=torch"))
        num_layers = self._served.spec.num_moe_layers
        return [steps[layer::num_layers] for layer in range(num_layers)]

    def _seconds(self, setting: tuple[float, str], num_ranks: int) -> float:
        """Returns the time of the slowest rank over all layers, for one step in which each rank has its rows."""
        spec, hidden = self._served.spec.router, self._served.spec.hidden
        capacity = ExpertCapacity(setting[0], setting[1] == "next")
        per_rank = spec.num_logical // num_ranks
        total = 0.0
        for steps, store in zip(self._layers, self._served.decoder.experts, strict=True):
            mine, limiting = [], 0.0
            for logits, bias, ids, weights in steps[:num_ranks]:
                ids, weights, totals = ids.clone(), weights.clone(), torch.zeros(2, dtype=torch.int64)
                if setting != FREE:
                    limit = logits, bias, spec, ids, weights, capacity, totals
                    limiting = max(limiting, cpu_seconds(len(ids), lambda do, limit=limit: do.limit_experts(*limit)))
                mine.append((ids, weights))
            ids, weights = (torch.cat(each) for each in zip(*mine, strict=True))
            x, slowest = torch.ones(len(ids), hidden), 0.0
            for rank in range(num_ranks):
                own = torch.where(ids // per_rank == rank, ids, -1)
                given = x, own, weights, store.packed
                slowest = max(slowest, cpu_seconds(len(x), lambda do, given=given: do.experts(*given)))
            total += limiting + slowest
        return total

    def _beyond(self, setting: tuple[float, str], num_ranks: int) -> tuple[float, float]:
        """Returns the share of choices beyond the capacity, and rows of the busiest rank over the mean."""
        spec = self._served.spec.router
        capacity = ExpertCapacity(setting[0], setting[1] == "next")
        changed = chosen = 0
        peaks = []
        for steps in self._layers:
            load = torch.zeros(spec.num_logical)
            for logits, bias, ids, weights in steps[:num_ranks]:
                ids = ids.clone()
                changed += int(limit_experts(logits, bias, spec, ids, weights.clone(), capacity).sum())
                chosen += ids.numel()
                load += torch.bincount(ids[ids >= 0], minlength=spec.num_logical)
            ranks = load.view(num_ranks, -1).sum(1)
            peaks.append(float(ranks.max() / ranks.mean()))
        return changed / chosen, sum(peaks) / len(peaks)


def cpu_seconds(num_rows: int, record: Callable[[Recorder], object]) -> float:
    """Returns the CPU time of what is recorded, without the recording."""
    recorder = Recorder(cpu_library(), num_rows, PartClock())
    record(recorder)
    run = RecordedRun(RowInputs(num_rows), num_chunks=1, overlap=False)
    started_s = time.process_time()
    recorder.run(run)
    return time.process_time() - started_s


if __name__ == "__main__":
    main()
