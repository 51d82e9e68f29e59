"""The embedded engine's tree and allocators against simple models, under random interleavings."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsweep.engines.embedded.allocator import KVAllocator, PageAllocator
from kvsweep.engines.embedded.tree import Key, Node, RadixTree
from kvsweep.tree import NodeCursor, Spans

CPU = torch.device("cpu")
PAGES = 40
NEVER = 1 << 62  # a deadline that does not pass


def make_tree(page_size: int, window: int) -> RadixTree:
    swa = PageAllocator("swa", PAGES * page_size, page_size, CPU) if window else None
    allocator = KVAllocator(PageAllocator("full", PAGES * page_size, page_size, CPU), swa, CPU)
    return RadixTree(allocator, page_size, window)


def free_slots(pool: PageAllocator) -> list[int]:
    view = pool.view()
    free = torch.cat(view.free)
    return (free if view.free_unit == "slot" else pool.slots_of(free)).tolist()


Path = tuple[str, tuple[int, ...], int]  # of one position: namespace, tokens up to the end of its page, position


def content(tree: RadixTree) -> dict[Path, tuple[int, bool]]:
    """Everything the tree holds: path of each position -> (slot, has a window slot)."""
    found: dict[Path, tuple[int, bool]] = {}
    stack: list[tuple[Node, tuple[int, ...]]] = [(tree.root(), ())]
    while stack:
        node, above = stack.pop()
        for child in node.children.values():
            tokens = above + tuple(child.key.tokens.tolist())
            for i, slot in enumerate(child.value.tolist()):
                position = len(above) + i
                path = (child.key.extra_key, tokens[: (position // tree.page_size + 1) * tree.page_size], position)
                assert path not in found
                found[path] = (slot, not child.swa_tombstone)
            stack.append((child, tokens))
    return found


class TreeMachine(RuleBasedStateMachine):
    """Drives a tree as a scheduler does; the model is the flat dict of `content`, changed by simple rules."""

    page_size = 1
    window = 0

    def __init__(self) -> None:
        super().__init__()
        self.tree = make_tree(self.page_size, self.window)
        self.model: dict[Path, tuple[int, bool]] = {}
        self.locks: list[tuple[Node, Path]] = []
        self.dead: list[tuple[Node, int]] = []  # nodes that left the tree, and a position they had
        self.cursor: NodeCursor | None = None
        self.spans = Spans()
        self.held: dict[Path, tuple[int, bool]] = {}  # held ever since the cursor began

    prompts = st.tuples(
        st.sampled_from(["", "tenant"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=8),
    )

    def key(self, prompt: tuple[str, list[int]]) -> tuple[Key, list[Path]]:
        """A key of whole pages, and the path of each of its positions."""
        tokens = [page * self.page_size + i for page in prompt[1] for i in range(self.page_size)]
        if prompt[1][0] and self.page_size > 1:
            tokens[-1] += 7  # differs in the midst of a page
        ends = [(i // self.page_size + 1) * self.page_size for i in range(len(tokens))]
        return Key(np.array(tokens), prompt[0]), [(prompt[0], tuple(tokens[:end]), i) for i, end in enumerate(ends)]

    def locked(self, path: Path) -> bool:
        return any(ns == path[0] and tokens[: len(path[1])] == path[1] for _, (ns, tokens, _) in self.locks)

    def settle(self) -> None:
        """After each rule: what the cursor must show is what stayed as it was throughout."""
        now = content(self.tree)
        self.held = {path: entry for path, entry in self.held.items() if now.get(path, (None,))[0] == entry[0]}

    @rule(prompt=prompts, evicted_pages=st.integers(0, 8), keep_lock=st.booleans())
    def request(self, prompt: tuple[str, list[int]], evicted_pages: int, keep_lock: bool) -> None:
        """A request comes, computes what is not cached and leaves it in the tree."""
        key, paths = self.key(prompt)
        node = self.tree.match(key)
        cached = self.tree.slots(node)
        self.check_match(paths, cached.tolist())
        self.tree.lock(node)
        missing = len(key) - len(cached)
        room = all(pool.available >= missing for pool in self.tree.allocator.pools())
        own = self.tree.allocator.alloc(missing)
        assert (own is not None) == room
        if own is None:
            self.tree.lock(node, -1)
            return
        swa_evicted = len(cached)
        if self.window:
            swa_evicted = max(swa_evicted, min(evicted_pages * self.page_size, len(key)))
            self.tree.allocator.free_swa(own[: swa_evicted - len(cached)])
        value = torch.cat([cached, own])
        end, last = self.tree.insert(key, value, owned_from=len(cached), swa_evicted=swa_evicted)
        for i in range(len(cached), end):
            has_window_slot = i >= swa_evicted or not self.window
            if paths[i] not in self.model:
                self.model[paths[i]] = (int(value[i]), has_window_slot)
            elif not self.model[paths[i]][1] and has_window_slot:
                assert not self.locked(paths[i])
                self.model[paths[i]] = (int(value[i]), True)
        if end < len(key):
            assert any(
                path in self.model and not self.model[path][1] and self.locked(path) for path in paths[swa_evicted:]
            )
        assert self.tree.slots(last).tolist() == [self.model[path][0] for path in paths[:end]]
        self.tree.allocator.free(value[end:])
        self.tree.lock(node, -1)
        if keep_lock and end:
            self.tree.lock(last)
            self.locks.append((last, paths[end - 1]))

    def check_match(self, paths: list[Path], slots: list[int]) -> None:
        known = [path in self.model for path in paths].index(False) if paths[-1] not in self.model else len(paths)
        resident = [self.model[path][1] for path in paths[:known]]
        assert slots == [self.model[path][0] for path in paths[: len(slots)]]
        assert all(resident[max(0, len(slots) - self.window) : len(slots)]) or not self.window
        if all(resident):
            assert len(slots) == known

    @rule(prompt=prompts)
    def match(self, prompt: tuple[str, list[int]]) -> None:
        key, paths = self.key(prompt)
        self.check_match(paths, self.tree.slots(self.tree.match(key)).tolist())

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.tree.lock(node, -1)

    @rule(num_slots=st.integers(1, 60))
    def evict(self, num_slots: int) -> None:
        before = self.nodes()
        freed = self.tree.evict(num_slots)
        after = content(self.tree)
        assert after.items() <= self.model.items() and len(self.model) - len(after) == freed
        assert all(path in after for path in self.model if self.locked(path))
        assert freed >= num_slots or all(self.locked(path) for path in after)
        self.model = after
        self.bury(before)

    @precondition(lambda self: self.window)
    @rule(num_slots=st.integers(1, 60))
    def evict_swa(self, num_slots: int) -> None:
        before = self.nodes()
        freed = self.tree.evict_swa(num_slots)
        after = content(self.tree)
        lost = [p for p, (_, resident) in self.model.items() if resident and not after.get(p, (0, False))[1]]
        assert len(lost) == freed and not any(self.locked(path) for path in lost)
        assert all(after[path][0] == self.model[path][0] for path in after)
        assert freed >= num_slots or all(self.locked(path) for path, (_, resident) in after.items() if resident)
        self.model = after
        self.bury(before)

    def nodes(self) -> list[tuple[Node, int]]:
        return [(node, len(self.tree.slots(node)) - 1) for node in self.tree.nodes()]

    def bury(self, before: list[tuple[Node, int]]) -> None:
        alive = set(self.tree.nodes())
        self.dead += [(node, position) for node, position in before if node not in alive]

    @rule()
    def reset(self) -> None:
        self.dead += self.nodes()
        generation = self.tree.generation
        self.tree.reset()
        self.tree.allocator.clear()
        self.model.clear()
        self.locks.clear()
        assert self.tree.generation != generation

    @rule()
    def begin_pass(self) -> None:
        self.cursor, self.spans, self.held = self.tree.cursor(), Spans(), content(self.tree)

    @precondition(lambda self: self.cursor is not None)
    @rule(slots=st.integers(1, 10))
    def advance_pass(self, slots: int) -> None:
        """A slice of a pass; at its end every slot that was held throughout has been seen (I1)."""
        assert self.cursor is not None
        self.settle()
        if self.cursor.advance(self.spans, self.spans.num_slots + slots, NEVER):
            seen = {
                (start + i, slot)
                for value, start in zip(self.spans.values, self.spans.starts, strict=True)
                for i, slot in enumerate(value.tolist())
            }
            assert {(path[2], slot) for path, (slot, _) in self.held.items()} <= seen
            self.cursor = None

    @invariant()
    def same_content(self) -> None:
        assert content(self.tree) == self.model
        self.settle()

    @invariant()
    def slots_are_conserved(self) -> None:
        allocator = self.tree.allocator
        held = [slot for slot, _ in self.model.values()]
        everything = range(self.page_size, (PAGES + 1) * self.page_size)
        assert sorted(held + free_slots(allocator.full)) == list(everything)
        if allocator.swa is not None and allocator.slot_map is not None:
            mapped = {slot: int(allocator.slot_map[slot]) for slot, resident in self.model.values() if resident}
            assert sorted([*mapped.values(), *free_slots(allocator.swa)]) == list(everything)
            assert set(torch.nonzero(allocator.slot_map).flatten().tolist()) == set(mapped)

    @invariant()
    def nodes_are_sound(self) -> None:
        tree = self.tree
        lock_refs = {id(node): 0 for node in tree.nodes()}
        for node, _ in self.locks:
            for part in tree._path(node):
                lock_refs[id(part)] += 1
        for node in tree.nodes():
            assert node.attached and node.lock_ref == lock_refs[id(node)]
            assert len(node.key) == len(node.value) and len(node.key) % self.page_size == 0 and len(node.key) > 0
            slots = tree.slots(node).tolist()
            namespace, tokens = tree.prefix(node, len(slots) - 1)
            assert self.model[namespace, tuple(tokens.tolist()), len(slots) - 1][0] == slots[-1]
            assert [tree.slot_at(node, position) for position in (0, len(slots) - 1)] == [slots[0], slots[-1]]
            assert tree.slot_at(node, len(slots)) is None
        assert all(tree.slot_at(node, position) is None for node, position in self.dead)


def machine(page_size: int, window: int) -> type:
    name = f"TreePage{page_size}Window{window}"
    cls = type(name, (TreeMachine,), {"page_size": page_size, "window": window})
    cls.TestCase.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return cls.TestCase


TestTreePage1 = machine(1, 0)
TestTreePage16 = machine(16, 0)
TestTreePage1Window = machine(1, 3)
TestTreePage16Window = machine(16, 32)
