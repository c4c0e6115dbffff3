"""The section of the configuration for the HTTP front end, and for the address where ranks attach to it."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from moe_serve.config.section import Section


class DegradeStep(Section):
    """Reduces calls once their share of the queue exceeds `above`; a share of its tokens works the same way."""

    above: float = Field(ge=0, lt=1)
    max_new_tokens: PositiveInt | None = None  # of requests that name no length
    min_priority: int | None = None  # calls below it get 429
    max_samples: PositiveInt | None = None  # calls with a larger `n` get 429

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.max_new_tokens is None and self.min_priority is None and self.max_samples is None:
            raise ValueError(
                "a step of server.degrade changes nothing; give max_new_tokens, min_priority or max_samples"
            )
        return self


class ServerConfig(Section):
    """The HTTP front end, and the address where workers attach to it."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = Field(default=30000, le=65535)
    # Processes that serve `port` together, each on a core of its own; only under `moe-serve serve`. One that dies takes
    # its open connections with it, and is started again. Each gets its share of the bounds on what waits or is open;
    # limits of clients hold for all together.
    api_workers: PositiveInt = Field(default=1, le=32)
    worker_host: str = "127.0.0.1"  # where workers reach the front end
    worker_port: NonNegativeInt = Field(default=30001, le=65535)
    # The secret by which front end and ranks trust each other, where $MOE_SERVE_TOKEN does not give it: a file that
    # only its owner reads, made by whoever starts first. None: one of this user on this machine, so worker_host must
    # be its loopback address. `moe-serve serve` needs neither token nor port: it uses sockets in a folder of its own.
    token_file: str | None = None
    max_body_mib: PositiveFloat = 16.0  # a larger HTTP body is refused
    max_bodies_mib: PositiveFloat = 64.0  # of all bodies that are received and parsed at a time; beyond it: HTTP 429
    # Of one client (its API key, or its address where there are no keys). None: half of max_bodies_mib, but one body
    max_bodies_mib_per_client: PositiveFloat | None = None
    # HTTPS: PEM files. ssl_keyfile None: the key is in ssl_certfile. ssl_ca_certs: clients need a certificate of these
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    # Files with one key on each line, a name before it or not, that only their owner may read; the environment's keys
    # ($MOE_SERVE_API_KEY, $MOE_SERVE_ADMIN_API_KEY) count too. Without an API key, anyone who reaches the port is
    # served. Without an admin key, admin routes are closed unless `host` is this machine's loopback. Before the key a
    # line may give limits of its own: NAME rpm_limit=60 tpm_limit=none KEY
    api_key_file: str | None = None
    admin_api_key_file: str | None = None
    # Cached prefixes are each client's own where there are keys: what one has sent, `cached_tokens` and the time of an
    # answer would tell another. true: all keys share them, as all clients do where there are none
    share_prefix_cache: bool = False
    # What one client may ask `/generate` and `/v1` for: by its API key, or by its address where there are no keys.
    # Requests per minute (each output counts), tokens per minute (prompts and outputs), and requests at a time; beyond
    # it: HTTP 429. None: no limit. Admin keys have the limits of their own line alone.
    rpm_limit: PositiveInt | None = None
    tpm_limit: PositiveInt | None = None
    max_parallel_requests: PositiveInt | None = None
    # Names by which clients may call this server, besides addresses and localhost; "*": any. None given: any, except
    # where `host` is loopback: a web page can make its own name point there.
    allowed_hosts: tuple[str, ...] = ()
    # Sites whose pages may use this server from a browser, such as https://a.example
    cors_origins: tuple[str, ...] = ()
    # At a bound on connections, one that waits for a request yields to a new one; where all are busy, that gets a 503.
    # The limit of descriptors is raised to fit at start, and lowers the bound where it cannot be.
    max_connections: PositiveInt = 4096
    max_connections_per_client: PositiveInt | None = None  # of one address; None: half of max_connections
    max_header_kib: PositiveFloat = 16.0
    # Time for a client to send the header of a request (and to shake hands), and its body; and for which a connection
    # without a request stays open.
    header_deadline_s: PositiveFloat = 10.0
    body_deadline_s: PositiveFloat = 60.0
    idle_deadline_s: PositiveFloat = 75.0
    # A client that takes less than 16 KiB in this time, while an answer waits for it, is cut off: its requests end.
    send_deadline_s: PositiveFloat = 30.0
    attach_deadline_s: PositiveFloat = 600.0  # how long the front end waits for all ranks at start
    # A rank ends when the front end is silent for longer than this. A rank is lost when it is silent for longer than
    # this and than engine.step_deadline_s.
    worker_deadline_s: PositiveFloat = 30.0
    # When all ranks are lost and their launcher starts them again, open requests wait so long for them, and go on.
    restart_deadline_s: PositiveFloat = 120.0
    # Prefix and session affinity yield above this gap, in tokens; also where only other ranks have a free slot
    routing_load_gap: NonNegativeFloat = 512.0
    # A request that waits for a rank with `priority: p` is served as if it had come p times this earlier; 0: priorities
    # mean nothing.
    priority_head_start_s: NonNegativeFloat = 1.0
    # A request that runs longer is cut short with finish_reason abort; `timeout` in a request may ask for less. One
    # that waits for a rank longer than queue_deadline_s gets 503.
    request_deadline_s: PositiveFloat | None = None
    queue_deadline_s: PositiveFloat | None = None
    # Prompt and longest output of the requests that wait for a rank; beyond it: HTTP 429, before the body is read.
    max_waiting_tokens: PositiveInt = 1_000_000
    # Reductions while the queue grows, the first steps first, each named in the header
    # x-moe-serve-degraded of the answers that it changes; such as
    # [{above: 0.5, max_new_tokens: 64}, {above: 0.8, min_priority: 0, max_samples: 1}]
    degrade: tuple[DegradeStep, ...] = ()
    # Sampling parameters that a call of /v1 leaves out, such as temperature and top_p: those that the model folder's
    # generation_config.json recommends, or OpenAI's. /generate has SGLang's.
    sampling_defaults: Literal["model", "openai"] = "model"
    # A file with the jinja template that makes a prompt of a chat's messages. None: the model folder's
    chat_template: str | None = None
    trust_request_chat_template: bool = False  # clients may send a template of their own, which runs in a sandbox
    # One line in the log for each request that has ended, up to 200 a second: ids, tokens, times, why; never text
    log_requests: bool = False
    log_format: Literal["text", "json"] = "text"  # of the log of every process
    metrics_compat: Literal["sglang", "vllm"] | None = None  # /metrics has these names too, where they mean the same
    # Where POST /stop_profile writes its traces of steps, their parts, and requests; None: profiles are refused
    profile_dir: str | None = None
    # Parsers of the text of chats, by their names in SGLang and vLLM. reasoning_parser: deepseek-r1,
    # deepseek-v3, qwen3, qwen3-thinking, glm45, minimax-m2, kimi_k2 or gpt-oss; tool_call_parser: hermes, qwen25,
    # qwen3_coder, deepseekv3, deepseekv31, glm45, minimax-m2, kimi_k2, mistral or gpt-oss. None: all text is content.
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    incremental_stream_output: bool = False  # events of a stream hold only what is new, where the request says nothing
    # After SIGTERM open requests have so long to end, and new ones get 503. Kubernetes kills after 30 s by default.
    drain_deadline_s: NonNegativeFloat = 25.0
    health_deadline_s: PositiveFloat = 20.0  # how long /health_generate waits for a token of every rank

    @model_validator(mode="after")
    def _a_body_fits(self) -> Self:
        if self.max_bodies_mib < self.max_body_mib:
            raise ValueError(
                f"max_bodies_mib is {self.max_bodies_mib:g} but one body may have max_body_mib = "
                f"{self.max_body_mib:g}; raise max_bodies_mib"
            )
        own = self.max_bodies_mib_per_client
        if own is not None and own < self.max_body_mib:
            raise ValueError(
                f"max_bodies_mib_per_client is {own:g} but one body may have max_body_mib = {self.max_body_mib:g}; "
                "raise max_bodies_mib_per_client"
            )
        return self

    @model_validator(mode="after")
    def _steps_come_in_order(self) -> Self:
        shares = [step.above for step in self.degrade]
        if shares != sorted(shares):
            raise ValueError(f"degrade has its steps above {shares} of the queue; give them in rising order")
        return self

    @model_validator(mode="after")
    def _keys_have_a_certificate(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("ssl_keyfile or ssl_ca_certs is set without ssl_certfile; set ssl_certfile too")
        return self

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.port and self.port == self.worker_port:
            raise ValueError(f"port and worker_port are both {self.port}; give them different values")
        return self
