"""The options of `serve`, `generate` and `check`. Most stand for one setting, under our name, SGLang's and vLLM's."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path | None, typer.Option(help="YAML file with settings; none: the demo model on this CPU, 2 ranks")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="override one setting; repeat for more; wins over all"),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="print the effective configuration, a file for --config, and end")
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

Host = Annotated[str | None, typer.Option(help="server.host; 0.0.0.0: other machines may connect, see --api-key")]
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
MaxLogprobs = Annotated[
    int | None,
    typer.Option("--max-logprobs", help="engine.max_logprobs: likeliest tokens that a request may ask for"),
]
PageSize = Annotated[int | None, typer.Option("--page-size", "--block-size", help="cache.block_size, tokens")]
NoPrefixCache = Annotated[bool, typer.Option("--disable-radix-cache", help="cache.prefix_cache: false")]

ApiKey = Annotated[
    str | None,
    typer.Option(
        help="a key that clients must send (authorization: Bearer KEY). Other users of this machine see it in the list "
        "of processes: better $MOE_SERVE_API_KEY, or --api-key-file",
        show_default=False,
    ),
]
AdminApiKey = Annotated[
    str | None,
    typer.Option(
        help="a key for what changes the server, such as moving experts; better $MOE_SERVE_ADMIN_API_KEY, or "
        "--admin-api-key-file. Without one, this is closed unless --host is this machine's loopback",
        show_default=False,
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(help="server.api_key_file: one key on each line, a name and limits before it or not; mode 600"),
]
AdminApiKeyFile = Annotated[str | None, typer.Option(help="server.admin_api_key_file, likewise")]
SslCertfile = Annotated[str | None, typer.Option("--ssl-certfile", help="server.ssl_certfile: PEM; serves HTTPS")]
SslKeyfile = Annotated[str | None, typer.Option("--ssl-keyfile", help="server.ssl_keyfile: PEM, without password")]
SslCaCerts = Annotated[
    str | None, typer.Option("--ssl-ca-certs", help="server.ssl_ca_certs: clients need a certificate of these")
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="server.allowed_hosts: a name clients may call this server by; repeatable"),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origins",
        "--allowed-origins",
        metavar="ORIGIN",
        help="server.cors_origins: a site whose pages may use this server, such as https://a.example; repeatable",
    ),
]
ApiWorkers = Annotated[
    int | None, typer.Option("--api-workers", help="server.api_workers: processes that serve the port together")
]
ChatTemplate = Annotated[
    str | None,
    typer.Option("--chat-template", help="server.chat_template: a file with the jinja template of chats"),
]
SamplingDefaults = Annotated[
    str | None,
    typer.Option(
        help="server.sampling_defaults: what calls of /v1 leave out is as the model recommends (model), or as OpenAI's "
        "(openai)"
    ),
]
TrustChatTemplate = Annotated[
    bool,
    typer.Option(
        "--trust-request-chat-template",
        help="server.trust_request_chat_template: clients may send a template, which runs in a sandbox",
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(help="server.reasoning_parser: how the model marks its reasoning, such as qwen3 or deepseek-r1"),
]
ToolCallParser = Annotated[
    str | None, typer.Option(help="server.tool_call_parser: how the model writes calls of tools, such as qwen25")
]
MaxConnections = Annotated[int | None, typer.Option(help="server.max_connections, open at a time")]
LogRequests = Annotated[
    bool,
    typer.Option(
        "--log-requests", "--enable-log-requests", help="server.log_requests: one line for each request that has ended"
    ),
]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="server.log_format: text or json")]
MetricsCompat = Annotated[
    str | None,
    typer.Option("--metrics-compat", help="server.metrics_compat: sglang or vllm; /metrics has these names too"),
]
ProfileDir = Annotated[
    str | None, typer.Option("--profile-dir", help="server.profile_dir: where POST /stop_profile writes its traces")
]
