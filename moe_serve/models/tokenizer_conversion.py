"""Makes a `tokenizers` tokenizer from a sentencepiece file (`tokenizer.model`) or tiktoken ranks (`tiktoken.model`).

Both files are read here. The converter of transformers 5 needs transformers, sentencepiece and protobuf, and for a
small BPE file it gave other ids than sentencepiece for 177 of 3,000 random texts. Tests compare this one with
sentencepiece and tiktoken themselves.
"""

import base64
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_serve.errors import ModelError

LARGEST_VOCABULARY = 2_000_000
_LONGEST_TOKEN = 1024  # bytes; merges of a token are found by cutting it everywhere

# ---- sentencepiece

_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # the type of a piece; 1: normal, 5: unused, 6: a byte
SPACE = "▁"  # as sentencepiece writes it


@dataclass
class SentencePieceModel:
    """The contents of a sentencepiece file, with the format's defaults."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    charsmap: bytes = b""  # Unicode normalization, compiled; empty = none


def sentencepiece_backend(data: bytes, where: str, legacy: bool) -> Any:
    """Returns the `tokenizers.Tokenizer` of a sentencepiece file.

    As in the Llama tokenizers of transformers, control symbols become special tokens and user-defined symbols become
    added tokens.

    legacy: as in tokenizer_config.json. True: text after an added token gets a leading space, too, as in older Llamas;
            False: that text does not, and neither does a text that begins with a space

    Raises ModelError for data that is no such file, and for kinds that are not converted.
    """
    try:
        model = read_sentencepiece(data)
        if model.model_type not in (_UNIGRAM, _BPE):
            raise ModelError(
                f"{where}: holds a sentencepiece model of words or characters, only unigram and BPE are converted; put "
                "a tokenizer.json in the folder"
            )
        return convert_sentencepiece(model, legacy)
    except (ValueError, struct.error, IndexError) as error:
        raise ModelError(
            f"{where}: cannot be read as a sentencepiece model ({str(error)[:80]}); copy the file again, or put a "
            "tokenizer.json in the folder"
        ) from None


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Reads a serialized ModelProto (sentencepiece_model.proto of google/sentencepiece).

    Raises ValueError, struct.error or IndexError.
    """
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            model.pieces.append(_piece(value))
        elif number == 2 and isinstance(value, bytes):
            spec = dict(_fields(value))
            model.model_type = _number(spec.get(3, _UNIGRAM))
            model.byte_fallback = bool(_number(spec.get(35, 0)))
        elif number == 3 and isinstance(value, bytes):
            spec = dict(_fields(value))
            charsmap = spec.get(2, b"")
            model.charsmap = charsmap if isinstance(charsmap, bytes) else b""
            model.add_dummy_prefix = bool(_number(spec.get(3, 1)))
            model.remove_extra_whitespaces = bool(_number(spec.get(4, 1)))
    if not 0 < len(model.pieces) <= LARGEST_VOCABULARY:
        raise ValueError(f"{len(model.pieces)} pieces")
    if not any(kind == UNKNOWN for *_, kind in model.pieces):
        raise ValueError("no piece for unknown text")
    return model


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(text) > _LONGEST_TOKEN:
        raise ValueError("a piece without text")
    return text.decode(), struct.unpack("<f", score)[0], _number(fields.get(3, 1))


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number belongs")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, value) of each field of a protobuf message: an int of a varint, else the bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == 2:
            length, at = _varint(data, at)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + length > len(data):
            raise ValueError("ends inside a field")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")


def convert_sentencepiece(model: SentencePieceModel, legacy: bool) -> Any:
    """Returns the `tokenizers.Tokenizer` of a model. legacy: as in `sentencepiece_backend`"""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = model.pieces
    unknown = next(i for i, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN)
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    if model.model_type == _UNIGRAM:
        scored = [(text, score) for text, score, _ in pieces]
        core: Any = models.Unigram(scored, unk_id=unknown, byte_fallback=model.byte_fallback)
    else:
        core = models.BPE(
            {text: i for i, (text, _, _) in enumerate(pieces)},
            _merges(
                {text: i for i, (text, _, kind) in enumerate(pieces) if kind not in special},
                lambda i: -pieces[i][1],
            ),
            unk_token=pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    backend = Tokenizer(core)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if legacy:
        steps += [normalizers.Prepend(SPACE)] if model.add_dummy_prefix else []
        steps += [normalizers.Replace(" ", SPACE)]
    else:
        scheme = "first" if model.add_dummy_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else [])
    )
    backend.add_tokens(
        [AddedToken(text, special=special[kind], normalized=False) for text, _, kind in pieces if kind in special]
    )
    return backend


def _merges(ids: Mapping[str, int], priority: Callable[[int], float]) -> list[tuple[str, str]]:
    """Returns every way to make a token of two others, the lowest priority first, then by the ids of both parts.

    ids: of the tokens that may be merged, by their text;  priority: of a token id
    """
    ways = [
        (priority(token_id), ids[text[:cut]], ids[text[cut:]], text, cut)
        for text, token_id in ids.items()
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    return [(text[:cut], text[cut:]) for *_, text, cut in sorted(ways)]


# ---- tiktoken
# Such a file holds only the tokens. How text is split and which special tokens follow stands in Python code beside it,
# which is never run: both are written here for the one known class, and others are refused by name.

KNOWN_CLASS = "TikTokenTokenizer"  # tokenizer_class of Kimi-K2 and Moonlight
_NUM_RESERVED = 256  # special tokens that follow the ranks: named in tokenizer_config.json, or after their id
_APOSTROPHE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(  # how it splits text, in Oniguruma's syntax, as `tokenizers` has it
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
)


def tiktoken_backend(data: bytes, where: str, settings: Mapping[str, Any]) -> Any:
    """Returns the `tokenizers.Tokenizer` of a file of ranks. settings: tokenizer_config.json

    Raises ModelError for a tokenizer class that is not known, and for a file that cannot be read.
    """
    name = settings.get("tokenizer_class")
    if name != KNOWN_CLASS:
        raise ModelError(
            f"{where}: belongs to the tokenizer class {str(name)[:80]!r}, whose way to split text is only in its "
            f"Python code, which is not run; known: {KNOWN_CLASS}; put a tokenizer.json in the folder, or set "
            "model.skip_tokenizer: true and send input_ids"
        )
    try:
        ranks = read_ranks(data)
    except ValueError as error:
        raise ModelError(
            f"{where}: cannot be read as tiktoken ranks ({str(error)[:80]}); copy the file again"
        ) from None
    return _convert_tiktoken(ranks, _named(settings, where), where)


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Returns the rank of each token, which is its id. Raises ValueError for lines that are not `base64 rank`."""
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
    if not 0 < len(ranks) <= LARGEST_VOCABULARY:
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


def _convert_tiktoken(ranks: dict[bytes, int], named: dict[int, tuple[str, bool]], where: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = byte_characters()
    ids = {"".join(characters[byte] for byte in token): rank for token, rank in ranks.items()}
    # tiktoken merges any two neighbours whose bytes together are a token, the lowest rank first; a whole piece of text
    # that is a token is that token, whether or not merges lead there.
    backend = Tokenizer(models.BPE(ids, _merges(ids, lambda rank: rank), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    reserved = [
        named.get(token_id, (f"<|reserved_token_{token_id}|>", True))
        for token_id in range(len(ids), len(ids) + _NUM_RESERVED)
    ]
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name, special in reserved])
    if backend.get_vocab_size() != len(ids) + _NUM_RESERVED:
        raise ModelError(
            f"{where}: two special tokens of tokenizer_config.json beside it are the same; copy that file again"
        )
    return backend


def byte_characters() -> list[str]:
    """Returns the character by which byte-level tokenizers write each byte: its own where it is visible (GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    moved = {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]
