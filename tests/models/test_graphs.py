"""Decode steps as captured graphs, with a stand-in: it runs what was captured, on the host's sizes of then."""

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_serve.attention_dp.batch import BatchBuilder, bucket_of
from moe_serve.dispatch.local import LocalAllToAll
from moe_serve.kernels.numerics import FAST
from moe_serve.models.decoder.graphs import GraphRunner, graph_logits
from moe_serve.models.decoder.moe_decoder import MoeDecoder, build_decoder
from moe_serve.models.decoder.runners import TorchRunner
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import dummy_weights
from tests.models.families import spec_of
from tests.models.runner import Runner, one_rank, one_rank_parallel
from tests.tolerance import LOGITS, relative_error


class Captures:
    """The stand-in. num: graphs captured so far;  num_replayed: runs of them"""

    def __init__(self, fails: bool = False):
        self.num = self.num_replayed = 0
        self._fails = fails

    def of(self, runner: GraphRunner) -> Callable[[Callable[[], object]], Callable[[], None]]:
        recorder = runner.parallel.recorder
        assert recorder is not None

        def capture(run: Callable[[], object]) -> Callable[[], None]:
            if self._fails:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            self.num += 1
            recorder.step_done()
            run()
            recorder.void_step()  # a capture counts nothing

            def replay() -> None:
                self.num_replayed += 1
                run()

            return replay

        return capture


def decoder_of(name: str, tmp_path: Any) -> MoeDecoder:
    spec = spec_of(name, tmp_path)
    share = WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu")
    return build_decoder(spec, dummy_weights(share, 3), one_rank_parallel(spec, FAST), "cpu")


def run_steps(decoder: MoeDecoder, sizes: list[int], captures: Captures | None) -> tuple[list[Tensor], Tensor]:
    """Returns the logits of decode steps of so many of seven requests, and the load of one layer."""
    runner = Runner(decoder, FAST)
    requests = [runner.request(str(i), range(3 + i, 9 + 2 * i)) for i in range(7)]
    runner.prefill(requests)
    eager: Any = decoder.run
    parallel = decoder.stack.layers[-1].moe._parallel  # type: ignore[union-attr]
    assert parallel.recorder is not None
    if captures is not None:
        eager = GraphRunner(eager, parallel)
        eager.capture = captures.of(eager)
    model = MoeDecoder(decoder.spec, decoder.stack, eager)
    builder = BatchBuilder(runner.tables, "cpu", FAST, pads_decodes=captures is not None)
    before, found = parallel.recorder.row(0).clone(), []
    with mock.patch.object(LocalAllToAll, "captures", True):
        for size in sizes:
            for request in requests[:size]:
                request.output_ids.append(request.num_known % 200)
            chunks = runner.schedule([(request, 1) for request in requests[:size]])
            found.append(model.forward(builder.build(chunks), runner.cache, 1).clone())
            for request in requests[:size]:
                request.num_computed += 1
    return found, parallel.recorder.row(0) - before


# Of families without windows: torch's attention takes the first key of a window from the host's lengths.
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_replayed_steps_give_the_logits_and_the_load_of_steps_that_run_as_they_are(name: str, tmp_path: Any) -> None:
    decoder = decoder_of(name, tmp_path)
    sizes = [3, 3, 4, 3, 7, 5, 6, 1, 0, 3]  # padded to 4, 4, 4, 4, 8, 8, 8, 1, 0, 4
    captures = Captures()
    got, load = run_steps(decoder, sizes, captures)
    wanted, wanted_load = run_steps(decoder, sizes, None)
    for logits, expected in zip(got, wanted, strict=True):
        assert logits.shape == expected.shape
        assert relative_error(logits, expected) < LOGITS
    assert torch.equal(load, wanted_load), "padding is no load"
    assert int(load.sum()) == sum(sizes) * decoder.spec.topk
    assert (captures.num, captures.num_replayed) == (2, 6)


def test_graphs_of_many_sizes_write_their_logits_to_few_tensors(tmp_path: Any) -> None:
    with mock.patch.object(GraphRunner, "_logits_of", autospec=True, side_effect=GraphRunner._logits_of) as asked:
        run_steps(decoder_of("qwen3_moe", tmp_path), [3, 3, 3, 7, 7, 7, 1, 1, 1], Captures())
    runner = asked.call_args.args[0]
    assert [tuple(each.shape) for each in runner._logits.values()] == [(4, 256), (8, 256), (1, 256)]
    assert set(runner._logits) <= set(graph_logits(8)) == {1, 2, 4, 8}


def test_where_a_capture_fails_steps_run_as_they_are_and_one_line_says_so(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = decoder_of("qwen3_moe", tmp_path)
    with caplog.at_level(logging.WARNING):
        got, load = run_steps(decoder, [2, 2, 2, 5, 5], Captures(fails=True))
    wanted, wanted_load = run_steps(decoder, [2, 2, 2, 5, 5], None)
    assert all(relative_error(*pair) < LOGITS for pair in zip(got, wanted, strict=True))
    assert torch.equal(load, wanted_load)
    (line,) = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    assert line.endswith("operation not permitted when stream is capturing")


def test_the_eager_runner_is_what_runs_where_nothing_may_be_captured(tmp_path: Any) -> None:
    decoder = decoder_of("qwen3_moe", tmp_path)
    assert isinstance(decoder.run, TorchRunner), "on CPUs nothing is captured"
    captures = Captures()
    with mock.patch.object(GraphRunner, "_can_capture", return_value=False):
        got, _ = run_steps(decoder, [2, 2, 2], captures)
    assert (captures.num, len(got)) == (0, 3)


def test_padding_is_small_and_sizes_are_few() -> None:
    sizes = [bucket_of(rows) for rows in range(513)]
    assert all(rows <= size < max(2 * rows, rows + 16) or not rows for rows, size in enumerate(sizes))
    assert len(set(sizes)) < 40
