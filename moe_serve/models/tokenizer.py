"""Text to token ids and back, from the vocabulary of a model folder.

Torch-free, since the front end uses it.
"""

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError, RequestError
from moe_serve.models.token_bytes import token_bytes
from moe_serve.models.tokenizer_files import adds_bos, read_backend, tokenizer_file, tokenizer_settings

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # Python strings may hold them, from os.fsdecode() for example


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
        """Returns the tokenizer of a model folder.

        Raises ModelError when the folder has no readable vocabulary.
        """
        path = tokenizer_file(folder)
        if path is None:
            raise ModelError(
                f"{Path(folder) / 'tokenizer.json'}: there is no tokenizer in the model folder; put tokenizer.json "
                "there, or set model.skip_tokenizer: true and send input_ids"
            )
        settings = tokenizer_settings(folder)
        backend = read_backend(path, settings)
        bos = _special_id(backend, settings.get("bos_token"))
        return cls(backend, bos_token_id=bos, add_bos=None if bos is None else adds_bos(path, settings))

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
        """Returns the bytes of each token of the logits, as models/token_bytes.py does."""
        return token_bytes(self._backend, vocab_size)

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
