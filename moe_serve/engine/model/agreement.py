"""All ranks compute with the same kernels on weights of the same form, or none starts.

The compiled kernels give the same bits with AVX-512 and AVX2, but not with AMX or without fused multiply-adds, and
another compiler may round elsewhere. Ranks that disagree would give a request other tokens on another rank, and could
not exchange experts byte for byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import gather_bytes
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.digest import kernel_digest

SAME_BITS = (
    "where some ranks have AMX (amx) and others have not, set engine.cpu_kernels: no_amx, else install the same C "
    "compiler on all machines, or set engine.cpu_kernels: torch"
)


@dataclass(frozen=True)
class RankFacts:
    """The facts in which all ranks must agree, as texts.

    kernels: the kind of kernels;  bits: a hash of their results, empty for torch;  weights: the form of expert slots
    """

    kernels: str
    bits: str
    weights: str

    @classmethod
    def of(cls, plan: ModelPlan) -> "RankFacts":
        """Returns the facts of this rank."""
        library = plan.choice.library
        if library is None:
            return cls("torch", "", plan.slot_form.label)
        return cls(f"compiled kernels ({library.form})", kernel_digest(), plan.slot_form.label)

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankFacts":
        return cls(*data.decode().split("|"))

    def to_bytes(self) -> bytes:
        return "|".join((self.kernels, self.bits, self.weights)).encode()


def check_agreement(own: RankFacts, group: EpGroup) -> None:
    """Raises ConfigError on every rank unless all CPU ranks have equal facts. A collective call.

    A rank that joins others that serve compares its own with theirs, alone.
    """
    if group.files is not None:
        if group.is_replacement:
            theirs = RankFacts.from_bytes(group.files.kernels.encode())
            _refuse(disagreement([own if rank == group.rank else theirs for rank in range(group.num_ranks)]))
        group.files.kernels = own.to_bytes().decode()
    if group.process_group is None or group.device.type != "cpu":
        return
    found = gather_bytes(own.to_bytes(), group.process_group)
    _refuse(disagreement([RankFacts.from_bytes(each) for each in found]))


def _refuse(message: str | None) -> None:
    if message is not None:
        raise ConfigError(message)


def disagreement(facts: Sequence[RankFacts]) -> str | None:
    """Returns a message that names what differs, on which ranks, and the fix; None where all agree.

    facts: by rank. AVX-512 and AVX2 may meet: their kernels have the same bits.
    """
    if len({fact.weights for fact in facts}) > 1:
        held = _by_value([fact.weights for fact in facts])
        return (
            f"ranks would hold experts in different forms: {held}; give all ranks the same checkpoint, and a C "
            "compiler or none, or set engine.cpu_kernels: torch"
        )
    if len({fact.bits for fact in facts}) > 1:
        computing = _by_value([f"{fact.kernels} {fact.bits}".strip() for fact in facts])
        return f"ranks compute with different bits: {computing}; {SAME_BITS}"
    return None


def _by_value(values: Sequence[str]) -> str:
    """Returns such as "ranks 0, 2: a; rank 1: b"."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who)}: {value}" for value, who in ranks.items())
