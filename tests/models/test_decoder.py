"""The decoder with the real MoE layer, on empty batches, and in bfloat16."""

import pytest
import torch

from moe_serve.attention_dp.batch import BatchBuilder, ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.ep.moe_layer import MoeLayer, Turns
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics
from moe_serve.models.decoder.moe_decoder import kv_layouts
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import dummy_weights
from tests.attention_dp.steps import tables_of
from tests.models.families import Oracle, oracle_logits, prompt
from tests.models.reference_moe import ReferenceMoe, record_call
from tests.models.runner import BLOCK_SIZE, INVARIANT, Runner, decoder_with, load_decoder, one_rank
from tests.tolerance import BFLOAT16_LOGITS, LOGITS, relative_error

NAMES = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "phimoe", "ernie4_5_moe", "deepseek_v2", "deepseek_v3")
CLASSES = {"fast": FAST, "invariant": INVARIANT, "compiled": COMPILED}


# With compiled kernels, test_parity.py and test_invariance.py run the real layer in every family.
@pytest.mark.parametrize("numerics", [FAST, INVARIANT], ids=["fast", "invariant"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_with_the_real_moe_layer_match_the_oracle(name: str, numerics: Numerics, oracle: Oracle) -> None:
    model, folder = oracle(name)
    runner = Runner(load_decoder(folder, numerics, moe_layer=MoeLayer), numerics)
    request = runner.request("request", prompt(0, 60))
    runner.prefill([request], chunk=25)
    assert relative_error(runner.stacked(request), oracle_logits(model, request.prompt_ids)) < LOGITS


@pytest.mark.parametrize("name", NAMES)
def test_with_the_real_moe_layer_logits_are_the_same_bits_in_any_batch(name: str, oracle: Oracle) -> None:
    runner = Runner(load_decoder(oracle(name)[1], INVARIANT, moe_layer=MoeLayer), INVARIANT)
    alone = runner.request("alone", prompt(0, 60))
    runner.prefill([alone])
    others = [runner.request(f"other{i}", prompt(i + 1, n)) for i, n in enumerate((7, 61, 30))]
    batched = runner.request("batched", prompt(0, 60))
    runner.prefill([others[0], batched, *others[1:]], chunk=11)
    single = runner.request("single", prompt(0, 60))
    runner.prefill([single], chunk=1)
    for request in (batched, single):
        assert torch.equal(runner.stacked(request), runner.stacked(alone)), request.request_id


@pytest.mark.parametrize("numerics", [INVARIANT, COMPILED], ids=["invariant", "compiled"])
@pytest.mark.parametrize("name", (*NAMES, "deepseek_v32", "deepseek_v4"))
def test_halves_of_a_batch_have_the_bits_of_the_whole(name: str, numerics: Numerics, oracle: Oracle) -> None:
    decoder = load_decoder(oracle(name)[1], numerics)
    found = []
    for overlap in (False, True):
        runner = Runner(decoder, numerics, overlap=overlap)
        requests = [runner.request(str(length), prompt(length, length)) for length in (1, 2, 9, 30, 61)]
        runner.prefill(requests[2:4])
        runner.prefill(requests, chunk=40)  # the longest in two chunks, that halves cut
        runner.greedy(requests, 3)
        found.append([runner.stacked(request) for request in requests])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("numerics", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_reaches_every_moe_layer(name: str, overlap: bool, numerics: Numerics, oracle: Oracle) -> None:
    folder = oracle(name)[1]
    spec = read_spec(folder)
    seen: list[tuple[int, int, int]] = []

    class Spy:
        needs_counts = False

        def __call__(self, x: torch.Tensor, num_tokens: int, num_chunks: int, *_: None) -> Turns[torch.Tensor]:
            seen.append((x.shape[0], num_tokens, num_chunks))
            yield
            return x

        def record(self, recorder: Recorder, x: torch.Tensor, _: None) -> torch.Tensor:
            return record_call(recorder, self, x)

    decoder = load_decoder(folder, numerics, moe_layer=lambda *args: Spy())
    logits = decoder.forward(ForwardBatch.empty("cpu", numerics), Runner(decoder, numerics).cache, 3, overlap)
    assert logits.shape == (0, spec.vocab_size)
    assert seen == [(0, 0, 3)] * (1 + overlap) * spec.num_moe_layers


@pytest.mark.parametrize("numerics", [FAST, INVARIANT], ids=["fast", "invariant"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_near_float32(name: str, numerics: Numerics, oracle: Oracle) -> None:
    """Against float32 with the same rounded weights; the router is compared through its effect only."""
    model, folder = oracle(name)
    decoder = load_decoder(folder, numerics, torch.bfloat16)
    runner = Runner(decoder, numerics, dtype=torch.bfloat16)
    request = runner.request("request", prompt(0, 30))
    runner.prefill([request], chunk=13)
    wanted = oracle_logits(model, request.prompt_ids)
    error = (runner.stacked(request) - wanted).norm() / wanted.norm()  # a flipped expert moves a few rows a lot
    assert float(error) < BFLOAT16_LOGITS


def test_the_last_row_of_each_chunk_gives_logits_first_of_those_that_sample(oracle: Oracle) -> None:
    from moe_serve.attention_dp.request import Request, SamplingParams
    from moe_serve.attention_dp.scheduler import ScheduledChunk

    folder = oracle("qwen3_moe")[1]
    decoder = load_decoder(folder)
    runner = Runner(decoder, FAST)
    long, short = runner.request("long", prompt(0, 20)), runner.request("short", prompt(1, 6))
    runner.prefill([long, short])
    cache = KvCache(kv_layouts(decoder.spec), 8, BLOCK_SIZE, torch.float32, "cpu")
    requests = [Request(r.request_id, 0, r.prompt_ids, [], SamplingParams(), 0) for r in (long, short)]
    requests[0].block_ids, requests[1].block_ids = [5, 0, 3], [7]
    chunks = [ScheduledChunk(requests[1], 0, 5, False), ScheduledChunk(requests[0], 0, 20, True)]
    tables = tables_of(BLOCK_SIZE, requests)
    first = decoder.forward(ForwardBatch.build(chunks, tables, "cpu", FAST), cache, 1)
    wanted = torch.stack((runner.stacked(long)[-1], runner.stacked(short)[4]))
    assert relative_error(first, wanted) < LOGITS
    requests[1].num_computed = 5
    chunks = [ScheduledChunk(requests[1], 5, 1, True)]
    second = decoder.forward(ForwardBatch.build(chunks, tables, "cpu", FAST), cache, 1)
    assert relative_error(second, runner.stacked(short)[-1:]) < LOGITS


@pytest.mark.parametrize("numerics", CLASSES.values(), ids=CLASSES)
def test_decodes_in_the_tensors_of_the_step_before_give_the_logits_of_new_tensors(
    numerics: Numerics, oracle: Oracle
) -> None:
    decoder = load_decoder(oracle("qwen3_moe")[1], numerics, moe_layer=MoeLayer)

    def decode(in_new_tensors: bool) -> torch.Tensor:
        """Returns the logits of all steps; each request gets two more blocks on the way."""
        runner = Runner(decoder, numerics)
        requests = [runner.request(str(i), prompt(i, length)) for i, length in enumerate((5, 12, 30))]
        runner.prefill(requests)
        builder, logits, ids = BatchBuilder(runner.tables, "cpu", numerics), [], set()
        for step in range(2 * BLOCK_SIZE):
            for request in requests:
                request.output_ids.append(3 + (7 * step + len(request.prompt_ids)) % 250)
            chunks = runner.schedule([(request, 1) for request in requests])
            if in_new_tensors:
                batch = ForwardBatch.build(chunks, runner.tables, "cpu", numerics)
            else:
                batch = builder.build(chunks)
                ids.add(id(batch.positions))
            logits.append(decoder.forward(batch, runner.cache, 1).clone())
            for request in requests:
                request.num_computed += 1
        assert in_new_tensors or len(ids) == 1, "the tensors are kept"
        return torch.cat(logits)

    assert torch.equal(decode(in_new_tensors=False), decode(in_new_tensors=True))


def test_dummy_weights_run_and_give_finite_logits_of_a_sensible_size(oracle: Oracle) -> None:
    for name in NAMES:
        spec = read_spec(oracle(name)[1])
        weights = dummy_weights(WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu"), seed=5)
        decoder = decoder_with(ReferenceMoe, spec, weights)
        runner = Runner(decoder, FAST)
        request = runner.request("request", prompt(0, 12))
        runner.prefill([request])
        assert 0.1 < float(runner.stacked(request).std()) < 10
