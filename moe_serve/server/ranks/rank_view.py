"""One rank as the front end sees it: what it has reported, and what is known of its process. Torch-free."""

from dataclasses import dataclass, field
from typing import Any, Self

from moe_serve.engine.protocol.messages import Hello, ModelLimits, Status


@dataclass
class RankView:
    """One rank, as far as it has reported. identity: its socket's name at our ROUTER.

    mask_reason:  why it is masked; None while it takes part
    suspicion:    (since when, why) it is presumed lost; its peers are about to report that they go on, or that they end
    times_masked: how often it was masked
    pulse_s:      when its process last showed that it lives; None: not yet
    last_phase:   what it was doing then
    """

    rank: int
    identity: bytes
    pid: int
    host: str
    heard_s: float
    phase: str = "attached"
    fraction: float = 0.0
    limits: ModelLimits | None = None  # known once it is ready
    info: dict[str, Any] = field(default_factory=dict)
    status: Status | None = None
    ended: bool = False
    mask_reason: str | None = None
    suspicion: tuple[float, str] | None = None
    times_masked: int = 0
    pulse_s: float | None = None
    last_phase: str = "its phase is not known"
    num_reconnects: int = 0
    num_before: int = 0
    restarts_left: int = 0

    @property
    def is_ready(self) -> bool:
        return self.limits is not None and not self.ended

    @property
    def serves(self) -> bool:
        """Whether it takes requests, as far as is known here."""
        return self.limits is not None and self.may_serve

    @property
    def may_serve(self) -> bool:
        """Whether nothing is known that keeps it from serving, though it may not have said here that it does."""
        return not self.ended and self.mask_reason is None and self.suspicion is None

    @property
    def can_be_spared(self) -> bool:
        """Whether this rank and its peers are set up to go on without each other."""
        return self.info.get("on_lost_rank") == "mask"

    def replaced_by(self, identity: bytes, hello: Hello, now_s: float) -> Self:
        """Returns the new process of this rank, which was killed: masked until the others say that it takes part."""
        view = type(self)(hello.rank, identity, hello.pid, hello.host, now_s, limits=self.limits, info=self.info)
        view.num_reconnects, view.num_before = hello.num_reconnects, hello.num_before
        view.restarts_left, view.mask_reason = hello.restarts_left, self.mask_reason
        return view
