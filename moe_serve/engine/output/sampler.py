"""Chooses the next token of each sequence from its logits, which the request's parameters change: one call for all rows
of a step.

Changes are a pure function of (parameters, prompt ids, output ids). A `RequestChanges` keeps counts from token to
token, so that one more token costs the same after a long output; one made anew from prompt and output gives the same.
No generator keeps a state, so a token does not depend on the batch, the rank, a preemption or a restart
(kernels/sampling.py says how it is drawn).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.attention_dp.constraint import FormStart
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.kernels.cpu.sampling import RowSampler
from moe_serve.kernels.sampling import (
    EDIT,
    NO_EDITS,
    NO_IDS,
    SAMPLING_ROW,
    LogitChanges,
    SamplingRows,
    pack_sampling_row,
    sample_rows_reference,
)


class Sampler:
    """Chooses tokens. Decode steps follow each other with the same requests, so their parameters are written once."""

    def __init__(self, eos_token_ids: Sequence[int], compiled: bool = False):
        """compiled: by the compiled kernel, which needs logits on CPU; the tokens are the same"""
        self._eos_token_ids = eos_token_ids
        self._compiled = compiled
        self._changes: dict[Request, RequestChanges] = {}
        self._keep([], 0)

    def __call__(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """Returns one token id for each row; or the reason why there is none: NOT_FINITE or NONE_LEFT.

        logits:   [num_rows, vocab] float32, row i belongs to requests[i]; changed in place as parameters say
        requests: the output so far gives each row its output index
        """
        if requests == self._requests:  # the same objects
            self._output_indices[:] = [len(request.output_ids) for request in requests]
        else:
            self._keep(requests, logits.shape[1])
        for row, changes in self._changing:
            self._row_changes[row] = changes.now()
        return self._choose(logits)

    def again(
        self,
        logits: Tensor,
        requests: list[Request],
        ahead: Sequence[int],
        changes: Sequence[LogitChanges | None] | None = None,
    ) -> list[int]:
        """Returns as a call does, for some requests of the newest one, whose outputs have grown since.

        ahead:   how many tokens each row's place is behind the output; 0 but for requests that `draws_alike` names, or
                 where their changes are given
        changes: of each row; None: those of its request's output as it is now
        """
        if changes is None:
            changes = [self._changes[each].now() if each in self._changes else None for each in requests]
        sampling = SamplingRows(
            _rows(requests, ahead), list(changes) if any(each is not None for each in changes) else []
        )
        return self._chooser(sampling)(logits)

    def behind(self, request: Request, drafts: Sequence[int]) -> list[LogitChanges]:
        """Returns the changes of a request of the newest call behind each of its drafts, as far as these have its form.

        drafts: the first is the newest token of the output
        Returns [] where its form has not begun, or more than that changes its logits or is told of them.
        """
        changes = self._changes.get(request)
        if changes is None or request.params.logprobs is not None:
            return []
        return changes.behind(drafts)

    def forced(self, request: Request) -> tuple[int, ...]:
        """Returns tokens that the form of a request of the newest call forces next, as far as they are known."""
        changes = self._changes.get(request)
        return () if changes is None else changes.forced()

    def _keep(self, requests: list[Request], vocab: int) -> None:
        """Writes the parameters of these requests; from now on their output indices and changes change."""
        self._requests = requests
        self._changes = {
            request: self._changes.get(request) or RequestChanges(request, self._eos_token_ids, vocab)
            for request in requests
            if changes_logits(request)
        }
        self._changing = [(row, self._changes[each]) for row, each in enumerate(requests) if each in self._changes]
        self._row_changes: list[LogitChanges | None] = [None] * len(requests) if self._changing else []
        sampling = SamplingRows(_rows(requests, [0] * len(requests)), self._row_changes)
        self._output_indices = sampling.rows["output_index"]
        self._choose = self._chooser(sampling)

    def _chooser(self, sampling: SamplingRows) -> Callable[[Tensor], list[int]]:
        return RowSampler(sampling) if self._compiled else partial(sample_rows, sampling=sampling)


@torch.inference_mode()
def sample_rows(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Returns what sample_rows_reference does; Triton on CUDA, in one launch, of which the host reads the tokens."""
    if logits.is_cuda:
        from moe_serve.kernels.triton.sampling import sample_rows_triton

        found: list[int] = sample_rows_triton(logits, sampling).tolist()
        return found
    return sample_rows_reference(logits, sampling)


def has_finite_best(logits: Tensor) -> list[bool]:
    """Returns for each row of logits [num_rows, vocab] whether a token could be chosen from it."""
    if logits.shape[0] == 0:
        return []
    sound: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    return sound


def _rows(requests: Sequence[Request], ahead: Sequence[int]) -> NDArray[np.void]:
    """Returns how the next token of each request is drawn, or one so many tokens later, as SAMPLING_ROW."""
    packed = [
        pack_sampling_row(p.temperature, p.top_p, p.min_p, p.top_k, request.seed, len(request.output_ids) + later)
        for request, later in zip(requests, ahead, strict=True)
        for p in [request.params]
    ]
    return np.frombuffer(bytearray().join(packed), SAMPLING_ROW)


def changes_logits(request: Request) -> bool:
    """Returns whether this request's next logits, or later ones, are changed."""
    params = request.params
    return len(request.output_ids) < params.min_new_tokens or params.changes_logits or params.constraint is not None


def draws_alike(request: Request) -> bool:
    """Returns whether tokens before it change nothing in how a token of this request is drawn, but for its index."""
    return request.params.logprobs is None and not changes_logits(request)


class RequestChanges:
    """The logit changes of one request with a growing output."""

    def __init__(self, request: Request, eos_token_ids: Sequence[int], vocab: int):
        """vocab: tokens of the logits; ids beyond it cannot be drawn, and change nothing"""
        params = request.params
        self._output_ids = request.output_ids
        self._edits = _Edits(params, request.prompt_ids, vocab)
        self._bad_words = _BadWords(params.bad_words_ids, vocab)
        self._may_end_from = params.min_new_tokens
        self._ending = _within((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)), vocab)
        self._mask = mask_of(params.allowed_token_ids, vocab) if params.allowed_token_ids else None
        self._form = _Form(request, eos_token_ids, vocab) if params.constraint is not None else None
        self._has_others = params.changes_logits

    def now(self) -> LogitChanges | None:
        """Returns the changes for the token after the output as it is now; None where there are none."""
        edits = self._edits.after(self._output_ids)
        banned = self._bad_words.after(self._output_ids)
        may_end, mask = len(self._output_ids) >= self._may_end_from, self._mask
        if self._form is not None:
            form = self._form.mask(may_end)
            may_end |= self._form.must_end
            if form is None:
                banned = np.concatenate([banned, self._form.not_before])
            else:
                mask = form if mask is None else form & mask
        if not may_end:
            banned = np.concatenate([banned, self._ending])
        if not edits.size and not banned.size and mask is None:
            return None
        return LogitChanges(edits, banned, mask)

    def behind(self, drafts: Sequence[int]) -> list[LogitChanges]:
        """Returns the changes behind each of these drafts; [] where others than those of the form depend on them.

        drafts: as of Sampler.behind
        """
        if self._form is None or self._has_others or len(self._output_ids) < self._may_end_from:
            return []
        return [LogitChanges(NO_EDITS, NO_IDS, mask) for mask in self._form.behind(drafts)]

    def forced(self) -> tuple[int, ...]:
        """Returns tokens of the text that the form forces after the output as it is now."""
        return () if self._form is None else self._form.forced()


class _Form:
    """The constraint of one request.

    End-of-sequence and stop tokens may come where the output is complete; a stop token that is text also where the
    form has it, and ends the output there. min_new_tokens holds the end off as long as anything else may come.

    must_end:   whether nothing else may come, after `mask`
    not_before: the tokens that may not come before the form begins, [num_ids] int64
    """

    def __init__(self, request: Request, eos_token_ids: Sequence[int], vocab: int):
        assert request.matcher is not None, f"{request.request_id} was scheduled before its grammar was compiled"
        assert request.params.constraint is not None
        start = request.params.constraint.start
        self._request = request
        self._matcher = request.matcher.copy(request.params.constraint.name)
        self._start = _Start(start, request.output_ids)
        self._num_matched = 0
        self._ahead: list[int] = []  # tokens behind these that the matcher has taken, as drafts
        self._opens = mask_of([] if start is None or start.opens is None else [start.opens], vocab)
        self.not_before = _within([] if start is None or start.may_end else eos_token_ids, vocab)
        self._stops = mask_of(request.params.stop_token_ids, vocab)
        self._none = np.zeros_like(self._stops)
        self.must_end = False

    def forced(self) -> tuple[int, ...]:
        """Returns tokens of the text that must come after the output; none before the form begins, or where it ends."""
        try:
            return tuple(self._matcher.forced()) if self._advance() else ()
        except RequestError:
            return ()  # `mask` says so

    def mask(self, may_stop: bool) -> NDArray[np.int32] | None:
        """Returns the tokens that may come after the output; none where the grammar is too complex there, None before
        the form begins.

        may_stop: whether a stop token would end the request
        """
        try:
            if not self._advance():
                return None
            mask: NDArray[np.int32] = self._matcher.mask()
        except RequestError as error:
            self._request.why_none_left = str(error)
            return self._none
        self.must_end = self._matcher.must_end
        if may_stop and self._matcher.may_end:
            mask |= self._stops
        return mask if self._request.output_ids else mask | self._opens

    def behind(self, drafts: Sequence[int]) -> list[NDArray[np.int32]]:
        """Returns the tokens that may come behind each of these drafts, as far as they have the form; [] before it
        begins. A stop token would end the request.

        drafts: as of Sampler.behind
        """
        first = self.mask(may_stop=True)
        if first is None:
            return []
        masks, has_stops = [first], len(self._request.params.stop_token_ids) > 0
        try:
            for token in drafts[1:]:
                if not self._matcher.takes(token):
                    break
                self._ahead.append(token)
                mask: NDArray[np.int32] = self._matcher.mask()
                masks.append(mask | self._stops if has_stops and self._matcher.may_end else mask)
        except RequestError:
            self._begin_anew()  # a draft that may never come must not end the request
        return masks

    def _begin_anew(self) -> None:
        matcher, constraint = self._request.matcher, self._request.params.constraint
        assert matcher is not None
        assert constraint is not None
        self._matcher, self._num_matched, self._ahead = matcher.copy(constraint.name), 0, []

    def _advance(self) -> bool:
        """Takes the tokens that have come; returns whether the form has begun. Raises as the matcher does."""
        begin = self._start.index()
        if begin is None:
            return False
        output_ids = self._request.output_ids
        if self._ahead:
            came = output_ids[self._num_matched :]
            num_right = next((i for i, (a, b) in enumerate(zip(self._ahead, came, strict=False)) if a != b), len(came))
            num_right = min(num_right, len(self._ahead))
            if num_right == len(self._ahead) or self._matcher.go_back(len(self._ahead) - num_right):
                self._num_matched, self._ahead = self._num_matched + num_right, []
            else:
                self._begin_anew()
        self._matcher.advance(output_ids[max(begin, self._num_matched) :])
        self._num_matched = len(output_ids)
        return True


class _Start:
    """Finds the beginning of the form in a growing output."""

    def __init__(self, start: FormStart | None, output_ids: Sequence[int]):
        self._left = [] if start is None else list(start.after)  # sequences that have not come
        self._opens = None if start is None else start.opens
        self._output_ids = output_ids
        self._read = 0  # tokens that belong to sequences that have come, or cannot begin the next one

    def index(self) -> int | None:
        """Returns the index of the form's first token, None while it has not begun."""
        output_ids = self._output_ids
        if self._opens is not None and output_ids[:1] != [self._opens]:
            return 0
        while self._left:
            wanted = list(self._left[0])
            for begin in range(self._read, len(output_ids) - len(wanted) + 1):
                if output_ids[begin : begin + len(wanted)] == wanted:
                    break
            else:
                self._read = max(self._read, len(output_ids) - len(wanted) + 1)
                return None
            self._read = begin + len(wanted)
            del self._left[0]
        return self._read


class _BadWords:
    """Words that the output must not hold, as vLLM bans them (v1/sample/ops/bad_words.py): the last token of a word
    is banned where the output ends with the tokens before it."""

    def __init__(self, words: Sequence[Sequence[int]], vocab: int):
        within = [word for word in words if 0 <= word[-1] < vocab]
        self._always = np.array([word[-1] for word in within if len(word) == 1], np.int64)
        self._longer: dict[int, list[tuple[list[int], int]]] = {}  # by the token before the last one
        for word in within:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def after(self, output_ids: Sequence[int]) -> NDArray[np.int64]:
        """Returns the ids that would complete a word, [num_ids] int64."""
        candidates = self._longer.get(output_ids[-1], ()) if output_ids else ()
        last = [token for before, token in candidates if output_ids[-len(before) :] == before]
        return np.array([*self._always.tolist(), *last], np.int64) if last else self._always


class _Edits:
    """One EDIT for each token with a bias or a penalty.

    repetition_penalty counts tokens of prompt and output (Keskar et al., CTRL, 2019; transformers'
    RepetitionPenaltyLogitsProcessor); frequency_penalty and presence_penalty those of the output (OpenAI's API
    reference): logit - count * frequency_penalty - (count > 0) * presence_penalty.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab: int):
        self._repetition = params.repetition_penalty
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = params.presence_penalty
        self._has_penalties = params.has_penalties
        self._vocab = vocab
        self._num_counted = 0  # tokens of the output
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab}
        repeated = _within(prompt_ids, vocab) if self._repetition != 1.0 else NO_IDS
        tokens = [*bias, *sorted(set(repeated.tolist()) - bias.keys())]
        self._slots = {token: slot for slot, token in enumerate(tokens)}
        self._counts = [0] * len(tokens)  # in the output, by slot
        self._edits = np.zeros(len(tokens), EDIT) if tokens else NO_EDITS
        self._edits["token"] = tokens
        self._edits["bias"][: len(bias)] = list(bias.values())
        self._edits["repetition"] = 1.0
        self._edits["repetition"][[self._slots[token] for token in set(repeated.tolist())]] = self._repetition

    def after(self, output_ids: Sequence[int]) -> NDArray[np.void]:
        """Returns [num_edits] EDIT for the next token; the memory is written anew in the next call."""
        if self._has_penalties:
            for token in output_ids[self._num_counted :]:
                if 0 <= token < self._vocab:
                    self._count(token)
            self._num_counted = len(output_ids)
        return self._edits[: len(self._counts)]

    def _count(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._counts))
        if slot == len(self._counts):
            self._counts.append(0)
            if slot == len(self._edits):
                self._edits = np.concatenate([self._edits, np.zeros(max(64, slot), EDIT)])
            self._edits[slot] = (token, 0.0, 1.0, 0.0, 0.0)
        self._counts[slot] += 1
        edit = self._edits[slot]
        edit["repetition"] = self._repetition
        edit["frequency"] = self._frequency * np.float32(self._counts[slot])
        edit["presence"] = self._presence


def mask_of(token_ids: Sequence[int], vocab: int) -> NDArray[np.int32]:
    """Returns the mask of LogitChanges that allows these tokens alone, [ceil(vocab / 32)] int32."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[_within(token_ids, vocab)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _within(token_ids: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """Returns the ids that logits have."""
    ids = np.array(token_ids, np.int64)
    return ids[(ids >= 0) & (ids < vocab)]
