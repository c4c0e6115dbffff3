"""Options of SGLang and vLLM that ask for what is not built, or is another setting here: each is refused in words.

Those that mean the same as a setting of ours are options of `moe-serve serve`.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from moe_serve.errors import ConfigError

_HOW = "every rank computes attention for its own requests, and experts are spread over all ranks"
# Patterns of names, and the end of a sentence that begins with the name. {ranks}: what gives the number of ranks
_REFUSED: Sequence[tuple[tuple[str, ...], str]] = (
    (
        ("-tp", "--tp", "--tp-size", "--tensor-parallel-size"),
        f"asks for tensor parallelism, which is not supported: {_HOW}; leave it out, and give the number of ranks by "
        "{ranks}",
    ),
    (
        ("-pp", "--pp", "--pp-size", "--pipeline-parallel-size"),
        f"asks for pipeline parallelism, which is not supported: {_HOW}; leave it out, and give the number of ranks "
        "by {ranks}",
    ),
    (
        ("-dcp", "-pcp", "--*context-parallel-size", "--attn-cp-size"),
        "asks for context parallelism, which is not supported: a request has its context on one rank; leave it out",
    ),
    (
        ("-ep", "--enable-expert-parallel", "--enable-dp-attention"),
        f"is not needed: {_HOW}; leave it out, and give the number of ranks by {{ranks}}",
    ),
    (
        ("--enable-lora", "--lora-*", "--max-lora*"),
        "asks for LoRA adapters, which are not supported; merge the adapter into the model's weights",
    ),
    (
        ("-sc", "--speculative-*"),
        "asks for speculative decoding, which is not supported; leave it out",
    ),
    (
        ("-q", "--quantization", "--torchao-config"),
        "is not an option: FP8 and MXFP4 checkpoints are served as they are; others are stored as "
        "model.expert_weights says (docs/numerics.md)",
    ),
    (
        ("--kv-cache-dtype",),
        "is not an option: the cache has the dtype of the computation; leave it out, or set model.dtype",
    ),
    (
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        "is not an option: the cache of a rank has a size of its own; set cache.memory_gib",
    ),
    (
        ("--disaggregation-*", "--kv-transfer-config"),
        "asks for prefill and decode on separate servers, which is not supported; leave it out",
    ),
    (
        ("--nnodes", "--node-rank", "--dist-init-addr", "--master-addr", "--master-port"),
        "is not an option: ranks on several hosts are started by torchrun or mpirun, beside moe-serve frontend",
    ),
    (
        ("--tokenizer", "--tokenizer-path"),
        "is not an option: the tokenizer is that of the model's folder; leave it out",
    ),
    (
        ("--trust-remote-code",),
        "is not an option: code in a model's folder is never run; leave it out",
    ),
)


def refusal(option: str, ranks: str = "--ep") -> str | None:
    """Returns why an option is refused, the end of a sentence that begins with it; None: it is none of these.

    ranks: the option for the number of ranks
    """
    for patterns, words in _REFUSED:
        if any(fnmatchcase(option, pattern) for pattern in patterns):
            return words.format(ranks=ranks)
    return None


def refuse_unsupported(arguments: Sequence[str]) -> None:
    """Raises ConfigError for the first of these options among the arguments of a command that starts ranks."""
    for argument in arguments:
        if argument == "--":
            return
        option = argument.partition("=")[0]
        if (words := refusal(option)) is not None:
            raise ConfigError(f"{option} {words}")
