"""A conversation with a server: history, commands, reasoning, an answer that is stopped, a server that is not there."""

import io

import pytest
from typer.testing import CliRunner

from moe_serve.errors import ConfigError, LaunchError, RequestError
from moe_serve.launcher.cli import app as cli
from moe_serve.launcher.cli.chat import Chat, ChatServer, Piece, converse
from tests.bench.fake_openai import Fake, running


class Scripted:
    """A server whose answers are given; an exception among the pieces is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.bodies = []

    def stream(self, body):
        self.bodies.append(body)
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def chat_with(*answers, shows_style: bool = True) -> Chat:
    return Chat(Scripted(*answers), {"model": "m"}, io.StringIO(), shows_style)  # type: ignore[arg-type]


def roles(chat: Chat, number: int) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in chat.server.bodies[number]["messages"]]


def lines(*said):
    left = iter(said)

    def read() -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def test_the_history_is_sent_until_it_is_reset_and_the_system_message_stays():
    chat = chat_with([Piece("one")], [Piece("two")], [Piece("three")])
    converse(chat, lines("/system be brief", "a", "", "b", "/reset", "c", "/exit", "never"))
    assert roles(chat, 1) == ["system: be brief", "user: a", "assistant: one", "user: b"]
    assert roles(chat, 2) == ["system: be brief", "user: c"]
    assert chat.out.getvalue() == "one\ntwo\nthree\n"


def test_reasoning_is_dimmed_in_a_terminal_and_no_part_of_the_history():
    chat = chat_with([Piece("hm", True), Piece("yes")], [Piece("ok")])
    converse(chat, lines("a", "b"))
    assert chat.out.getvalue().startswith("\x1b[2mhm\x1b[0m\nyes\n")
    assert roles(chat, 1) == ["user: a", "assistant: yes", "user: b"]


def test_a_terminal_gets_no_control_characters_of_a_model_and_a_pipe_gets_all_as_it_is():
    for shows_style, expected in ((True, "[31mred\n\n"), (False, "\x1b[31mred\n\n")):
        chat = chat_with([Piece("\x1b[31mred\n")], shows_style=shows_style)
        chat.say("a")
        assert chat.out.getvalue() == expected


def test_ctrl_c_stops_the_answer_and_what_was_said_stays():
    chat = chat_with([Piece("par"), KeyboardInterrupt()], [Piece("ok")])
    converse(chat, lines("a", KeyboardInterrupt(), "b"))
    assert roles(chat, 1) == ["user: a", "assistant: par", "user: b"]


def test_an_error_is_shown_and_leaves_the_conversation_as_it_was(capsys):
    chat = chat_with([RequestError("too long")], [Piece("ok")])
    converse(chat, lines("a", "b", "/what"))
    assert "moe-serve: too long" in capsys.readouterr().err
    assert roles(chat, 1) == ["user: b"]
    assert "/reset forgets" in chat.out.getvalue()


def test_a_pipe_is_one_message_and_its_answer():
    with running(Fake(first_s=0, gap_s=0)) as fake:
        done = CliRunner().invoke(cli.app, ["chat", "--base-url", fake.url, "--max-tokens", "3"], input="hi\nthere\n")
    assert (done.exit_code, done.stdout) == (0, "xxx\n")
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "hi\nthere"}]


def test_failures_of_a_server_are_errors_that_say_what_to_do():
    with pytest.raises(LaunchError, match=r"nothing answers at http://127\.0\.0\.1:1 .*moe-serve serve"):
        ChatServer("http://127.0.0.1:1", None).model()
    with pytest.raises(ConfigError, match="expected http://"):
        ChatServer("localhost:30000", None)
    body = {"messages": [], "max_completion_tokens": 4}
    fake = Fake(first_s=0, gap_s=0, refuses=frozenset({0}), breaks=frozenset({1}), cuts=frozenset({2}))
    with running(fake):
        server = ChatServer(f"{fake.url}/v1", "secret")
        with pytest.raises(RequestError, match="answers 429: the queue is full"):
            list(server.stream(body))
        with pytest.raises(RequestError, match="rank 1 was lost"):
            list(server.stream(body))
        with pytest.raises(LaunchError):
            list(server.stream(body))
    assert fake.keys == ["Bearer secret"] * 3
