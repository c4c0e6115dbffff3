"""The parsers by the names that SGLang and vLLM give them."""

from collections.abc import Mapping

from moe_serve.errors import ConfigError
from moe_serve.server.api.tools.harmony import HarmonyParser
from moe_serve.server.api.tools.json_calls import HermesParser, MistralParser
from moe_serve.server.api.tools.marker_calls import SECTION, DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from moe_serve.server.api.tools.parser import CallParser
from moe_serve.server.api.tools.think import ThinkTags
from moe_serve.server.api.tools.xml_calls import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser

HARMONY = "gpt-oss"  # one format of reasoning and calls: either name turns it on
# None: in harmony's messages
REASONING_PARSERS: Mapping[str, ThinkTags | None] = {
    "deepseek-r1": ThinkTags(begins_inside=True),
    "deepseek-v3": ThinkTags(),  # V3.1, whose template says whether it reasons
    "qwen3": ThinkTags(),
    "qwen3-thinking": ThinkTags(begins_inside=True),
    "glm45": ThinkTags(),
    "minimax-m2": ThinkTags(begins_inside=True),
    "kimi_k2": ThinkTags(interrupts=(SECTION,)),
    HARMONY: None,
}
TOOL_CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "qwen25": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "deepseekv3": DeepSeekV3Parser,
    "deepseekv31": DeepSeekV31Parser,
    "glm45": Glm45Parser,
    "minimax-m2": MiniMaxM2Parser,
    "kimi_k2": KimiK2Parser,
    "mistral": MistralParser,
    HARMONY: HarmonyParser,
}
_OTHER_NAMES = {
    "deepseekv31": "deepseekv3",
    "qwen": "qwen25",
    "glm4.5": "glm45",
    "glm": "glm45",
    "openai": "gptoss",
    "openaigptoss": "gptoss",
}


def known_name(setting: str, given: str | None, known: Mapping[str, object]) -> str | None:
    """Returns the name of a parser as it is here; `-`, `_` and capitals are as good. Raises ConfigError."""
    if given is None:
        return None
    names = {_plain(name): name for name in known}
    plain = _plain(given)
    found = names.get(plain) or names.get(_OTHER_NAMES.get(plain, ""))
    if found is None:
        raise ConfigError(f"{setting} is {given[:80]!r}, expected one of {', '.join(known)}; or leave it out")
    return found


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
