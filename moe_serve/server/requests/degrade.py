"""What a server gives up first while more waits than it serves: steps of `server.degrade`, in order. Torch-free.

A step changes only the calls that it is about, and each of their answers names it in a header. Off by default.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moe_serve.config.server_section import DegradeStep
from moe_serve.errors import QueueFullError
from moe_serve.server.requests.admission import Queue
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

HEADER = b"x-moe-serve-degraded"
STEPS = ("max_new_tokens", "min_priority", "max_samples")


class Degradation:
    """The steps. counts: calls that each has changed or refused"""

    def __init__(self, steps: Sequence[DegradeStep]):
        self.counts: Counter[str] = Counter(
            {name: 0 for step in steps for name in STEPS if _value(step, name) is not None}
        )
        self._steps = steps

    def num_active(self, queue_share: float) -> int:
        """Returns how many steps are taken. queue_share: of what may wait, how much does"""
        return sum(queue_share > step.above for step in self._steps)

    def apply(self, call: GenerateRequest, queue: Queue, named: list[str]) -> GenerateRequest:
        """Returns the call as it is served now; adds to `named` what has changed it. Raises QueueFullError."""
        active = self._steps[: self.num_active(queue.share)]
        for step in active:
            if step.min_priority is not None and call.priority < step.min_priority:
                self._name(named, "min_priority", step.min_priority)
                raise QueueFullError(
                    f"priority is {call.priority}, and while the server is busy calls below {step.min_priority} are "
                    "refused (server.degrade); try again later",
                    queue.seconds_until(step.above),
                )
            samples = max(prompt.params.num_samples for prompt in call.prompts)
            if step.max_samples is not None and samples > step.max_samples:
                self._name(named, "max_samples", step.max_samples)
                raise QueueFullError(
                    f"sampling_params.n is {samples}, and while the server is busy at most {step.max_samples} samples "
                    "are taken (server.degrade); ask for fewer, or try again later",
                    queue.seconds_until(step.above),
                )
        caps = [step.max_new_tokens for step in active if step.max_new_tokens is not None]
        return self._shorten(call, min(caps), named) if caps else call

    def _shorten(self, call: GenerateRequest, most: int, named: list[str]) -> GenerateRequest:
        """Caps the outputs of prompts that name no length."""
        prompts = tuple(_shortened(prompt, most) for prompt in call.prompts)
        if prompts == call.prompts:
            return call
        self._name(named, "max_new_tokens", most)
        return replace(call, prompts=prompts)

    def _name(self, named: list[str], step: str, value: int) -> None:
        self.counts[step] += 1
        named.append(f"{step}={value}")


def _shortened(prompt: Prompt, most: int) -> Prompt:
    params = prompt.params
    if prompt.explicit_length or params.max_new_tokens <= max(most, params.min_new_tokens):
        return prompt
    return replace(prompt, params=replace(params, max_new_tokens=max(most, params.min_new_tokens)))


def _value(step: DegradeStep, name: str) -> int | None:
    value: int | None = getattr(step, name)
    return value
