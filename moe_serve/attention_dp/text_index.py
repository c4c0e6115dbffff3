"""Where runs of tokens came before in the texts of a rank, in bounded memory: what followed there may follow again.

Prompt lookup decoding (Saxena 2023), with an index over the texts of many requests as in SuffixDecoding
(arXiv 2411.04975). Numpy only.
"""

from array import array
from collections.abc import Sequence

import numpy as np

_NGRAM = 3  # tokens that are looked up
_ID_BITS = 21  # of each in a key
_POSITION_BITS = 32
_INDEX_BYTES = 120  # of one token in the index, measured: two ints and their place in a dict
_TOKEN_BYTES = 5  # of one token in its text: an array keeps some room
_TEXT_BYTES = 600  # of a text without tokens, measured: its array, its number and their places, and those of a salt


class TextIndex:
    """Where each run of three tokens came last in the texts of a rank, those of each salt apart.

    Memory is bounded by generations: when the young one, texts included, holds half of what is allowed, the old one is
    forgotten.
    """

    def __init__(self, max_bytes: int):
        self._max_young_bytes = max_bytes // 2
        self._young: dict[str, dict[int, int]] = {}
        self._old: dict[str, dict[int, int]] = {}
        self._young_bytes = 0
        self._texts: dict[int, array[int]] = {}
        self._num_entered: dict[int, int] = {}  # runs of each text, the first ones
        self._num_texts = 0
        self._of_old: set[int] = set()  # texts that no entry of the young generation names

    def begin(self) -> int:
        """Returns the number of a new text, which takes no memory before it has tokens."""
        self._num_texts += 1
        return self._num_texts

    def text(self, number: int) -> "array[int] | None":
        """Returns the tokens of a text, None if it has none or they are forgotten."""
        return self._texts.get(number)

    def extend(self, number: int, salt: str, token_ids: Sequence[int], enters: bool = True) -> None:
        """Adds tokens to a text. The run that ends with the last one is not entered before more follow.

        enters: whether to enter all runs that are not; the others are found in their own text alone
        """
        text = self._texts.setdefault(number, array("i"))
        if not text or number in self._of_old:  # the young generation has all of it from now on
            self._of_old.discard(number)
            self._young_bytes += _TEXT_BYTES + _TOKEN_BYTES * len(text)
        text.extend(token_ids)
        self._young_bytes += _TOKEN_BYTES * len(token_ids)
        if enters and self.num_left(number) > 0:
            self._enter(number, salt, text)
        if self._young_bytes > self._max_young_bytes:
            self._forget_old()

    def _enter(self, number: int, salt: str, text: "array[int]") -> None:
        """Enters the runs of a text that are not, but for the one that ends with its last token."""
        first, entries = self._num_entered.get(number, 0), self._young.setdefault(salt, {})
        before, ids = len(entries), np.frombuffer(text, np.int32)[first:].astype(np.int64)
        keys = ids[:-3] << 2 * _ID_BITS | ids[1:-2] << _ID_BITS | ids[2:-1]
        places = (number << _POSITION_BITS) + first + _NGRAM + np.arange(len(keys))
        entries.update(zip(keys.tolist(), places.tolist(), strict=True))
        self._num_entered[number] = first + len(keys)
        self._young_bytes += _INDEX_BYTES * (len(entries) - before)

    def num_left(self, number: int) -> int:
        """Returns how many runs of a text are not entered."""
        return len(self._texts.get(number, ())) - _NGRAM - self._num_entered.get(number, 0)

    def find(self, number: int, salt: str) -> tuple[int, int] | None:
        """Returns a text, and where in it what came after the last three tokens of this one begins; None: nowhere."""
        text = self._texts.get(number)
        if text is None or len(text) < _NGRAM:
            return None
        if (place := self._find_left(number, text)) is not None:
            return number, place
        first, second, third = text[-_NGRAM:]
        key = first << 2 * _ID_BITS | second << _ID_BITS | third
        for generation in (self._young, self._old):
            place = generation.get(salt, {}).get(key)
            if place is not None and place >> _POSITION_BITS in self._texts:
                return place >> _POSITION_BITS, place & (1 << _POSITION_BITS) - 1
        return None

    def _find_left(self, number: int, text: "array[int]") -> int | None:
        """Returns the place among the runs of a text that are not entered."""
        first, size = self._num_entered.get(number, 0), text.itemsize
        if len(text) - _NGRAM <= first:
            return None
        left, run = text[first:].tobytes(), text[-_NGRAM:].tobytes()
        at = left.rfind(run, 0, len(left) - size)
        while at % size and at >= 0:  # bytes of neighbours
            at = left.rfind(run, 0, at + len(run) - 1)
        return None if at < 0 else first + at // size + _NGRAM

    def _forget_old(self) -> None:
        for number in self._of_old:
            self._texts.pop(number, None)
            self._num_entered.pop(number, None)
        self._of_old = set(self._texts)
        self._old, self._young, self._young_bytes = self._young, {}, 0
