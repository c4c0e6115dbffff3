"""The options of `serve`, `generate` and `check`. Most stand for one setting, under our name, SGLang's and vLLM's."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path | None, typer.Option(help="YAML file with settings; none: the demo model on this CPU, 2 ranks")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="override one setting; repeat for more; wins over all"),
]

ModelPath = Annotated[str | None, typer.Option("--model-path", "--model", help="model.path: a folder, or demo")]
ServedName = Annotated[str | None, typer.Option("--served-model-name", help="model.served_name")]
LoadFormat = Annotated[str | None, typer.Option(help="model.load_format: auto, or dummy for random weights")]
Dtype = Annotated[str | None, typer.Option(help="model.dtype: auto, float32 or bfloat16")]
ContextLength = Annotated[
    int | None, typer.Option("--context-length", "--max-model-len", help="model.max_model_len, tokens")
]
SkipTokenizer = Annotated[bool, typer.Option("--skip-tokenizer-init", help="model.skip_tokenizer: ids in, ids out")]

NumRanks = Annotated[
    int | None,
    typer.Option("--ep-size", "--ep", "--expert-parallel-size", "--num-ranks", help="parallel.num_ranks"),
]
AttentionSize = Annotated[
    int | None,
    typer.Option(
        "--attn-dp-size",
        "--attention-data-parallel-size",
        "--dp-size",
        "--data-parallel-size",
        help="parallel.num_ranks as well: attention is data-parallel over all ranks",
    ),
]
Device = Annotated[str | None, typer.Option(help="parallel.device: auto, cpu or cuda")]

Host = Annotated[str | None, typer.Option(help="server.host")]
Port = Annotated[int | None, typer.Option(help="server.port; 0: any free one")]

InitExpertLocation = Annotated[
    str | None, typer.Option(help="eplb.init_expert_location: trivial, or a placement file (ours or SGLang's)")
]
RedundantExperts = Annotated[
    int | None, typer.Option("--ep-num-redundant-experts", help="eplb.num_redundant_experts, per layer")
]
EnableEplb = Annotated[bool, typer.Option("--enable-eplb", help="eplb.mode: dynamic, experts move while serving")]
EplbAlgorithm = Annotated[
    str | None, typer.Option("--eplb-algorithm", help="eplb.policy: incremental, greedy, refined or deepseek")
]
EplbTrigger = Annotated[
    float | None,
    typer.Option(
        "--eplb-min-rebalancing-utilization-threshold",
        help="eplb.trigger: plan layers whose balancedness (mean / max of ranks) is below",
    ),
]
RecorderMode = Annotated[
    str | None,
    typer.Option("--expert-distribution-recorder-mode", help="eplb.recorder_mode: stat, per_pass or per_token"),
]

MaxRunning = Annotated[
    int | None,
    typer.Option("--max-running-requests", "--max-num-seqs", help="engine.max_running_requests, per rank"),
]
MaxQueued = Annotated[
    int | None,
    typer.Option("--max-queued-requests", help="engine.max_queued_requests, over all ranks; beyond it: HTTP 429"),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        "--chunked-prefill-size",
        "--max-num-batched-tokens",
        help="engine.max_batch_tokens: tokens of one step of one rank",
    ),
]
PageSize = Annotated[int | None, typer.Option("--page-size", "--block-size", help="cache.block_size, tokens")]
NoPrefixCache = Annotated[bool, typer.Option("--disable-radix-cache", help="cache.prefix_cache: false")]
