"""Which block holds which tokens after which others: finds the blocks of a prompt seen before.

Blocks form a tree: a block's place is its parent block and its tokens. The index is a hash table
keyed by a hash chained over (parent, tokens); the root hashes a salt, so that prompts of different
salts (tenants, adapters, images) share nothing. A hash only proposes: a hit is verified against the
stored tokens, parent and salt, so a collision costs a miss and never gives wrong contents.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index

from paged_attn._checks import require

__all__ = ["HashFunction", "PrefixCache", "pack_tokens"]

# (hash of what is before, tokens of the block as 8-byte integers) -> hash
HashFunction = Callable[[bytes, bytes], bytes]

_ROOT = -1


@dataclass(slots=True)
class Entry:
    """The place of a block in the tree."""

    key: bytes
    parent: int  # block id, or _ROOT
    tokens: bytes
    salt: str
    children: set[int] = field(default_factory=set)


class PrefixCache:
    """An index of full blocks by contents. It owns no block: the pool does.

    Attributes:
        block_size: tokens a block.
        hits: blocks found by prompts that were added.
        misses: full blocks of such prompts that were not found.
        evictions: blocks whose contents the pool gave up.
        entries: what is known of each block that can be found; for reading.
    """

    def __init__(self, block_size: int, hash_function: HashFunction | None = None) -> None:
        self.block_size = block_size
        self.hits = self.misses = self.evictions = 0
        self._hash = KeyedHash() if hash_function is None else hash_function
        self.entries: dict[int, Entry] = {}  # of a block
        self._blocks: dict[bytes, int] = {}  # of a chained hash

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, tokens: array[int], salt: str) -> list[int]:
        """The blocks that hold the longest cached prefix of `tokens`, in order.

        At most (len(tokens) - 1) // block_size: one token is always left to run, since its logits
        are what the caller is after. Changes nothing.
        """
        blocks: list[int] = []
        parent, key = _ROOT, self._root(salt)
        for start, end in self._spans((len(tokens) - 1) // self.block_size):
            content = tokens[start:end].tobytes()
            key = self._hash(key, content)
            block = self._blocks.get(key)
            if block is None or not self._matches(block, parent, content, salt):
                break
            blocks.append(block)
            parent = block
        return blocks

    def insert(self, blocks: Sequence[int], num_known: int, tokens: array[int], salt: str) -> int:
        """Indexes full blocks of one sequence, from number `num_known` on.

        Stops where another block already has that place: what follows would then hang from a
        block that this sequence does not own.

        Args:
            blocks: the sequence's blocks, all of them full and written.
            num_known: how many of them, from the first on, are indexed already.
            tokens: the ids of (at least) the tokens in `blocks`.
            salt: of the sequence.

        Returns:
            How many are indexed now.
        """
        known = blocks[num_known - 1] if num_known else _ROOT
        key = self.entries[known].key if num_known else self._root(salt)
        for number in range(num_known, len(blocks)):
            start = number * self.block_size
            content = tokens[start : start + self.block_size].tobytes()
            key = self._hash(key, content)
            block = blocks[number]
            if block in self.entries:  # a sequence that shares it was faster
                if not self._matches(block, known, content, salt):
                    return number
            elif key in self._blocks:
                return number
            else:
                self.entries[block] = Entry(key, known, content, salt)
                self._blocks[key] = block
                if known != _ROOT:
                    self.entries[known].children.add(block)
            known = block
        return len(blocks)

    def remove(self, block: int) -> list[int]:
        """Forgets a block and all that hang from it; returns them, the deepest last."""
        removed = [block]
        for parent in removed:  # grows as it goes
            removed += self.entries[parent].children
        above = self.entries[block].parent
        if above != _ROOT:
            self.entries[above].children.discard(block)
        for gone in removed:
            del self._blocks[self.entries.pop(gone).key]
        return removed

    def children(self, block: int) -> set[int]:
        """The blocks that continue `block`."""
        return self.entries[block].children

    def check_invariants(self) -> None:
        """Raises AssertionError unless both tables and the tree agree. O(entries)."""
        require(
            self._blocks == {entry.key: block for block, entry in self.entries.items()},
            "the hash table and the entries of the prefix cache differ",
        )
        for block, entry in self.entries.items():
            require(
                len(entry.tokens) == self.block_size * 8, f"cached block {block} is not a full one"
            )
            if entry.parent != _ROOT:
                require(entry.parent in self.entries, f"the parent of block {block} is not cached")
                require(
                    block in self.entries[entry.parent].children,
                    f"block {block} is no child of its parent",
                )

    def _spans(self, count: int) -> Iterator[tuple[int, int]]:
        for number in range(count):
            yield number * self.block_size, (number + 1) * self.block_size

    def _matches(self, block: int, parent: int, content: bytes, salt: str) -> bool:
        entry = self.entries[block]
        return entry.tokens == content and entry.parent == parent and entry.salt == salt

    def _root(self, salt: str) -> bytes:
        return self._hash(b"", salt.encode())


class KeyedHash:
    """BLAKE2b with a random key: nobody outside can make blocks that collide."""

    def __init__(self) -> None:
        self._key = os.urandom(16)

    def __call__(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=16, key=self._key).digest()


def pack_tokens(what: str, tokens: Iterable[int]) -> array[int]:
    """Token ids as 8-byte integers. TypeError for what is no integer (or a bool), ValueError."""
    ids = tokens if isinstance(tokens, (list, tuple, array)) else list(tokens)
    if not isinstance(ids, array) and set(map(type, ids)) - {int}:
        if any(isinstance(token, bool) for token in ids):
            raise TypeError(f"{what} must be integers, got a bool")
        try:
            ids = [index(token) for token in ids]
        except TypeError as error:
            raise TypeError(f"{what} must be integers: {error}") from None
    try:
        return array("q", ids)
    except OverflowError:
        raise ValueError(f"{what} must fit into 64 bits") from None
    except TypeError as error:  # an array of another type
        raise TypeError(f"{what} must be integers: {error}") from None
