"""Finds cache blocks by the tokens that they hold, so that equal beginnings of prompts are computed once.

A block's *key* is a link of a blake2b chain over (model key, salt, all tokens up to the block's end): equal keys mean
equal tokens from the first one on. Keys depend on nothing else, so a front end computes the same keys as a rank.
Only full blocks have keys, and only blocks whose KV is computed are published; they are never written again.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

KEY_BYTES = 32  # prompts are not trusted: a collision would show one user's context to another


def root_key(model_key: bytes, salt: str, block_size: int) -> bytes:
    """Returns the start of the chain of all prompts of one model and salt.

    model_key: everything that makes cached values differ: the model's identity, its weights' version, the cache dtype
    salt:      requests share blocks only within one salt
    """
    start = blake2b(block_size.to_bytes(8, "little"), digest_size=KEY_BYTES)
    start.update(len(model_key).to_bytes(8, "little"))  # so that (key, salt) pairs cannot run into each other
    start.update(model_key)
    start.update(salt.encode("utf-8", "surrogatepass"))
    return start.digest()


def next_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the key of the block with these tokens that follows the block (or root) with key `previous`."""
    return blake2b(previous + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


def block_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Returns the keys of all full blocks of a token sequence, in order."""
    keys = []
    key = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = next_key(key, token_ids[end - block_size : end])
        keys.append(key)
    return keys


def state_keys(key: bytes, pages: range) -> list[bytes]:
    """Returns the keys of these pages of the state behind the block with this key.

    They begin with numbers that follow each other, by which HostPages spreads the pages of a state evenly.
    """
    digest = blake2b(key, digest_size=KEY_BYTES, person=b"state").digest()
    first, rest = int.from_bytes(digest[:8], "little"), digest[8:]
    return [((first + index) % 2**64).to_bytes(8, "little") + rest for index in pages]


class PrefixCache:
    """The published blocks by key. BlockPool keeps reference counts and the order of eviction."""

    __slots__ = ("_block_of", "_key_of")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: object) -> bool:
        """Returns whether the block is published."""
        return block in self._key_of

    def has_key(self, key: bytes) -> bool:
        """Returns whether a block with this key is published."""
        return key in self._block_of

    def key_of(self, block: int) -> bytes:
        """Returns the key of a published block."""
        return self._key_of[block]

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest published run of keys, from the first one on."""
        blocks = []
        block_of = self._block_of
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, key: bytes, block: int) -> None:
        """Publishes a computed block. Where two requests computed the same tokens, the first one's block stays."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops the entries of these blocks: a new holder will write them, or their values cannot be trusted."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]

    def clear(self) -> int:
        """Drops all entries; returns how many there were."""
        num_blocks = len(self._block_of)
        self._block_of.clear()
        self._key_of.clear()
        return num_blocks

    def check(self) -> None:
        """Asserts that keys and blocks are one to one."""
        assert len(self._block_of) == len(self._key_of)
        assert all(self._block_of[key] == block for block, key in self._key_of.items())
