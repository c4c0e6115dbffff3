"""Counts of one rank against counts made one by one, whatever is counted together and whatever is voided."""

import random

import numpy as np
import pytest
import torch

from moe_serve.dispatch.base import EpGroup
from moe_serve.ep.load_recorder import LoadRecorder

LAYERS, EXPERTS = 2, 5


@pytest.mark.parametrize("seed", range(20))
def test_every_step_that_is_done_counts_once(seed: int) -> None:
    draw = random.Random(seed)
    recorder = LoadRecorder(LAYERS, EXPERTS, EpGroup(0, 1, torch.device("cpu")))
    total = np.zeros((LAYERS, EXPERTS), dtype=np.int64)  # of steps that are done
    in_records = np.zeros_like(total)
    for _ in range(300):
        step = np.zeros_like(total)
        for layer in range(LAYERS):
            counts = torch.tensor([draw.choice([0, 0, 1, 8]) for _ in range(EXPERTS)])
            step[layer] += counts.numpy()
            if draw.random() < 0.5:
                recorder.row(layer).add_(counts)
            else:  # as a kernel does
                recorder.row(layer).add_(counts)
        if draw.random() < 0.2:
            recorder.void_step()
            continue
        recorder.step_done()
        total += step
        if draw.random() < 0.1:
            taken = recorder.take().by_source[:, 0]
            assert np.array_equal(taken, total - in_records)
            if draw.random() < 0.5:
                recorder.confirm()
                in_records = total.copy()
            else:
                recorder.void_step()  # the record is dropped: its counts are in the next one
    assert np.array_equal(recorder.take().by_source[:, 0], total - in_records)
    assert total.sum() > 1000
