"""Makes a `tokenizers` tokenizer from a file of tiktoken ranks. Torch-free.

Such a file holds only the tokens. How text is split before and which special tokens follow stands in Python code beside
it, which is never run: both are written here for the families that are known, and others are refused by name.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.errors import ModelError

_FIX = "put a tokenizer.json in the folder, or set model.skip_tokenizer: true and send input_ids"
_LARGEST_VOCABULARY = 2_000_000
_LONGEST_TOKEN = 1024  # bytes; merges of a token are found by cutting it everywhere
_APOSTROPHE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"


@dataclass(frozen=True)
class Family:
    """What the Python code of one family of tokenizers says. pattern: Oniguruma's syntax, as `tokenizers` has it"""

    pattern: str
    num_reserved: int  # special tokens that follow the ranks: named in tokenizer_config.json, or after their id


FAMILIES: Mapping[str, Family] = {  # by the tokenizer_class of tokenizer_config.json
    "TikTokenTokenizer": Family(  # Kimi-K2, Moonlight
        pattern="|".join(
            (
                r"[\p{Han}]+",
                f"{_FIRST}{_UPPER}*{_LOWER}+{_APOSTROPHE}",
                f"{_FIRST}{_UPPER}+{_LOWER}*{_APOSTROPHE}",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
        num_reserved=256,
    )
}


def tiktoken_backend(data: bytes, where: str, settings: Mapping[str, Any]) -> Any:
    """Returns the `tokenizers.Tokenizer` of a file of ranks. settings: tokenizer_config.json

    Raises ModelError for a family that is not known, and for a file that cannot be read.
    """
    name = settings.get("tokenizer_class")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"{where}: belongs to the tokenizer class {str(name)[:80]!r}, whose way to split text is only in its "
            f"Python code, which is not run; known: {known}; {_FIX}"
        )
    try:
        ranks = read_ranks(data)
    except ValueError as error:
        raise ModelError(
            f"{where}: cannot be read as tiktoken ranks ({str(error)[:80]}); copy the file again"
        ) from None
    return _convert(ranks, family, _named(settings, where), where)


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Returns the rank, which is its id, of each token. Raises ValueError for lines that are not `base64 rank`."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split()
        if len(parts) != 2:
            raise ValueError(f"line {number}: {len(parts)} words, expected a token and its rank")
        token = base64.b64decode(parts[0], validate=True)
        if not 0 < len(token) <= _LONGEST_TOKEN or token in ranks:
            raise ValueError(f"line {number}: a token that is empty, too long or twice there")
        ranks[token] = int(parts[1])
    if not 0 < len(ranks) <= _LARGEST_VOCABULARY:
        raise ValueError(f"{len(ranks)} tokens")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("the ranks are not 0, 1, 2 and so on")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ValueError(f"byte {missing} is no token")
    return ranks


def _named(settings: Mapping[str, Any], where: str) -> dict[int, tuple[str, bool]]:
    """Returns (text, whether special) of the added tokens that tokenizer_config.json names."""
    given = settings.get("added_tokens_decoder") or {}
    try:
        return {int(key): (str(value["content"]), bool(value.get("special", True))) for key, value in given.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(
            f"{where}: added_tokens_decoder of tokenizer_config.json beside it cannot be read; copy that file again"
        ) from None


def _convert(ranks: dict[bytes, int], family: Family, named: dict[int, tuple[str, bool]], where: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    shown = _byte_characters()

    def text(token: bytes) -> str:
        return "".join(shown[byte] for byte in token)

    # tiktoken merges any two neighbours whose bytes together are a token, the lowest rank first.
    ways = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token, cut)
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges = [(text(token[:cut]), text(token[cut:])) for *_, token, cut in sorted(ways)]
    # ignore_merges: a whole piece of text that is a token is that token, whether or not merges lead there.
    core = models.BPE({text(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    backend = Tokenizer(core)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    first = len(ranks)
    reserved = [
        named.get(token_id, (f"<|reserved_token_{token_id}|>", True))
        for token_id in range(first, first + family.num_reserved)
    ]
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name, special in reserved])
    if backend.get_vocab_size() != first + len(reserved):
        raise ModelError(
            f"{where}: two special tokens of tokenizer_config.json beside it are the same; copy that file again"
        )
    return backend


def _byte_characters() -> list[str]:
    """Returns the character by which byte-level tokenizers write each byte: its own where it is visible (GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    moved = {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]
