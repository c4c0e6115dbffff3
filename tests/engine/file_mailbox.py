"""A front end's part, played by files: for ranks of which one may die at any moment.

Every rank writes the tokens it sends into a file of its own; when the group masks a rank, the first of the others
submits that rank's requests again, with the output in the files.
"""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Members, Message, Shutdown, Submit, Tokens, Voided
from tests.engine.queue_mailbox import QueueMailbox
from tests.engine.strikes import Fault


def mine(submits: Sequence[Submit], rank: int, num_ranks: int) -> list[Submit]:
    return list(submits[rank::num_ranks])


def tokens_in(folder: Path) -> dict[str, tuple[list[int], bool]]:
    """Returns the output of each request, and whether it is all, from the files of all ranks.

    A token that two ranks computed is the same; a reader sees no gap.
    """
    tokens: dict[str, dict[int, int]] = {}
    finished = set()
    for file in folder.glob("tokens.*"):
        for line in file.read_text().splitlines():
            request_id, index, token_ids, finish = json.loads(line)
            known = tokens.setdefault(request_id, {})
            for place, token in enumerate(token_ids, start=index):
                assert known.setdefault(place, token) == token, f"two tokens at {place} of {request_id}"
            if finish is not None:
                finished.add(request_id)
    for request_id, known in tokens.items():
        assert sorted(known) == list(range(len(known))), f"a gap in {request_id}"
    return {
        request_id: ([known[place] for place in sorted(known)], request_id in finished)
        for request_id, known in tokens.items()
    }


class FileMailbox(QueueMailbox):
    """extra: a request for the victim, sent when it is back; the run ends when all requests have."""

    def __init__(self, rank: int, num_ranks: int, submits: Sequence[Submit], fault: Fault | None, folder: Path):
        super().__init__(mine(submits, rank, num_ranks), end_when_idle=False)
        self._rank, self._num_ranks, self._submits, self._fault = rank, num_ranks, submits, fault
        self._folder = folder
        self._comes_back = fault is not None and (fault.sign == signal.SIGSTOP or fault.anew)
        self._is_stopped = False
        self._is_new = False
        self.may_continue: Callable[[], bool] = lambda: True  # a stopped rank
        self.groups: list[list[int]] = []
        self.ended: list[list[int]] = []
        self.voids: list[Voided] = []
        (folder / f"pid{rank}").write_text(str(os.getpid()))

    def begin_anew(self) -> None:
        """This rank takes the place of a dead one."""
        self._inbox.clear()
        self._is_new = True

    def send(self, message: Message) -> None:
        if isinstance(message, Tokens):
            assert all(event.finish != "error" for event in message.events)
            rows = [[event.request_id, event.index, event.token_ids, event.finish] for event in message.events]
            with (self._folder / f"tokens.{self._rank}").open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
        elif isinstance(message, Voided):
            self.voids.append(message)
        elif isinstance(message, Members):
            self.ended.append(message.ended)
            self._regroup(message.members)

    def _regroup(self, members: list[int]) -> None:
        assert self._fault is not None
        before = self.groups[-1] if self.groups else range(self._num_ranks)
        self.groups.append(members)
        for lost in set(range(self._num_ranks)) - set(members):
            (self._folder / f"masked{lost}").touch()
        if self._rank == min(members) and not self._is_new:
            self._is_stopped |= self._fault.sign == signal.SIGSTOP and self._fault.victim not in members
            known = tokens_in(self._folder)
            for lost in set(before) - set(members):
                for submit in mine(self._submits, lost, self._num_ranks):
                    output, is_all = known.get(submit.request_id, ([], False))
                    if not is_all:
                        again = (submit.request_id, len(self.groups), submit.prompt_ids, submit.params, submit.seed)
                        self.put(Submit(*again, output_ids=output))
        if self._rank == self._fault.victim and self._rank in members:
            first = self._submits[0]
            self.put(Submit("extra", 0, first.prompt_ids, first.params, first.seed))

    def poll(self, timeout_s: float) -> list[Inbound]:
        if self._is_stopped and self._fault is not None and self.may_continue():
            # Repeatedly: on a busy machine it may have been masked before it stopped.
            os.kill(int((self._folder / f"pid{self._fault.victim}").read_text()), signal.SIGCONT)
        arrived = super().poll(timeout_s)
        return [Shutdown()] if timeout_s > 0 and not arrived and self._all_done() else arrived

    def _all_done(self) -> bool:
        done = {request_id for request_id, (_, is_all) in tokens_in(self._folder).items() if is_all}
        wanted = {submit.request_id for submit in self._submits} | ({"extra"} if self._comes_back else set())
        return done >= wanted
