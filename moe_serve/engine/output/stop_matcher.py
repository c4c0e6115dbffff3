"""Finds where a request ends, and releases its text up to there. The HTTP server and `LLM` use it.

All ending rules are here: end-of-sequence, stop ids, stop strings and expressions, length. Tokens are processed one by
one, so the result does not depend on how a stream was cut into messages. Text that may still grow into a stop string is
held back, so a reader never sees a part of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.output.incremental_decoder import Decoder, IncrementalDecoder
from moe_serve.engine.output.stop_regex import RegexFinder

Found = tuple[int, int, str]  # start and end of a match in the text that is held back, and the stop string or regex


@dataclass(frozen=True)
class FinishReason:
    """The reason for the end of a request. matched: the stop id, stop string or stop_regex; of "abort": its cause"""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None


class StopMatcher:
    """The output of one request as its reader sees it.

    output_ids:    the tokens that count, up to and including the one that ended the request
    text:          released text, without a matched stop id or stop string, except with `no_stop_trim`
    finish_reason: None while the request runs

    A request ends at the first of: an end-of-sequence or stop id after `min_new_tokens` others (until then the sampler
    masks them), or an end-of-sequence id where an output with a constraint can only end; a stop string, or a match of a
    stop_regex, that is complete with at least `min_new_tokens` tokens; `max_new_tokens`. If one token completes
    several, the one that ends first wins. Tokens pushed after the end are ignored.
    """

    def __init__(
        self,
        tokenizer: Decoder | None,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """
        tokenizer:  None = ids only, without text or stop strings
        prompt_ids: what the output continues; its text depends on the last few
        """
        self._params = params
        self._decoder = None
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens, prompt_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= frozenset(eos_token_ids)
        self._form_ends = frozenset(() if params.constraint is None else eos_token_ids)
        self._regexes = [RegexFinder(pattern) for pattern in params.stop_regex]
        self._longest_stop = max((len(stop) for stop in params.stop), default=0)
        self._held = ""  # decoded text that is not released
        self.output_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, FinishReason | None]:
        """Adds tokens; returns the text that they release and, once the request has ended, why."""
        before = len(self.text)
        for token_id in token_ids:
            if self.finish_reason:
                break
            self._push_one(token_id)
        return self.text[before:], self.finish_reason

    def close(self, reason: FinishReason) -> str:
        """Ends the request for a reason that its rank gives; returns the text that was held back."""
        before = len(self.text)
        if not self.finish_reason:
            self._end(reason)
        return self.text[before:]

    def _push_one(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        count = len(self.output_ids)
        may_stop = count > self._params.min_new_tokens or token_id in self._form_ends
        if token_id in self._stop_ids and may_stop:
            if self._decoder and self._params.no_stop_trim:
                self._held += self._decoder.push(token_id)
            self._end(FinishReason("stop", matched=token_id))
            return
        if self._decoder:
            self._take(self._decoder.push(token_id), may_stop=count >= self._params.min_new_tokens)
        if not self.finish_reason and count >= self._params.max_new_tokens:
            self._end(FinishReason("length"))

    def _take(self, new: str, may_stop: bool) -> None:
        """Adds text. Ends the request where it completes a stop string, else releases text that cannot begin one."""
        if not self._longest_stop and not self._regexes:
            self.text += new
            return
        old, self._held = len(self._held), self._held + new
        ends = [(regex, regex.push(new)) for regex in self._regexes]
        found = _first_complete(self._held, old, self._params.stop) if new and may_stop else None
        if may_stop:
            found = self._first_of(found, [(regex, old + end) for regex, every in ends for end in every])
        if found:
            start, end, stop = found
            self.text += self._held[: end if self._params.no_stop_trim else start]
            self._held = ""
            self.finish_reason = FinishReason("stop", matched=stop)
            return
        keep = _possible_beginning(self._held, self._params.stop, self._longest_stop)
        cut = max(0, len(self._held) - max([keep, *(regex.num_open for regex in self._regexes)]))
        self.text += self._held[:cut]
        self._held = self._held[cut:]

    def _first_of(self, found: Found | None, ends: list[tuple[RegexFinder, int]]) -> Found | None:
        """Returns the first of a stop string and matches of regexes that end there; the longer one if two end there."""
        for regex, end in sorted(ends, key=lambda each: each[1]):
            if found is not None and end > found[1]:
                break
            start = regex.start_of(self._held[:end])
            if start is not None and (found is None or (end, start) < (found[1], found[0])):
                found = start, end, regex.pattern
        return found

    def _end(self, reason: FinishReason) -> None:
        self.text += self._held + (self._decoder.flush() if self._decoder else "")
        self._held = ""
        self.finish_reason = reason


def _first_complete(text: str, old: int, stops: Sequence[str]) -> Found | None:
    """Returns the stop string that ends first beyond text[:old]; the longer one if two end there."""
    best: Found | None = None
    for stop in stops:
        start = text.find(stop, max(0, old - len(stop) + 1))
        end = start + len(stop)
        if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
            best = start, end, stop
    return best


def _possible_beginning(text: str, stops: Sequence[str], longest: int) -> int:
    """Returns the length of the longest proper prefix of a stop string that text ends with."""
    for length in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(stop) > length and stop.startswith(tail) for stop in stops):
            return length
    return 0
