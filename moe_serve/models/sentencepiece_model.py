"""Makes a `tokenizers` tokenizer from a sentencepiece file (`tokenizer.model`). Torch-free.

The file is read here, since the `sentencepiece` package does not show a model's options without a protobuf runtime, and
transformers' converter would bring all of transformers. Format: sentencepiece_model.proto of google/sentencepiece. The
rules of the conversion are those of the Llama tokenizers that transformers makes: control symbols become special
tokens, user-defined symbols become added tokens.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moe_serve.errors import ModelError

_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # the type of a piece; 1: normal, 5: unused, 6: a byte
_SPACE = "▁"
_LARGEST_VOCABULARY = 2_000_000
_LONGEST_PIECE = 1024  # characters; merges of a piece are found by cutting it everywhere


@dataclass
class SentencePieceModel:
    """What a file says. Defaults are those of the format."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    charsmap: bytes = b""  # Unicode normalization, compiled; empty = none


def sentencepiece_backend(data: bytes, where: str, legacy: bool) -> Any:
    """Returns the `tokenizers.Tokenizer` of a sentencepiece file.

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
        return _convert(model, legacy)
    except (ValueError, struct.error, IndexError) as error:
        raise ModelError(
            f"{where}: cannot be read as a sentencepiece model ({str(error)[:80]}); copy the file again, or put a "
            "tokenizer.json in the folder"
        ) from None


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Returns what a serialized sentencepiece ModelProto says. Raises ValueError, struct.error or IndexError."""
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
    if not 0 < len(model.pieces) <= _LARGEST_VOCABULARY:
        raise ValueError(f"{len(model.pieces)} pieces")
    if not any(kind == _UNKNOWN for *_, kind in model.pieces):
        raise ValueError("no piece for unknown text")
    return model


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(text) > _LONGEST_PIECE:
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


def _convert(model: SentencePieceModel, legacy: bool) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = next(i for i, piece in enumerate(model.pieces) if piece[2] == _UNKNOWN)
    if model.model_type == _UNIGRAM:
        scored = [(text, score) for text, score, _ in model.pieces]
        core: Any = models.Unigram(scored, unk_id=unknown, byte_fallback=model.byte_fallback)
    else:
        core = models.BPE(
            {text: i for i, (text, _, _) in enumerate(model.pieces)},
            _merges(model.pieces),
            unk_token=model.pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    backend = Tokenizer(core)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if legacy:
        steps += [normalizers.Prepend(_SPACE)] if model.add_dummy_prefix else []
        steps += [normalizers.Replace(" ", _SPACE)]
    else:
        scheme = "first" if model.add_dummy_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else [])
    )
    special = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    backend.add_tokens(
        [AddedToken(text, special=special[kind], normalized=False) for text, _, kind in model.pieces if kind in special]
    )
    return backend


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model: every way to make a piece of two others, the best score first."""
    ids = {text: i for i, (text, _, kind) in enumerate(pieces) if kind not in (_CONTROL, _UNKNOWN, _USER_DEFINED)}
    ways = [
        (-pieces[i][1], ids[text[:cut]], ids[text[cut:]], text[:cut], text[cut:])
        for text, i in ids.items()
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(ways)]
