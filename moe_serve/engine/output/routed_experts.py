"""The experts of a request's tokens, as the gates chose them: logical ids by token, MoE layer and rank of the choice.

They lie beside keys and values in the KV cache (attention_dp/kv_cache.py), written when the gate has chosen. So a
prefix that is reused, moved or handed over has them, and where experts lie, or which rank computes, does not matter.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_serve.engine.protocol.messages import ExpertsBlock, TokenEvent
from moe_serve.errors import RequestError

if TYPE_CHECKING:  # front ends load no torch
    from moe_serve.attention_dp.kv_cache import KvCache
    from moe_serve.attention_dp.request import Request

MOST_BYTES = 1 << 24  # of one request's, which may come in one event
_TOKENS_TOGETHER = 16  # whose experts are sent at once while a request goes on
_BYTES_OF_A_MESSAGE = 1 << 24  # from which on the events of a step go on in another; a message may hold 64 MiB


class KeptExperts:
    """The experts that a rank keeps beside its cache."""

    def __init__(self, cache: "KvCache", num_layers: int, topk: int, num_logical: int):
        ids = cache.expert_ids(num_layers, topk, num_logical)
        self._on_gpu = ids.is_cuda
        self._ids: Any = ids if ids.is_cuda else ids.numpy()  # numpy takes a tenth of torch's time for one row
        self._block_size = cache.block_size
        self._shape = num_layers, topk
        self._dtype = "uint8" if ids.itemsize == 1 else "uint16"

    def next_of(self, request: "Request", is_last: bool) -> ExpertsBlock | None:
        """Returns the experts of a request's computed tokens that have not been sent, and notes that they are.

        None: they are few, and more will come. The request still holds its blocks.

        is_last: no event of the request follows. Where a front end may end it by a text, any event may be the last
        """
        first, end = request.num_experts_sent, request.num_known - 1  # the newest token has no row yet
        params = request.params
        if not (is_last or params.stop or params.stop_regex) and end - first < _TOKENS_TOGETHER:
            return None
        request.num_experts_sent = end
        positions = np.arange(first, end)
        blocks = np.asarray(request.block_ids, dtype=np.int64)[positions // self._block_size]
        rows = self._ids[blocks * self._block_size + positions % self._block_size]
        rows = rows.cpu().numpy() if self._on_gpu else rows
        return ExpertsBlock(first, *self._shape, self._dtype, rows.tobytes())


def in_messages(events: Sequence[TokenEvent]) -> Iterator[list[TokenEvent]]:
    """Yields the events of a step in parts that are no larger than messages may be: many prompts may end in one."""
    part: list[TokenEvent] = []
    num_bytes = 0
    for event in events:
        if num_bytes >= _BYTES_OF_A_MESSAGE:
            yield part
            part, num_bytes = [], 0
        part.append(event)
        num_bytes += len(event.embedding or b"") + (0 if event.experts is None else len(event.experts.rows))
    yield part


class RoutedExperts:
    """The experts of a request so far, at the front end."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._shape = 0, 0
        self._dtype = "uint8"

    def add(self, block: ExpertsBlock) -> None:
        """Adds rows, which may repeat those of an earlier attempt."""
        self._shape, self._dtype = (block.num_layers, block.topk), block.dtype
        self._rows[block.first * self._row_bytes :] = block.rows

    @property
    def _row_bytes(self) -> int:
        return self._shape[0] * self._shape[1] * np.dtype(self._dtype).itemsize

    def array(self, num_tokens: int) -> np.ndarray:
        """Returns those of the first tokens, [at most num_tokens, MoE layers, experts of a token], uint8 or uint16."""
        rows = bytes(self._rows[: num_tokens * self._row_bytes])
        return np.frombuffer(rows, self._dtype).reshape(-1, *self._shape) if rows else np.empty((0, *self._shape), "u1")

    def as_json(self, num_tokens: int) -> dict[str, Any]:
        """Returns the same as an object: base64 of its bytes, little-endian, its shape and its dtype."""
        found = self.array(num_tokens)
        data = base64.b64encode(found.astype(found.dtype.newbyteorder("<")).tobytes()).decode()
        return {"data": data, "shape": list(found.shape), "dtype": str(found.dtype)}


def check_experts(num_tokens: int, bytes_per_token: int | None) -> None:
    """Raises RequestError where a request for experts cannot be served. num_tokens: prompt and output

    bytes_per_token: of the experts that ranks keep; None: they keep none
    """
    name = "return_routed_experts"
    if bytes_per_token is None:
        raise RequestError(
            f"{name} is true, but this server keeps no experts of tokens; serve with engine.return_routed_experts "
            "(--enable-return-routed-experts), or leave it out",
            field=name,
        )
    if num_tokens * bytes_per_token > MOST_BYTES:
        raise RequestError(
            f"{name} for up to {num_tokens} tokens may bring {num_tokens * bytes_per_token} bytes of expert ids, but "
            f"at most {MOST_BYTES} are given; send a shorter prompt or a smaller max_new_tokens",
            field=name,
        )
