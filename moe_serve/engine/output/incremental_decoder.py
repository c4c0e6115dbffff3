"""Turns the tokens of one request into text as they arrive.

Text that ends in U+FFFD waits: its last bytes may be the beginning of a character. More than the last character may be
affected: with byte fallback (Llama, Mixtral) a whole run of byte tokens decodes to one U+FFFD per byte until the run is
valid UTF-8.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"  # decoders write it for bytes that are not a whole character (yet)
_CUTS = range(4)  # a character has at most 4 bytes: cutting off 0 to 3 tokens finds one that begins at a character
_MAX_WAITING = 8  # tokens that wait for the rest of a character, at most
_NUM_CONTEXT = 8  # tokens of the prompt that are decoded in front of the first new token
_LOOK_BACK = 32  # the last tokens of the prompt, among which those with text are searched


class Decoder(Protocol):
    """The part of a tokenizer that decoding needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool: ...


class IncrementalDecoder:
    """Decodes a growing list of ids. Each new token decodes a few: mostly two, never more than 2 * _MAX_WAITING."""

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()):
        """prompt_ids: the text before the new tokens, since a decoder treats the first token of a text differently."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        recent = [i for i in prompt_ids[-_LOOK_BACK:] if tokenizer.has_text(i, skip_special_tokens)]
        context, waiting = self._part(recent[-_NUM_CONTEXT:], starts=_CUTS)
        self._window = context + waiting
        self._num_context = len(context)  # the reader has their text
        # What the reader has of the window's text; several candidates where that is not clear, the likeliest first.
        self._known = [self._decode(self._window)]
        if self._known[0].endswith(_UNFINISHED):
            # Either U+FFFD is the prompt's text, or the prompt ends inside a character that the output completes.
            shorter = (self._decode(self._window[: max(0, len(self._window) - cut)]) for cut in _CUTS)
            self._known += [self._known[0][:-1], *shorter]

    def push(self, token_id: int) -> str:
        """Returns the text that is complete with one more token."""
        if not self._tokenizer.has_text(token_id, self._skip_special):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(_UNFINISHED):
            return self._release(self._window, text)
        if len(self._window) - self._num_context < _MAX_WAITING:
            return ""
        # Broken bytes, or U+FFFD in the true text: release all but the bytes that can still become a character.
        settled, _ = self._part(self._window)
        return self._release(settled, self._decode(settled))

    def flush(self) -> str:
        """Returns the text that was waiting for more bytes; nothing comes after it."""
        return self._release(self._window, self._decode(self._window))

    def _release(self, settled: list[int], text: str) -> str:
        """Returns the new part of the text of these first ids of the window. The new ids become the context."""
        fresh = settled[self._num_context :]
        for known in self._known:
            if text.startswith(known):
                new = text[len(known) :]
                break
        else:
            # A broken run of byte tokens turns its earlier characters into U+FFFD, too; the reader keeps these.
            new = self._decode(fresh)
        self._window = self._window[self._num_context :]
        self._num_context = len(fresh)
        self._known = [self._decode(fresh)]
        return new

    def _part(self, ids: list[int], starts: Iterable[int] = (0,)) -> tuple[list[int], list[int]]:
        """Returns (settled, waiting): ids[start:stop] with the fewest U+FFFD in their text, and ids[stop:]."""
        best: tuple[list[int], list[int]] = ([], [])
        fewest = math.inf
        for start, cut in itertools.product(starts, _CUTS):
            stop = max(0, len(ids) - cut)
            if 0 < stop <= start:
                continue
            count = self._decode(ids[start:stop]).count(_UNFINISHED)
            if count < fewest:
                best, fewest = (ids[start:stop], ids[stop:]), count
            if count == 0:
                break
        return best

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
