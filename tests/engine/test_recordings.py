"""Recordings of two serving ranks: right totals at the right steps, in SGLang's files."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import RecordCommand
from moe_serve.eplb import read_trace
from tests.engine.offline import ScriptedMailbox, Served, prompts_with_shared_beginnings, serve, submits_of

TOPK = 4  # of the demo model
Commands = Sequence[tuple[int, str]]  # (poll, command)
START_STOP_DUMP = ((3, "start"), (14, "stop"), (15, "dump"))


def send_commands(commands: Commands, engine: Engine) -> None:
    """Every rank hears of the commands, rank 1 a few polls later; the first polls of a script bring its requests."""
    mailbox = engine.mailbox
    assert isinstance(mailbox, ScriptedMailbox)
    mailbox.script += [(poll + 2 * engine.rank, RecordCommand(poll, name)) for poll, name in commands]
    mailbox.script.sort(key=lambda item: item[0])


def record(folder: Path, mode: str, commands: Commands = START_STOP_DUMP, *overrides: str) -> Served:
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    requests = submits_of(prompts_with_shared_beginnings(7, 2048, 30), params)
    settings = [f"eplb.recorder_dir={folder}", f"eplb.recorder_mode={mode}", "eplb.record_window_steps=4", *overrides]
    return serve(2, requests, settings, prepare=partial(send_commands, commands))


def rows_in(served: Served, rank: int, step: int) -> int:
    return sum(served.rows[rank].get(step, (0, 0)))


def test_stat_dumps_hold_the_windows_between_start_and_stop(tmp_path: Path) -> None:
    served = record(tmp_path, "stat")
    assert [(answer.rank, answer.call_id, answer.ok) for answer in served.answers] == [
        (0, n, True) for n in (3, 14, 15)
    ]
    (path,) = served.answers[2].facts["files"]
    assert [str(each) for each in tmp_path.iterdir()] == [path]
    content = torch.load(path, weights_only=True)
    counts = content["logical_count"]
    assert (content["rank"], counts.shape[1:]) == (0, (5, 32)), "all layers of the model; the first is dense"
    assert not counts[:, 0].any()
    tokens = [each.tokens.tolist() for each in served.records]
    first = tokens.index(counts[0, 1:].tolist())
    windows = served.records[first : first + len(counts)]
    assert [each.tokens.tolist() for each in windows] == counts[:, 1:].tolist()
    steps = range(windows[0].first_step, windows[-1].first_step + windows[-1].num_steps)
    assert 8 <= len(steps) <= 14
    assert served.answers[1].text == f"{len(windows)} windows, {counts[:, 1:].nbytes / 2**20:.1f} MiB"
    trace = read_trace(path)
    assert trace.moe_layer_ids == (1, 2, 3, 4)
    wanted = TOPK * sum(rows_in(served, rank, step) for step in steps for rank in range(2))
    assert sum(each.tokens.sum(1) for each in trace).tolist() == [wanted] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["per_pass", "per_token"])
def test_passes_know_their_step_their_source_rank_and_their_tokens(tmp_path: Path, mode: str) -> None:
    commands = [*START_STOP_DUMP, (20, "start"), (24, "dump")]  # the second recording runs on
    served = record(tmp_path / "new", mode, commands, "eplb.num_redundant_experts=4", "dispatch.max_tokens_per_rank=6")
    assert all(answer.ok for answer in served.answers)
    named = [path for answer in served.answers for path in answer.facts.get("files", [])]
    assert len(named) == 4
    assert {str(path) for path in (tmp_path / "new").iterdir()} == set(named), "the answers name the files of all ranks"
    trace = read_trace(tmp_path / "new")
    assert trace.moe_layer_ids == (1, 2, 3, 4)
    assert trace.topk in (None, TOPK)
    contents = [torch.load(path, weights_only=True) for path in (tmp_path / "new").iterdir()]
    steps = sorted({each["forward_pass_id"] for content in contents for each in content["records"]})
    gap = next(i for i in range(1, len(steps)) if steps[i] - steps[i - 1] > 1)
    first = range(steps[0], steps[gap - 1] + 1)
    assert 8 <= len(first) <= 14
    for each, step in zip(trace, steps, strict=True):
        assert each.by_source is not None
        for rank in range(2):
            assert (each.by_source[:, rank].sum(1) == TOPK * rows_in(served, rank, step)).all()
    for content in contents:
        assert content["last_physical_to_logical_map"].shape == (5, 36)
        for each in content["records"]:
            rows = rows_in(served, each["rank"], each["forward_pass_id"])
            if mode == "per_token":
                assert each["topk_ids_of_layer"].shape == (5, rows, TOPK)
                assert each["topk_ids_of_layer"].dtype == torch.int32
                assert len(each["input_ids"]) == len(each["positions"]) == rows
            else:
                assert each["global_physical_count"].shape == (5, 36)
