"""`moe-serve chat`."""

import sys
from typing import Annotated

import typer

from moe_serve.launcher.cli.api_key import api_key_of_environment

HELP = """Talk with a running server, ours or any with OpenAI's API.

In a terminal: /reset, /system TEXT, /exit; Ctrl-C stops an answer. In a pipe the input is one message. An API key is
read from MOE_SERVE_API_KEY, else OPENAI_API_KEY.

\b
  moe-serve chat
  echo "What is an expert?" | moe-serve chat --max-tokens 64
"""


def chat(
    base_url: Annotated[str, typer.Option("--base-url")] = "http://127.0.0.1:30000",
    model: Annotated[
        str | None, typer.Option("--model", help="its name on the server; none: the first it lists")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="the system message")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="of an answer")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0)] = None,
) -> None:
    """Talks with a running server."""
    from moe_serve.launcher.chat import HELP as COMMANDS
    from moe_serve.launcher.chat import Chat, ChatServer, converse

    server = ChatServer(base_url, api_key_of_environment())
    name = model or server.model()
    fields = {"model": name, "max_completion_tokens": max_tokens, "temperature": temperature}
    given = {key: value for key, value in fields.items() if value is not None}
    talk = Chat(server, given, sys.stdout, sys.stdout.isatty(), system)
    if not sys.stdin.isatty():
        talk.say(sys.stdin.read().strip())
        return
    import readline  # noqa: F401  lines can be edited, and recalled

    typer.echo(f"{name} at {base_url}. {COMMANDS}", err=True)
    converse(talk, lambda: input("> "))
