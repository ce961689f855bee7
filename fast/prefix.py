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


@dataclass(slots=True, eq=False)
class Entry:
    """One published block. `parent` is the block before it, so that an entry stands for a whole prefix."""

    name: int
    block: int
    parent: Entry | None
    token_ids: tuple[int, ...]
    salt: str
    behind: set[Entry] = field(default_factory=set)  # published blocks whose parent this is


@dataclass(slots=True)
class Prefix:
    """What a sequence knows of its own full blocks: their names, and the entries that hold the first of them.

    While it waits, `entries` are those found so far; while it runs, they go as far as it has computed. The first `own`
    of them are blocks of its row; another is a copy that was published before the row's own.
    """

    salt: str
    names: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    own: int = 0
    doubtful: bool = False  # its answer ended with an error: its logits may have been no numbers, and so its K/V
    apart: bool = False  # logits of its tokens are to be read, so it computes them all: it finds and follows nothing
    idle: tuple[int, int, int] = (0, 0, 0)  # (entries, turns, idle ones among them) when `PrefixCache.idle` counted

    def forget(self, *, apart: bool) -> None:
        """The row is gone, and with it what it held."""
        self.entries.clear()
        self.own, self.apart = 0, apart


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

    def match(self, prefix: Prefix, tokens: Sequence[int]) -> list[Entry]:
        """All entries of `prefix`, gone on with as far as `tokens` are published; the last token never counts.

        What an earlier look found is not looked at again, but for what was given up since: a look costs what is new.
        """
        names, entries = self.names(prefix, tokens), self._live(prefix)
        most = 0 if prefix.apart else (len(tokens) - 1) // self.block_size
        for index in range(len(entries), most):
            entry = self._entries.get(names[index])
            if entry is None or not self._same(entry, entries[-1] if entries else None, prefix, tokens, index):
                break
            entries.append(entry)
        check_last_recomputed(cached=len(entries) * self.block_size, tokens=len(tokens))
        return entries

    def idle(self, prefix: Prefix) -> int:
        """How many of the entries nobody holds, so that taking them takes room; kept while no block's turn comes."""
        entries, turns = len(prefix.entries), self.allocator.idle_turns
        if prefix.idle[:2] != (entries, turns):
            idle = sum(1 for entry in prefix.entries if not self.allocator.holders(entry.block))
            prefix.idle = (entries, turns, idle)
        return prefix.idle[2]

    def take(self, prefix: Prefix, tokens: Sequence[int]) -> list[int]:
        """The blocks that were matched and are not the row's own yet; they are from now on."""
        first, size = prefix.own, self.block_size
        taken = prefix.entries[first:]
        check_hit_verified(
            tokens=tokens[first * size : (first + len(taken)) * size],
            salt=prefix.salt,
            held=[entry.token_ids for entry in taken],
            salts=[entry.salt for entry in taken],
            linked=[
                entry.parent is (prefix.entries[first + at - 1] if first + at else None)
                for at, entry in enumerate(taken)
            ],
            published=[self._by_block.get(entry.block) is entry for entry in taken],
        )
        prefix.own = len(prefix.entries)
        return [entry.block for entry in taken]

    def catch_up(self, prefix: Prefix, tokens: Sequence[int], *, stored: int) -> list[int]:
        """The blocks that were published behind the `stored` tokens of a row; they are its own from now on.

        None, when the row is inside a block or holds a copy of its own: whoever holds a published block holds those
        before it, or they would be given up under it.
        """
        at, begun = divmod(stored, self.block_size)
        if begun or prefix.apart or not prefix.own == len(prefix.entries) == at:
            return []
        self.match(prefix, tokens)
        return self.take(prefix, tokens)

    def leaders(self, waiting: Sequence[tuple[Prefix | None, Sequence[int], int]]) -> list[int]:
        """Who computes the next block of each of (prefix, tokens, tokens stored), in line: its place, or their own.

        An earlier one does that has not come to that block, or is inside it. Only those with one first block are asked.
        """
        size, behind = self.block_size, list(range(len(waiting)))
        computing: dict[int, list[tuple[int, int, list[int]]]] = {}
        for place, (prefix, tokens, stored) in enumerate(waiting):
            names = [] if prefix is None else self.names(prefix, tokens)
            if prefix is None or not names:
                continue
            at, ahead = stored // size, computing.setdefault(names[0], [])
            if not (stored % size or prefix.apart) and prefix.own == at and at < (len(tokens) - 1) // size:
                led = (one for one, begins, theirs in ahead if begins <= at < len(theirs) and theirs[at] == names[at])
                behind[place] = next(led, place)
            if behind[place] == place:
                ahead.append((place, at, names))
        return behind

    def give_up(self, prefix: Prefix) -> None:
        """Forget what a sequence leaves behind, from its first block on that nobody holds any more.

        Where a token has made NaN, weights of zero have carried it to the tokens before it in the same tile as well.
        """
        idle = next((one.block for one in self._live(prefix) if not self.allocator.holders(one.block)), None)
        if idle is not None:
            self._evicted(idle)
            self.allocator.drop(idle)

    def publish(
        self, prefix: Prefix, tokens: Sequence[int], blocks: Sequence[int], *, computed: int
    ) -> list[tuple[int, int]]:
        """Publish a sequence's full blocks of its first `computed` tokens, as far as they are not.

        Returns:
            (published block, own block) for each that another sequence had published with the same tokens.
        """
        # Of a copy that another published and that was given up, ours takes the place.
        names, entries, twice = self.names(prefix, tokens), self._live(prefix), []
        for index in range(len(entries), computed // self.block_size):
            parent = entries[-1] if entries else None
            held = self._entries.get(names[index])
            if held is None:
                check_published_computed(
                    stop=(index + 1) * self.block_size,
                    computed=computed,
                    before=tokens[max(0, index - 1) * self.block_size : index * self.block_size],
                    parent=() if parent is None else parent.token_ids,
                )
                held = self._add(names[index], blocks[index], parent, prefix, tokens, index)
            elif not self._same(held, parent, prefix, tokens, index):
                break  # the name is another prefix's; this one stays private
            elif held.block != blocks[index]:
                twice.append((held.block, blocks[index]))
            prefix.own += held.block == blocks[index] and prefix.own == index
            entries.append(held)
        return twice

    def _live(self, prefix: Prefix) -> list[Entry]:
        """Its entries, without those that were given up: what stands behind one goes with it, so they are the last."""
        entries = prefix.entries
        while entries and self._entries.get(entries[-1].name) is not entries[-1]:
            entries.pop()
        prefix.own = min(prefix.own, len(entries))
        return entries

    def _add(
        self, name: int, block: int, parent: Entry | None, prefix: Prefix, tokens: Sequence[int], index: int
    ) -> Entry:
        size = self.block_size
        entry = Entry(name, block, parent, tuple(tokens[index * size : (index + 1) * size]), prefix.salt)
        self._entries[name] = self._by_block[block] = entry
        if parent is not None:
            parent.behind.add(entry)
        self.allocator.keep(block)
        return entry

    def _same(self, entry: Entry, parent: Entry | None, prefix: Prefix, tokens: Sequence[int], index: int) -> bool:
        size = self.block_size
        ours = tuple(tokens[index * size : (index + 1) * size])
        return entry.parent is parent and entry.token_ids == ours and entry.salt == prefix.salt

    def _evicted(self, block: int) -> None:
        """The block has another owner. What stood behind it can be reached no more, and is forgotten with it."""
        entry = self._by_block[block]
        if entry.parent is not None:
            entry.parent.behind.discard(entry)
        gone = [entry]
        while gone:
            entry = gone.pop()
            gone += entry.behind
            del self._entries[entry.name], self._by_block[entry.block]
            self.evictions += 1
            if entry.block != block:
                self.allocator.drop(entry.block)
