"""Prompts of two domains, from texts that every Python brings: its library's source code, and its manual.

A language model routes code and prose to different experts, so a change of domain shifts their load.
"""

import importlib.util
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

DOMAINS = ("code", "prose")
_MODULES = ("ast", "argparse", "heapq", "random", "textwrap", "threading", "tarfile", "pathlib", "dataclasses", "enum")
_PROMPT_CHARS = 160


@cache
def texts_of(domain: str) -> tuple[str, ...]:
    """Returns long texts of a domain."""
    if domain == "code":
        specs = [importlib.util.find_spec(name) for name in _MODULES]
        files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
        return tuple(file.read_text(encoding="utf-8") for file in files if file.suffix == ".py")
    from pydoc_data.topics import topics

    return tuple(text for text in topics.values() if len(text) > 4 * _PROMPT_CHARS)


def prompts_of(domain: str, seed: int) -> Iterator[str]:
    """Yields pieces of the domain's texts, without end; the same for the same seed."""
    draw = random.Random(f"{domain} {seed}")
    while True:
        yield piece_of(domain, draw, _PROMPT_CHARS)


def piece_of(domain: str, draw: random.Random, num_chars: int) -> str:
    """Returns a piece of the domain's texts; a long one goes on with other texts."""
    text = draw.choice(texts_of(domain))
    start = draw.randrange(len(text) - _PROMPT_CHARS)
    piece = text[start : start + num_chars]
    while len(piece) < num_chars:
        piece += draw.choice(texts_of(domain))[: num_chars - len(piece)]
    return piece
