"""Regular expressions that end a request, found in text as it grows: no expression and no text takes long.

Python's `re` backtracks, which takes exponential time for some expressions. Here an expression becomes its position
automaton (Glushkov, "The abstract theory of automata", 1961): sets of positions are integers, and one more character
costs at most MAX_POSITIONS operations on them. So there are no anchors, references or lookarounds.
"""

import functools
import operator
import re
from dataclasses import dataclass

from moe_serve.errors import RequestError

MAX_POSITIONS = 64  # characters and classes of one expression, those of repeated parts counted as often
MAX_OF_A_CALL = 32  # different expressions of all prompts together: reading a large one takes milliseconds
MAX_MATCH = 1024  # characters of a match: so much text may be held back
_MAX_DEPTH = 16  # of groups
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv]|[^0-9A-Za-z])", re.DOTALL)
_CLASS = re.compile(r"\[\^?(?:\\.|[^\]\\\[])+\]", re.DOTALL)
_WARNED_OF = re.compile(r"--|&&|~~|\|\|")  # in a class: `re` may read these as operations on sets one day
_REPEAT = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
_MAX_BUILT = 2000  # parts of an expression, repeated ones counted as often
_MARKS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_STEPS_KEPT = 256  # of an automaton: (positions, character) -> positions


@dataclass(frozen=True)
class Leaf:
    """One character. accepts: a pattern that matches this character at the beginning of a text"""

    accepts: re.Pattern[str]


@dataclass(frozen=True)
class Sequence:
    parts: list["Node"]


@dataclass(frozen=True)
class Either:
    branches: list["Node"]


@dataclass(frozen=True)
class Repeat:
    """high: None = without end"""

    part: "Node"
    low: int
    high: int | None


Node = Leaf | Sequence | Either | Repeat
_Built = tuple[int, int, bool]  # first positions, last positions, whether the empty text matches


class Automaton:
    """The positions of one expression as bits of integers."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._accepts: list[re.Pattern[str]] = []  # of each position, the characters
        self._next: list[int] = []  # of each position, those that may follow
        self._num_built = 0
        self._first, self._last, is_empty = self._build(_Parser(pattern).parse())
        if is_empty:
            raise _refusal(pattern, "matches the empty text")
        self._before = [
            sum(1 << i for i, after in enumerate(self._next) if after >> j & 1) for j in range(len(self._next))
        ]
        self._of_character: dict[str, int] = {}
        self._steps: dict[tuple[int, str], int] = {}

    def step(self, active: int, character: str) -> int:
        """Returns the positions that matches in progress have reached with one more character, new matches included."""
        found = self._steps.get((active, character))
        if found is None:
            found = (_union(self._next, active) | self._first) & self._accepting(character)
            if len(self._steps) >= _STEPS_KEPT:
                self._steps.clear()
            self._steps[active, character] = found
        return found

    def ends(self, active: int) -> bool:
        """Returns whether a match ends at one of these positions."""
        return bool(active & self._last)

    def start_of(self, text: str) -> int | None:
        """Returns where the longest match begins that ends with the text; None where there is none."""
        start, active = None, self._last
        for at in range(len(text) - 1, -1, -1):
            active &= self._accepting(text[at])
            if active & self._first:
                start = at
            if not active:
                break
            active = _union(self._before, active)
        return start

    def _accepting(self, character: str) -> int:
        found = self._of_character.get(character)
        if found is None:
            found = sum(1 << i for i, accepts in enumerate(self._accepts) if accepts.match(character))
            if len(self._of_character) >= _STEPS_KEPT:
                self._of_character.clear()
            self._of_character[character] = found
        return found

    def _build(self, node: Node) -> _Built:
        """Adds the positions of a node."""
        self._num_built += 1
        if self._num_built > _MAX_BUILT or (isinstance(node, Leaf) and len(self._next) == MAX_POSITIONS):
            why = f"is too large: at most {MAX_POSITIONS} characters and classes, repeated ones counted as often"
            raise _refusal(self.pattern, why)
        if isinstance(node, Leaf):
            self._accepts.append(node.accepts)
            self._next.append(0)
            bit = 1 << (len(self._next) - 1)
            return bit, bit, False
        if isinstance(node, Either):
            built = [self._build(branch) for branch in node.branches]
            first, last = (functools.reduce(operator.or_, bits) for bits in list(zip(*built, strict=True))[:2])
            return first, last, any(is_empty for _, _, is_empty in built)
        whole: _Built = 0, 0, True
        if isinstance(node, Sequence):
            for part in node.parts:
                whole = self._joined(whole, self._build(part))
            return whole
        for number in range(max(node.low, 1) if node.high is None else node.high):
            first, last, is_empty = self._build(node.part)
            if node.high is None and number + 1 >= node.low:
                self._link(last, first)
            whole = self._joined(whole, (first, last, is_empty or number >= node.low))
        return whole

    def _joined(self, a: _Built, b: _Built) -> _Built:
        self._link(a[1], b[0])
        return a[0] | (b[0] if a[2] else 0), b[1] | (a[1] if b[2] else 0), a[2] and b[2]

    def _link(self, last: int, first: int) -> None:
        for position in range(last.bit_length()):
            if last >> position & 1:
                self._next[position] |= first


@functools.lru_cache(maxsize=MAX_OF_A_CALL)
def compile_stop_regex(pattern: str) -> Automaton:
    """Returns the automaton of an expression. Raises RequestError for one that is not supported."""
    return Automaton(pattern)


class RegexFinder:
    """Looks for one expression in a text that grows."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._automaton = compile_stop_regex(pattern)
        self._active = 0
        self.num_open = 0  # characters at the end of the text that a match in progress may have

    def push(self, new: str) -> list[int]:
        """Adds text; returns where in it matches end, as numbers of its characters."""
        ends = []
        for number, character in enumerate(new, 1):
            self._active = self._automaton.step(self._active, character)
            self.num_open = min(self.num_open + 1, MAX_MATCH - 1) if self._active else 0
            if self._automaton.ends(self._active):
                ends.append(number)
        return ends

    def start_of(self, text: str) -> int | None:
        """Returns where the longest match begins that ends with the text; None where there is none."""
        return self._automaton.start_of(text)


class _Parser:
    """Reads the part of Python's syntax that an Automaton knows."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parse(self) -> Node:
        tree = self._either(0)
        if self._at < len(self._pattern):
            raise self._refusal("has a ) without its (")
        return tree

    def _either(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self._refusal(f"has groups deeper than {_MAX_DEPTH}")
        branches = [self._sequence(depth)]
        while self._takes("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else Either(branches)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._repeated(self._one(depth)))
        return Sequence(parts)

    def _repeated(self, part: Node) -> Node:
        mark = next((mark for mark in _MARKS if self._takes(mark)), None)
        if mark is not None:
            low, high = _MARKS[mark]
        else:
            found = _REPEAT.match(self._pattern, self._at)
            if not found:
                return part
            self._at = found.end()
            low = int(found[1])
            high = low if not found[2] else int(found[3]) if found[3] else None
            if high is not None and high < low:
                raise self._refusal("has a {m,n} with m above n")
        self._takes("?")  # the first end counts, which a lazy repeat does not change
        if self._at < len(self._pattern) and self._pattern[self._at] in "*+?{":
            raise self._refusal("has a repeat of a repeat")
        return Repeat(part, low, high)

    def _one(self, depth: int) -> Node:
        character = self._pattern[self._at]
        if self._takes("("):
            if self._takes("?") and not self._takes(":"):
                raise self._refusal("has a group of another kind than (...) and (?:...)")
            group = self._either(depth + 1)
            if not self._takes(")"):
                raise self._refusal("has a ( without its )")
            return group
        if character in "^$*+?{":
            why = f"has a {character} that repeats nothing, or is an anchor; write \\{character} for the character"
            raise self._refusal(why)
        if character in "[\\":
            found = (_CLASS if character == "[" else _ESCAPE).match(self._pattern, self._at)
            if not found or (character == "[" and _WARNED_OF.search(found[0])):
                raise self._refusal(f"has at {self._at} what is no supported class or escape")
            return self._leaf(found[0])
        return self._leaf("." if character == "." else re.escape(character), 1)

    def _leaf(self, text: str, num_characters: int = 0) -> Leaf:
        try:
            accepts = re.compile(text)
        except re.error as error:
            raise self._refusal(f"is not valid: {error.msg}") from None
        self._at += num_characters or len(text)
        return Leaf(accepts)

    def _takes(self, mark: str) -> bool:
        if not self._pattern.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _refusal(self, why: str) -> RequestError:
        return _refusal(self._pattern, why)


def _union(sets: list[int], members: int) -> int:
    """Returns the union of the sets of these members."""
    union = 0
    while members:
        lowest = members & -members
        union |= sets[lowest.bit_length() - 1]
        members ^= lowest
    return union


def _refusal(pattern: str, why: str) -> RequestError:
    return RequestError(f"stop_regex {pattern[:60]!r} {why}", field="stop_regex")
