"""What tests of OpenAI's routes share: a template, calls, and the events of streams."""

import json
from pathlib import Path
from typing import Any

from tests.server.served import Served, demo_tokenizer

TEXT = demo_tokenizer()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def with_template(folder: Path, template: str = TEMPLATE) -> str:
    """The setting for a server with this chat template."""
    (folder / "chat.jinja").write_text(template)
    return f"server.chat_template={folder / 'chat.jinja'}"


def says(text: str):
    """A reply of fake ranks: this text, then the end of the sequence."""
    ids = [*TEXT.encode(text), 1]
    return lambda submit: ids


async def post(served: Served, path: str, **fields: Any):
    return await served.client.post(path, json=fields)


async def answer(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    """The answer of a call that succeeds."""
    response = await post(served, path, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed call, without the last one, which is checked."""
    found = []
    async with served.client.stream("POST", path, json={"stream": True, **fields}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                found.append(line[6:])
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]
