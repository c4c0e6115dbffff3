"""Checks before anything is started: files that a configuration or a command names, options that are not supported.

Nothing heavy is imported at once: every command begins here.
"""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from moe_serve.errors import CapacityError, ConfigError, ModelError
from moe_serve.log import get_logger
from moe_serve.process_facts import is_private, not_private

if TYPE_CHECKING:
    from moe_serve.config import ServeConfig
    from moe_serve.models.spec import ModelSpec
    from moe_serve.models.tokenizer import Tokenizer

log = get_logger(__name__)


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA's driver, AMD's, and of Windows' Linux


def look_for_files(config: "ServeConfig") -> None:
    """Raises ModelError or ConfigError naming the first file that is missing or does not fit, and what to do.

    Model folders may be hostile: what is read here is bounded, and nothing hangs on a pipe.
    """
    from moe_serve.config import hub_cache, is_hub_name, model_dir
    from moe_serve.models.checkpoint import all_tensors
    from moe_serve.models.checkpoint_parts import CheckpointParts
    from moe_serve.models.families.registry import read_spec
    from moe_serve.models.tokenizer import Tokenizer

    folder = model_dir(config.model)
    if not folder.exists() and is_hub_name(config.model.path):
        raise ModelError(
            f"model.path is {config.model.path!r}, which is no folder here, and {hub_cache()} has no such model; "
            f"nothing is downloaded: run `hf download {config.model.path}` first, then serve it by this name"
        )
    if not folder.exists():
        raise ModelError(
            f"model.path is {config.model.path!r} but there is no such folder or file; give the folder of a Hugging "
            "Face model, a GGUF file, or demo"
        )
    spec = read_spec(folder)
    longest, wanted = spec.max_position, config.model.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"model.max_model_len is {wanted} but the model knows {longest} positions; lower max_model_len"
        )
    if config.model.load_format != "dummy":
        CheckpointParts(spec, all_tensors(folder)).check(folder)
    if has_tokenizer(config):
        Tokenizer.from_folder(folder)  # a front end that cannot read it would end while the ranks load
    location = config.eplb.init_expert_location
    if location != "trivial" and not Path(location).is_file():
        raise ConfigError(f"eplb.init_expert_location is {location!r} but there is no such file; correct the path")
    _check_memory(config, spec)
    if config.parallel.num_prefill_ranks and config.parallel.device == "auto" and Path("/dev/nvidiactl").exists():
        raise ConfigError(
            "parallel.num_prefill_ranks is above 0 and this machine has a GPU, but prefill ranks are on CPUs; set "
            "parallel.num_prefill_ranks: 0, or parallel.device: cpu"
        )
    if config.speculation.mode == "mtp":
        from moe_serve.engine.model.predictor_plan import with_predictor

        with_predictor(config, spec, None if config.model.load_format == "dummy" else folder, on_gpu=False)
    if config.speculation.reads_text:
        from moe_serve.attention_dp.text_index import index_library

        index_library()
    look_at_secrets(config)
    look_where_to_write(config)
    if config.parallel.device == "cuda" and not any(map(os.path.exists, _GPU_DEVICES)):
        raise ConfigError("parallel.device is cuda but this machine has no GPU; set parallel.device: cpu")


def _check_memory(config: "ServeConfig", spec: "ModelSpec") -> None:
    """Raises CapacityError where one CPU rank's weights cannot fit this machine, however small they are stored."""
    if config.parallel.device == "cuda" or (config.parallel.device == "auto" and Path("/dev/nvidiactl").exists()):
        return
    from moe_serve.models.weight_plan import dense_parameters

    experts = spec.num_moe_layers * spec.num_logical * spec.expert_parameters
    least_bytes = dense_parameters(spec) + experts // config.parallel.num_ranks  # one byte each
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if least_bytes > memory_bytes:
        raise CapacityError(
            f"the weights of one rank take at least {least_bytes / 2**30:.0f} GiB and this machine has "
            f"{memory_bytes / 2**30:.0f} GiB of memory; use more ranks on more machines, or correct config.json"
        )


def look_at_secrets(config: "ServeConfig") -> None:
    """Raises ConfigError where the files for TLS or with API keys, or names of parsers, cannot be used."""
    from moe_serve.server.api.parsed_output import OutputParsers
    from moe_serve.server.edge.keys import KeyRing
    from moe_serve.server.edge.ports import make_tls

    make_tls(config.server)
    OutputParsers(config.server, None)
    KeyRing.load(config.server)


def look_where_to_write(config: "ServeConfig") -> None:
    """Raises ConfigError where eplb.record_path or cache.path cannot be written: ranks would find out later."""
    path = None if config.eplb.record_path is None else Path(config.eplb.record_path)
    if path is not None and path.exists() and not path.is_file():
        raise ConfigError(f"eplb.record_path: {path} is not a regular file; name one in a folder that exists")
    check_output(path, "eplb.record_path")
    if config.cache.path is not None:
        _check_page_folder(Path(config.cache.path).expanduser())


def _check_page_folder(path: Path) -> None:
    """Raises ConfigError where a folder for pages of the KV cache cannot be made or used."""
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    problem = None if os.access(nearest, os.W_OK | os.X_OK) else "Permission denied"
    if not nearest.is_dir():
        problem = f"{nearest} is not a folder"
    if problem is not None:
        raise ConfigError(
            f"cache.path {path} cannot be written ({problem}); name a folder that can, or leave out cache.disk_gb"
        )
    if nearest == path and not is_private(path.stat()):
        raise ConfigError(not_private("cache.path", path))


def check_output(path: Path | None, name: str) -> None:
    """Raises ConfigError where a file cannot be written, before the work whose result goes there.

    name: of the option or setting that names the file
    """
    if path is None:
        return
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "Permission denied"
    else:
        return
    raise ConfigError(f"{name}: {path} cannot be written ({problem}); name a file in a folder that exists")


def has_tokenizer(config: "ServeConfig") -> bool:
    """Returns whether text is served; without a tokenizer, token ids alone are."""
    from moe_serve.config import model_dir
    from moe_serve.models.tokenizer import tokenizer_file

    return not config.model.skip_tokenizer and tokenizer_file(model_dir(config.model)) is not None


def load_tokenizer(config: "ServeConfig") -> "Tokenizer | None":
    """Returns the tokenizer of the model, None without one; a log line says so when the model folder lacks it."""
    from moe_serve.config import model_dir
    from moe_serve.models.tokenizer import Tokenizer

    folder = model_dir(config.model)
    if has_tokenizer(config):
        return Tokenizer.from_folder(folder)
    if not config.model.skip_tokenizer:
        log.warning("%s has no tokenizer.json: only token ids are served; put it there to serve text", folder)
    return None


_HOW = "every rank computes attention for its own requests, and experts are spread over all ranks"
# Options of SGLang and vLLM that ask for what is not built, or are another setting here. Those that mean the same as a
# setting of ours are options of `moe-serve serve`. Each row: patterns of names, and the end of a sentence that begins
# with the name. {ranks}: the option that gives the number of ranks
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
        (
            *("--spec-model", "--speculative-draft-*", "--speculative-token-map"),
            *("--speculative-dflash-*", "--speculative-dspark-*"),
        ),
        "asks for drafts by a model of its own, which are not supported; those from text come by --speculation auto, "
        "those of the checkpoint's layer for multi-token prediction by --speculation mtp",
    ),
    (
        ("--speculative-eagle-topk",),
        "is not an option: the layer for multi-token prediction guesses one token after another, as with 1; leave it "
        "out, and give how many by --speculative-num-steps",
    ),
    (
        ("--speculative-ngram-*", "--speculative-accept-*", "--speculative-adaptive*"),
        "is not an option: the longest match in text is taken, as many of its tokens are verified as pay by measured "
        "times, and one counts where it is the token that is drawn; leave it out",
    ),
    (
        ("-q", "--quantization", "--torchao-config"),
        "is not an option: FP8 and MXFP4 checkpoints are served as they are; others are stored as "
        "model.expert_weights says (docs/numerics.md)",
    ),
    (
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        "is not an option: the cache of a rank has a size of its own; set cache.memory_gib",
    ),
    (
        ("--disaggregation-[!m]*", "--kv-transfer-config"),
        "is for two servers with a router before them; here one command starts ranks of both kinds and routes: leave "
        "it out, and give moe-serve serve --prefill-ranks P --decode-ranks D with as many ranks as these servers had",
    ),
    (
        ("--enable-hierarchical-cache", "--hicache-*", "--kv-offloading-*", "--swap-space"),
        "is not an option: prefixes beyond the KV cache lie in memory of the size cache.host_gb, and in files of the "
        "size cache.disk_gb in cache.path; leave it out, and set these",
    ),
    (
        ("--master-addr", "--master-port", "--nccl-init-addr"),
        "is not an option: several hosts meet at --dist-init-addr HOST:PORT, beside --nnodes and --node-rank",
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
