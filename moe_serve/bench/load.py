"""The load that `moe-serve bench` sends: lengths, prefixes, domains, arrivals, when to stop, and its prompts.

Prompts are the same for the same seed, number and domain, so that runs repeat.
"""

import math
import random
import re
from dataclasses import dataclass, field

from moe_serve.bench.domains import DOMAINS, piece_of
from moe_serve.errors import ConfigError
from moe_serve.models.tokenizer import Tokenizer

SLO_NAMES = ("ttft", "tpot", "e2el")
_MOST_TOKENS = 1_000_000
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, uniform where sigma is 0, else a lognormal one.

    low, high: both ends, equal for a fixed length, and the median of a lognormal one
    """

    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, flag: str, text: str) -> "Lengths":
        """Returns `128` (fixed), `64-256` (uniform, both ends in it) or `lognormal:128:0.5` (median, sigma).

        Raises ConfigError.
        """
        if found := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
            low = int(found[1])
            lengths = cls(low, int(found[2] or low))
        elif found := re.fullmatch(rf"lognormal:(\d+):{_NUMBER}", text):
            lengths = cls(int(found[1]), int(found[1]), float(found[2]))
        else:
            raise ConfigError(
                f"{flag} is {text!r}, expected tokens: 128, a range such as 64-256, or lognormal:MEDIAN:SIGMA"
            )
        if not 1 <= lengths.low <= lengths.high <= _MOST_TOKENS or lengths.sigma > 5:
            raise ConfigError(
                f"{flag} is {text!r}: lengths run from 1 to {_MOST_TOKENS:,} tokens, the smaller first, sigma to 5"
            )
        return lengths

    def draw(self, random_: random.Random) -> int:
        """Returns one length. A lognormal one is at most 32 times the median."""
        if self.sigma:
            drawn = round(self.low * math.exp(random_.gauss(0, self.sigma)))
            return min(max(drawn, 1), 32 * self.low, _MOST_TOKENS)
        return random_.randint(self.low, self.high)


def slo_of(pairs: list[str]) -> dict[str, float]:
    """Returns the bounds that a good request keeps, in milliseconds, from pairs such as `ttft:500`, as vLLM has them.

    Raises ConfigError.
    """
    bounds: dict[str, float] = {}
    for pair in (piece for text in pairs for piece in text.split()):
        found = re.fullmatch(rf"(\w+):{_NUMBER}", pair)
        if found is None or found[1] not in SLO_NAMES:
            raise ConfigError(f"--goodput has {pair!r}, expected NAME:MILLISECONDS with {', '.join(SLO_NAMES)}")
        bounds[found[1]] = float(found[2])
    return bounds


@dataclass(frozen=True)
class Load:
    """The whole load. Times are in seconds.

    num_prompts:     requests that are measured; None = as many as `duration_s` allows
    request_rate:    requests per second; inf = at once, or, with max_concurrency, as soon as another one ends
    burstiness:      shape of the gamma distribution of gaps: 1 = Poisson, below burstier, inf = equal gaps (as vLLM's)
    prefix_share:    of the prompts, those that begin with one of num_prefixes prefixes of prefix_len tokens
    shift_after_s:   the domain of prompts changes to the next one each time; None = every prompt is of the first one
    num_warmups:     requests before the measured ones, one after the other
    """

    num_prompts: int | None = 100
    duration_s: float | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: Lengths = field(default_factory=lambda: Lengths(128, 128))
    output_len: Lengths = field(default_factory=lambda: Lengths(128, 128))
    prefix_len: int = 0
    prefix_share: float = 1.0
    num_prefixes: int = 1
    domains: tuple[str, ...] = DOMAINS
    shift_after_s: float | None = None
    num_warmups: int = 1
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError where flags contradict each other."""
        unknown = [domain for domain in self.domains if domain not in DOMAINS]
        if unknown or not self.domains:
            raise ConfigError(f"--domains has {unknown}, expected one or more of {', '.join(DOMAINS)}, with commas")
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise ConfigError("--request-rate and --burstiness must be above 0; inf is a rate, too")
        if self.num_prompts is None and math.isinf(self.request_rate) and self.max_concurrency is None:
            raise ConfigError(
                "--duration with requests that are all sent at once has no end; set --max-concurrency, "
                "--request-rate or --num-prompts"
            )
        if self.shift_after_s is not None and len(self.domains) < 2:
            raise ConfigError(f"--shift-after needs two --domains, and there is {self.domains[0]} alone")

    def domain_at(self, elapsed_s: float) -> str:
        """Returns the domain of a prompt that is sent so long after the first one."""
        if self.shift_after_s is None:
            return self.domains[0]
        return self.domains[int(elapsed_s // self.shift_after_s) % len(self.domains)]


def arrivals(load: Load, draw: random.Random) -> list[float] | None:
    """Returns when each request is due, in seconds after the first; None where others' ends decide (a closed loop)."""
    if math.isinf(load.request_rate):
        return None if load.max_concurrency is not None else [0.0] * (load.num_prompts or 0)
    due: list[float] = []
    at_s = 0.0
    mean_s = 1 / load.request_rate
    while (load.num_prompts is None or len(due) < load.num_prompts) and (
        load.duration_s is None or at_s < load.duration_s
    ):
        due.append(at_s)
        if math.isinf(load.burstiness):
            at_s = len(due) / load.request_rate  # not a sum, whose rounding would add up
        else:
            at_s += draw.gammavariate(load.burstiness, mean_s / load.burstiness)
    return due


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
