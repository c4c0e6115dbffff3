"""The bytes that each token of a vocabulary stands for, whatever kind of tokenizer it has. Torch-free."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from moe_serve.errors import ModelError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # as sentencepiece writes it


def token_bytes(backend: Any, vocab_size: int) -> list[bytes | None]:
    """Returns the bytes of each token id of the logits; None for special tokens and ids without a token.

    backend: a `tokenizers.Tokenizer`, byte-level, or sentencepiece-like with spaces as U+2581 and maybe byte fallback
    Raises ModelError for tokenizers whose tokens have no bytes of their own.
    """
    kinds = set(_decoder_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder else set()
    found: list[bytes | None] = [None] * vocab_size
    if "ByteLevel" in kinds:
        of_char = _bytes_of_chars()
        for word, token_id in backend.get_vocab(with_added_tokens=False).items():
            if token_id < vocab_size and all(char in of_char for char in word):
                found[token_id] = bytes(of_char[char] for char in word)
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        for word, token_id in backend.get_vocab(with_added_tokens=False).items():
            if token_id < vocab_size:
                found[token_id] = _sentencepiece(word, "ByteFallback" in kinds)
    else:
        raise ModelError(
            f"the decoder of this model's tokenizer ({', '.join(sorted(kinds)) or 'none'}) gives tokens no bytes of "
            "their own, as structured output needs; byte-level ones and sentencepiece's do"
        )
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token_id < vocab_size:
            found[token_id] = None if token.special else token.content.encode()
    return [each or None for each in found]


def _sentencepiece(word: str, has_byte_tokens: bool) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(word) if has_byte_tokens else None
    return bytes([int(byte[1], 16)]) if byte else word.replace(_SPACE, " ").encode()


def _decoder_kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)


@cache
def _bytes_of_chars() -> dict[str, int]:
    """Returns GPT-2's characters for bytes: printable Latin-1 as it is, the others from U+0100 on."""
    as_they_are = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in as_they_are]
    return {chr(byte): byte for byte in as_they_are} | {chr(256 + i): byte for i, byte in enumerate(others)}
