"""The time to the first token of a prompt whose pages have left the KV cache: from a tier, over computing it again.

    python -m benchmarks.page_tiers [--tokens 4096] [--rounds 5]

Serves the bench model, whose pool holds little more than one prompt, on one rank with one thread. Each round sends a
new prompt, then another, which takes the blocks of the first, then the first one again: with no tier, with pages in
memory, with pages in files. `after a restart` sends the prompts of the rounds to a new process with the same files.
What tiers cost where nothing is found: the time to the first token of new prompts, and of 32 tokens right behind one,
while its pages go down, over the rank without a tier.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_model import CONFIG, write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from moe_serve import LLM, SamplingParams

ONE = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
FEW = SamplingParams(max_new_tokens=33, temperature=0, ignore_eos=True)
_WRITTEN_S = 30.0


class Rank:
    """The bench model with some tiers. tiers: settings of `cache`"""

    def __init__(self, path: Path, num_tokens: int, tiers: dict[str, Any]):
        cache = {"num_blocks": num_tokens * 5 // 4 // 16, "block_size": 16, **tiers}
        self.llm = LLM(
            str(path), num_ranks=1, threads_per_rank=1, skip_tokenizer=True, max_batch_tokens=1024, cache=cache
        )
        self.ask(random.Random(1).choices(range(3, 8000), k=512))  # meets cold pools

    def ask(self, prompt: list[int]) -> float:
        """Returns the milliseconds to the token behind a prompt."""
        began_s = time.perf_counter()
        self.llm.generate([prompt], ONE)
        return 1e3 * (time.perf_counter() - began_s)

    def decode(self, prompt: list[int]) -> float:
        """Returns the milliseconds of a token, over 32 of them."""
        times = [time.perf_counter() for _ in self.llm.stream([prompt], FEW)]
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def wait_until_written(folder: Path, num_pages: int) -> None:
    """Waits for the thread that writes pages behind the steps."""
    late_s = time.monotonic() + _WRITTEN_S
    while len(list(folder.glob("*/*.page"))) < num_pages and time.monotonic() < late_s:
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    facts = conditions()
    draw, vocab = random.Random(0), range(3, int(str(CONFIG["vocab_size"])))
    prompts = [draw.choices(vocab, k=args.tokens) for _ in range(2 * args.rounds)]
    ways = ("computed again", "from memory", "from files", "from files, after a restart")
    times: dict[str, list[float]] = {way: [] for way in ways}
    new: dict[str, list[float]] = {way: [] for way in ways}
    steps: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        model = write_bench_model(Path(scratch) / "model", max_position_embeddings=2 * args.tokens)
        pages = Path(scratch) / "pages"
        disk: dict[str, Any] = {"path": str(pages), "disk_gb": 20.0}
        tiers: dict[str, dict[str, Any]] = dict(zip(ways, ({}, {"host_gb": 2.0}, disk), strict=False))
        ranks = {way: Rank(model, args.tokens, settings) for way, settings in tiers.items()}
        for number in range(args.rounds):
            for way, rank in ranks.items():
                for at in (0, 1):
                    new[way].append(rank.ask(prompts[2 * number + at]))
                    if at == 1:
                        steps[way].append(rank.decode(draw.choices(vocab, k=8)))
                    if way == "from files":
                        wait_until_written(pages, (2 * number + at + 1) * (args.tokens // 16))
                times[way].append(rank.ask(prompts[2 * number]))
        for rank in ranks.values():
            rank.llm.close()
        again = Rank(model, args.tokens, disk)
        for number in range(args.rounds):
            times[ways[3]].append(again.ask(prompts[2 * number]))
        again.llm.close()
    base = statistics.median(times[ways[0]])
    rows = [
        {
            "pages": way,
            "ms to the first token, median": f"{statistics.median(found):.0f}",
            "over computing again": f"{statistics.median(found) / base:.3f}",
            "a new prompt, over no tier": _over(new[way], new[ways[0]]),
            "tokens behind it, over no tier": _over(steps[way], steps[ways[0]]),
        }
        for way, found in times.items()
    ]
    notes = (
        f"A prompt of {args.tokens} tokens, {args.rounds} rounds, ways interleaved but for the restart. Files lie in "
        "the cache of the system: what reading them from a disk takes comes on top."
    )
    print(save("page_tiers", "Pages outside the KV cache", rows, facts, notes, per_cpu=True))


def _over(found: list[float], base: list[float]) -> str:
    """Returns the median of ratios, since each round sends the same to all ways."""
    if not found:
        return "–"
    return f"{statistics.median(one / other for one, other in zip(found, base, strict=True)):.3f}"


if __name__ == "__main__":
    main()
