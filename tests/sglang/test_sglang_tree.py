"""kvsweep's walk over SGLang's own trees: the same slots as SGLang's walk, whatever happens in between."""

from __future__ import annotations

import gc
import itertools

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang_caches import Cache, make_cache

from kvsweep.pool import slots_of_pages
from kvsweep.tree import Spans

pytestmark = pytest.mark.sglang
KINDS = ["classic", "python", "rust", "python-swa", "rust-swa"]
CASES = [(kind, page_size) for kind in KINDS for page_size in (1, 16)]


@pytest.fixture(params=CASES, ids=[f"{kind}-page{page}" for kind, page in CASES])
def cache(request: pytest.FixtureRequest):
    kind, page_size = request.param
    made = make_cache(kind, 2048, page_size)
    made.engine.attach()
    yield made
    made.engine.detach()


# Prompts that share prefixes: a few bases, cut and extended, in a few namespaces.
prompts = st.tuples(
    st.integers(0, 3), st.integers(1, 150), st.integers(0, 60), st.integers(0, 5), st.sampled_from([None, "lora-a"])
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), prompts),
        st.tuples(st.just("insert_own"), prompts),
        st.tuples(st.just("match"), prompts),
        st.tuples(st.just("evict"), st.integers(1, 400)),
        st.tuples(st.just("evict_window"), st.integers(1, 100)),
        st.tuples(st.just("flush"), st.none()),
        st.tuples(st.just("advance"), st.integers(1, 200)),
    ),
    max_size=40,
)


def prompt(spec: tuple) -> tuple[list[int], str | None]:
    base, cut, tail, which, namespace = spec
    return [base * 1000 + i for i in range(cut)] + [100_000 + which * 1000 + i for i in range(tail)], namespace


def apply(cache: Cache, step: str, spec) -> None:
    if step in ("insert", "insert_own"):
        tokens, namespace = prompt(spec)
        cache.insert(tokens, namespace, reuse=step == "insert")
    elif step == "match":
        tokens, namespace = prompt(spec)
        cache.match(tokens, namespace)
    elif step == "evict":
        cache.evict(spec)
    elif step == "evict_window" and cache.swa:
        cache.evict(0, spec)
    elif step == "flush":
        cache.flush()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_the_cursor_sees_what_sglang_sees(cache: Cache, steps):
    """I1: after any history of inserts, splits, evictions and resets a walk gives SGLang's own rows, as a set."""
    cache.flush()
    for step, spec in steps:
        apply(cache, step, spec)
    spans = cache.sweep(slice_slots=37)
    assert cache.rows(spans) == cache.walk()
    assert spans.skipped["untracked"] == 0
    for key, value in zip(spans.keys, spans.values, strict=True):
        assert len(key) == value.numel()
    if cache.swa:
        resident = cache.sweep(swa_resident_only=True)
        rows = {row[:2] for row in cache.rows(resident)}
        assert rows == {row[:2] for row in cache.walk(swa_resident_only=True)}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_a_walk_survives_what_happens_between_its_slices(cache: Cache, steps):
    """I1 and I2: slots held for the whole walk are all met, with the right position, token and slot before; the
    lookup that settles a suspect agrees with SGLang's walk at the end."""
    cache.flush()
    for which in range(6):
        cache.insert(prompt((which % 3, 40 + 15 * which, 30, which, None))[0])
    cache.engine.journal.drain()
    stayed, generation = cache.walk(), cache.engine.tree.generation
    cursor, spans, done = cache.engine.tree.cursor(), Spans(), False
    for step, spec in steps:
        if step == "advance" and not done:
            done = cursor.advance(spans, spans.num_slots + spec, 1 << 62)
        else:
            apply(cache, step, spec)
            stayed = still_there(cache, stayed)
    while not done:
        done = cursor.advance(spans, spans.num_slots + 50, 1 << 62)
    if cache.engine.tree.generation == generation:
        assert {row[:2] for row in stayed} <= {row[:2] for row in cache.rows(spans)}
    now = {position_slot[::-1] for position_slot in (row[:2] for row in cache.walk())}
    for node, value, start in zip(spans.nodes, spans.values, spans.starts, strict=True):
        for offset in (0, value.numel() - 1):
            slot = cache.engine.tree.slot_at(node, start + offset)
            assert slot is None or (start + offset, slot) in now


def still_there(cache: Cache, rows: set) -> set:
    """Those of `rows` that the tree still holds and that were not freed meanwhile (and perhaps taken again)."""
    rows &= cache.walk()
    for pool, slots, page_size in cache.engine.journal.drain():
        if pool in ("*", "full"):
            freed = {row[0] for row in rows} if slots is None else set(slots_of_pages(slots, page_size).tolist())
            rows = {row for row in rows if row[0] not in freed}
    return rows


def test_tokens_and_namespaces(cache: Cache):
    """Issue 4, item 2: keys give the tokens of each slot, and a prefix its namespace and all its tokens."""
    tokens = list(range(1000, 1096))
    cache.insert(tokens)
    cache.insert(tokens[:48] + list(range(5000, 5048)))
    cache.insert(tokens, "lora-b")
    tree = cache.engine.tree
    expected = {(None, tuple(tokens)), (None, tuple(tokens[:48] + list(range(5000, 5048)))), ("lora-b", tuple(tokens))}
    spans = cache.sweep()
    full = set()
    for node, key, start in zip(spans.nodes, spans.keys, spans.starts, strict=True):
        namespace, prefix = tree.prefix(node, start + len(key) - 1)
        assert prefix.tolist()[start:] == tree.tokens(key).tolist()
        if not tree.reader.children(node):
            full.add((namespace or None, tuple(prefix.tolist())))
        assert tree.node_name(node)
    assert full == expected


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["python-eagle", "rust-eagle"])
def test_trees_of_bigrams(kind: str, page_size: int):
    """Issue 4, item 2: with EAGLE a tree's keys are pairs of tokens; a slot's token is the first of its pair."""
    cache = make_cache(kind, 2048, page_size)
    cache.engine.attach()
    tokens = list(range(200))
    for other in ([], list(range(900, 980))):  # the second splits the first in a page's middle
        cache.insert(tokens[: 100 if other else 200] + other, reuse=False)
    cache.match(tokens[:60])
    spans = cache.sweep()
    assert cache.rows(spans) == cache.walk()
    assert spans.skipped["untracked"] == 0
    for node, key, start in zip(spans.nodes, spans.keys, spans.starts, strict=True):
        prefix = cache.engine.tree.prefix(node, start + len(key) - 1)[1].tolist()
        assert prefix in (tokens[: len(prefix)], (tokens[:100] + list(range(900, 980)))[: len(prefix)])
    cache.engine.detach()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "swa" not in kind])  # where any prefix can be matched
def test_the_fronts_of_an_evicted_node_are_found_through_it(kind: str):
    """I1: what was handed out as one node, then split twice and partly evicted, is looked up where it still is."""
    cache = make_cache(kind)
    cache.engine.attach()
    cache.insert(list(range(60)))
    spans = cache.sweep()
    (node,), (slots,) = spans.nodes, [value.tolist() for value in spans.values]
    look = lambda position: cache.engine.tree.slot_at(node, position)  # noqa: E731
    for held in (40, 20):
        cache.match(list(range(held)))
        lock = cache.cache.lock(last_node(cache, list(range(held))))
        cache.evict(1000)
        assert [look(position) for position in (0, held - 1)] == [slots[0], slots[held - 1]]
        assert look(held) is None and look(59) is None
        cache.cache.unlock(lock)
    cache.evict(1000)
    assert look(0) is None and cache.sweep().num_slots == 0
    cache.engine.detach()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "swa" not in kind])
@pytest.mark.parametrize("order", list(itertools.permutations([10, 20, 30])), ids=str)
def test_the_oldest_front_outlives_all_others(kind: str, order: tuple[int, ...]):
    """I1: a waiting node is split in any order, and all but its first front is evicted, piece by piece: that front is
    walked and looked up through the node it once was part of."""
    cache = make_cache(kind)
    cache.engine.attach()
    cache.insert(list(range(40)))
    spans, cursor = cache.sweep(), cache.engine.tree.cursor()
    (node,), (slots,) = spans.nodes, [value.tolist() for value in spans.values]
    for length in order:
        cache.match(list(range(length)))
    for held in (30, 20, 10):
        cache.evict(10)
        assert len(cache.walk()) == held if kind != "classic" else cache.sweep().num_slots == held
        assert [cache.engine.tree.slot_at(node, at) for at in (0, held - 1, held)] == [slots[0], slots[held - 1], None]
    assert cache.engine.tree.slot_at(node, -1) is None
    walked = Spans()
    assert cursor.advance(walked, 1 << 60, 1 << 62)
    assert torch.cat(walked.values).tolist() == slots[:10]
    cache.engine.detach()


def last_node(cache: Cache, tokens: list[int]):
    return cache.cache.match_prefix(MatchPrefixParams(key=cache.key(tokens))).last_device_node


@pytest.mark.parametrize("namespace", [None, "lora-a"])
def test_splits_the_mirror_was_not_told_of_are_seen_when_a_node_is_visited(namespace: str | None):
    """I1: a node that got shorter behind kvsweep's back lost its front to a new node: both are walked, once."""
    cache = make_cache("rust")
    cache.engine.attach()
    tokens = list(range(60))
    cache.insert(tokens, namespace)
    cache.insert([*tokens[:50], 900, 901], namespace)
    cache.engine.detach()
    for length in (10, 30, 20):
        cache.match(tokens[:length], namespace)
    cache.engine.attach()
    spans = cache.sweep()
    assert cache.rows(spans) == cache.walk() and spans.skipped["untracked"] == 0
    assert len(spans) == 6 and len(cache.sweep()) == 6
    assert {cache.engine.tree.prefix(node, 9)[0] for node in spans.nodes} == {namespace or ""}
    cache.engine.detach()


@settings(max_examples=30, deadline=None)
@given(steps=steps)
def test_the_mirror_forgets_what_the_core_forgets(steps):
    """I5: whatever the tree went through, an empty tree leaves nothing in the mirror but its root."""
    cache = make_cache("rust", 2048)
    cache.engine.attach()
    mirror = cache.engine.tree.reader
    for step, spec in steps:
        apply(cache, step, spec)
        cache.sweep()
        assert len(mirror._parents) == len(mirror._by_name) == len(mirror._raw) - 1
        assert len(mirror._gone) == len(mirror._tails) and mirror._children.keys() <= mirror._raw.keys()
    cache.evict(4096)
    assert cache.sweep().num_slots == 0
    assert mirror._raw.keys() == {mirror.root()} and not mirror.children(mirror.root())
    assert not (mirror._parents or mirror._by_name or mirror._namespaces or mirror._gone or mirror._tails)
    cache.engine.detach()


def test_the_mirror_keeps_the_tokens_of_living_slots_only():
    """I5: a tail does not keep in memory what its fronts took from it."""
    cache = make_cache("rust", 4096)
    cache.engine.attach()
    cache.insert(list(range(2000)))
    for length in range(1990, 0, -10):
        cache.match(list(range(length)))
    mirror = cache.engine.tree.reader
    arrays = {id(raw if raw.base is None else raw.base): raw if raw.base is None else raw.base
              for raw in mirror._raw.values()}  # fmt: skip
    assert len(mirror._raw) == 201
    assert sum(array.nbytes for array in arrays.values()) <= 2 * 8 * 2000
    cache.engine.detach()


def test_a_long_path_is_learnt_in_one_go():
    """I1, I4: what was inserted and split before kvsweep came is learnt by one match, each node looked at once."""
    cache = make_cache("rust", 8192)
    tokens = list(range(4000))
    cache.insert(tokens)
    for length in range(3998, 0, -2):
        cache.match(tokens[:length])
    cache.engine.attach()
    mirror, asked = cache.engine.tree.reader, []

    class Counting(dict):
        def __contains__(self, node: object) -> bool:
            asked.append(node)
            return super().__contains__(node)

    mirror._raw = Counting(mirror._raw)
    cache.match(tokens)
    assert len(mirror._raw) == 2001 and len(asked) < 4 * 2000
    assert cache.rows(cache.sweep()) == cache.walk()
    cache.engine.detach()


def test_the_mirror_is_nothing_to_the_collector():
    """Issue 4, item 2: the scheduler is not stopped by Python's collector for what kvsweep keeps of its tree."""
    cache = make_cache("rust", 24_000)
    cache.engine.attach()

    def grow(first: int) -> None:
        for prompt in range(first, first + 1000):
            cache.insert([prompt * 10 + i for i in range(8)])
            cache.match([prompt * 10 + i for i in range(5)])
        gc.collect()

    grow(0)
    before = len(gc.get_objects())
    grow(1000)
    added = len(gc.get_objects()) - before
    assert added < 100 and cache.sweep().num_slots == 16_000
    cache.engine.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_ten_thousand_nodes(kind: str):
    """Issue 4, item 2: deep trees neither recurse nor lose anything."""
    cache = make_cache(kind, 24_000)
    cache.engine.attach()
    tokens = list(range(20_000))
    cache.insert(tokens)
    for depth in range(19_998, 0, -2):  # each match splits what is left of the front
        cache.match(tokens[:depth])
    spans = cache.sweep(slice_slots=1000)
    assert len(spans) == 10_000
    assert {row[:2] for row in cache.rows(spans)} == {(slot, slot - 1) for slot in range(1, 20_001)}
    assert cache.engine.tree.slot_at(spans.nodes[-1], 3) == 4
    cache.engine.detach()


def test_a_tree_from_before_kvsweep_is_not_called_covered():
    """I6: nodes the Rust core's mirror never heard of are counted as untracked, and learnt when they are matched."""
    cache = make_cache("rust")
    cache.insert(list(range(60)))
    cache.engine.attach()
    assert cache.sweep().skipped["untracked"] == 60
    cache.match(list(range(60)))
    spans = cache.sweep()
    assert spans.skipped["untracked"] == 0
    assert cache.rows(spans) == cache.walk()
    cache.engine.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_detach_gives_the_methods_back(kind: str):
    """I8: after detach every object has only the attributes it had before attach."""
    cache = make_cache(kind)
    objects = [cache.cache, cache.core, cache.allocator, *(leaf for _, leaf in cache.engine._leaf_allocators)]
    before = [set(vars(each)) for each in objects]
    for _ in range(3):
        cache.engine.attach()
        assert any(set(vars(each)) != names for each, names in zip(objects, before, strict=True))
        cache.engine.detach()
        assert [set(vars(each)) for each in objects] == before


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_nodes_on_the_host_are_skipped_and_come_back(kind: str):
    """Issue 4, item 2: a node evicted to the host keeps its place; what an insert brings back is walked again, and a
    host-only path that a prefetch hangs below a node is counted, not verified."""
    cache = make_cache(kind)
    cache.engine.attach()
    tokens = list(range(40))
    cache.insert(tokens)
    cache.match(tokens[:25])  # two nodes: 25 and 15
    core = cache.core
    core.set_hicache_enabled()
    spans, reader = cache.sweep(), cache.engine.tree.reader
    (front, tail) = sorted(spans.nodes, key=lambda node: len(reader.key(node)), reverse=True)
    for node in (front, tail):
        core.commit_backup(reader.id(node), torch.arange(1, len(reader.key(node)) + 1), {})
    cache.cache._demote(reader.id(tail), {ComponentType.FULL: 0})
    spans = cache.sweep()
    assert spans.skipped["host_evicted"] == 15 and spans.num_slots == 25
    assert spans.skipped["untracked"] == 0
    assert cache.engine.tree.slot_at(tail, 30) is None
    core.insert_host(reader.id(tail), cache.key(list(range(40, 48))), torch.arange(100, 108), ["h"] * 8)
    spans = cache.sweep()
    assert spans.skipped["host_evicted"] == 23
    assert {tuple(cache.engine.tree.prefix(node, 24)[1]) for node in spans.nodes} == {tuple(range(25))}
    cache.insert(tokens, reuse=False)  # the request computed all of it again
    spans = cache.sweep()
    assert spans.skipped["host_evicted"] == 8 and spans.num_slots == 40
    assert cache.rows(spans) == cache.walk()
    cache.engine.detach()


def test_what_the_host_tier_drops_leaves_the_mirror():
    """I5: nodes that go with the host tier go from the mirror too, also while nothing is swept."""
    cache = make_cache("rust", 4096)
    cache.engine.attach()
    core, mirror = cache.core, cache.engine.tree.reader
    core.set_hicache_enabled()
    most = 0
    for prompt in range(300):
        tokens = [prompt * 100 + i for i in range(20)]
        cache.insert(tokens, reuse=False)
        node = core.match_full_device_prefix(cache.key(tokens))[1]
        core.commit_backup(node, torch.arange(1, 21), {})
        cache.cache._demote(node, {ComponentType.FULL: 0})
        evicted = core.drive_host_eviction(ComponentType.FULL, 20)
        for freed in (evicted.host_frees, evicted.device_frees, evicted.cache_actions):
            freed.clear()
        most = max(most, len(mirror._parents))
    assert most <= 64 and cache.engine.tree.broken is None
    cache.engine.detach()


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_a_load_that_ends_unseen_is_over(kind: str):
    """I1: a load under way when kvsweep detached is not waited for for ever; one that still is under way, is."""
    cache = make_cache(kind)
    cache.engine.attach()
    core, nodes = cache.core, []
    core.set_hicache_enabled()
    for first in (0, 1000):
        cache.insert(list(range(first, first + 40)))
    for node in map(cache.engine.tree.reader.id, cache.sweep().nodes):
        core.commit_backup(node, torch.arange(1, 41), {})
        cache.cache._demote(node, {ComponentType.FULL: 0})
        transfer, others = core.build_load_back_spec(node)
        core.commit_load_back(node_id=node, device_indices=cache.alloc(40), kv_xfer=transfer, comp_xfers=others)
        nodes.append(node)
    assert cache.sweep().skipped == {"loading": 80}
    core.insert_host(nodes[0], cache.key(list(range(5000, 5030))), torch.arange(100, 130), ["h"] * 30)
    assert cache.sweep().skipped == {"loading": 80, "host_evicted": 30}  # it has no slots to wait for
    cache.engine.detach()
    core.finish_load_back(nodes[0])
    cache.cache.ongoing_load_back = {nodes[1]: None}  # as the cache's own load_back() notes it
    cache.engine.attach()
    spans = cache.sweep()
    assert spans.skipped["loading"] == 40 and spans.num_slots == 40
    cache.engine.detach()


@pytest.mark.parametrize("kind", ["rust", "rust-swa"])
def test_kvsweep_comes_in_the_middle_of_an_insert(kind: str):
    """I8: an insert that was suspended when the hooks came ends as if they were not there; a match learns the rest."""
    cache = make_cache(kind)
    cache.insert(list(range(60)), reuse=False)
    if cache.swa:
        cache.evict(0, 30)
    step = cache.core.begin_insert(InsertParams(key=cache.key(list(range(70))), value=cache.alloc(70)))
    assert (step.result is None) == cache.swa  # suspended where window slots are to be made anew
    cache.engine.attach()
    cache.cache._apply_cache_actions(step.actions)
    while step.result is None:
        step = cache.core.resume_insert()
        cache.cache._apply_cache_actions(step.actions)
    cache.cache._apply_cache_actions(cache.core.end_insert())
    assert cache.engine.tree.broken is None
    cache.match(list(range(70)))
    assert cache.rows(cache.sweep()) == cache.walk()
    cache.engine.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_attached_anew_it_is_whole_again(kind: str):
    """I8: what broke kvsweep's view of the tree does not outlive a stop and a start."""
    cache = make_cache(kind)
    cache.engine.attach()
    cache.insert(list(range(40)))
    cache.engine.tree.broken = "a hook into SGLang failed"
    with pytest.raises(RuntimeError, match="a hook"):
        cache.sweep()
    cache.engine.detach()
    cache.engine.attach()
    cache.match(list(range(40)))
    assert cache.sweep().num_slots == 40
    cache.engine.detach()


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_a_load_back_is_waited_for(kind: str):
    """Issue 4, item 5: between commit_load_back and finish_load_back a node is loading, then it is walked."""
    cache = make_cache(kind)
    cache.engine.attach()
    tokens = list(range(40))
    cache.insert(tokens)
    core = cache.core
    core.set_hicache_enabled()
    (node,) = map(cache.engine.tree.reader.id, cache.sweep().nodes)
    core.commit_backup(node, torch.arange(1, 41), {})
    cache.cache._demote(node, {ComponentType.FULL: 0})
    assert cache.sweep().skipped["host_evicted"] == 40
    transfer, others = core.build_load_back_spec(node)
    fresh = cache.alloc(40)
    actions = core.commit_load_back(node_id=node, device_indices=fresh, kv_xfer=transfer, comp_xfers=others)
    assert actions == []
    spans = cache.sweep()
    assert spans.skipped == {"loading": 40} and spans.num_slots == 0
    core.finish_load_back(node)
    assert {row[:2] for row in cache.rows(cache.sweep())} == {(int(slot), i) for i, slot in enumerate(fresh)}
    cache.engine.detach()
