"""The options of `serve`, `generate` and `check`. Most stand for one setting, under our name, SGLang's and vLLM's.

Each is declared once: its type, its setting, its names, its help. A flag wins over the file, as `--set` does.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moe_serve.eplb.policies.names import SERVED
from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.command import option
from moe_serve.log import get_logger

if TYPE_CHECKING:
    from moe_serve.config import ServeConfig

# What `moe-serve serve` serves without arguments; configs/demo-cpu.yaml says the same.
DEMO_SETTINGS: Mapping[str, Any] = {
    "model": {"path": "demo"},
    "parallel": {"num_ranks": 2, "device": "cpu"},
    "engine": {"return_routed_experts": True},  # /chat shows them
}

log = get_logger(__name__)

_PANELS = {  # under which heading of --help the options of a section stand
    "model": "Model",
    "parallel": "Ranks and hosts",
    "launcher": "Ranks and hosts",
    "engine": "Engine and KV cache",
    "cache": "Engine and KV cache",
    "speculation": "Engine and KV cache",
    "eplb": "Experts",
    "server": "HTTP server",
}


def setting(key: str, *names: str, help: str = "", sets: object = None, **more: Any) -> Any:
    """Returns a field that stands for a setting; None or False where it is not given.

    key:   "section.name"
    names: of the option; none: the field's
    help:  follows the key; where it does not begin with punctuation, after a colon
    sets:  what an option without a value sets; None: it has a value
    """
    text = key + ("" if help[:1] in ("", ",", ";", " ") else ": ") + help
    shown = typer.Option(*names, help=text, rich_help_panel=_PANELS[key.partition(".")[0]], **more)
    metadata = {"typer": shown, "names": names, "key": key, "sets": sets}
    return field(default=None if sets is None else False, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Where the settings of any command stand."""

    config: Path | None = option(help="YAML file with settings; none: the demo model on this CPU, 2 ranks")
    overrides: list[str] | None = option(
        "--set", metavar="section.key=value", help="override one setting; repeat for more; wins over all"
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ConfigOptions):
    """The options of every command with a model."""

    model_path: str | None = setting(
        "model.path", "--model-path", "--model",
        help="a folder, a GGUF file, a name of the Hugging Face Hub whose files are on this machine, or demo",
    )  # fmt: skip
    num_ranks: int | None = setting("parallel.num_ranks", "--ep-size", "--ep", "--expert-parallel-size", "--num-ranks")
    load_format: str | None = setting("model.load_format", help="auto, or dummy for random weights")
    dtype: str | None = setting("model.dtype", help="auto, float32 or bfloat16")
    speculation: str | None = setting(
        "speculation.mode", "--speculation", "--speculative-algorithm", "--spec-method",
        help="guesses of tokens, which change none: off; from text: lookup; mtp: from the checkpoint's layer for "
        "multi-token prediction (SGLang's nextn); auto: from both, as many as pay (SGLang's ngram)",
    )  # fmt: skip
    speculative_config: str | None = setting(
        "speculation", "--speculative-config", "-sc",
        help='vLLM\'s, as JSON: {"method": "ngram" or "mtp", "num_speculative_tokens": N}, or settings of ours',
    )  # fmt: skip
    spec_tokens: int | None = setting(
        "speculation.num_speculative_tokens", help="vLLM's: drafts of one request in one step, of the layer with mtp"
    )
    speculative_num_draft_tokens: int | None = setting("speculation.max_drafts", help=", of one request in one step")
    speculative_num_steps: int | None = setting(
        "speculation.predicted_drafts", help="; of these, so many are the layer's"
    )

    def flags(self) -> dict[str, dict[str, object]]:
        """Returns the settings of the options that were given, by section. Raises ConfigError where two disagree."""
        given: dict[str, dict[str, object]] = {}
        for each in fields(self):
            value, key, sets = getattr(self, each.name), each.metadata.get("key"), each.metadata.get("sets")
            if key is None or value is None or value is False:
                continue
            section, _, name = key.partition(".")
            found = {name: value if sets is None else sets} if name else _settings_of(section, value)
            for name, one in found.items():
                known = given.setdefault(section, {}).setdefault(name, one)
                if one != known:
                    why = (
                        "; every rank holds experts and its own requests, so the sizes are one number"
                        if key == "parallel.num_ranks"
                        else ""
                    )
                    raise ConfigError(f"{section}.{name} is given as {known} and {one}{why}: give it once")
        return given

    def effective_config(self) -> "ServeConfig":
        """Returns the configuration of the file (without one, the demo's settings), with flags and then `--set` on
        top."""
        from moe_serve.config import DEMO_MODEL, load_config

        above = [self.flags(), *(self.overrides or ())]
        base: Mapping[str, Any] = {}
        if self.config is None:
            two_ranks = {"parallel": {"num_ranks": 2}}
            asked = load_config(overrides=above, base=two_ranks)
            is_demo = asked.model.path == DEMO_MODEL
            base = DEMO_SETTINGS if is_demo else two_ranks  # a model other than the demo may use GPUs
            if is_demo and asked.speculation.mode == "mtp":
                name = "return_routed_experts"
                base = {**base, "engine": {key: value for key, value in base["engine"].items() if key != name}}
                if not asked.engine.return_routed_experts:
                    log.warning(
                        "with --speculation mtp the demo keeps no experts of tokens, so /chat shows none: those of the "
                        "layer that predicts are not those of a token; --speculation auto keeps them"
                    )
        return load_config(self.config, above, base)


@dataclass(frozen=True, kw_only=True)
class NamedModelOptions(ModelOptions):
    """The options of a command whose one argument is the model."""

    model: str | None = field(
        default=None,
        metadata={
            "typer": typer.Argument(
                help="a folder, a GGUF file, a name of the Hugging Face Hub whose files are on this machine, or demo; "
                "the same as --model",
                metavar="[MODEL]",
            ),
            "names": ("MODEL",), "key": "model.path", "sets": None,
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeOptions(NamedModelOptions):
    """The options of `moe-serve serve`."""

    attn_dp_size: int | None = setting(
        "parallel.num_ranks", "--attn-dp-size", "--attention-data-parallel-size", "--dp-size", "--data-parallel-size",
        help=" as well: attention is data-parallel over all ranks",
    )  # fmt: skip
    decode_ranks: int | None = setting(
        "parallel.num_ranks", help=" as well: beside --prefill-ranks they decode, and compute short prompts"
    )
    prefill_ranks: int | None = setting(
        "parallel.num_prefill_ranks", help="ranks that compute prompts with their first token alone; 0: every rank does"
    )

    def _of_role(self, role: str) -> "ServeOptions":
        """Returns these options with the node rank that --disaggregation-mode means; raises ConfigError for none."""
        if role not in ("prefill", "decode"):
            raise ConfigError(f"--disaggregation-mode is {role!r:.40}, expected prefill, decode or null")
        options = replace(self, disaggregation_mode=None)
        config = options.effective_config()
        if config.launcher.nnodes == 1 or not config.parallel.num_prefill_ranks:
            raise ConfigError(
                f"--disaggregation-mode {role} says which ranks this one of several hosts has, beside --prefill-ranks, "
                "--decode-ranks, --nnodes and --dist-init-addr on all; on one host one command starts "
                "ranks of both kinds and routes: leave it out, and give --prefill-ranks and --decode-ranks"
            )
        nodes = config.nodes_of("prefill" if role == "prefill" else "decode")
        is_given = "node_rank" in config.launcher.model_fields_set
        if not is_given and len(nodes) == 1:
            return replace(options, node_rank=nodes[0])
        if not is_given or config.launcher.node_rank not in nodes:
            given = config.launcher.node_rank if is_given else "not given"
            raise ConfigError(
                f"--disaggregation-mode is {role} and --node-rank is {given}, but these ranks are on node rank "
                f"{', '.join(map(str, nodes))}; give one of them, or another --disaggregation-mode"
            )
        return options

    def effective_config(self) -> "ServeConfig":
        if (role := self.disaggregation_mode) is not None and role != "null":  # SGLang's word for none
            return self._of_role(role).effective_config()
        if self.decode_ranks == 0:
            raise ConfigError(
                "--decode-ranks is 0, but prefill ranks compute a prompt with its first token alone; give at least 1"
            )
        config = super().effective_config()
        if self.decode_ranks is not None and not config.parallel.num_prefill_ranks:
            raise ConfigError(
                f"--decode-ranks is {self.decode_ranks}, but there are no prefill ranks; give --prefill-ranks as well, "
                "or --ep for ranks that do both"
            )
        return config

    print_config: bool = option(
        "--print-config", default=False, help="print the effective configuration, a file for --config, and end"
    )
    nnodes: int | None = setting("launcher.nnodes", help="hosts; the same command on each, with its own --node-rank")
    node_rank: int | None = setting("launcher.node_rank", help="which host this is, from 0")
    prefill_nnodes: int | None = setting(
        "launcher.prefill_nnodes", help="with --prefill-ranks, how many of the hosts have these: the last ones"
    )
    disaggregation_mode: str | None = option(
        "--disaggregation-mode", metavar="prefill|decode|null", rich_help_panel=_PANELS["launcher"],
        help="which ranks this one of several hosts has; where one host has all of these, in the place of --node-rank",
    )  # fmt: skip
    dist_init_addr: str | None = setting(
        "launcher.dist_init_addr", metavar="HOST:PORT", help="where the hosts meet: an address of node rank 0"
    )
    front_ends: str | None = setting(
        "launcher.front_ends", help="which hosts take HTTP: first_host, that of node rank 0, or every_host"
    )
    host: str | None = setting("server.host", help="; 0.0.0.0: other machines may connect, see --api-key")
    port: int | None = setting("server.port", help="; 0: any free one")
    served_model_name: list[str] | None = setting(
        "model.served_name", metavar="NAME", help="a name of the model for clients; repeatable, answers have the first"
    )
    device: str | None = setting("parallel.device", help="auto, cpu or cuda")
    context_length: int | None = setting("model.max_model_len", "--context-length", "--max-model-len", help=", tokens")
    skip_tokenizer_init: bool = setting(
        "model.skip_tokenizer", "--skip-tokenizer-init", sets=True, help="ids in, ids out"
    )
    init_expert_location: str | None = setting(
        "eplb.init_expert_location", help="trivial, or a placement file (ours or SGLang's)"
    )
    redundant_experts: int | None = setting(
        "eplb.num_redundant_experts", "--ep-num-redundant-experts", help=", per layer"
    )
    enable_eplb: bool = setting(
        "eplb.mode", "--enable-eplb", sets="dynamic", help="dynamic, experts move while serving"
    )
    eplb_algorithm: str | None = setting("eplb.policy", help=f"{', '.join(SERVED[:-1])} or {SERVED[-1]}")
    eplb_trigger: float | None = setting(
        "eplb.trigger", "--eplb-min-rebalancing-utilization-threshold",
        help="plan layers whose balancedness (mean / max of ranks) is below",
    )  # fmt: skip
    recorder_mode: str | None = setting(
        "eplb.recorder_mode", "--expert-distribution-recorder-mode", help="stat, per_pass or per_token"
    )
    max_running_requests: int | None = setting(
        "engine.max_running_requests", "--max-running-requests", "--max-num-seqs", help=", per rank"
    )
    max_queued_requests: int | None = setting(
        "engine.max_queued_requests", help=", over all ranks; beyond it: HTTP 429"
    )
    chunked_prefill_size: int | None = setting(
        "engine.max_batch_tokens", "--chunked-prefill-size", "--max-num-batched-tokens",
        help="tokens of one step of one rank",
    )  # fmt: skip
    max_logprobs: int | None = setting("engine.max_logprobs", help="likeliest tokens that a request may ask for")
    enable_return_routed_experts: bool = setting(
        "engine.return_routed_experts", "--enable-return-routed-experts", sets=True,
        help="requests may ask for the experts of their tokens",
    )  # fmt: skip
    expert_capacity: float | None = setting(
        "engine.expert_capacity",
        help="of the rows of a rank, an expert takes at most this many times the mean; answers change",
    )
    over_capacity: str | None = setting("engine.over_capacity", help="where the others go: next or drop")
    page_size: int | None = setting("cache.block_size", "--page-size", "--block-size", help=", tokens")
    attention_backend: str | None = setting(
        "engine.attention_backend", help="of GPUs: auto, triton, flashinfer or flashmla"
    )
    kv_cache_dtype: str | None = setting(
        "cache.dtype", help="auto, or int8 or fp8_e4m3: half the memory of bfloat16, answers change a little"
    )
    disable_radix_cache: bool = setting("cache.prefix_cache", "--disable-radix-cache", sets=False, help="false")
    api_key: str | None = option(
        help="a key that clients must send (authorization: Bearer KEY). Other users of this machine see it in the "
        "list of processes: better $MOE_SERVE_API_KEY, or --api-key-file",
        show_default=False,
    )
    admin_api_key: str | None = option(
        help="a key for what changes the server, such as moving experts; better $MOE_SERVE_ADMIN_API_KEY, or "
        "--admin-api-key-file. Without one, this is closed unless --host is this machine's loopback",
        show_default=False,
    )
    api_key_file: str | None = setting(
        "server.api_key_file", help="one key on each line, a name and limits before it or not; mode 600"
    )
    admin_api_key_file: str | None = setting("server.admin_api_key_file", help=", likewise")
    ssl_certfile: str | None = setting("server.ssl_certfile", help="PEM; serves HTTPS")
    ssl_keyfile: str | None = setting("server.ssl_keyfile", help="PEM, without password")
    ssl_ca_certs: str | None = setting("server.ssl_ca_certs", help="clients need a certificate of these")
    allowed_hosts: list[str] | None = setting(
        "server.allowed_hosts", metavar="NAME", help="a name clients may call this server by; repeatable"
    )
    cors_origins: list[str] | None = setting(
        "server.cors_origins", "--cors-origins", "--allowed-origins", metavar="ORIGIN",
        help="a site whose pages may use this server, such as https://a.example; repeatable",
    )  # fmt: skip
    max_connections: int | None = setting("server.max_connections", help=", open at a time")
    api_workers: int | None = setting("server.api_workers", help="processes that serve the port of a host together")
    chat_template: str | None = setting("server.chat_template", help="a file with the jinja template of chats")
    sampling_defaults: str | None = setting(
        "server.sampling_defaults",
        help="what calls of /v1 leave out is as the model recommends (model), or as OpenAI's (openai)",
    )
    reasoning_parser: str | None = setting(
        "server.reasoning_parser", help="how the model marks its reasoning, such as qwen3 or deepseek-r1"
    )
    tool_call_parser: str | None = setting(
        "server.tool_call_parser", help="how the model writes calls of tools, such as qwen25"
    )
    trust_request_chat_template: bool = setting(
        "server.trust_request_chat_template", "--trust-request-chat-template", sets=True,
        help="clients may send a template, which runs in a sandbox",
    )  # fmt: skip
    log_requests: bool = setting(
        "server.log_requests", "--log-requests", "--enable-log-requests", sets=True,
        help="one line for each request that has ended",
    )  # fmt: skip
    log_format: str | None = setting("server.log_format", help="text or json")
    metrics_compat: str | None = setting("server.metrics_compat", help="sglang or vllm; /metrics has these names too")
    profile_dir: str | None = setting("server.profile_dir", help="where POST /stop_profile writes its traces")


def _settings_of(section: str, text: str) -> dict[str, object]:
    """Returns the settings in an option's JSON for a section. Raises ConfigError where it is none."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{section} is {text[:60]!r}, expected JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{section} is {text[:60]!r}, expected a JSON object")
    return values


_SETTING = re.compile(r"(?<![\w.-])([a-z]+\.)?[a-z_]+\b(?![.]\w)")
_SECTION = re.compile(r"configuration: ([a-z]+): ")  # then its settings are named without it


@cache
def flags() -> dict[str, str]:
    """Returns the flag of `moe-serve serve` for each setting that has one."""
    found: dict[str, str] = {}
    for each in fields(ServeOptions):
        if "." in each.metadata.get("key", ""):  # others stand for a section
            flag = next(iter(each.metadata["names"]), "--" + each.name.replace("_", "-"))
            found.setdefault(each.metadata["key"], flag)
    return found


def with_flags(message: str) -> str:
    """Returns a message in which each setting that has a flag is followed by it, where it is first named."""
    known, named = flags(), set[str]()
    section = _SECTION.search(message)

    def add(match: re.Match[str]) -> str:
        name = match[0] if match[1] or section is None else f"{section[1]}.{match[0]}"
        flag = known.get(name)
        if flag is None or name in named or flag in message:
            return match[0]
        named.add(name)
        return f"{match[0]} ({flag})"

    return _SETTING.sub(add, message)
