"""The vocabulary of a model as grammars see it: the bytes of each token. Loads llguidance when used."""

from collections.abc import Sequence
from typing import Any

from moe_serve.errors import RequestError

_SPECIAL = b"\xff"  # llguidance: a token that begins so stands for no text


class Vocabulary:
    """A model's tokens as llguidance takes them. Made once for a model; 151,000 words take 0.5 to 1 s and 14 MB."""

    def __init__(self, tokens: Sequence[bytes | None], eos_token_ids: Sequence[int]):
        """
        tokens:        [vocab_size], None = stands for no text, and is never part of an output with a constraint
        eos_token_ids: what may follow where an output is complete

        Raises RequestError for a model without an end-of-sequence token.
        """
        from llguidance import LLTokenizer

        self.eos_token_ids = [token for token in eos_token_ids if token < len(tokens)]
        self.size = len(tokens)
        if not self.eos_token_ids:
            raise RequestError(
                "this model has no end-of-sequence token, which ends an output that is complete; leave the constraint "
                "out",
                field="constraint",
            )
        of_text = [_SPECIAL + b"<%d>" % token if each is None else each for token, each in enumerate(tokens)]
        self.tokens = of_text
        words = _Words(of_text, self.eos_token_ids[0])
        self.tokenizer: Any = LLTokenizer(words, eos_token=self.eos_token_ids)  # type: ignore[arg-type]
        words.greedy = self.tokenizer.greedy_tokenize


class _Words:
    """The vocabulary in the form that llguidance's Python tokenizer takes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int):
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = [token for token, each in enumerate(tokens) if each.startswith(_SPECIAL)]
        self.greedy: Any = None

    def __call__(self, text: str) -> list[int]:
        """Returns tokens of a text that a grammar forces: the longest first, which every kind of vocabulary has."""
        found: list[int] = self.greedy(text)
        return found
