"""A vocabulary of real size: 128,000 byte-level tokens as of a BPE. The demo model's 2,048 hide what masks take."""

import itertools
import random
from functools import cache

from moe_serve.structured.vocabulary import Vocabulary

EOS = 0
_SIZE = 128_000
_SYLLABLES = ["".join(pair) for pair in itertools.product("bcdfghjklmnprstvwxyz", "aeiou")]
_PUNCTUATION = ['"', ",", ":", "{", "}", "[", "]", " ", "\n", "_", "\\"]


@cache
def large_vocabulary() -> Vocabulary:
    """Returns bytes, numbers, runs of punctuation, and words of one to four syllables, some with a mark before them."""
    draw = random.Random(0)
    tokens: dict[bytes, None] = {bytes([byte]): None for byte in range(256)}
    tokens |= dict.fromkeys(b"%d" % number for number in range(1000))
    for length in (2, 3, 4, 5):
        runs = ["".join(run) for run in itertools.product(_PUNCTUATION, repeat=length)]
        tokens |= dict.fromkeys(run.encode() for run in draw.sample(runs, min(len(runs), 250)))
    while len(tokens) < _SIZE - 1:
        word = "".join(draw.choices(_SYLLABLES, k=draw.choice((1, 2, 2, 3, 3, 4))))
        word = draw.choice((word, word, word.capitalize()))
        tokens[(draw.choice(("", "", " ", " ", '"', "_", ".", "(")) + word).encode()] = None
    return Vocabulary([None, *tokens], [EOS])
