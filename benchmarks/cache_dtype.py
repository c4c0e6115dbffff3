"""How far a KV cache in 8 bits shifts log probabilities, and what a token takes in it.

    python -m benchmarks.cache_dtype

The compiled CPU kernels compute, so nothing but the cache differs: other batches, chunks and ranks give the same bits.
The demo model is asked about texts that it has drawn itself; the tiny models of the tests have random weights, so their
attention is flatter than a trained one's, and where two experts are nearly tied a token may go to the other one.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_serve
from benchmarks.conditions import conditions, save
from moe_serve.attention_dp.kv_cache import bytes_per_block
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.numerics import COMPILED
from moe_serve.models.decoder.moe_decoder import MoeDecoder, kv_layouts
from tests.models.families import make_oracle
from tests.models.families import save as save_model
from tests.models.runner import Runner, load_decoder

DTYPES = {"auto": torch.float32, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
FAMILIES = ("qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3")
TEXTS, LENGTH = 8, 256


def main() -> None:
    facts = conditions("moe-serve")
    rows = []
    demo = load_decoder(Path(moe_serve.__file__).parent / "demo_model", COMPILED, moe_layer=MoeLayer)
    rows += shifts("demo (trained, latents)", demo, drawn_texts(demo))
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_model(make_oracle(name), Path(folder))
            decoder = load_decoder(Path(folder), COMPILED, moe_layer=MoeLayer)
        draw = torch.Generator().manual_seed(1)
        rows += shifts(f"{name} (tiny, random)", decoder, torch.randint(3, 256, (TEXTS, 200), generator=draw).tolist())
    print(
        save(
            "cache_dtype",
            "KV cache in 8 bits: shift of log probabilities",
            rows,
            facts,
            f"{TEXTS} texts of each model, every position but the first. Mean and largest change of the log "
            "probability of the text's own token, change of its mean (nats; above 0: worse), mean KL divergence from "
            "float32 (nats), and the share of positions whose likeliest token is the same. No time is measured.",
        )
    )


def drawn_texts(decoder: MoeDecoder) -> list[list[int]]:
    """Returns texts that the model has drawn at temperature 1, each from its first token on."""
    runner = Runner(decoder, COMPILED, num_blocks=512)
    draw = torch.Generator().manual_seed(0)
    requests = [runner.request(str(text), [1 + text, 40 + text]) for text in range(TEXTS)]
    runner.prefill(requests)
    for _ in range(LENGTH - 2):
        for request in requests:
            logits = runner.logits[request.request_id][request.num_known - 1]
            request.output_ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=draw)))
        runner.step([(request, 1) for request in requests])
    return [[*request.prompt_ids, *request.output_ids] for request in requests]


def shifts(name: str, decoder: MoeDecoder, texts: list[list[int]]) -> list[dict[str, Any]]:
    """Returns a row for each dtype of the cache."""
    rows, exact = [], log_probabilities(decoder, texts, torch.float32)
    tokens = torch.tensor([token for text in texts for token in text[1:]])[:, None]
    of_text = exact.gather(1, tokens)[:, 0]
    for dtype, kept in DTYPES.items():
        found = exact if kept == torch.float32 else log_probabilities(decoder, texts, kept)
        change = found.gather(1, tokens)[:, 0] - of_text
        rows.append({
            "model": name,
            "cache.dtype": dtype,
            "bytes a token": bytes_per_block(kv_layouts(decoder.spec), 1, kept),
            "mean |change|": f"{change.abs().mean():.5f}",
            "largest": f"{change.abs().max():.3f}",
            "change of mean": f"{-change.mean():+.5f}",
            "mean KL": f"{(exact.exp() * (exact - found)).sum(1).mean():.6f}",
            "same top": f"{100 * (exact.argmax(1) == found.argmax(1)).float().mean():.2f} %",
        })  # fmt: skip
    return rows


def log_probabilities(decoder: MoeDecoder, texts: list[list[int]], kept: torch.dtype) -> Tensor:
    """Returns those of the token behind every position of the texts, [positions, vocab] float64."""
    runner = Runner(decoder, COMPILED, num_blocks=512, cache_dtype=kept)
    requests = [runner.request(str(number), text) for number, text in enumerate(texts)]
    runner.prefill(requests, chunk=100)
    return torch.cat([runner.stacked(request)[:-1].double().log_softmax(-1) for request in requests])


if __name__ == "__main__":
    main()
