"""Text to token ids and back, from the `tokenizer.json` of a model folder.

Torch-free, since the front end uses it.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError, RequestError
from moe_serve.models.model_files import read_bytes, read_json

_COPY_AGAIN = "copy the file again"
_LARGEST_TOKENIZER = 256 << 20  # bytes of tokenizer.json; real ones have up to 35 MB
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # Python strings may hold them, from os.fsdecode() for example


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, backend: Any, bos_token_id: int | None = None, add_bos: bool | None = None):
        """
        backend:      a `tokenizers.Tokenizer`
        bos_token_id: id of the beginning-of-sequence token; None = the model has none
        add_bos:      whether to encode text with it in front; None = as the tokenizer's own post-processor does
        """
        self._backend = backend
        self._bos_token_id = bos_token_id
        self._add_bos = add_bos

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Returns the tokenizer of a model folder.

        Raises ModelError when the folder has no readable `tokenizer.json`.
        """
        from tokenizers import Tokenizer as Backend

        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise ModelError(
                f"{path}: there is no tokenizer in the model folder; put tokenizer.json there, "
                "or set model.skip_tokenizer: true and send input_ids"
            )
        data = read_bytes(path, _COPY_AGAIN, _LARGEST_TOKENIZER)
        try:
            backend = Backend.from_buffer(data)
        except Exception as error:  # the Rust library raises bare Exception for everything
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{path}: cannot be read as a tokenizer ({reason}); {_COPY_AGAIN}") from None
        config = path.with_name("tokenizer_config.json")
        settings = read_json(config, _COPY_AGAIN) if config.exists() else {}
        bos = _special_id(backend, settings.get("bos_token"))
        add_bos = settings.get("add_bos_token")
        return cls(
            backend,
            bos_token_id=bos,
            add_bos=add_bos if isinstance(add_bos, bool) and bos is not None else None,
        )

    @cached_property
    def longest_token(self) -> int:
        """The characters of the longest token: a text has at least its characters divided by this many tokens."""
        return max(len(token) for token in self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with the beginning-of-sequence token where this model wants one.

        Raises RequestError for text that is not valid Unicode.
        """
        check_unicode("text", text)
        if self._add_bos is None:
            return list(self._backend.encode(text).ids)
        # The configuration of Llama-like tokenizers wins over the post-processor in tokenizer.json.
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        return [self._bos_token_id, *ids] if self._add_bos and self._bos_token_id is not None else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Bytes that are not UTF-8 (yet) become U+FFFD; ids without text become nothing."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Returns whether `decode` looks at an id: it is in the vocabulary, and not a special one to be skipped."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

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
