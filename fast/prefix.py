"""The prefix cache: full blocks of K/V, found again by the tokens that they and all before them hold.

A block is named by a hash over (the block before it, its token ids, the request's salt), so equal prefixes of any
length share names. A name is only where to look: a hit is taken when the token ids, the salt and the block before it
are the same, whatever the hash says. A block is published once its K/V is computed, and from then on nobody writes it.
What nobody holds stays, the longest unused is given up first. The last token of a prompt is never taken from here,
since its logits are what comes next. This module knows tokens and block ids, and no tensor.

Gates: gates.prefix. Proof: tests/test_prefix.py. Story: prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fast.blocks import BlockAllocator
from gates.prefix import check_hit_verified, check_last_recomputed, check_published_computed


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One published block. `parent` is the block before it, so that an entry stands for a whole prefix."""

    name: int
    block: int
    parent: Entry | None
    token_ids: tuple[int, ...]
    salt: str


@dataclass(slots=True)
class Prefix:
    """What a sequence knows of its own full blocks: their names, and the entries they are published as so far."""

    salt: str
    names: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)


def block_name(parent: int, token_ids: tuple[int, ...], salt: str) -> int:
    """A 64-bit hash of a block; `parent` is the name of the block before it, 0 for the first."""
    return hash((parent, token_ids, salt))


class PrefixCache:
    """Published blocks of one pool, by name."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        name_of: Callable[[int, tuple[int, ...], str], int] = block_name,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.evictions = 0
        self._name_of = name_of
        self._entries: dict[int, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        allocator.on_evict = self._evicted

    def __len__(self) -> int:
        """Blocks published now."""
        return len(self._entries)

    def names(self, prefix: Prefix, tokens: Sequence[int]) -> list[int]:
        """The name of every full block of `tokens`; those known already are not hashed again."""
        size, names = self.block_size, prefix.names
        for index in range(len(names), len(tokens) // size):
            parent = names[-1] if names else 0
            names.append(self._name_of(parent, tuple(tokens[index * size : (index + 1) * size]), prefix.salt))
        return names

    def match(self, prefix: Prefix, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the longest published prefix of `tokens`, at most all but the last token."""
        names = self.names(prefix, tokens)
        parent: Entry | None = None
        found: list[Entry] = []
        for index in range((len(tokens) - 1) // self.block_size):
            entry = self._entries.get(names[index])
            if entry is None or not self._same(entry, parent, prefix, tokens, index):
                break
            found.append(entry)
            parent = entry
        check_last_recomputed(cached=len(found) * self.block_size, tokens=len(tokens))
        check_hit_verified(
            tokens=tokens,
            salt=prefix.salt,
            held=[entry.token_ids for entry in found],
            salts=[entry.salt for entry in found],
            linked=[entry.parent is (found[at - 1] if at else None) for at, entry in enumerate(found)],
        )
        return [entry.block for entry in found]

    def publish(
        self, prefix: Prefix, tokens: Sequence[int], blocks: Sequence[int], *, computed: int
    ) -> list[tuple[int, int]]:
        """Publish a sequence's full blocks of its first `computed` tokens, as far as they are not.

        Returns:
            (published block, own block) for each that another sequence had published with the same tokens.
        """
        names, entries, twice = self.names(prefix, tokens), prefix.entries, []
        if entries and self._entries.get(entries[-1].name) is not entries[-1]:
            entries.clear()  # the copy that another sequence published is given up; ours takes its place
        for index in range(len(entries), computed // self.block_size):
            parent = entries[-1] if entries else None
            held = self._entries.get(names[index])
            if held is not None and self._stale(held):
                self._forget(held)
                held = None
            if held is None and blocks[index] not in self._by_block:
                check_published_computed(stop=(index + 1) * self.block_size, computed=computed)
                held = self._add(names[index], blocks[index], parent, prefix, tokens, index)
            elif held is None or not self._same(held, parent, prefix, tokens, index):
                break  # the name is another prefix's; this one stays private
            elif held.block != blocks[index]:
                twice.append((held.block, blocks[index]))
            entries.append(held)
        return twice

    def _add(
        self, name: int, block: int, parent: Entry | None, prefix: Prefix, tokens: Sequence[int], index: int
    ) -> Entry:
        size = self.block_size
        entry = Entry(name, block, parent, tuple(tokens[index * size : (index + 1) * size]), prefix.salt)
        self._entries[name] = self._by_block[block] = entry
        self.allocator.keep(block)
        return entry

    def _same(self, entry: Entry, parent: Entry | None, prefix: Prefix, tokens: Sequence[int], index: int) -> bool:
        size = self.block_size
        ours = tuple(tokens[index * size : (index + 1) * size])
        return entry.parent is parent and entry.token_ids == ours and entry.salt == prefix.salt

    def _stale(self, entry: Entry) -> bool:
        """Its parent was given up before it, so that no match can reach it."""
        parent = entry.parent
        return parent is not None and self._entries.get(parent.name) is not parent

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.name]
        del self._by_block[entry.block]
        self.allocator.drop(entry.block)

    def _evicted(self, block: int) -> None:
        entry = self._by_block.pop(block)
        del self._entries[entry.name]
        self.evictions += 1
