"""What the processes of one host decide once and for all, though any of them may die or stop at any instruction.

A file without a name that all of them may append to. The kernel puts appended records behind each other, whole, also
when several processes append at once; so the first record of a question is the same for whoever looks, and it is the
answer. Nobody waits for anybody: who appends and reads back knows the answer. Plain loads and stores of shared memory
cannot give that (of two ranks that give each other up at one moment, both would go on).
"""

import os
import struct

_RECORD = struct.Struct("<qq")  # question, proposed answer
_NO_QUESTION = -1


class Decisions:
    """Answers to numbered questions; each process holds one, over the same file."""

    def __init__(self, descriptor: int):
        """descriptor: of a file that was opened for reading and appending; closed with this object"""
        self._descriptor = descriptor
        self._answers: dict[int, int] = {}
        self._read_bytes = 0
        self.decide(_NO_QUESTION, 0)  # takes a page now: there may be none when it is needed

    @classmethod
    def anonymous(cls) -> "Decisions":
        """Returns an empty file that processes forked from here share."""
        unnamed = os.memfd_create("moe_serve_decisions")
        try:
            return cls(os.open(f"/proc/self/fd/{unnamed}", os.O_RDWR | os.O_APPEND))
        finally:
            os.close(unnamed)

    def answer(self, question: int) -> int | None:
        """Returns what was decided; None: nothing yet."""
        data = os.pread(self._descriptor, 1 << 20, self._read_bytes)
        whole = len(data) - len(data) % _RECORD.size
        for number, value in _RECORD.iter_unpack(data[:whole]):
            self._answers.setdefault(number, value)
        self._read_bytes += whole
        return self._answers.get(question)

    def newest(self) -> tuple[int, int] | None:
        """Returns the highest question that is decided, and its answer; None: none is."""
        self.answer(_NO_QUESTION)  # reads what was appended
        question = max(self._answers)
        return None if question == _NO_QUESTION else (question, self._answers[question])

    def decide(self, question: int, proposal: int) -> int:
        """Returns the answer, which is this proposal if nothing was decided before."""
        os.write(self._descriptor, _RECORD.pack(question, proposal))
        answer = self.answer(question)
        assert answer is not None, "what was appended can be read"
        return answer

    def __del__(self) -> None:
        os.close(self._descriptor)
