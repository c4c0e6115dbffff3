"""llama-index over OpenAI's API: completion, chat, stream."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model="demo", api_base=os.environ["BASE_URL"] + "/v1", api_key="none", max_tokens=8, timeout=60,
                 is_chat_model=True)  # fmt: skip


def complete():
    assert llm.complete("def read(").text


def chat():
    assert llm.chat([ChatMessage(role="user", content="a")]).message.content


def stream():
    assert "".join(part.delta or "" for part in llm.stream_complete("a"))
