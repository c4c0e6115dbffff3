"""Records the begin and end of each step of a rank, and of each part of a step, until a bound is reached.

All times are of the host's monotonic clock, in ns. A profile holds nothing of the content of requests.
"""

import time
from array import array

from moe_serve.attention_dp.scheduler import Proposal
from moe_serve.engine.protocol.messages import STEP_WORDS, Answer, Profile
from moe_serve.engine.step.plan import PHASES, StepPlan
from moe_serve.kernels.part_clock import PARTS, PartClock
from moe_serve.process_facts import boot_id


class Profiler:
    """Records while a profile runs, and keeps the profile until the front end has asked for it or a new one begins.

    rank, launch_id: of the answers
    """

    def __init__(self, rank: int, launch_id: int, clock: PartClock):
        self.is_on = False
        self._own = rank, launch_id
        self._clock = clock
        self._steps = array("q")
        self._limits = Profile(0, "start")
        self._until_s = 0.0
        self._num_left_out = 0
        self._has_any = False

    def command(self, command: Profile) -> Answer:
        """Starts a profile, or ends it and answers with its records. Refuses a second start, and an end without one."""
        if command.command == "start":
            if self.is_on and time.monotonic() < self._until_s:
                return self._answer(command, False, "a profile is being recorded already; POST /stop_profile ends it")
            self._steps, self._limits = array("q"), command
            self._until_s = time.monotonic() + command.max_s
            self._num_left_out = 0
            self._clock.write_turns(command.most_turns)
            self.is_on = self._has_any = True
            return self._answer(command, True, "recording")
        if not self._has_any:
            return self._answer(command, False, "no profile was started: POST /start_profile first")
        turns = self._clock.turns()
        facts = {
            "steps": self._steps.tobytes(),
            "turns": turns.tobytes(),
            "parts": list(PARTS),
            "phases": list(PHASES),
            "num_left_out": self._num_left_out,
            "turns_full": len(turns) >= 2 * self._limits.most_turns,
            "clock": boot_id(),
            "wall_ns": time.time_ns() - time.monotonic_ns(),
        }
        self.is_on = self._has_any = False
        self._steps = array("q")
        self._clock.write_turns(0)
        return self._answer(command, True, "recorded", facts)

    def add(self, plan: StepPlan, times_ns: tuple[int, int, int], proposal: Proposal, waited_s: float) -> None:
        """Records a step that has ended, while a profile runs.

        times_ns: when its exchange began, when the ranks had agreed, when it ended
        proposal: of this rank, of which the plan may hold the prefills
        waited_s: for rows of peers, since the start
        """
        if time.monotonic() > self._until_s:
            self._end()
            return
        if len(self._steps) >= STEP_WORDS * self._limits.most_steps:
            self._num_left_out += 1
            return
        num_prefill = 0 if plan.hold_prefill else sum(chunk.length for chunk in proposal.prefills)
        phase = PHASES.index(plan.phase) if plan.phase in PHASES else -1
        self._steps.extend(
            (plan.step, phase, *times_ns, len(proposal.decodes), num_prefill, plan.num_chunks, int(plan.overlap),
             plan.moves.activate, int(1e9 * waited_s))
        )  # fmt: skip

    def _end(self) -> None:
        if self.is_on:
            self.is_on = False
            self._clock.stop_writing()

    def _answer(self, command: Profile, ok: bool, text: str, facts: dict[str, object] | None = None) -> Answer:
        return Answer(*self._own, command.call_id, ok, text, facts or {})
