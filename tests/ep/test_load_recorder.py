"""Counts of one rank against counts made one by one, whatever is counted together and whatever is voided."""

import random

import numpy as np
import pytest
import torch

from moe_serve.dispatch.base import EpGroup
from moe_serve.ep import load_recorder
from moe_serve.ep.load_recorder import LoadRecorder

LAYERS, EXPERTS, TOPK = 2, 5, 3


@pytest.mark.parametrize("seed", range(20))
def test_every_step_that_is_done_counts_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_recorder, "IDS_AT_ONCE", 60)
    draw = random.Random(seed)
    recorder = LoadRecorder(LAYERS, EXPERTS, EpGroup(0, 1, torch.device("cpu")))
    total = np.zeros((LAYERS, EXPERTS), dtype=np.int64)  # of steps that are done
    in_records = np.zeros_like(total)
    for _ in range(300):
        step = np.zeros_like(total)
        num_tokens = draw.choice([0, 1, 2, 8])
        for layer in range(LAYERS):
            ids = torch.tensor([[draw.randrange(-1, EXPERTS) for _ in range(TOPK)] for _ in range(num_tokens + 2)])
            real = ids[:num_tokens].ravel().tolist()
            counts = np.bincount([expert for expert in real if expert >= 0], minlength=EXPERTS)
            step[layer] += counts
            if draw.random() < 0.5:
                recorder.add(layer, ids, num_tokens)
            else:
                recorder.add_counts(layer, torch.from_numpy(counts))
        if draw.random() < 0.2:
            recorder.void_step()
            continue
        recorder.step_done()
        total += step
        if draw.random() < 0.1:
            taken = recorder.take()[:, 0]
            assert np.array_equal(taken, total - in_records)
            if draw.random() < 0.5:
                recorder.confirm()
                in_records = total.copy()
            else:
                recorder.void_step()  # the record is dropped: its counts are in the next one
    assert np.array_equal(recorder.take()[:, 0], total - in_records)
    assert total.sum() > 1000


def test_no_more_waits_to_be_counted_than_a_bound() -> None:
    recorder = LoadRecorder(1, EXPERTS, EpGroup(0, 1, torch.device("cpu")))
    for step in range(200):
        recorder.add(0, torch.zeros(50_000 if step % 3 == 0 else 1, TOPK, dtype=torch.int64), 1 if step % 2 else 50_000)
        recorder.step_done()
        waiting = [ids for _, ids in recorder._ids]
        assert len(waiting) < load_recorder.STEPS_AT_ONCE
        assert sum(ids.numel() for ids in waiting) <= load_recorder.IDS_AT_ONCE
