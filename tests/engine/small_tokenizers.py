"""Small tokenizers of the kinds that models have: of the `tokenizers` library, and from files of other libraries.

byte_level():    every token is bytes (GPT-2, Qwen, DeepSeek); a character may be cut between tokens
byte_fallback(): words of a metaspace vocabulary, and byte tokens for what it lacks (Llama, Mixtral); a run of byte
                 tokens decodes to one U+FFFD per byte while it is not valid UTF-8
metaspace():     words only; the first word of a text loses its leading space
sentencepiece_bpe(), sentencepiece_unigram(): read from a `tokenizer.model`, with byte tokens and without
kimi():          read from a `tiktoken.model`
"""

import base64
import itertools
import struct
from collections.abc import Callable

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers as norms

from moe_serve.models.tokenizer import Tokenizer
from moe_serve.models.tokenizer_conversion import sentencepiece_backend, tiktoken_backend

SPECIALS = ("<unk>", "<s>", "</s>")
EOS = 2
WORDS = ("▁", "▁a", "▁b", "▁the", "re", "a", "b", "c", "e", "h", "t", ".", "\n", "é", "▁▁", "stop")


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *alphabet, "th", "ab", "Ġa", "Ġð"))}
    backend = Backend(models.BPE(vocabulary, [("t", "h"), ("a", "b"), ("Ġ", "a"), ("Ġ", "ð")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend)


def byte_fallback() -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *byte_tokens, *WORDS))}
    backend = Backend(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend)


def metaspace() -> Tokenizer:
    backend = Backend(models.Unigram([(token, -1.0) for token in (*SPECIALS, *WORDS, "\ufffd", "漢")], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Metaspace()
    return _finished(backend)


def sentencepiece_bpe() -> Tokenizer:
    data = sentencepiece_file(bpe_pieces(), model_type=2, byte_fallback=True, remove_extra_whitespaces=False)
    return Tokenizer(sentencepiece_backend(data, "tokenizer.model", legacy=True))


def sentencepiece_unigram() -> Tokenizer:
    data = sentencepiece_file(unigram_pieces(), model_type=1, remove_extra_whitespaces=False)
    return Tokenizer(sentencepiece_backend(data, "tokenizer.model", legacy=False))


def kimi() -> Tokenizer:
    first = len(RANKS)
    named = {str(first + i): {"content": name, "special": True} for i, name in enumerate(SPECIALS)}
    settings = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": named}
    return Tokenizer(tiktoken_backend(ranks_file(RANKS), "tiktoken.model", settings))


KINDS: tuple[Callable[[], Tokenizer], ...] = (
    byte_level,
    byte_fallback,
    metaspace,
    sentencepiece_bpe,
    sentencepiece_unigram,
    kimi,
)

Piece = tuple[str, float, int]  # text, score, type as in sentencepiece_model.proto
_SPECIAL_PIECES: list[Piece] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
MERGED = ("▁a", "▁b", "th", "▁th", "▁the", "re", "▁▁", "aa", "aaa")
RANKS = [
    *(bytes([i]) for i in range(256)),
    b"th",
    b"ab",
    b" a",
    b" the",
    b"the",
    "你".encode()[:2],
    "é".encode(),
    b"\n\n",
]


def bpe_pieces() -> list[Piece]:
    """Pieces of a BPE vocabulary: a byte each, what can be merged (the first ones first), and single characters."""
    pieces = [*_SPECIAL_PIECES, *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256))]
    words = (*MERGED, "▁", *"abcehrt.\né")
    return [*pieces, *((word, -float(i), 1) for i, word in enumerate(words))]


def unigram_pieces() -> list[Piece]:
    words = (*MERGED, "▁", *"abcehrt.\né漢\ufffd")
    return [*_SPECIAL_PIECES, *((word, -1.0 - 0.37 * i, 1) for i, word in enumerate(words))]


def sentencepiece_file(
    pieces: list[Piece],
    model_type: int,
    byte_fallback: bool = False,
    add_dummy_prefix: bool = True,
    remove_extra_whitespaces: bool = True,
    charsmap: bytes = b"",
) -> bytes:
    """Returns a serialized sentencepiece ModelProto."""
    data = b"".join(
        _bytes(1, _bytes(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _varint(3, kind))
        for text, score, kind in pieces
    )
    data += _bytes(2, _varint(3, model_type) + _varint(35, byte_fallback))
    spec = _bytes(1, b"identity") + (_bytes(2, charsmap) if charsmap else b"")
    return data + _bytes(3, spec + _varint(3, add_dummy_prefix) + _varint(4, remove_extra_whitespaces))


def ranks_file(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def _varint(number: int, value: int) -> bytes:
    return _base_128(number << 3) + _base_128(int(value))


def _bytes(number: int, value: bytes) -> bytes:
    return _base_128(number << 3 | 2) + _base_128(len(value)) + value


def _base_128(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _finished(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return Tokenizer(backend)


def eos_of(tokenizer: Tokenizer) -> int:
    return tokenizer.encode("</s>", add_special_tokens=False)[0]


def vocab_size(tokenizer: Tokenizer) -> int:
    return next(token_id for token_id in itertools.count() if tokenizer.token_of(token_id) is None)
