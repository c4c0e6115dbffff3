"""Facts that must be equal on all ranks: versions, settings, and the files that decide what is computed.

Ranks that differ would serve wrong answers, or wait for each other without end in calls that do not match.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import moe_serve
from moe_serve.config import ServeConfig, model_dir
from moe_serve.links.link import find_link
from moe_serve.models.checkpoint import INDEX, header_bytes, weight_files
from moe_serve.models.model_files import read_bytes
from moe_serve.models.tokenizer import tokenizer_file

# What may differ: where files lie on a host (their contents are compared), how many cores it has.
_OWN_OF_A_RANK = frozenset({
    "model.path", "model.served_name", "parallel.threads_per_rank", "eplb.init_expert_location", "eplb.record_path",
    "eplb.recorder_dir", "launcher.node_rank", "launcher.dist_init_addr",
})  # fmt: skip
# The other settings of `server` are the front end's, or say which of its addresses a host reaches.
_OF_RANKS_IN_SERVER = frozenset(
    {"api_workers", "worker_port", "attach_deadline_s", "worker_deadline_s", "drain_deadline_s"}
)
_TOKEN = "the token ($MOE_SERVE_TOKEN, or server.token_file)"
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
_GGUF_HEADER = "the header of the GGUF file"  # which holds the configuration and the vocabulary
_PAGES = "the names of pages, which say of which files they are, by size and time of change"
_HASHED_BYTES = 32 << 20  # of weights; of a larger checkpoint, samples of its bytes
_SAMPLE_BYTES = 16 << 10
_LARGEST_FILE = 1 << 30


# Where experts and ranks are changes no token.
_NO_VALUES = ("parallel.", "server.", "launcher.", "eplb.", "the file of eplb.")


class Fact(NamedTuple):
    """key: a setting, or what else must be equal;  value: compared;  note: for people, may differ"""

    key: str
    value: str
    note: str = ""


def facts_of(config: ServeConfig, device: str) -> list[Fact]:
    """Returns this rank's facts, in the order in which a difference is reported. device: "cpu" or "cuda"

    Raises ModelError where a file cannot be read, LaunchError where there is no token to trust.
    """
    return [
        Fact("the version of moe_serve", moe_serve.__version__),
        Fact("the version of torch", metadata.version("torch")),
        *_settings(config),
        Fact("the device", device, "parallel.device"),
        Fact(_TOKEN, _of_secret(find_link(config.server).token)),
        *_files(config),
    ]


def launcher_facts(config: ServeConfig) -> list[Fact]:
    """Returns what the launchers of all hosts must have in common; the ranks compare the rest."""
    return [Fact("the version of moe_serve", moe_serve.__version__), *_settings(config)]


def facts_of_values(facts: Sequence[Fact], arithmetic: str, page_key: bytes) -> list[Fact]:
    """Returns what decides about the values that ranks compute and hand over, however many ranks there are.

    facts: of a rank;  arithmetic: in words;  page_key: from which pages of its KV cache have their names
    """
    kept = [fact for fact in facts if not fact.key.startswith(_NO_VALUES) and fact.key != _TOKEN]
    return [*kept, Fact("the arithmetic", arithmetic), Fact(_PAGES, _short(page_key))]


def difference_of_roles(decode: Sequence[Fact], prefill: Sequence[Fact]) -> str | None:
    """Returns a line that names the first difference between the ranks of both roles, and the fix; None: none.

    decode, prefill: from `facts_of_values`; empty: not known yet
    """
    if not decode or not prefill:
        return None
    return first_difference([decode, prefill], "role", ["decode", "prefill"])


def front_end_facts(config: ServeConfig) -> dict[str, str]:
    """Returns the facts that the front end must share with its ranks: the form of messages, and the text of each id.

    Ranks report it in /server_info. Raises ModelError where the tokenizer cannot be read.
    """
    facts = {"version": moe_serve.__version__}
    if not config.model.skip_tokenizer:
        folder = model_dir(config.model)
        path = tokenizer_file(folder) or folder / "tokenizer.json"
        facts |= {_GGUF_HEADER: _digest_of_header(path)} if path == folder else {path.name: _digest_of_file(path)}
    return facts


def front_end_difference(own: Mapping[str, str], rank: int, theirs: object) -> str | None:
    """Returns a line that names the first difference between a rank and this front end, and the fix; None: none.

    theirs: what the rank reported; None = nothing, as a rank of another kind
    """
    if theirs is None or theirs == own:
        return None
    reported = theirs if isinstance(theirs, dict) else {}
    for key, value in own.items():
        if reported.get(key) != value:
            found = str(reported.get(key, "none"))[:40]
            return (
                f"{key} is {value} here and {found} on rank {rank}; start the front end with the ranks' configuration"
            )
    return None


def first_difference(
    facts: Sequence[Sequence[Fact]], noun: str = "rank", numbers: Sequence[int | str] | None = None
) -> str | None:
    """Returns a line that names the first difference between ranks, on which ranks, and the fix; None: all agree.

    facts:   by rank, as `facts_of` returns them
    numbers: of those compared, or their names; None: from 0;  noun: what they are
    """
    tables = [{fact.key: fact for fact in own} for own in facts]
    keys = list(dict.fromkeys(fact.key for own in facts for fact in own))
    absent = Fact("", "not known there")
    unequal = [key for key in keys if len({table.get(key, absent).value for table in tables}) > 1]
    if not unequal:
        return None
    key = unequal[0]
    said = [table.get(key, absent) for table in tables]
    held = by_value([f"{fact.value} ({fact.note})" if fact.note else fact.value for fact in said], noun, numbers)
    also = f"; they also differ in {', '.join(unequal[1:4])}" if len(unequal) > 1 else ""
    also += f" and {len(unequal) - 4} more" if len(unequal) > 4 else ""
    return f"{noun}s differ in {key}: {held}{also}. {_what_to_do(key, noun)}"


def by_value(values: Sequence[str], noun: str = "rank", numbers: Sequence[int | str] | None = None) -> str:
    """Returns such as "a on ranks 0, 2; b on rank 1"."""
    holders: dict[str, list[str]] = {}
    for number, value in zip(numbers or range(len(values)), values, strict=True):
        holders.setdefault(value, []).append(str(number))
    return "; ".join(
        f"{value} on {noun}{'s' if len(who) > 1 else ''} {', '.join(who)}" for value, who in holders.items()
    )


def _what_to_do(key: str, noun: str) -> str:
    if key.startswith("the version"):
        return "Install the same version on all machines"
    if key.startswith("the file"):
        return f"Give all {noun}s the same files"
    if key == _PAGES:
        return f"Give all {noun}s the same files, with their times of change (cp -p, rsync -t)"
    if key == _TOKEN:
        return "Give all ranks and the front end the same token"
    return f"Start all {noun}s with the same configuration file and options"


def _settings(config: ServeConfig) -> Iterator[Fact]:
    for section, values in config.model_dump(mode="json").items():
        for name, value in values.items():
            of_ranks = section != "server" or name in _OF_RANKS_IN_SERVER
            if of_ranks and f"{section}.{name}" not in _OWN_OF_A_RANK:
                yield Fact(f"{section}.{name}", str(value))


def _of_secret(token: str) -> str:
    """Returns 16 bits of a hash: enough to see a difference, too few to find the token from them."""
    return hashlib.blake2b(token.encode(), digest_size=2).hexdigest() if token else "none: the ranks are on one host"


def _files(config: ServeConfig) -> Iterator[Fact]:
    location = config.eplb.init_expert_location
    if location != "trivial":
        yield Fact("the file of eplb.init_expert_location", _digest_of_file(Path(location)), location)
    folder = model_dir(config.model)
    if folder.is_file():
        yield Fact(_GGUF_HEADER, _digest_of_header(folder), str(folder))
    else:
        vocabulary = None if config.model.skip_tokenizer else tokenizer_file(folder)
        for name in (*_MODEL_FILES, *([vocabulary.name] if vocabulary else [])):
            yield Fact(f"the file {name} of the model", _digest_of_file(folder / name), str(folder))
    if config.model.load_format != "dummy":
        headers, values = weight_digests(folder)
        yield Fact("the files of weights: their names, index and headers", headers, str(folder))
        yield Fact("the files of weights: their values", values, str(folder))


def _digest_of_file(path: Path) -> str:
    return _short(read_bytes(path, "check the file", _LARGEST_FILE)) if path.exists() else "missing"


def _digest_of_header(path: Path) -> str:
    return _short(header_bytes(path)[0])


def _short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def weight_digests(folder: Path) -> tuple[str, str]:
    """Returns hashes of a checkpoint: of its index, file names, sizes and headers; and of its values.

    Values are hashed whole up to 32 MiB, else samples of them, spread evenly: other weights differ nearly everywhere.
    """
    headers, values = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    index = folder / INDEX
    if index.exists():
        headers.update(read_bytes(index, "download the file again"))
    files = weight_files(folder)
    budget = _HASHED_BYTES // len(files)
    for path in files:
        data, size = header_bytes(path)
        headers.update(f"{path.name} {size} ".encode() + data)
        with path.open("rb") as file:
            for start, num_bytes in samples(8 + len(data), size, budget):
                file.seek(start)
                values.update(file.read(num_bytes))
    return headers.hexdigest(), values.hexdigest()


def samples(start: int, end: int, budget: int) -> Iterator[tuple[int, int]]:
    """Yields (first byte, number of bytes) of what is hashed of a file: all, or pieces that take `budget` together."""
    if end - start <= budget:
        yield start, end - start
        return
    pieces = max(1, budget // _SAMPLE_BYTES)
    for piece in range(pieces):
        yield start + (end - start - _SAMPLE_BYTES) * piece // max(pieces - 1, 1), _SAMPLE_BYTES
