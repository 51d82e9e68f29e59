"""Every SGLang allocator's frees reach the journal before the slot can be handed out again."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang_caches import mha_pool, plain_allocator, swa_pool

from kvsweep.engines.sglang.engine import _leaf_allocators
from kvsweep.engines.sglang.hooks import Patches, UnsupportedSGLang, journal_frees
from kvsweep.pool import slots_of_pages
from kvsweep.tree import FreeJournal

pytestmark = pytest.mark.sglang
SIZE = 256


def make(kind: str, page_size: int, need_sort: bool):
    if kind == "plain":
        allocator = plain_allocator(mha_pool(SIZE, page_size), SIZE, page_size)
        allocator.need_sort = need_sort
        return allocator
    pool = swa_pool(SIZE, page_size)
    return SWATokenToKVPoolAllocator(SIZE, SIZE, page_size, torch.bfloat16, "cpu", pool, need_sort)


steps = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "free", "segment", "window", "full", "group", "clear", "drain"]),
        st.integers(1, 6),
        st.integers(0, 1 << 20),
    ),
    max_size=60,
)


class Watch:
    """Ownership by slot, from outside: what was handed out, freed, and seen in the journal since."""

    def __init__(self, allocator, journal: FreeJournal) -> None:
        self.allocator, self.journal = allocator, journal
        self.owned: list[torch.Tensor] = []  # tensors handed out, page-aligned
        self.window_freed: set[int] = set()  # first slots of those whose window slots are gone
        self.noted: dict[str, set[int]] = {"full": set(), "swa": set()}
        self.used: dict[str, set[int]] = {"full": set(), "swa": set()}

    def drain(self) -> None:
        for pool, slots, page_size in self.journal.drain():
            freed = range(SIZE * 2) if slots is None else slots_of_pages(slots, page_size).tolist()
            for name in self.noted:
                if pool in ("*", name):
                    self.noted[name] |= set(freed)

    def handed_out(self, pool: str, slots: set[int]) -> None:
        again = slots & self.used[pool]
        assert again <= self.noted[pool], f"{pool} slots reused and never in the journal: {again - self.noted[pool]}"
        self.noted[pool] -= slots
        self.used[pool] |= slots

    def alloc(self, pages: int) -> None:
        size = self.allocator.page_size
        count = pages * size
        if isinstance(self.allocator, SWATokenToKVPoolAllocator) and size > 1:
            zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([count])
            got = self.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), count)
        else:
            got = self.allocator.alloc(count)
        if got is None:
            return
        self.drain()  # whatever the reuse of these slots rests on must have been noted by now
        self.handed_out("full", set(got.tolist()))
        mapping = getattr(self.allocator, "full_to_swa_index_mapping", None)
        if mapping is not None:
            self.handed_out("swa", set(mapping[got].tolist()))
        self.owned.append(got)


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "swa"])
@settings(max_examples=80, deadline=None)
@given(steps=steps)
def test_no_slot_is_reused_that_the_journal_did_not_bring_up(kind, page_size, need_sort, steps):
    """I2: free, free_segment, free_swa, free_full, grouped frees and clear, over token, paged and SWA allocators."""
    allocator = make(kind, page_size, need_sort)
    journal, patches = FreeJournal(), Patches()
    journal_frees(patches, _leaf_allocators(allocator), journal)
    watch = Watch(allocator, journal)
    for step, pages, pick in steps:
        taken = (
            watch.owned.pop(pick % len(watch.owned)) if watch.owned and step in ("free", "segment", "full") else None
        )
        if step == "alloc":
            watch.alloc(pages)
        elif taken is not None:
            gone = int(taken[0]) in watch.window_freed
            watch.window_freed.discard(int(taken[0]))
            if kind == "swa" and (gone or step == "full"):
                if not gone:
                    allocator.free_swa_segment(taken, start_pos=0)
                allocator.free_full_segment(taken, start_pos=0)
            elif step == "segment":
                allocator.free_segment(taken, start_pos=0)
            else:
                allocator.free(taken)
        elif step == "window" and kind == "swa" and watch.owned:
            kept = watch.owned[pick % len(watch.owned)]
            if int(kept[0]) not in watch.window_freed:
                allocator.free_swa(kept)
                watch.window_freed.add(int(kept[0]))
        elif step == "group":
            allocator.free_group_begin()
            for kept in watch.owned[: pages // 2]:
                if int(kept[0]) not in watch.window_freed:
                    allocator.free(kept)
                    watch.owned = [other for other in watch.owned if other is not kept]
            if pick % 2:
                watch.drain()  # between the free and the end of its group
            allocator.free_group_end()
        elif step == "clear":
            allocator.clear()
            watch.owned.clear()
            watch.window_freed.clear()
        elif step == "drain":
            watch.drain()
    patches.restore()
    assert "free" not in vars(allocator)


def test_an_allocator_that_relocates_slots_is_refused():
    """Issue 4: an unknown class is named, with what is supported."""

    class UnifiedSomethingAllocator:
        swa_req_ring = False

    with pytest.raises(UnsupportedSGLang, match=r"UnifiedSomethingAllocator.*relocate slots.*PagedTokenToKVPool"):
        _leaf_allocators(UnifiedSomethingAllocator())
