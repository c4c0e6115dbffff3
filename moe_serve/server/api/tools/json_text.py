"""Reads JSON that comes character by character: hands it on as it comes, and knows where it ends. Torch-free.

Control characters in strings, which models write although JSON forbids them, are handed on escaped.
"""

import json
import re

_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string
_IN_WORD = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LONGEST_WORD = 400  # characters of a number
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):
    """The text is not what its format says."""


class Truncated(Malformed):
    """The text ends before its format does."""


class JsonReader:
    """Follows one JSON object or list. is_done: its last character was read;  has_failed: it is no JSON"""

    def __init__(self) -> None:
        self.is_done = False
        self.has_failed = False
        self._open: list[str] = []  # brackets
        self._wants = "value"  # or "key", "key or end", "value or end", "colon", "comma"
        self._string: str | None = None  # None, or what is special: "", "\\", "u", "uX", ...
        self._word = ""  # of a number or true, false, null that may go on

    @property
    def unsaid(self) -> str:
        """What was read and not handed on."""
        return self._word

    def read(self, text: str) -> tuple[str, int]:
        """Returns the JSON that is certain with more text, and how many characters of it were read.

        It stops behind the value, and before the first character that makes it no JSON: then it `has_failed`.
        """
        said: list[str] = []
        at = 0
        while at < len(text) and not self.is_done:
            if self._string == "" and (run := _PLAIN.match(text, at)):
                said.append(run[0])
                at = run.end()
                continue
            try:
                said.append(self._read_one(text[at]))
            except Malformed:
                self.has_failed = True
                break
            at += 1
        return "".join(said), at

    def _read_one(self, char: str) -> str:
        if self._string is not None:
            return self._in_string(char)
        if char in _IN_WORD:
            if self._wants not in ("value", "value or end") or len(self._word) >= _LONGEST_WORD:
                raise Malformed
            self._word += char
            return ""
        word = self._word
        if word:
            # Only objects and lists say where they end.
            if not self._open or (word not in ("true", "false", "null") and not _NUMBER.match(word)):
                raise Malformed
            self._wants = "comma"
        if char not in _SPACE:
            self._structure(char)
        self._word = ""  # not before: of what is no JSON, it is unsaid
        return word + char

    def _structure(self, char: str) -> None:
        wants = self._wants
        if char in "{[" and wants in ("value", "value or end"):
            self._open.append(char)
            self._wants = "key or end" if char == "{" else "value or end"
        elif char == '"' and wants in ("key", "key or end", "value", "value or end") and self._open:
            self._string = ""
            self._wants = "colon" if wants.startswith("key") else "comma"
        elif char == ":" and wants == "colon":
            self._wants = "value"
        elif char == "," and wants == "comma":
            self._wants = "key" if self._open[-1] == "{" else "value"
        elif char in "}]" and self._open and wants != "colon" and (wants == "comma" or wants.endswith(" or end")):
            if (char == "}") != (self._open.pop() == "{"):
                raise Malformed
            self._wants = "comma"
            self.is_done = not self._open
        else:
            raise Malformed

    def _in_string(self, char: str) -> str:
        special, self._string = self._string, ""
        if special == "\\":
            if char not in _ESCAPES:
                raise Malformed
            self._string = "u" if char == "u" else ""
        elif special:
            if char not in _HEX:
                raise Malformed
            self._string = special + "x" if len(special) < 4 else ""
        elif char == "\\":
            self._string = "\\"
        elif char == '"':
            self._string = None
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char
