"""A rank without a model, over the real socket and the real messages. Imports little: processes run it.

A fake rank answers with the ids it is told to (by default: count upwards from the request's seed), one per turn of the
event loop, and follows the ending rules of a real rank. It remembers what it was told.
"""

import asyncio
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
import zmq.asyncio

from moe_serve.config import ServerConfig
from moe_serve.engine.protocol.mailbox import Disconnected, Reconnected, ZmqMailbox
from moe_serve.engine.protocol.messages import (
    Abort,
    Alive,
    Answer,
    Expect,
    ExpertsBlock,
    FlushCache,
    ForFrontEnds,
    Goodbye,
    Hello,
    Message,
    ModelLimits,
    Profile,
    Ready,
    Rebalance,
    RecordCommand,
    Refused,
    SetPlacement,
    Shutdown,
    Status,
    Submit,
    TokenEvent,
    Tokens,
    ToRank,
    Wake,
    decode_to_rank,
    encode,
    front_end_of,
)
from moe_serve.links.link import Link, find_link
from moe_serve.links.sockets import Keys
from tests.server.fake_logprobs import output_block, prompt_block

LIMITS = ModelLimits(
    model_name="demo", vocab_size=2048, max_model_len=256, max_prompt_len=200, eos_token_ids=[1], block_size=4,
    expert_id_bytes=4, embedding_size=2,
)  # fmt: skip


def counting(submit: Submit) -> list[int]:
    """The output of a fake rank: ids that count upwards from the seed and are never special."""
    return [2 + (submit.seed + i) % 2000 for i in range(submit.params.max_new_tokens)]


@dataclass
class FakeWorker:
    """One rank. reply: the output ids of a request;  go: cleared = produce nothing for now

    failure: message and field of the error with which every request ends; None: requests get their output
    """

    rank: int
    num_ranks: int
    port: int
    launch_id: int = 0
    token: str | None = None  # None: that of the environment
    limits: ModelLimits = LIMITS
    restarts_left: int = 0
    info: dict[str, object] = field(default_factory=lambda: {"backend": "fake"})
    computes: list[tuple[str, str, str]] = field(default_factory=list)
    reply: Callable[[Submit], list[int]] = counting
    failure: tuple[str, str | None] | None = None
    num_changed: int | None = None  # choices that the capacity of experts has changed, in every event
    tokens_at_once: int = 1
    round_s: float = 0.001  # between two rounds of tokens
    go: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: list[Submit] = field(default_factory=list)
    expected: list[Expect] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    commands: list[RecordCommand | Rebalance | SetPlacement | FlushCache | Profile] = field(default_factory=list)
    pass_on: Callable[[ForFrontEnds], None] | None = None  # takes what front ends tell each other; None: pass it on
    answer: Callable[[int], Answer] | None = None  # by call_id, given to each command; None: no answer
    running: dict[str, Submit] = field(default_factory=dict)
    produced: dict[str, int] = field(default_factory=dict)
    num_alive: int = 0
    was_shut_down: bool = False
    refusal: str | None = None
    num_reconnects: int = 0

    async def run(self, ready: bool = True) -> None:
        self.go.set()
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        link = self.link()
        if link.folder is None:
            Keys.of(link.token).connect(self._socket)
        self._socket.connect(link.front_end)
        try:
            self.say(self.hello())
            if ready:
                self.get_ready()
            await asyncio.gather(self._listen(), self._produce())
        finally:
            self._socket.close()
            context.term()

    def link(self) -> Link:
        link = find_link(ServerConfig(worker_port=self.port))
        return link if self.token is None else replace(link, token=self.token)

    def hello(self) -> Hello:
        host, left = "testhost", self.restarts_left
        return Hello(self.rank, self.num_ranks, self.launch_id, os.getpid(), host, restarts_left=left)

    def say(self, message: Message) -> None:
        self._socket.send(encode(message))

    def get_ready(self) -> None:
        self.say(Ready(self.rank, self.launch_id, self.limits, self.info, self.computes))

    def load(self, num_running: int) -> None:
        self.say(Status(self.rank, self.launch_id, 7, num_running, 0, 5, 10, 0, {"num_steps": 7.0}))

    async def _listen(self) -> None:
        while not self.was_shut_down:
            self._take(decode_to_rank(await self._socket.recv()))

    def _take(self, message: ToRank) -> None:
        match message:
            case Submit():
                self.submitted.append(message)
                self.running[message.request_id] = message
                self.produced[message.request_id] = len(message.output_ids)
            case Expect():
                self.expected.append(message)
            case Abort(request_id):
                self.aborted.append(request_id)
                self.running.pop(request_id, None)
            case RecordCommand() | Rebalance() | SetPlacement() | FlushCache() | Profile() as command:
                self.commands.append(command)
                if self.answer is not None:
                    self.say(self.answer(command.call_id))
            case ForFrontEnds():
                (self.pass_on or self.say)(message)
            case Alive():
                self.num_alive += 1
            case Refused(reason):
                self.refusal = reason
            case Shutdown():
                self.was_shut_down = True
                self.say(Goodbye(self.rank, self.launch_id))

    async def _produce(self) -> None:
        while not self.was_shut_down:
            await self.go.wait()
            events = [self._step(submit) for submit in list(self.running.values())]
            if events:
                self.say(Tokens(self.rank, self.launch_id, events))
            await asyncio.sleep(self.round_s)

    def _step(self, submit: Submit) -> TokenEvent:
        if self.failure is not None:
            del self.running[submit.request_id]
            message, field = self.failure
            return TokenEvent(submit.request_id, submit.attempt, 0, [], "error", message=message, field=field)
        start = self.produced[submit.request_id]
        token_ids: list[int] = []
        finish = matched = None
        for token in self.reply(submit)[start : start + self.tokens_at_once]:
            token_ids.append(token)
            count = start + len(token_ids)
            if token in (*self.limits.eos_token_ids, *submit.params.stop_token_ids):
                finish, matched = "stop", token
                break
            if count >= submit.params.max_new_tokens:
                finish = "length"
                break
        self.produced[submit.request_id] = start + len(token_ids)
        if finish is not None:
            del self.running[submit.request_id]
        return TokenEvent(
            submit.request_id, submit.attempt, start, token_ids, finish, matched, num_cached_prompt=3,
            logprobs=output_block(submit, start, token_ids), prompt_logprobs=prompt_block(submit, start),
            experts=experts_block(submit, start, len(token_ids)), num_changed=self.num_changed,
            embedding=embedding_of(submit),
        )  # fmt: skip


def embedding_of(submit: Submit) -> bytes | None:
    """The row of a prompt of n tokens is 3, 4 n."""
    return array("f", [3.0, 4.0 * len(submit.prompt_ids)]).tobytes() if submit.params.return_embedding else None


def experts_block(submit: Submit, start: int, num_tokens: int) -> ExpertsBlock | None:
    """The experts behind output tokens: those of position p are [[p, 1], [2, 3]] in two layers."""
    if not submit.params.return_routed_experts:
        return None
    first, end = (len(submit.prompt_ids) + at - 1 for at in (start, start + num_tokens))
    first = first if start else 0
    rows = b"".join(bytes([position, 1, 2, 3]) for position in range(first, end))
    return ExpertsBlock(first, num_layers=2, topk=2, dtype="uint8", rows=rows)


@dataclass
class LinkedWorker(FakeWorker):
    """A fake rank over a real rank's mailbox: its connection heals, and it says hello again.

    folder: of the sockets; None: TCP
    """

    num_front_ends: int = 1
    folder: Path | None = None

    async def run(self, ready: bool = True) -> None:
        self.go.set()
        link = self.link() if self.folder is None else Link(folder=self.folder)
        self.mailbox = ZmqMailbox(link, self.rank, "127.0.0.1", self.num_front_ends)
        try:
            self.say(self.hello())
            if ready:
                self.get_ready()
            await asyncio.gather(self._listen(), self._produce())
        finally:
            self.mailbox.close()

    def say(self, message: Message) -> None:
        self.mailbox.send(message)

    async def _listen(self) -> None:
        while not self.was_shut_down:
            for message in self.mailbox.poll(0.0):
                if isinstance(message, Disconnected | Reconnected):
                    self.num_reconnects += isinstance(message, Reconnected)
                    for request_id in list(self.running):
                        if message.front_end in (None, front_end_of(request_id)):
                            del self.running[request_id]
                elif not isinstance(message, Wake):
                    self._take(message)
            await asyncio.sleep(0.002)
