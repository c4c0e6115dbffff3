"""How much requests differ in the experts they choose, by the single passes that our server records.

    python -m benchmarks.request_spread [--prompts 1500]

The demo model reads prompts of code and of prose, mixed, so that a pass holds so many of them, and writes a trace of
windows of one step (eplb.record_window_steps: 1). The spread is fitted on passes of one size. It is to say how uneven
passes are that the fit has not seen, of this size and of the others. Counts, not times: a loud machine does no harm.
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.bench.domains import DOMAINS, prompts_of
from moe_serve.config import load_config
from moe_serve.eplb.cost.batches import drawn_imbalance, find_spread
from moe_serve.eplb.files.traces import read_trace
from moe_serve.eplb.load import LoadTrace
from moe_serve.launcher.llm import LLM
from moe_serve.launcher.preflight import load_tokenizer

PROMPT_TOKENS = 32
PROMPTS_A_PASS = (4, 8, 16, 32)
RANKS = 8  # among which the experts would be divided
NEIGHBOURS = 32  # passes that are compared with each other, as `find_spread` does


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1500)
    arguments = parser.parse_args()
    facts, rows, rng = conditions(), [], np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        traces = {n: recorded(n, arguments.prompts, Path(folder) / f"load_{n}.jsonl") for n in PROMPTS_A_PASS}
    found = {n: find_spread(trace, trace.topk or 1, PROMPT_TOKENS, RANKS) for n, trace in traces.items()}
    fitted = found[PROMPTS_A_PASS[1]]
    assert fitted is not None
    for n, trace in traces.items():
        each, topk = found[n], trace.topk or 1
        assert each is not None
        passes = np.array([record.tokens for record in trace if record.phase == "prefill" and record.tokens.any()])
        other = [
            drawn_imbalance(
                shares_of(part[::2]), part[1::2].sum(axis=2), fitted.spread, topk, PROMPT_TOKENS, RANKS, rng
            )
            for part in (passes[i : i + NEIGHBOURS] for i in range(0, len(passes) - NEIGHBOURS + 1, NEIGHBOURS))
        ]
        rows.append(
            {
                "prompts a pass": n,
                "passes": each.num_passes,
                "spread": f"{each.spread:.2f} ({each.low:.2f} to {each.high:.2f})",
                "measured": f"{each.measured:.3f}",
                "drawn": f"{each.drawn:.3f}",
                f"drawn with that of {PROMPTS_A_PASS[1]} prompts": f"{np.mean(other):.3f}",
                "by chance": f"{each.by_chance:.3f}",
            }
        )
        print(rows[-1], flush=True)
    notes = (
        f"The demo model ({passes.shape[1]} MoE layers of {passes.shape[2]} experts), prompts of {PROMPT_TOKENS} "
        f"tokens, half of them code and half prose. Busiest of {RANKS} ranks over the mean one, on ranks that are "
        "level for half of the passes, mean over layers and the others: measured, drawn with the spread of the first "
        "half, and by chance."
    )
    print(save("request_spread", "How much requests differ", rows, facts, notes))


def shares_of(passes: np.ndarray) -> np.ndarray:
    """Returns the shares [L, E] of the sum of passes [S, L, E]."""
    sums = passes.sum(axis=0)
    return np.asarray(sums / sums.sum(axis=1, keepdims=True))


def recorded(prompts_a_pass: int, num_prompts: int, path: Path) -> LoadTrace:
    """Returns the trace of a server that reads so many prompts in each step."""
    tokenizer = load_tokenizer(load_config())
    assert tokenizer is not None
    draw = random.Random(0)
    texts = {domain: prompts_of(domain, 0) for domain in DOMAINS}
    with LLM(
        "demo",
        num_ranks=1,
        engine={"max_batch_tokens": prompts_a_pass * PROMPT_TOKENS, "max_running_requests": prompts_a_pass},
        eplb={"record_path": str(path), "record_window_steps": 1},
    ) as llm:
        prompts: list[list[int]] = []
        while len(prompts) < num_prompts:
            ids = tokenizer.encode(next(texts[draw.choice(DOMAINS)]))[:PROMPT_TOKENS]
            prompts += [ids] if len(ids) == PROMPT_TOKENS else []
        llm.generate(prompts, SamplingParams(max_new_tokens=1, temperature=0))
    trace = read_trace(str(path))
    return LoadTrace.of(tuple(trace), topk=trace.topk)


if __name__ == "__main__":
    main()
