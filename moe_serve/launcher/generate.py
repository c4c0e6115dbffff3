"""`moe-serve generate`: writes the continuations of prompts to a stream as they arrive. Torch-free."""

from collections.abc import Sequence
from typing import TextIO

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import ServeConfig
from moe_serve.launcher.llm import LLM


def generate_to(out: TextIO, config: ServeConfig, prompts: Sequence[str], params: SamplingParams) -> None:
    """Writes each prompt with its continuation, in order. All are computed at once; one at a time is shown growing."""
    with LLM.from_config(config, progress=True) as llm:
        texts = [""] * len(prompts)
        finished = [False] * len(prompts)
        shown, num_chars = 0, 0
        out.write(prompts[0])
        for index, output in llm.stream(prompts, params):
            texts[index], finished[index] = output.text, output.finish_reason is not None
            while shown < len(prompts):
                out.write(texts[shown][num_chars:])
                num_chars = len(texts[shown])
                if not finished[shown]:
                    break
                out.write("\n")
                shown, num_chars = shown + 1, 0
                if shown < len(prompts):
                    out.write(f"\n{prompts[shown]}")
            out.flush()
