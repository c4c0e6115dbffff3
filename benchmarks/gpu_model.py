"""Whole steps of a decoder on one GPU: right, and against the roofline of its recorded launches.

    python -m benchmarks.gpu_model [NAME ...]

A part of `python -m benchmarks.gpu`. `step`: logits of small models against the same weights in float32 on the CPU,
prefill and decodes. `graphs`: the same through captured graphs, and how much longer steps take launch by
launch. `speed`: published models with random weights, decodes in a graph, against what their launches take at least
(moe_serve/roofline). `sampling`: drawn tokens against the plain sampler on the CPU, and their time.
"""

import json
import logging
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import BF16, DEVICE, Ceilings, Row, numbers, run_benchmarks, time_us
from moe_serve.attention_dp.batch import BatchBuilder
from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.engine.output.sampler import sample_rows
from moe_serve.ep.expert_form import ExpertForm
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.numerics import FAST
from moe_serve.kernels.sampling import sample_rows_reference
from moe_serve.models.decoder.moe_decoder import MoeDecoder, build_decoder, captures_decodes, kv_layouts
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_share import WeightShare, fp8_projections
from moe_serve.models.weights import LoadedWeights, dummy_weights, no_weights
from moe_serve.roofline.step import RankStep, record_step
from moe_serve.roofline.work import work_of
from tests.kernels.sampling_rows import rows_of
from tests.models.published import DEEPSEEK_V3, OLMOE_1B_7B, QWEN3_30B

CPU = torch.device("cpu")
BLOCK_SIZE, LAUNCH_US = 16, 1.3
VOCABULARY = 151936  # of Qwen3
# Relative errors of logits, over float32 on the CPU: sums in another order, and a dozen roundings a layer.
FLOAT32_LOGITS, BFLOAT16_LOGITS = 1e-4, 1e-1
SMALL: dict[str, dict[str, Any]] = {
    "latents, dense layer, shared expert": DEEPSEEK_V3 | {
        "num_hidden_layers": 3, "hidden_size": 256, "vocab_size": 512, "num_attention_heads": 4, "q_lora_rank": 64,
        "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "intermediate_size": 256,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "quantization_config": None,
        "max_position_embeddings": 4096, "rope_scaling": None,
    },
    "grouped queries": QWEN3_30B | {
        "num_hidden_layers": 3, "hidden_size": 256, "vocab_size": 512, "num_attention_heads": 8, "head_dim": 32,
        "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
        "eos_token_id": 1, "bos_token_id": 0,
    },
}  # fmt: skip


@dataclass
class Rank:
    """One rank with a whole model, and requests that it computes."""

    decoder: MoeDecoder
    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    tables: BlockTables = field(default_factory=lambda: BlockTables(BLOCK_SIZE))
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = KvCache(kv_layouts(self.decoder.spec), self.num_blocks, BLOCK_SIZE, self.dtype, self.device)
        self._free = list(range(self.num_blocks))
        pads_decodes = captures_decodes(self.decoder.spec, FAST, self.device, "auto")
        self._builder = BatchBuilder(self.tables, self.device, FAST, pads_decodes)

    def submit(self, prompt: list[int]) -> None:
        self.requests.append(Request(str(len(self.requests)), 0, prompt, [], SamplingParams(), 0))

    def forget(self) -> None:
        """Ends all requests."""
        for request in self.requests:
            self._free += request.block_ids
            self.tables.drop(request)
        self.requests.clear()

    def step(self, num_tokens: int = 1) -> Tensor:
        """Computes so many more tokens of each request, and returns the logits of their last rows in order."""
        chunks = []
        for request in self.requests:
            end = request.num_computed + num_tokens
            request.output_ids += [1] * (end - request.num_known)  # where nobody has said which token it is
            while len(request.block_ids) * BLOCK_SIZE < end:
                self.tables.extend(request, [self._free.pop()])
            chunks.append(ScheduledChunk(request, request.num_computed, num_tokens, end == request.num_known))
        logits = self.decoder.forward(self._builder.build(chunks), self.cache, 1)
        for request in self.requests:
            request.num_computed += num_tokens
        return logits


def spec_of(config: dict[str, Any]) -> ModelSpec:
    """Returns the spec of a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return read_spec(folder)


def share_of(spec: ModelSpec, dtype: torch.dtype, device: torch.device, form: ExpertForm = "dense") -> WeightShare:
    placement = Placement.trivial(spec.num_moe_layers, spec.num_logical, 1, moe_layer_ids=spec.moe_layer_ids)
    fp8_dense = fp8_projections(spec, None) if form == "fp8" else frozenset[str]()
    return WeightShare(spec, placement, 0, dtype, device, form, fp8_dense=fp8_dense)


def rank_of(share: WeightShare, weights: LoadedWeights, most_tokens: int, num_blocks: int) -> Rank:
    """Returns a rank that holds all experts."""
    spec, device, placement = share.spec, torch.device(share.device), share.placement
    group = EpGroup(0, 1, device)
    limits = BufferLimits(most_tokens, spec.hidden, spec.topk, placement.slots_per_rank)
    request = TransportRequest("local", limits, share.dtype, fp8_rows=share.form == "fp8")
    parallel = ExpertParallel(
        rank=0,
        router=spec.router,
        all_to_all=make_all_to_all(group, request),
        replica_map=ReplicaMap(placement, device),
        recorder=LoadRecorder(placement.num_layers, placement.num_logical, group),
        max_tokens_per_rank=most_tokens,
        numerics=FAST,
    )
    return Rank(build_decoder(spec, weights, parallel, device), device, share.dtype, num_blocks)


def small_ranks(config: dict[str, Any], dtype: torch.dtype) -> tuple[Rank, Rank]:
    """Returns a rank on the GPU and one on the CPU in float32, of the same weights, with five requests."""
    spec = spec_of(config)
    pair = []
    for rank_dtype, device in ((dtype, DEVICE), (torch.float32, CPU)):
        share = share_of(spec, rank_dtype, device)
        pair.append(rank_of(share, dummy_weights(share, seed=3), 1024, 256))
    for rank in pair:
        for request in range(5):
            rank.submit([(37 * request + 11 * place) % spec.vocab_size for place in range(96)])
    return pair[0], pair[1]


def decode_both(ours: Rank, plain: Rank, num_steps: int) -> list[float]:
    """Runs a prefill and decodes on both, fed with the plain one's tokens; returns the relative error of each row."""
    found: list[float] = []
    for number in range(num_steps + 1):
        num_tokens = 1 if number else len(plain.requests[0].prompt_ids)
        got, expected = ours.step(num_tokens).to(CPU).double(), plain.step(num_tokens).double()
        found += numbers((got - expected).norm(dim=1) / expected.norm(dim=1))
        for pair in zip(ours.requests, plain.requests, expected.argmax(1).tolist(), strict=True):
            for request in pair[:2]:
                request.output_ids.append(pair[2])
    return found


def checked(errors: list[float], dtype: torch.dtype, what: str) -> Row:
    """Returns the row of these errors of logits. Raises AssertionError where they are more than rounding.

    In bfloat16 a row's experts may be others than in float32, where two are nearly as likely: the median tells.
    """
    is_float32 = dtype == torch.float32
    error, limit = (max(errors), FLOAT32_LOGITS) if is_float32 else (statistics.median(errors), BFLOAT16_LOGITS)
    word = "worst" if is_float32 else "median"
    assert error < limit, f"logits, {what}: their {word} error is {error}, allowed {limit}"
    conditions = f"over float32 on the CPU, {len(errors)} rows of 5 requests"
    return Row(f"{word} error of logits, {what}", 1e6 * error, "e-6", f"< {1e6 * limit:,.0f}", True, conditions)


def step(limits: Ceilings) -> Iterator[Row]:
    """A prefill of five prompts, and decodes that run as they are."""
    for name, config in SMALL.items():
        for dtype in (torch.float32, BF16):
            ours, plain = small_ranks(config, dtype)
            ours.decoder.run._failed = True  # type: ignore[attr-defined]  # captures nothing
            yield checked(decode_both(ours, plain, num_steps=3), dtype, f"{name}, {dtype}".replace("torch.", ""))


def graphs(limits: Ceilings) -> Iterator[Row]:
    """Decodes in captured graphs: the second of a size is captured, the others are replayed."""
    for name, config in SMALL.items():
        ours, plain = small_ranks(config, torch.float32)
        runner: Any = ours.decoder.run
        with Warnings() as warnings:
            errors = decode_both(ours, plain, num_steps=8)
        assert not runner._failed, f"no graph was captured: {'; '.join(warnings)}"
        yield checked(errors, torch.float32, f"{name}, in graphs")
        replayed = time_us([ours.step])
        runner._failed = True
        yield Row(f"a decode launch by launch over one in a graph, {name}", time_us([ours.step]) / replayed, "x")


def speed(limits: Ceilings) -> Iterator[Row]:
    """Decodes of published models against their roofline: bytes at the sheet's rate, or FLOP, and each launch."""
    fp8_layers = DEEPSEEK_V3 | {"num_hidden_layers": 2, "first_k_dense_replace": 0}
    cases: tuple[tuple[str, dict[str, Any], ExpertForm], ...] = (
        ("OLMoE-1B-7B", OLMOE_1B_7B, "dense"),
        ("two layers of DeepSeek-V3, FP8", fp8_layers, "fp8"),
    )
    for name, config, form in cases:
        spec = replace(spec_of(config), max_position=8192)
        share = share_of(spec, BF16, DEVICE, form)
        rank = rank_of(share, random_weights(share), 128, 128 * (1024 // BLOCK_SIZE + 8))
        for batch in (1, 32, 128):
            yield from speed_of(name, rank, RankStep(spec, batch, 1024, expert_form=form), limits)
        del rank
        torch.cuda.empty_cache()


def speed_of(name: str, rank: Rank, step: RankStep, limits: Ceilings) -> Iterator[Row]:
    """Times decodes of as many requests as a step has, and sets them beside its roofline."""
    rank.forget()
    for number in range(step.sequences):
        rank.submit([(7 * number + place) % step.spec.vocab_size for place in range(step.context + 1)])
    for request in rank.requests:  # as if it were computed: the cache holds zeros
        request.num_computed = step.context
    micros = time_us([rank.step], repeats=10)
    least = least_us(step, limits)
    conditions = f"{step.sequences} decodes behind {step.context} tokens, one GPU; with the host's batch"
    yield Row(f"a decode step, {name}", micros, "us", "", None, conditions)
    if least is not None:
        yield Row("  its roofline over it", least / micros, "x", "", None, conditions, least / micros)


def least_us(step: RankStep, limits: Ceilings) -> float | None:
    """Returns the least time of a step's launches on the sheet; None without a sheet."""
    sheet = limits.sheet
    if sheet is None:
        return None
    least = 0.0
    for launch in record_step(step).launches:
        work = work_of(launch, step)
        rate = sheet.fp8_tflop_s if launch.arguments.get("SCALED") else sheet.bf16_tflop_s
        least += max(work.num_bytes / sheet.memory_gb_s / 1e3, work.flops / rate / 1e6, LAUNCH_US)
    return least


def random_weights(share: WeightShare) -> LoadedWeights:
    """Returns weights drawn on the device: those of a published model take minutes on a CPU."""
    weights = no_weights(share)
    for tensor in [*weights.dense.values(), *(each for layer in weights.experts.values() for each in layer.values())]:
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).random_(0, 64)  # below 0.06
        elif tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
    return weights


def sampling(limits: Ceilings) -> Iterator[Row]:
    """Tokens of 128 rows."""
    kinds: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "top-k, top-p": {"top_k": 50, "top_p": 0.9},
        "min-p": {"min_p": 0.05},
    }
    logits = torch.randn(128, VOCABULARY, device=DEVICE) * 3
    for name, parameters in kinds.items():
        rows = rows_of([{**parameters, "seed": seed, "output_index": seed % 7} for seed in range(128)])
        got, expected = sample_rows(logits.clone(), rows), sample_rows_reference(logits.to(CPU), rows)
        differ = sum(one != other for one, other in zip(got, expected, strict=True))
        assert differ == 0, f"{name}: {differ} of 128 tokens are not the plain sampler's"
        micros = time_us([lambda rows=rows: sample_rows(logits.clone(), rows)])
        moved = 2 * logits.numel() * 4 / micros / 1e3
        conditions = f"128 rows of {VOCABULARY}, copied before and read after; the tokens are the plain sampler's"
        yield Row(f"sampling, {name}", micros, "us", "", None, conditions, limits.of_memory(moved))


class Warnings(logging.Handler):
    """Collects warnings of moe_serve while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("moe_serve").addHandler(self)
        return self._found

    def __exit__(self, *_: object) -> None:
        logging.getLogger("moe_serve").removeHandler(self)


BENCHMARKS = {"step": step, "graphs": graphs, "sampling": sampling, "speed": speed}

if __name__ == "__main__":
    run_benchmarks(BENCHMARKS, __doc__ or "")
