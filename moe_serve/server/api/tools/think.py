"""Reasoning between tags at the beginning of an output: DeepSeek-R1 and V3.1, Qwen3, GLM-4.5, MiniMax-M2, Kimi-K2.

Chat templates may have written the first tag, or an empty pair of tags, into the prompt already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.server.api.tools.parser import Content, Reasoning, Steps, StreamParser


@dataclass(frozen=True)
class ThinkTags:
    """How a family marks its reasoning.

    begins_inside: the output is reasoning from its first token where the prompt does not say
    interrupts:    markers that end it, too, and are read on as content
    """

    start: str = "<think>"
    end: str = "</think>"
    begins_inside: bool = False
    interrupts: tuple[str, ...] = ()

    def inside(self, prompt_end: str, continued: str | None = None) -> bool:
        """Returns whether the output begins inside the reasoning.

        prompt_end: the last characters of the prompt;  continued: the message that the output goes on with, None = none
        """
        if continued is not None:
            return continued.rfind(self.start) > continued.rfind(self.end)
        prompt_end = prompt_end.rstrip()
        if prompt_end.endswith(self.start):
            return True
        return self.begins_inside and not prompt_end.endswith(self.end)


def up_to(end_id: int, token_ids: Sequence[int]) -> int:
    """Returns how many tokens there are up to the end of the reasoning, with it; all where it has not come."""
    return token_ids.index(end_id) + 1 if end_id in token_ids else len(token_ids)


class ThinkParser(StreamParser):
    """Parts reasoning from content. Whitespace around the tags is dropped."""

    def __init__(self, tags: ThinkTags, prompt_end: str, continued: str | None = None):
        """As ThinkTags.inside. What continues a message begins with neither a tag nor whitespace that is dropped."""
        self._tags = tags
        self._is_inside = tags.inside(prompt_end, continued)
        self._continues = continued is not None
        super().__init__()

    def _parse(self) -> Steps[None]:
        tags = self._tags
        begins = False
        if not self._continues:
            yield from self._skip_space()
            begins = yield from self._accept(tags.start)
        if begins or self._is_inside:
            self._unsaid.clear()
            if not self._continues:
                yield from self._skip_space()
            found = yield from self._until((tags.end, *tags.interrupts), lambda text: self._add(Reasoning(text)))
            self._unsaid.clear()
            if found in tags.interrupts:
                self._add(Content(found))
            else:
                yield from self._skip_space()
                self._unsaid.clear()
        self._give_back()
        while True:
            if self._text:
                self._add(Content(self._text))
                self._text = ""
            if self._has_ended:
                return
            yield
