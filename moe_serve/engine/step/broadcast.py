"""Broadcasts bytes of one rank to all inside a step, over the transport's exchange of counts.

That exchange carries int64 numbers exactly, and works without masked ranks. The step plan names the root, so all ranks
make the same calls. A checksum protects the bytes.
"""

import hashlib

import numpy as np
import torch

from moe_serve.dispatch.base import AnyAllToAll
from moe_serve.ep.load_recorder import GATHERED_AT_ONCE
from moe_serve.errors import PeerError

MAX_BYTES = 64 * 2**20


def broadcast(all_to_all: AnyAllToAll, source: int, data: bytes | None, device: torch.device) -> bytes:
    """Returns the bytes of rank `source`; a collective call.

    data: on the source its bytes, at most MAX_BYTES; None on the others
    Raises PeerError when a peer is missing, or the bytes arrived damaged.
    """
    head = torch.zeros(3, dtype=torch.int64, device=device)
    if data is not None:
        assert len(data) <= MAX_BYTES, f"{len(data)} bytes in one broadcast"
        head = torch.tensor([len(data), *_digest(data)], dtype=torch.int64, device=device)
    size, *digest = all_to_all.exchange_counts(head).wait()[source].tolist()
    if not 0 <= size <= MAX_BYTES:
        raise PeerError(f"rank {source} announced a message of {size} bytes; restart the ranks", source, "broadcast", 0)
    words = np.zeros(-(-size // 8), dtype=np.int64)
    if data is not None:
        words.view(np.uint8)[:size] = np.frombuffer(data, dtype=np.uint8)
    parts = [
        all_to_all.exchange_counts(torch.from_numpy(words[start : start + GATHERED_AT_ONCE]).to(device)).wait()[source]
        for start in range(0, len(words), GATHERED_AT_ONCE)
    ]
    arrived = torch.cat(parts).cpu().numpy().tobytes()[:size] if parts else b""
    if _digest(arrived) != tuple(digest):
        raise PeerError(f"a message of rank {source} arrived damaged; restart the ranks", source, "broadcast", 0)
    return arrived


def _digest(data: bytes) -> tuple[int, int]:
    first, second = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), dtype=np.int64).tolist()
    return first, second
