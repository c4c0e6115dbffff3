"""What connects the GPUs of this machine with each other and with other machines."""

from pathlib import Path

import torch


def host_number() -> int:
    """Returns 62 bits that are equal for all processes of one booted machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    return int(boot, 16) & (2**62 - 1)


def rdma_devices() -> tuple[str, ...]:
    """Returns the names of this machine's RDMA devices."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def unlinked_pairs() -> tuple[tuple[int, int], ...]:
    """Returns the pairs of visible GPUs that cannot reach each other's memory."""
    gpus = range(torch.cuda.device_count())
    return tuple((a, b) for a in gpus for b in gpus if a < b and not torch.cuda.can_device_access_peer(a, b))
