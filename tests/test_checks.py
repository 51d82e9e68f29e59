"""Issue 5: each structural check is a pure function on arrays and finds exactly what is wrong."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsweep.checks import structural


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def flags(size: int, *where: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(where)] = True
    return mask


def test_out_of_range_names_negative_padding_and_past_the_end() -> None:
    """Issue 5, out_of_range: a negative, the padding slot and an index past the pool; the borders are legal."""
    assert structural.out_of_range(ints(1, -3, 0, 9, 10, 7), 1, 10).tolist() == [1, 2, 4]


def test_out_of_range_counts_the_whole_padding_page() -> None:
    """Issue 5, out_of_range: with pages of 16 the first page is padding."""
    assert structural.out_of_range(ints(15, 16, 31), 16, 32).tolist() == [0]


def test_claim_finds_both_kinds_of_second_owner() -> None:
    """Issue 5, duplicate_owner: claimed before, and claimed twice within one call."""
    owner = torch.full((10,), structural.UNOWNED, dtype=torch.int32)
    rows, _ = structural.claim(owner, ints(3, 4, 5), torch.tensor([0, 1, 2], dtype=torch.int32))
    assert rows.numel() == 0
    rows, others = structural.claim(owner, ints(7, 4, 7), torch.tensor([3, 4, 5], dtype=torch.int32))
    found = dict(zip(rows.tolist(), others.tolist(), strict=True))
    assert found.pop(1) == 1  # slot 4 was row 1's
    ((loser, winner),) = found.items()  # slot 7: one of the rows 0 and 2 of this call lost it to the other
    assert {loser + 3, winner} == {3, 5}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 15), max_size=12), max_size=5))
def test_claim_agrees_with_a_count(calls: list[list[int]]) -> None:
    """Issue 5, duplicate_owner: an index claimed n times gives n - 1 conflicts, however the calls are cut, and every
    conflict names a row that has the same index."""
    owner = torch.full((16,), structural.UNOWNED, dtype=torch.int32)
    claimed: list[int] = []
    conflicts: list[int] = []
    for call in calls:
        first = len(claimed)
        claimed += call
        claimants = torch.arange(first, len(claimed), dtype=torch.int32)
        rows, others = structural.claim(owner, torch.tensor(call, dtype=torch.int64), claimants)
        for row, other in zip(rows.tolist(), others.tolist(), strict=True):
            assert other != first + row and claimed[other] == call[row]
            conflicts.append(call[row])
    assert sorted(conflicts) == sorted(x for i in range(16) for x in [i] * (claimed.count(i) - 1))


def test_repeated_is_blind_to_totals() -> None:
    """Issue 5, accounting: a compensating double free keeps the length of the free list and is still found."""
    right, wrong = ints(1, 2, 3, 4), ints(1, 2, 2, 4)
    assert structural.repeated(right, 6).tolist() == []
    assert structural.repeated(wrong, 6).tolist() == [2]


def test_unaccounted_leaves_padding_out() -> None:
    """Issue 5, accounting: the padding page is nobody's, and that is no leak."""
    assert structural.unaccounted(flags(6, 2, 3, 5), 1).tolist() == [1, 4]


def test_free_and_owned_needs_both() -> None:
    """Issue 5, free_in_tree."""
    owner = torch.tensor([-1, 0, 1, -1, 2], dtype=torch.int32)
    assert structural.free_and_owned(flags(5, 1, 3, 4), owner).tolist() == [1, 4]


def test_run_heads_enter_each_page_once() -> None:
    """Issue 5, page: one head a page and span, and a new span is a new head even within one page."""
    slots = ints(4, 5, 6, 7, 12, 13, 14, 15)
    assert structural.run_heads(slots, ints(0), 4).tolist() == [0, 4]
    assert structural.run_heads(slots, ints(0, 2), 4).tolist() == [0, 2, 4]
    assert structural.run_heads(ints(4, 5, 12, 13, 6, 7), ints(0), 4).tolist() == [0, 2, 4]


def test_misaligned() -> None:
    """Issue 5, page: slot and position must have the same offset in their pages."""
    assert structural.misaligned(ints(4, 5, 10, 11), ints(0, 1, 2, 4), 4).tolist() == [3]


def test_window_faults_tell_the_faults_apart() -> None:
    """Issue 5, swa_map: every fault by its own name, and a map without faults gives none."""
    in_tree, in_request = flags(10, 1, 2, 3, 4, 5), flags(10, 6)
    resident, free, swa_free = flags(10, 1, 2, 3), flags(10, 7, 8, 9), flags(6, 4, 5)
    healthy = ints(0, 1, 2, 3, 0, 0, 0, 0, 0, 0)
    args = (in_tree, resident, in_request, free, swa_free, 1, 6)
    assert all(found.numel() == 0 for found in structural.window_faults(healthy, *args).values())
    sick = ints(0, 1, 0, 99, 2, 0, 4, 0, 3, 0)
    found = {name: slots.tolist() for name, slots in structural.window_faults(sick, *args).items()}
    assert found == {
        "target_out_of_range": [3],
        "tombstone_mapped": [4],
        "resident_unmapped": [2],
        "mapped_free": [6],
        "free_mapped": [8],
    }


def test_lock_faults() -> None:
    """Issue 5, lock: a negative count, a node less locked than its children, and who was locked by name."""
    negative, short, direct = structural.lock_faults([0, -1, 2, 0, 1, 3], [0, 0, 2, 1, 2, 1])
    assert (negative, short, direct) == ([1], [1, 3, 4], [5])
    assert structural.lock_faults([], []) == ([], [], [])
