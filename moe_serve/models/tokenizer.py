"""Text to token ids and back, from the vocabulary of a model folder, of whichever kind it is."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError, RequestError
from moe_serve.models.gguf_tokenizer import gguf_backend, gguf_settings
from moe_serve.models.model_files import read_bytes, read_json
from moe_serve.models.tokenizer_conversion import SPACE, byte_characters, sentencepiece_backend, tiktoken_backend

_COPY_AGAIN = "copy the file again"
_LARGEST_TOKENIZER = 256 << 20  # bytes; real ones have up to 35 MB
_KINDS = ("tokenizer.json", "tokenizer.model", "tiktoken.model")  # the first that a folder has is read
# Vocabularies that cannot be read: the rules that belong to them are only in Python code beside them.
_OTHER_KINDS = ("*.tiktoken", "tekken.json", "vocab.json")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # Python strings may hold them, from os.fsdecode() for example
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, backend: Any, bos_token_id: int | None = None, add_bos: bool | None = None):
        """
        backend:      a `tokenizers.Tokenizer`
        bos_token_id: id of the beginning-of-sequence token; None = the model has none
        add_bos:      whether to encode text with it in front; None = as the tokenizer's own post-processor does
        """
        # A batch is one text. Threads for more would be those of the first process, and are lost where it forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._backend = backend
        self._bos_token_id = bos_token_id
        self._add_bos = add_bos

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Returns the tokenizer of a model folder, or of a GGUF file.

        Raises ModelError when the folder has no readable vocabulary.
        """
        path = tokenizer_file(folder)
        if path is None:
            raise ModelError(
                f"{Path(folder) / 'tokenizer.json'}: there is no tokenizer in the model folder; put tokenizer.json "
                "there, or set model.skip_tokenizer: true and send input_ids"
            )
        settings = tokenizer_settings(folder)
        backend = gguf_backend(path) if path == Path(folder) else _read_backend(path, settings)
        bos = _special_id(backend, settings.get("bos_token"))
        return cls(backend, bos_token_id=bos, add_bos=None if bos is None else _adds_bos(path, settings))

    @cached_property
    def longest_token(self) -> int:
        """The characters of the longest token: a text has at least its characters divided by this many tokens."""
        return max(len(token) for token in self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text, with the beginning-of-sequence token where this model wants one.

        add_special_tokens: False = only what is written in the text, such as one that a chat template wrote

        Raises RequestError for text that is not valid Unicode, ModelError where the model's vocabulary is at fault.
        """
        check_unicode("text", text)
        if self._add_bos is None or not add_special_tokens:
            return self._ids(text, add_special_tokens)
        # The configuration of Llama-like tokenizers wins over the post-processor in tokenizer.json.
        ids = self._ids(text, add_special_tokens=False)
        return [self._bos_token_id, *ids] if self._add_bos and self._bos_token_id is not None else ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # As a batch, since `encode` holds Python's lock: 600,000 characters kept all other threads waiting for 1 s.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except BaseException as error:  # of the Rust library: a bare Exception, or a panic, which is not even that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"the model's tokenizer fails on this text ({reason}); copy the files of its vocabulary again"
            ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Bytes that are not UTF-8 (yet) become U+FFFD; ids without text become nothing."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Returns whether `decode` looks at an id: it is in the vocabulary, and not a special one to be skipped."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def token_of(self, token_id: int) -> str | None:
        """Returns how the vocabulary spells a token, such as "Ġthe"; None where it has no such id."""
        found = self._backend.id_to_token(token_id)
        return None if found is None else str(found)

    def token_bytes(self, vocab_size: int) -> list[bytes | None]:
        """Returns the bytes of each token id of the logits; None for special tokens and ids without a token.

        Tokens have bytes in byte-level tokenizers, and in those like sentencepiece's, with spaces as U+2581 and maybe
        byte tokens. Raises ModelError for others.
        """
        decoder = self._backend.decoder
        kinds = set(_decoder_kinds(json.loads(decoder.__getstate__()))) if decoder else set()
        words = self._backend.get_vocab(with_added_tokens=False)
        found: list[bytes | None] = [None] * vocab_size
        if "ByteLevel" in kinds:
            of_character = {character: byte for byte, character in enumerate(byte_characters())}
            for word, token_id in words.items():
                if token_id < vocab_size and all(character in of_character for character in word):
                    found[token_id] = bytes(of_character[character] for character in word)
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            for word, token_id in words.items():
                if token_id < vocab_size:
                    byte = _BYTE_TOKEN.fullmatch(word) if "ByteFallback" in kinds else None
                    found[token_id] = bytes([int(byte[1], 16)]) if byte else word.replace(SPACE, " ").encode()
        else:
            raise ModelError(
                f"the decoder of this model's tokenizer ({', '.join(sorted(kinds)) or 'none'}) gives tokens no bytes "
                "of their own, as structured output needs; byte-level ones and sentencepiece's do"
            )
        for token_id, token in self._backend.get_added_tokens_decoder().items():
            if token_id < vocab_size:
                found[token_id] = None if token.special else token.content.encode()
        return [each or None for each in found]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)


def check_unicode(field: str, text: str) -> None:
    """Raises RequestError for a lone surrogate, which Python's strings may hold but UTF-8 cannot."""
    found = _LONE_SURROGATE.search(text)
    if found is not None:
        raise RequestError(
            f"{field} has the lone surrogate U+{ord(found.group()):04X} at character {found.start()}, which is not "
            "valid Unicode; replace it, or read the text with the right encoding",
            field=field,
        )


def _special_id(backend: Any, token: Any) -> int | None:
    """Returns the id of a special token, which older files wrap in an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(content) if isinstance(content, str) else None
    return None if found is None else int(found)


def tokenizer_settings(folder: str | Path) -> Mapping[str, Any]:
    """Returns the contents of a model folder's tokenizer_config.json, empty without one, or what a GGUF file says.

    Raises ModelError for a file that cannot be read.
    """
    folder = Path(folder)
    if folder.is_file():
        return gguf_settings(folder)
    configuration = folder / "tokenizer_config.json"
    return read_json(configuration, _COPY_AGAIN) if configuration.exists() else {}


def tokenizer_file(folder: str | Path) -> Path | None:
    """Returns the file from which the tokenizer of a model folder is read, None where there is none.

    A GGUF file has its own.

    Raises ModelError where the only vocabulary is of a kind that cannot be read.
    """
    folder = Path(folder)
    if folder.is_file():
        return folder
    found = next((folder / name for name in _KINDS if (folder / name).exists()), None)
    if found is not None:
        return found
    other = next((path for pattern in _OTHER_KINDS for path in sorted(folder.glob(pattern))), None)
    if other is not None:
        raise ModelError(
            f"{other}: is a vocabulary that cannot be read; read are {', '.join(_KINDS)}: put a tokenizer.json there "
            "(such as transformers' save_pretrained writes), or set model.skip_tokenizer: true and send input_ids"
        )
    return None


def _read_backend(path: Path, settings: Mapping[str, Any]) -> Any:
    """Returns the `tokenizers.Tokenizer` in a file that `tokenizer_file` found. settings: tokenizer_config.json

    Raises ModelError for a file that cannot be read.
    """
    data = read_bytes(path, _COPY_AGAIN, _LARGEST_TOKENIZER)
    try:
        match path.name:
            case "tokenizer.model":
                backend = sentencepiece_backend(data, str(path), settings.get("legacy") is not False)
            case "tiktoken.model":
                backend = tiktoken_backend(data, str(path), settings)
            case _:
                from tokenizers import Tokenizer as Backend

                backend = Backend.from_buffer(data)
    except ModelError:
        raise
    except Exception as error:  # the Rust library raises bare Exception for everything
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: cannot be read as a tokenizer ({reason}); {_COPY_AGAIN}") from None
    _add_tokens(backend, settings, path)
    return backend


def _adds_bos(path: Path, settings: Mapping[str, Any]) -> bool | None:
    """Returns whether text is encoded with the beginning-of-sequence token; None = as tokenizer.json itself says."""
    given = settings.get("add_bos_token")
    if isinstance(given, bool):
        return given
    # What transformers' class for sentencepiece files does where nothing is said.
    is_llama = str(settings.get("tokenizer_class", "LlamaTokenizer")).startswith("Llama")
    return True if path.name == "tokenizer.model" and is_llama else None


def _add_tokens(backend: Any, settings: Mapping[str, Any], path: Path) -> None:
    """Adds the tokens that only tokenizer_config.json names, each with the id that it has there."""
    from tokenizers import AddedToken

    given = settings.get("added_tokens_decoder")
    if not isinstance(given, dict):
        return
    where = path.with_name("tokenizer_config.json")
    try:
        tokens = sorted((int(key), value) for key, value in given.items())
        known = [(token_id, str(value["content"]), bool(value.get("special", False))) for token_id, value in tokens]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{where}: added_tokens_decoder cannot be read; {_COPY_AGAIN}") from None
    for token_id, text, special in known:
        if backend.token_to_id(text) == token_id:
            continue
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
        if backend.token_to_id(text) != token_id:
            raise ModelError(
                f"{where}: the added token {text[:80]!r} has the id {token_id} there and {backend.token_to_id(text)} "
                f"in {path.name}; copy both files again from the same model"
            )


def _decoder_kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)
