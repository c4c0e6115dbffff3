"""Prompts of a load: the same for the same seed, number and domain, so that runs repeat."""

import random
from dataclasses import dataclass

from moe_serve.bench.domains import piece_of
from moe_serve.bench.load import Load
from moe_serve.models.tokenizer import Tokenizer

CHARS_PER_TOKEN = 4  # where no tokenizer is given: what vocabularies of 100,000 tokens come to in English
_MOST_PREPARED = 4096


@dataclass(frozen=True)
class Ask:
    """One request. number: from 0, below 0 a warm-up;  max_tokens: of the output"""

    number: int
    domain: str
    prompt: str
    max_tokens: int


class Prompts:
    """Makes them. tokenizer: of the served model; None = lengths are estimated by characters"""

    def __init__(self, load: Load, tokenizer: Tokenizer | None):
        self._load = load
        self._tokenizer = tokenizer
        self._prepared: dict[tuple[int, str], Ask] = {}

    def prepare(self) -> None:
        """Makes the first ones now, since it costs time that would be missing while requests are due."""
        domains = self._load.domains if self._load.shift_after_s is not None else self._load.domains[:1]
        num_each = min(self._load.num_prompts or _MOST_PREPARED, _MOST_PREPARED // len(domains))
        for domain in domains:
            for number in range(num_each):
                self._prepared[number, domain] = self._make(number, domain)

    def ask(self, number: int, domain: str) -> Ask:
        """Returns a request. number: from 0, below 0 for warm-ups"""
        return self._prepared.pop((number, domain), None) or self._make(number, domain)

    def _make(self, number: int, domain: str) -> Ask:
        load = self._load
        draw = random.Random(f"{load.seed} {number} {domain}")
        num_input, max_tokens = load.input_len.draw(draw), load.output_len.draw(draw)
        prompt = self._text(domain, draw, num_input)
        if load.prefix_len and draw.random() < load.prefix_share:
            which = draw.randrange(load.num_prefixes)
            prefix = self._text(domain, random.Random(f"{load.seed} prefix {which} {domain}"), load.prefix_len)
            prompt = prefix + prompt
        return Ask(number, domain, prompt, max_tokens)

    def _text(self, domain: str, draw: random.Random, num_tokens: int) -> str:
        """Returns a text of so many tokens; the joint of two texts, and a cut word, may make it one more or less."""
        if self._tokenizer is None:
            return piece_of(domain, draw, CHARS_PER_TOKEN * num_tokens)
        num_chars = 2 * CHARS_PER_TOKEN * num_tokens
        text = ""
        while True:
            text += piece_of(domain, draw, num_chars)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(ids) >= num_tokens:
                return self._tokenizer.decode(ids[:num_tokens])
