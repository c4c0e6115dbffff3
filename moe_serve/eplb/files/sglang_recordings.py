"""Tells SGLang's recordings in one folder apart: which per_pass or per_token dumps of the ranks belong together.

A file is named expert_distribution_recorder_{time it was written}_{rank}.pt. A restarted server counts its forward
passes from 0 again, so `forward_pass_id` alone would add passes of two recordings.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import check_table_size, whole_counts
from moe_serve.errors import TraceError

_NAME = re.compile(r"expert_distribution_recorder_(\d{1,12}(?:\.\d{1,12})?)_\d{1,6}\.pt")
_MAX_SPREAD_S = 120.0  # one request makes all ranks write; each names its file before it writes, by its own clock
_ALONE = "put the files of each recording in a folder of its own"


@dataclass(frozen=True, eq=False)
class Recording:
    """The dumps of one recording.

    passes: rank -> forward pass -> its records: one, or one for each of two overlapping batches
    table:  [model layers, P] int64, expert of each slot
    """

    path: Path
    passes: dict[int, dict[int, list[dict[str, Any]]]]
    table: np.ndarray


@dataclass(frozen=True, eq=False)
class _Dump:
    path: Path
    rank: int
    written_s: float | None  # None: the file was renamed
    passes: dict[int, list[dict[str, Any]]]
    table: np.ndarray


def recordings_of(contents: list[tuple[Path, Any]]) -> list[Recording]:
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


def _pooled(by_rank: dict[int, list[_Dump]]) -> Recording:
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
    return Recording(first.path, passes, first.table)


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


def refuse_missing_ranks(slots: np.ndarray, stated: int, alike: bool, path: Path) -> None:
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
