"""The options of `moe-serve serve`: the setting that each stands for, and its flag in messages about the setting."""

import re
from dataclasses import asdict, dataclass
from functools import cache
from typing import get_type_hints

import moe_serve.launcher.cli.options as opt

SETTINGS = {  # of the options with a value
    "model_path": "model.path",
    "num_ranks": "parallel.num_ranks",
    "attn_dp_size": "parallel.num_ranks",
    "host": "server.host",
    "port": "server.port",
    "served_model_name": "model.served_name",
    "load_format": "model.load_format",
    "dtype": "model.dtype",
    "device": "parallel.device",
    "context_length": "model.max_model_len",
    "init_expert_location": "eplb.init_expert_location",
    "redundant_experts": "eplb.num_redundant_experts",
    "eplb_algorithm": "eplb.policy",
    "eplb_trigger": "eplb.trigger",
    "recorder_mode": "eplb.recorder_mode",
    "max_running_requests": "engine.max_running_requests",
    "max_queued_requests": "engine.max_queued_requests",
    "chunked_prefill_size": "engine.max_batch_tokens",
    "max_logprobs": "engine.max_logprobs",
    "page_size": "cache.block_size",
    "api_key_file": "server.api_key_file",
    "admin_api_key_file": "server.admin_api_key_file",
    "ssl_certfile": "server.ssl_certfile",
    "ssl_keyfile": "server.ssl_keyfile",
    "ssl_ca_certs": "server.ssl_ca_certs",
    "allowed_hosts": "server.allowed_hosts",
    "cors_origins": "server.cors_origins",
    "max_connections": "server.max_connections",
    "api_workers": "server.api_workers",
    "chat_template": "server.chat_template",
    "sampling_defaults": "server.sampling_defaults",
    "log_format": "server.log_format",
    "metrics_compat": "server.metrics_compat",
    "profile_dir": "server.profile_dir",
    "reasoning_parser": "server.reasoning_parser",
    "tool_call_parser": "server.tool_call_parser",
}
FLAGS = {  # of those without one: the setting, and what it becomes
    "skip_tokenizer_init": ("model.skip_tokenizer", True),
    "enable_eplb": ("eplb.mode", "dynamic"),
    "disable_radix_cache": ("cache.prefix_cache", False),
    "trust_request_chat_template": ("server.trust_request_chat_template", True),
    "log_requests": ("server.log_requests", True),
}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `moe-serve serve`: most are one setting each."""

    config: opt.Config = None
    overrides: opt.Overrides = None
    print_config: opt.PrintConfig = False
    model_path: opt.ModelPath = None
    num_ranks: opt.NumRanks = None
    attn_dp_size: opt.AttentionSize = None
    host: opt.Host = None
    port: opt.Port = None
    served_model_name: opt.ServedName = None
    load_format: opt.LoadFormat = None
    dtype: opt.Dtype = None
    device: opt.Device = None
    context_length: opt.ContextLength = None
    skip_tokenizer_init: opt.SkipTokenizer = False
    init_expert_location: opt.InitExpertLocation = None
    redundant_experts: opt.RedundantExperts = None
    enable_eplb: opt.EnableEplb = False
    eplb_algorithm: opt.EplbAlgorithm = None
    eplb_trigger: opt.EplbTrigger = None
    recorder_mode: opt.RecorderMode = None
    max_running_requests: opt.MaxRunning = None
    max_queued_requests: opt.MaxQueued = None
    chunked_prefill_size: opt.MaxBatchTokens = None
    max_logprobs: opt.MaxLogprobs = None
    page_size: opt.PageSize = None
    disable_radix_cache: opt.NoPrefixCache = False
    api_key: opt.ApiKey = None
    admin_api_key: opt.AdminApiKey = None
    api_key_file: opt.ApiKeyFile = None
    admin_api_key_file: opt.AdminApiKeyFile = None
    ssl_certfile: opt.SslCertfile = None
    ssl_keyfile: opt.SslKeyfile = None
    ssl_ca_certs: opt.SslCaCerts = None
    allowed_hosts: opt.AllowedHosts = None
    cors_origins: opt.CorsOrigins = None
    max_connections: opt.MaxConnections = None
    api_workers: opt.ApiWorkers = None
    chat_template: opt.ChatTemplate = None
    sampling_defaults: opt.SamplingDefaults = None
    reasoning_parser: opt.ReasoningParser = None
    tool_call_parser: opt.ToolCallParser = None
    trust_request_chat_template: opt.TrustChatTemplate = False
    log_requests: opt.LogRequests = False
    log_format: opt.LogFormat = None
    metrics_compat: opt.MetricsCompat = None
    profile_dir: opt.ProfileDir = None

    def settings(self) -> dict[str, list[object]]:
        """Returns the values of all options of each setting; those that were not given are None."""
        found: dict[str, list[object]] = {setting: [] for setting in SETTINGS.values()}
        given = asdict(self)
        for option, setting in SETTINGS.items():
            value = given[option]
            found[setting].append(tuple(value) if isinstance(value, list) else value)
        return found | {setting: [value] for option, (setting, value) in FLAGS.items() if given[option]}


_SETTING = re.compile(r"(?<![\w.-])([a-z]+\.)?[a-z_]+\b(?![.]\w)")
_SECTION = re.compile(r"configuration: ([a-z]+): ")  # then its settings are named without it


@cache
def flags() -> dict[str, str]:
    """Returns the flag of `moe-serve serve` for each setting that has one."""
    hints = get_type_hints(ServeOptions, include_extras=True)
    settings = SETTINGS | {option: setting for option, (setting, _) in FLAGS.items()}
    found: dict[str, str] = {}
    for option, setting in settings.items():
        given = hints[option].__metadata__[0]  # typer takes the first name for a default, and looks at it later
        names = [name for name in (given.default, *given.param_decls) if isinstance(name, str)]
        found.setdefault(setting, names[0] if names else "--" + option.replace("_", "-"))
    return found


def with_flags(message: str) -> str:
    """Returns a message in which each setting that has a flag is followed by it, where it is first named."""
    known, named = flags(), set[str]()
    section = _SECTION.search(message)

    def add(match: re.Match[str]) -> str:
        setting = match[0] if match[1] or section is None else f"{section[1]}.{match[0]}"
        flag = known.get(setting)
        if flag is None or setting in named or flag in message:
            return match[0]
        named.add(setting)
        return f"{match[0]} ({flag})"

    return _SETTING.sub(add, message)
