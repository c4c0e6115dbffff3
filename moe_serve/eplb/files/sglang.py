"""SGLang's files: dumps of its expert distribution recorder as load traces, and expert locations in and out.

Dumps (`/dump_expert_distribution_record`):
stat, stat_approx: one .pt {"rank", "logical_count": [steps, model layers, E], …}, already summed over ranks.
per_pass:  one .pt per rank {"records": [{"forward_pass_id", "rank", "gatherer_key", "global_physical_count":
           [model layers, P]}], "last_physical_to_logical_map": [model layers, P]}.
per_token: the same with "topk_ids_of_layer" [model layers, tokens, 8] (physical ids, -1 = none) in every record.
A pass becomes one record, summed over its ranks. If the placement changed while it recorded, per_pass and per_token
dumps name the last map only and mislead: record between rebalances.

A per_pass or per_token file is named expert_distribution_recorder_{time it was written}_{rank}.pt. A restarted server
counts its forward passes from 0 again, so `forward_pass_id` alone would add passes of two recordings: those of one
folder are told apart by time.

Locations (`--init-expert-location`): an object with "physical_to_logical_map" [model layers, P], used as it is, or with
"logical_count" [model layers, E] or [steps, model layers, E], from which a placement is planned. JSON or .pt by suffix.

SGLang counts every layer of the model, dense ones included. Their rows mean nothing: in dumps they are zeros and are
left out, while the others keep their layer id. Layout learned from sglang/srt/eplb/expert_location.py and
expert_distribution.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.untrusted import (
    MAX_TORCH_BYTES,
    ByteProgress,
    as_array,
    check_table_size,
    counted,
    load_torch_file,
    naming,
    whole_counts,
)
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError, TraceError

_PHASE_OF_FORWARD_MODE = {1: "prefill", 2: "decode", 3: "mixed"}  # sglang ForwardMode; 4 = idle says nothing
_NAME = re.compile(r"expert_distribution_recorder_(\d{1,12}(?:\.\d{1,12})?)_\d{1,6}\.pt")
_MAX_SPREAD_S = 120.0  # one request makes all ranks write; each names its file before it writes, by its own clock
_ALONE = "put the files of each recording in a folder of its own"


def read_sglang(
    paths: list[Path], progress: ByteProgress | None = None, max_torch_bytes: int = MAX_TORCH_BYTES
) -> LoadTrace:
    """Returns the trace in one stat dump, or in the per_pass or per_token dumps of all ranks."""
    contents = [(path, load_torch_file(path, TraceError, max_torch_bytes)) for path in paths]
    kinds = {path: _kind(content, path) for path, content in contents}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{path.name}: {kind}" for path, kind in kinds.items())
        raise TraceError(f"dumps of different recorder modes are mixed ({listed}); give those of one recording")
    if kinds[paths[0]] == "stat":
        if len(contents) > 1:
            raise TraceError(
                f"{paths[0].parent} holds {len(contents)} stat dumps, and each is a recording of its own; give one file"
            )
        return stat_trace(contents[0][1]["logical_count"], paths[0], progress)
    return _passes_trace(contents, progress)


def stat_trace(logical_count: Any, path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace of `logical_count` [steps, model layers, E] (or [model layers, E]: one step)."""
    counts = as_array(logical_count, f"{path}, key logical_count")  # a view of the mapped file where it is a tensor
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or counts.dtype.kind not in "iuf":
        raise TraceError(
            f"{path}, key logical_count: shape {list(counts.shape)} of {counts.dtype}, expected counts "
            f"[steps, layers, experts]"
        )
    check_table_size(counts.shape[1], counts.shape[2], f"{path}, key logical_count")
    used = np.zeros(counts.shape[1], dtype=bool)
    for step in counts:
        used |= step.any(axis=1)
    layers = np.flatnonzero(used)
    if not len(layers):
        raise TraceError(f"{path}, key logical_count: no tokens in {len(counts)} steps; record while requests run")

    def records() -> Iterator[LoadRecord]:
        for index, step in enumerate(counted(counts, len(counts), progress)):
            with naming(f"{path}, key logical_count[{index}]"):
                record = LoadRecord(index, 1, "mixed", step[layers])
            yield record

    return LoadTrace(
        records, counts.shape[2], tuple(layers.tolist()), source=f"{path} (SGLang stat)", num_records=len(counts)
    )


def _kind(content: Any, path: Path) -> str:
    if isinstance(content, dict) and "logical_count" in content:
        return "stat"
    if isinstance(content, dict) and "records" in content:
        if "last_physical_to_logical_map" not in content:
            raise TraceError(f"{path}, key last_physical_to_logical_map: not there; expected beside 'records'")
        return "per_pass or per_token"
    if isinstance(content, dict) and "physical_to_logical_map" in content:
        raise TraceError(f"{path} is a placement, not a load trace; give it as --current, or convert it")
    found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
    raise TraceError(f"{path}: not an SGLang dump; expected 'logical_count' or 'records', found {found}")


@dataclass(frozen=True, eq=False)
class _Dump:
    path: Path
    rank: int
    written_s: float | None  # None: the file was renamed
    passes: dict[int, list[dict[str, Any]]]
    table: np.ndarray


def _recordings_of(contents: list[tuple[Path, Any]]) -> list["_Recording"]:
    """Returns the recordings in the dumps of a folder, in the order they were written.

    Raises TraceError when it is not sure which dumps belong together, or when a rank's dump is missing.
    """
    dumps = [dump for path, content in contents if (dump := _dump(path, content)) is not None]
    if not dumps:
        raise TraceError(f"{contents[0][0]}, key records: empty; record while requests run")
    by_rank: dict[int, list[_Dump]] = {}
    for dump in dumps:
        by_rank.setdefault(dump.rank, []).append(dump)
    ranks = sorted(by_rank)
    if ranks != list(range(len(ranks))):
        raise TraceError(f"dumps of ranks {ranks} found, expected 0 to {ranks[-1]}; copy the files of all ranks")
    if any(dump.written_s is None for dump in dumps):
        return [_pooled(by_rank)]
    counts = {rank: len(own) for rank, own in by_rank.items()}
    if len(set(counts.values())) > 1:
        few, many = min(counts, key=lambda rank: counts[rank]), max(counts, key=lambda rank: counts[rank])
        raise TraceError(
            f"{dumps[0].path.parent}: {counts[few]} dumps of rank {few}, but {counts[many]} of rank {many}; copy the "
            f"files of all ranks of each recording"
        )
    in_order = [sorted(own, key=lambda dump: dump.written_s or 0.0) for own in by_rank.values()]
    together = [list(group) for group in zip(*in_order, strict=True)]
    times = [sorted(dump.written_s or 0.0 for dump in group) for group in together]
    for group, written in zip(together, times, strict=True):
        if written[-1] - written[0] > _MAX_SPREAD_S:
            raise TraceError(
                f"{group[0].path.parent}: the dumps of ranks 0 to {ranks[-1]} were written "
                f"{written[-1] - written[0]:.0f} s apart; they are of different recordings, and some ranks' files are "
                f"missing: copy them, or {_ALONE}"
            )
    for number, (earlier, later) in enumerate(pairwise(times)):
        if earlier[-1] >= later[0]:
            raise TraceError(
                f"{dumps[0].path.parent}: recordings {number} and {number + 1} were written at the same time; {_ALONE}"
            )
    return [_pooled({dump.rank: [dump] for dump in group}) for group in together]


def _pooled(by_rank: dict[int, list[_Dump]]) -> "_Recording":
    """Returns one recording of all these dumps; a rank may have several, of passes that follow each other."""
    first = by_rank[0][0]
    passes: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for rank, dumps in sorted(by_rank.items()):
        passes[rank] = {}
        for dump in dumps:
            if dump.table.shape != first.table.shape or not np.array_equal(dump.table, first.table):
                raise TraceError(
                    f"{dump.path}, key last_physical_to_logical_map: differs from {first.path.name}; dumps of "
                    f"different recordings are mixed: {_ALONE}"
                )
            again = passes[rank].keys() & dump.passes.keys()
            if again:
                raise TraceError(
                    f"{dump.path}: forward pass {min(again)} of rank {rank} is in another file, too; the server was "
                    f"restarted, and these are two recordings: {_ALONE}, or give the files the names SGLang wrote"
                )
            passes[rank] |= dump.passes
    return _Recording.of(first.path, passes, first.table)


def _dump(path: Path, content: dict[str, Any]) -> _Dump | None:
    """Returns what a file holds; None = nothing was recorded."""
    where = f"{path}, key last_physical_to_logical_map"
    table = whole_counts(content["last_physical_to_logical_map"], where)
    if table.ndim != 2 or not table.size or table.min() < 0:
        raise TraceError(f"{where}: shape {list(table.shape)}, expected experts [layers, slots] of at least 0")
    num_experts = int(table.max()) + 1
    if num_experts > table.shape[1]:
        raise TraceError(f"{where}: expert {num_experts - 1} in {table.shape[1]} slots; every expert has one at least")
    check_table_size(len(table), num_experts, where)
    records = content["records"]
    if not isinstance(records, list):
        raise TraceError(f"{path}, key records: expected a list, found {records!r:.60}")
    passes: dict[int, list[dict[str, Any]]] = {}
    ranks: set[int] = set()
    for number, record in enumerate(records):
        where = f"{path}, key records[{number}]"
        if not isinstance(record, dict) or "forward_pass_id" not in record:
            raise TraceError(f"{where}: expected a record with forward_pass_id, found {record!r:.60}")
        for name in ("forward_pass_id", "rank", "forward_mode"):
            value = record.get(name, 0)
            if type(value) is not int or not 0 <= value < 2**53:
                raise TraceError(f"{where}, key {name}: expected a whole number from 0, found {value!r:.60}")
        ranks.add(record.get("rank", 0))
        passes.setdefault(record["forward_pass_id"], []).append(record)
    if not ranks:
        return None
    if len(ranks) > 1:
        raise TraceError(f"{path}, key records: of ranks {sorted(ranks)[:8]}, expected one rank a file")
    named = _NAME.fullmatch(path.name)
    return _Dump(path, ranks.pop(), float(named[1]) if named else None, passes, table)


def _refuse_missing_ranks(slots: np.ndarray, stated: int, alike: bool, path: Path) -> None:
    """Raises when the counts show that ranks beyond the last one found took part.

    slots:  [ranks, P], what each rank counted at each slot in the whole recording
    stated: ranks of the expert parallel group, where a dump says it; 0 = none does
    alike:  every rank counted the same tokens (tensor-parallel attention), so that no dump can be missed
    """
    found, num_slots = slots.shape
    needed = stated
    if not stated and not alike:
        needed = _ranks_that_count_on_arrival(slots)
    if needed > found:
        raise TraceError(
            f"{path.parent}: dumps of ranks 0 to {found - 1} found, but {needed} ranks of {num_slots // needed} slots "
            f"each took part; copy the files of ranks {found} to {needed - 1}"
        )
    # Slots divide over the ranks, or over groups of 2, 4, … ranks that share each expert's weights.
    groups = [found >> shift for shift in range(found.bit_length()) if not found % (1 << shift)]
    if not alike and found > 1 and all(num_slots % size for size in groups):
        raise TraceError(
            f"{path.parent}: dumps of ranks 0 to {found - 1} found, but {num_slots} slots do not divide over {found} "
            f"ranks; copy the files of all ranks"
        )


def _ranks_that_count_on_arrival(slots: np.ndarray) -> int:
    """Returns how many ranks there are where each counted at its own slots only (low latency); 0 = cannot tell."""
    found, num_slots = slots.shape
    if (slots.sum(axis=1) < 4 * num_slots).any():
        return 0  # too few tokens: slots stay empty by chance
    first = (slots > 0).argmax(axis=1)
    last = num_slots - 1 - (slots[:, ::-1] > 0).argmax(axis=1)
    sizes = [num_slots // ranks for ranks in range(found, num_slots + 1) if num_slots % ranks == 0]
    own = np.arange(found)
    fitting = [size for size in sizes if ((first >= own * size) & (last < (own + 1) * size)).all()]
    if not fitting:
        return 0
    # One rank alone fits any number: the range it used in full.
    return int(num_slots // fitting[-1 if found == 1 else 0])


def _passes_trace(contents: list[tuple[Path, Any]], progress: ByteProgress | None) -> LoadTrace:
    """Returns the trace of the dumps of all ranks; of several recordings, one behind the other."""
    recordings = _recordings_of(contents)
    path = recordings[0].path
    shapes = {(len(each.table), int(each.table.max()) + 1) for each in recordings}
    if len(shapes) > 1:
        raise TraceError(f"{path.parent}: recordings of {sorted(shapes)} (layers, experts); of different models")
    used = np.zeros(len(recordings[0].table), dtype=bool)
    topk = 0
    for each in recordings:
        used |= each.used
        topk = max(topk, each.topk)
    layers = np.flatnonzero(used)
    total = sum(len(each.pass_ids) for each in recordings)
    if not len(layers):
        raise TraceError(f"{path}: no tokens in {total} passes; record while requests run")
    ranks = max(len(each.by_rank) for each in recordings)
    left_out = sum(each.num_left_out for each in recordings)
    dropped = f", {left_out} passes not in all files left out" if left_out else ""
    apart = f" in {len(recordings)} recordings, kept apart by when they were written" if len(recordings) > 1 else ""
    in_order = [(each, pass_id) for each in recordings for pass_id in each.pass_ids]

    def records() -> Iterator[LoadRecord]:
        for index, (each, pass_id) in enumerate(counted(in_order, total, progress)):
            yield each.record(pass_id, index, layers)

    return LoadTrace(
        records,
        shapes.pop()[1],
        tuple(layers.tolist()),
        topk or None,
        source=f"{path.parent if len(contents) > 1 else path} (SGLang passes of {ranks} ranks{apart}{dropped})",
        num_records=total,
    )


@dataclass(frozen=True, eq=False)
class _Recording:
    """The dumps of one recording, and the forward passes that are in those of all its ranks.

    by_rank: rank -> forward pass -> its records: one, or one for each of two overlapping batches
    table:   [model layers, P] int64, expert of each slot
    used:    [model layers] bool, layers with tokens
    """

    path: Path
    by_rank: dict[int, dict[int, list[dict[str, Any]]]]
    table: np.ndarray
    pass_ids: list[int]
    num_left_out: int
    used: np.ndarray
    topk: int

    @classmethod
    def of(cls, path: Path, by_rank: dict[int, dict[int, list[dict[str, Any]]]], table: np.ndarray) -> "_Recording":
        """Reads all counts once: which layers have tokens, and whether a rank is missing."""
        shared = sorted(set.intersection(*(set(passes) for passes in by_rank.values())))
        every = set.union(*(set(passes) for passes in by_rank.values()))
        if not shared:
            raise TraceError(f"no forward pass is in all {len(by_rank)} files; dumps of different recordings are mixed")
        used = np.zeros(len(table), dtype=bool)
        slots = np.zeros((len(by_rank), table.shape[1]), dtype=np.int64)
        topk = stated = 0
        alike = len(by_rank) > 1
        for pass_id in shared:  # the ranks of one pass at a time: the tensors stay in the mapped files
            first: np.ndarray | None = None
            for rank, passes in by_rank.items():
                counted = np.zeros(table.shape, dtype=np.int64)
                for record in passes[pass_id]:
                    counted += _physical(record, table, f"{path.parent}, rank {rank}, forward pass {pass_id}")
                    topk = max(topk, _topk(record))
                    stated = max(stated, _stated_ranks(record))
                used |= counted.any(axis=1)
                slots[rank] += counted.sum(axis=0)
                first = counted if first is None else first
                alike = alike and bool((counted == first).all())
        _refuse_missing_ranks(slots, stated, alike, path)
        return cls(path, by_rank, table, shared, len(every) - len(shared), used, topk)

    def record(self, pass_id: int, index: int, layers: np.ndarray) -> LoadRecord:
        """Returns the pass with the rows of these layers."""
        num_layers, num_slots = self.table.shape
        by_slot = np.zeros((len(self.by_rank), num_layers, num_slots), dtype=np.int64)
        for rank, passes in self.by_rank.items():
            for record in passes[pass_id]:
                by_slot[rank] += _physical(record, self.table, f"{self.path.parent}, rank {rank}, pass {pass_id}")
        counts = np.zeros((len(by_slot), num_layers, int(self.table.max()) + 1), dtype=np.int64)
        for rank, physical in enumerate(by_slot):
            np.add.at(counts[rank], (np.arange(num_layers)[:, None], self.table), physical)
        counts = counts[:, layers]
        total = counts.sum(axis=0)
        source: np.ndarray | None = counts.transpose(1, 0, 2)
        if len(counts) > 1 and (counts == counts[0]).all():
            total, source = counts[0], None  # tensor-parallel attention: every rank counted the same tokens
        elif _counted_on_arrival(by_slot):
            source = None  # low latency: ranks counted what reached them, not what they sent
        return LoadRecord(index, 1, self._phase(pass_id), total, by_source=source)

    def _phase(self, pass_id: int) -> str:
        modes = {
            _PHASE_OF_FORWARD_MODE.get(record.get("forward_mode", 3), "")
            for passes in self.by_rank.values()
            for record in passes[pass_id]
        } - {""}
        return modes.pop() if len(modes) == 1 else "mixed"


def _counted_on_arrival(by_slot: np.ndarray) -> bool:
    """Returns whether each rank counted at its own slots only. by_slot: [ranks, layers, P]"""
    per_rank = by_slot.shape[2] // len(by_slot)
    return all(
        counted[:, rank * per_rank : (rank + 1) * per_rank].sum() == counted.sum()
        for rank, counted in enumerate(by_slot)
    )


def _physical(record: dict[str, Any], table: np.ndarray, where: str) -> np.ndarray:
    """Returns [model layers, P] int64, what a record counts at each slot."""
    if "global_physical_count" in record:
        physical = whole_counts(record["global_physical_count"], f"{where}, key global_physical_count")
        if physical.shape != table.shape or physical.min(initial=0) < 0:
            raise TraceError(
                f"{where}, key global_physical_count: shape {list(physical.shape)} from {physical.min(initial=0)}, "
                f"expected counts {list(table.shape)} (as last_physical_to_logical_map)"
            )
        return physical
    if "topk_ids_of_layer" not in record:
        raise TraceError(f"{where}: expected global_physical_count or topk_ids_of_layer")
    ids = whole_counts(record["topk_ids_of_layer"], f"{where}, key topk_ids_of_layer")
    if ids.ndim != 3 or len(ids) != len(table) or ids.max(initial=-1) >= table.shape[1]:
        raise TraceError(
            f"{where}, key topk_ids_of_layer: shape {list(ids.shape)} up to {ids.max(initial=-1)}, expected "
            f"[{len(table)}, tokens, topk] of ids below {table.shape[1]}"
        )
    return np.stack([np.bincount(row[row >= 0], minlength=table.shape[1]) for row in ids])


def _topk(record: dict[str, Any]) -> int:
    ids = np.asarray(record.get("topk_ids_of_layer", ()))
    return int((ids >= 0).sum(axis=2).max()) if ids.ndim == 3 and ids.size else 0


def _stated_ranks(record: dict[str, Any]) -> int:
    """Returns the size of the expert parallel group; per_token dumps of DeepEP's normal mode have a count per rank."""
    misc = record.get("misc_objects")
    first = misc[0] if isinstance(misc, list) and misc else None
    per_rank = first.get("num_tokens_per_rank") if isinstance(first, dict) else None
    return len(per_rank) if isinstance(per_rank, list) else 0


def location_rows(content: dict[str, Any]) -> Any:
    """Returns the nested list or array under "physical_to_logical_map"."""
    rows = content["physical_to_logical_map"]
    return np.asarray(rows.numpy()) if hasattr(rows, "numpy") else rows


def location_counts(content: dict[str, Any], path: Path, num_logical: int | None) -> np.ndarray:
    """Returns [model layers, E] int64, the counts under "logical_count" summed over its steps."""
    raw = content["logical_count"]
    counts = whole_counts(raw, f"{path}, key logical_count", PlacementError)
    if counts.ndim == 3:
        counts = counts.sum(axis=0)
    if counts.ndim != 2 or not counts.size or counts.min() < 0:
        raise PlacementError(
            f"{path}, key logical_count: shape {list(counts.shape)} of {counts.dtype}, "
            f"expected token counts [layers, experts] or [steps, layers, experts]"
        )
    if num_logical is not None and counts.shape[1] != num_logical:
        raise PlacementError(
            f"{path}, key logical_count: {counts.shape[1]} experts, expected {num_logical} (as the model has)"
        )
    check_table_size(len(counts), counts.shape[1], f"{path}, key logical_count", PlacementError)
    return counts


def write_location(placement: Placement, path: Path, num_model_layers: int | None = None) -> None:
    """Writes a file for SGLang's `--init-expert-location`; .pt needs torch, anything else is JSON.

    num_model_layers: all layers of the model (None: up to the last MoE layer); dense ones hold experts in order.
    """
    layer_ids = list(placement.moe_layer_ids)
    rows = max(max(layer_ids) + 1, num_model_layers or 0)
    table = np.tile(np.arange(placement.num_slots, dtype=np.int64) % placement.num_logical, (rows, 1))
    table[layer_ids] = placement.physical_to_logical
    if path.suffix == ".pt":
        try:
            import torch
        except ImportError:
            raise PlacementError(f"writing {path} needs torch; name a .json file instead") from None
        torch.save({"physical_to_logical_map": torch.from_numpy(table)}, path)
    else:
        path.write_text(json.dumps({"physical_to_logical_map": table.tolist()}) + "\n", encoding="utf-8")
