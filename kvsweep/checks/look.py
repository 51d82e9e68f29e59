"""One look at the whole cache: the arrays a light pass fills, and the suspects it reads off them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kvsweep.checks import structural
from kvsweep.checks.suspects import (
    Fact,
    InTree,
    LastNodeUnlocked,
    Mapped,
    OnFreeList,
    Owner,
    Residency,
    Suspect,
    WrongLock,
    free_entries,
)
from kvsweep.checks.tables import PoolTable, Views
from kvsweep.checks.views import AllocatorView
from kvsweep.pool import KVPool
from kvsweep.tree import Spans

Columns = tuple[torch.Tensor, ...]  # of equal length: a table of what was found
HIDES_NOTHING = frozenset({"host_evicted", "mamba_state"})  # reasons to skip a node that has no slot of these pools


class Look:
    """Fill it with the views at the start, the spans of a walk, the views at the end, then ask for suspects.

    Why a look at legal operation finds next to nothing, though the engine moves on meanwhile: a slot changes hands
    only free -> request -> tree -> free, and each way back to free is in the journal. So a slot that the journal does
    not name went forward only: who held it at the start, or later in the walk, and finds it free or in a request
    after the walk, has met a violation. What was read in the middle of a change is left for the re-read.

    Args:
        full, swa: the pools.
        views: at the start.
        freed: pool -> bool [slots], True where freed since before `views` was taken; kept up to date by the caller.
        limit: suspects to name of each kind and pool; `seen` counts all.
        request_locks_only: nothing but running requests locks nodes.
    """

    def __init__(
        self,
        full: KVPool,
        swa: KVPool | None,
        views: Views,
        freed: Mapping[str, torch.Tensor],
        *,
        limit: int,
        request_locks_only: bool,
    ) -> None:
        self.full = PoolTable(full, views.allocators.get(full.name))
        self.swa = PoolTable(swa, views.allocators.get(swa.name)) if swa else None
        self.seen: Counter[tuple[str, str]] = Counter()
        self.tree_rows = 0
        self._freed = freed
        self._limit = limit
        self._request_locks_only = request_locks_only and views.request_ids is not None
        self._nodes: list[Any] = []
        self._starts: list[int] = []
        self._offsets: list[int] = []  # row each span begins at
        self._begin = self._end = views
        self._leaks_known = views.request_ids is not None
        self._resident = torch.zeros_like(self.full.free) if swa else None
        self._map: torch.Tensor | None = None
        self._found: defaultdict[str, list[Columns]] = defaultdict(list)  # kind -> slots, their rows, other rows
        self._free_lists: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # pool -> entries out of range, doubles
        self._wrong_locks: list[tuple[str, Any, int]] = []  # kind, node, start
        self._locked: list[tuple[Any, int, int]] = []  # node, start, times it was locked by name
        self._account_views(views)

    # -- filling it, in this order -----------------------------------------------------------------------------

    def add_spans(self, spans: Spans, locks: tuple[Sequence[int], Sequence[int]] | None) -> None:
        """One chunk of the walk; `locks` are lock counts of its nodes and, for each, the sum over its children."""
        if not HIDES_NOTHING.issuperset(spans.skipped):
            self._leaks_known = False  # slots the tree holds were passed over
        if locks is not None:
            negative, short, direct = structural.lock_faults(*locks)
            for kind, which in (("negative", negative), ("short", short)):
                self._wrong_locks += [(kind, spans.nodes[i], spans.starts[i]) for i in which]
            own, below = locks
            self._locked += [(spans.nodes[i], spans.starts[i], own[i] - max(below[i], 0)) for i in direct]
        if not spans.values:
            return
        device, page_size = self.full.owner.device, self.full.page_size
        slots = torch.cat(spans.values).to(device, torch.int64)
        lengths = torch.tensor([value.numel() for value in spans.values], device=device)
        offsets = lengths.cumsum(0) - lengths
        first = self.tree_rows
        self._nodes += spans.nodes
        self._starts += spans.starts
        self._offsets += (offsets + first).tolist()
        self.tree_rows += slots.numel()
        rows = torch.arange(first, self.tree_rows, dtype=torch.int32, device=device)
        if page_size > 1:
            starts = torch.tensor(spans.starts, device=device)
            positions = torch.repeat_interleave(starts - offsets, lengths) + (rows - first)
            crooked = structural.misaligned(slots, positions, page_size)
            ragged = offsets[(lengths % page_size != 0) | (starts % page_size != 0)]
            crooked = torch.unique(torch.cat([crooked, ragged]))
            crooked = crooked[(slots[crooked] >= self.full.low) & (slots[crooked] < self.full.high)]
            self._found["misaligned"].append((slots[crooked], rows[crooked]))
        self._claim(slots, rows, offsets)
        if self._resident is not None:
            resident = torch.repeat_interleave(torch.tensor(spans.swa_resident, device=device), lengths)
            inside = slots[resident]
            self._resident.index_fill_(0, inside[(inside >= 0) & (inside < self._resident.numel())], True)

    def end(self, views: Views, slot_map: torch.Tensor | None) -> None:
        """After the walk: the views at the end, and the window map (int [>= full slots]), read after them."""
        self._end = views
        self._account_views(views)
        self.full.tree_slots = int((self.full.owner != structural.UNOWNED).sum())
        for table in self._tables():
            if view := views.allocators.get(table.name):
                self._read_free_list(table, view)
        if views.request_ids is None:
            self._leaks_known = False
        else:
            rows = torch.arange(views.own.numel(), dtype=torch.int32, device=self.full.owner.device) + self.tree_rows
            offsets = torch.tensor(views.offsets, dtype=torch.int64, device=rows.device)
            self._claim(views.own, rows, offsets[offsets < rows.numel()])
            self.full.request_slots = views.own.numel()
        if self.swa is not None and slot_map is not None:
            self._read_map(self.swa, slot_map)

    def _claim(self, slots: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> None:
        """Slots of nodes or requests, each beginning at one of `offsets`, get their owners."""
        table = self.full
        invalid = structural.out_of_range(slots, table.low, table.high)
        heads = structural.run_heads(slots, offsets, table.page_size) if table.page_size > 1 else None
        if invalid.numel():
            self._found["tree_slot"].append((slots[invalid], rows[invalid]))
            valid = torch.ones_like(slots, dtype=torch.bool)
            valid[invalid] = False
            heads = None if heads is None else heads[valid[heads]]
        if heads is not None:
            entered, claimants = slots[heads], rows[heads]
            clash, others = structural.claim(table.page_owner, entered // table.page_size, claimants)
            self._found["shared_page"].append((entered[clash], claimants[clash], others))
        if invalid.numel():
            slots, rows = slots[valid], rows[valid]
        clash, others = structural.claim(table.owner, slots, rows)
        self._found["two_owners"].append((slots[clash], rows[clash], others))

    def _account_views(self, views: Views) -> None:
        for table in self._tables():
            if view := views.allocators.get(table.name):
                table.account(self._free_slots(table, view))
        own = views.own
        self.full.account(own[(own >= self.full.low) & (own < self.full.high)])

    def _free_slots(self, table: PoolTable, view: AllocatorView) -> torch.Tensor:
        """int64 [n]: valid entries of a free list, a page as its first slot."""
        entries = free_entries(view).to(table.owner.device)
        slots = entries * table.page_size if view.free_unit == "page" else entries
        return slots[(slots >= table.low) & (slots < table.high)]

    def _read_free_list(self, table: PoolTable, view: AllocatorView) -> None:
        unit = table.page_size if view.free_unit == "page" else 1
        entries = free_entries(view).to(table.owner.device)
        bad = structural.out_of_range(entries, table.low // unit, table.high // unit)
        slots = self._free_slots(table, view)
        table.free.view(-1, unit)[slots // unit] = True
        table.free_slots, table.free_unit = slots.numel() * unit, unit
        doubles = structural.repeated(slots // unit, table.free.numel() // unit) * unit
        self._free_lists[table.name] = entries[bad] * unit, doubles

    def _read_map(self, swa: PoolTable, slot_map: torch.Tensor) -> None:
        target = slot_map[: self.full.owner.numel()].to(torch.int64)
        live = self.full.owner[: target.numel()] != structural.UNOWNED
        valid = (target >= swa.low) & (target < swa.high)
        swa.account(target[valid])
        full = (valid & live).nonzero().flatten()
        clash, others = structural.claim(swa.owner, target[full], full.to(torch.int32))
        self._found["shared_target"].append((target[full[clash]], full[clash], others.to(torch.int64)))
        owner = self.full.owner[full]
        swa.tree_slots = int((owner < self.tree_rows).sum())
        swa.request_slots = full.numel() - swa.tree_slots
        self._map = target

    def _tables(self) -> tuple[PoolTable, ...]:
        return (self.full,) if self.swa is None else (self.full, self.swa)

    # -- reading it --------------------------------------------------------------------------------------------

    def suspects(self) -> list[Suspect]:
        """What looks wrong, freed slots left out."""
        return [
            *self._range_suspects(),
            *self._ownership_suspects(),
            *self._accounting_suspects(),
            *self._window_suspects(),
            *self._lock_suspects(),
        ]

    def sizes(self) -> dict[str, dict[str, int]]:
        return {table.name: table.sizes() for table in self._tables()}

    def _range_suspects(self) -> Iterator[Suspect]:
        full = self.full.name
        for slot, row in self._limited("tree_slot", full, self._found["tree_slot"]):
            owner = self._owner(row)
            yield Suspect(
                check="out_of_range",
                kind="tree_slot",
                pool=full,
                slot=slot,
                owners=(owner,),
                facts=(owner.fact(slot),),
            )
        for name, (invalid, _) in self._free_lists.items():
            for (slot,) in self._limited("free_slot", name, [(invalid,)]):
                yield Suspect(check="out_of_range", kind="free_slot", pool=name, slot=slot)

    def _ownership_suspects(self) -> Iterator[Suspect]:
        full, page_size = self.full.name, self.full.page_size
        twice = self._alive(full, self._found["two_owners"])
        for slot, row, other in self._limited("two_owners", full, twice):
            yield self._shared("duplicate_owner", "two_owners", slot, row, other, 1)
        both = structural.free_and_owned(self.full.free, self.full.owner)
        rows = self.full.owner[both]
        in_tree = rows < self.tree_rows
        for kind, which in (("free", in_tree), ("free_held", ~in_tree)):
            for slot, row in self._limited(kind, full, self._alive(full, [(both[which], rows[which])])):
                owner = self._owner(row)
                yield Suspect(
                    check="free_in_tree" if kind == "free" else "accounting",
                    kind=kind,
                    pool=full,
                    slot=slot,
                    owners=(owner,),
                    facts=(owner.fact(slot), OnFreeList(full, slot)),
                )
        # A page of which some slot has two owners is that slot's finding.
        told = torch.cat([slots for slots, *_ in twice]) // page_size if twice else None
        pages = [
            tuple(column[~torch.isin(columns[0] // page_size, told)] for column in columns)
            if told is not None
            else columns
            for columns in self._alive(full, self._found["shared_page"])
        ]
        for slot, row, other in self._limited("shared_page", full, pages):
            yield self._shared("page", "shared_page", slot, row, other, page_size)
        for slot, row in self._limited("misaligned", full, self._alive(full, self._found["misaligned"])):
            owner = self._owner(row)
            yield Suspect(
                check="page", kind="misaligned", pool=full, slot=slot, owners=(owner,), facts=(owner.fact(slot),)
            )

    def _shared(self, check: str, kind: str, slot: int, row: int, other: int, unit: int) -> Suspect:
        owners = tuple(self._owner(claimant) for claimant in sorted((row, other)))
        facts = tuple(owner.fact(slot, unit) for owner in owners)
        return Suspect(check=check, kind=kind, pool=self.full.name, slot=slot, owners=owners, facts=facts)

    def _accounting_suspects(self) -> Iterator[Suspect]:
        for table in self._tables():
            name = table.name
            _, doubles = self._free_lists.get(name, (None, None))
            twice = [] if doubles is None else self._alive(name, [(doubles,)])
            for (slot,) in self._limited("double_free", name, twice, table.free_unit):
                facts: tuple[Fact, ...] = (OnFreeList(name, slot, 2),)
                yield Suspect(
                    check="accounting", kind="double_free", pool=name, slot=slot, count=table.free_unit, facts=facts
                )
            if not (self._leaks_known and table.has_view):
                continue
            accounted = table.accounted | table.any_of_page(self._freed[name])
            if table is self.full:
                accounted |= table.any_of_page(table.owner != structural.UNOWNED)
            lost = structural.unaccounted(accounted[: table.high // table.page_size], table.low // table.page_size)
            for (slot,) in self._limited("leak", name, [(lost * table.page_size,)], table.page_size):
                yield Suspect(check="accounting", kind="leak", pool=name, slot=slot, count=table.page_size)

    def _window_suspects(self) -> Iterator[Suspect]:
        if self.swa is None or self._map is None or self._resident is None:
            return
        full, swa, target = self.full.name, self.swa.name, self._map
        owner = self.full.owner[: target.numel()]
        faults = structural.window_faults(
            target,
            (owner != structural.UNOWNED) & (owner < self.tree_rows),
            self._resident[: target.numel()],
            owner >= self.tree_rows,
            self.full.free[: target.numel()] if self.full.has_view else None,
            self.swa.free if self.swa.has_view else None,
            self.swa.low,
            self.swa.high,
        )
        for kind, slots in faults.items():
            slots = slots[self._settled(slots, target[slots])]
            pool = full if kind in ("target_out_of_range", "resident_unmapped") else swa  # whose slots are named
            for slot, row, to in self._limited(kind, pool, [(slots, owner[slots], target[slots])]):
                facts: list[Fact] = [Mapped(swa, slot, to)]
                owners: tuple[Owner, ...] = ()
                if row != structural.UNOWNED:
                    owners = (self._owner(row),)
                    facts.append(owners[0].fact(slot))
                if kind == "mapped_free":
                    facts.append(OnFreeList(swa, to))
                if kind == "free_mapped":
                    facts.append(OnFreeList(full, slot))
                if kind in ("tombstone_mapped", "resident_unmapped"):
                    facts.append(Residency(owners[0].node, owners[0].position, kind == "resident_unmapped"))
                named, other = (slot, to) if pool == full else (to, slot)
                yield Suspect(
                    check="swa_map", kind=kind, pool=pool, slot=named, owners=owners, other=other, facts=tuple(facts)
                )
        shared = [
            tuple(column[self._settled(one, to) & self._settled(two, to)] for column in (to, one, two))
            for to, one, two in self._found["shared_target"]
        ]
        for to, *pair in self._limited("shared_target", swa, shared):
            ordered = sorted(pair)
            owners = tuple(self._owner(int(owner[slot])) for slot in ordered)
            yield Suspect(
                check="swa_map",
                kind="shared_target",
                pool=swa,
                slot=to,
                owners=owners,
                other=ordered[-1],
                facts=tuple(
                    fact
                    for slot, who in zip(ordered, owners, strict=True)
                    for fact in (Mapped(swa, slot, to), who.fact(slot))
                ),
            )

    def _lock_suspects(self) -> Iterator[Suspect]:
        lockers = [Counter(map(id, views.last_nodes)) for views in (self._begin, self._end)]
        leaked = [
            ("lock_leak", node, start)
            for node, start, times in self._locked
            if self._request_locks_only and times > max(count[id(node)] for count in lockers)
        ]
        for kind, node, start in self._wrong_locks + leaked:
            self.seen[kind, self.full.name] += 1
            if self.seen[kind, self.full.name] <= self._limit:
                yield Suspect(
                    check="lock",
                    kind=kind,
                    pool=self.full.name,
                    slot=None,
                    owners=(Owner(node, None, start),),
                    facts=(InTree(node, start, None), WrongLock(node, kind)),
                )
        for request_id in self._end.unlocked[: self._limit]:
            yield Suspect(
                check="lock",
                kind="last_node",
                pool=self.full.name,
                slot=None,
                owners=(Owner(None, request_id, 0),),
                facts=(LastNodeUnlocked(request_id),),
            )

    # -- helpers -----------------------------------------------------------------------------------------------

    def _alive(self, pool: str, found: Sequence[Columns]) -> list[Columns]:
        """Without the rows whose slot (first column) was freed meanwhile."""
        freed = self._freed[pool]
        kept = []
        for columns in found:
            alive = ~freed[columns[0].clamp(0, freed.numel() - 1)]
            kept.append(tuple(column[alive] for column in columns))
        return kept

    def _settled(self, slots: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """bool [n]: neither the full slot nor the window slot that the map gives it was freed meanwhile."""
        assert self.swa is not None
        full, swa = self._freed[self.full.name], self._freed[self.swa.name]
        return ~(full[slots] | swa[targets.clamp(0, swa.numel() - 1)])

    def _limited(
        self, kind: str, pool: str, found: Sequence[Columns], slots_each: int = 1
    ) -> Iterator[tuple[int, ...]]:
        """Rows of the concatenated columns as Python ints, the lowest slots first, counted in `seen`."""
        if not found:
            return
        columns = [torch.cat(column) for column in zip(*found, strict=True)]
        self.seen[kind, pool] += columns[0].numel() * slots_each
        lowest = columns[0].argsort()[: self._limit]
        yield from zip(*(column[lowest].tolist() for column in columns), strict=True)

    def _owner(self, row: int) -> Owner:
        """Who claimed with that row number."""
        if row < self.tree_rows:
            span = bisect_right(self._offsets, row) - 1
            return Owner(self._nodes[span], None, self._starts[span] + row - self._offsets[span])
        views, row = self._end, row - self.tree_rows
        assert views.request_ids is not None
        index = bisect_right(views.offsets, row) - 1
        return Owner(None, views.request_ids[index], views.prefix_lens[index] + row - views.offsets[index])
