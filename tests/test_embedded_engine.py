"""The embedded engine: what it generates, the stamps it writes, and that it never loses a slot."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig, Request
from kvsweep.engines.embedded.synthetic import build_tree
from kvsweep.engines.embedded.traffic import Traffic, generate
from kvsweep.pool import PoolKind, RealKvMode
from kvsweep.verify import hashing

LAYOUTS = [(1, 0), (16, 0), (1, 32), (16, 32)]  # page_size, window
layouts = pytest.mark.parametrize(("page_size", "window"), LAYOUTS)


def make_engine(page_size: int = 1, window: int = 0, **shapes: object) -> EmbeddedEngine:
    small = dict(full_slots=1024, swa_slots=1024, max_context=512, max_batch=4, vocab=64)
    return EmbeddedEngine(ModelConfig(page_size=page_size, window=window, **{**small, **shapes}), prefill_chunk=24)


def prompt_of(seed: int, length: int = 70) -> list[int]:
    words = random.Random(seed)
    return [words.randrange(64) for _ in range(length)]


def check_conservation(engine: EmbeddedEngine) -> None:
    """Every slot of every pool is free, the tree's or one request's: exactly one of these."""
    tree_slots = [slot for node in engine.tree.nodes() for slot in node.value.tolist()]
    own_slots = [slot for view in engine.requests() for slot in view.slots[view.prefix_len :].tolist()]
    held = tree_slots + own_slots
    for pool in engine.allocator.pools():
        view = pool.view()
        free = torch.cat(view.free)
        free = (free if view.free_unit == "slot" else pool.slots_of(free)).tolist()
        if pool.name == "full":
            used = held
        else:
            resident = [slot for node in engine.tree.nodes() if not node.swa_tombstone for slot in node.value.tolist()]
            used = [slot for slot in engine.allocator.slot_map[torch.tensor(held, dtype=torch.int64)].tolist() if slot]
            assert len(used) == engine.allocator.slot_map.count_nonzero()
            assert all(engine.allocator.slot_map[slot] for slot in resident)
        assert sorted(used + free) == list(range(pool.page_size, pool.size + pool.page_size))
    for request in engine.running:
        above = engine.tree.slots(request.last_node)
        assert engine.model.table[request.row, : request.prefix_len].tolist() == above.tolist()
        assert request.last_node.lock_ref > 0 or not request.prefix_len
    locks = sum(node.lock_ref for node in engine.tree.root().children.values())
    assert locks == sum(request.prefix_len > 0 for request in engine.running)


def check_stamps(engine: EmbeddedEngine) -> int:
    """Every stamp of every cached slot, recomputed one by one from the specification; how many were checked."""
    checked = 0
    for pool in engine.pools():
        for node in engine.tree.nodes():
            if pool.kind is PoolKind.SWA and node.swa_tombstone:
                continue
            slots = engine.tree.slots(node).tolist()
            _, tokens = engine.tree.prefix(node, len(slots) - 1)
            prev_hash = hashing.s(hashing.CHAIN_ROOT_SEED)
            for position, (slot, token) in enumerate(zip(slots, tokens.tolist(), strict=True)):
                if position >= len(slots) - len(node.key):
                    row = slot if pool.slot_map is None else int(pool.slot_map[slot])
                    for stamp in pool.stamps:
                        sources = zip(stamp.sources, stamp.read_bytes, strict=True)
                        read = [
                            bytes(source.tensor[row].view(torch.uint8).flatten()[:n].tolist()) for source, n in sources
                        ]
                        real_kv = 0 if stamp.mode is RealKvMode.NONE else hashing.real_kv_hash(read)
                        expected = [token, position, hashing.signed(prev_hash), hashing.signed(real_kv)]
                        assert stamp.buffer[row].view(torch.int64).tolist() == expected
                        checked += 1
                prev_hash = hashing.mix3(prev_hash, token, position)
    return checked


def drain(engine: EmbeddedEngine) -> None:
    while engine.step():
        pass


@layouts
def test_cached_output_equals_uncached(page_size: int, window: int) -> None:
    """Issue 2: a prefix out of the cache gives the text that computing it gives, also next to other requests."""
    engine = make_engine(page_size, window)
    shared, tails = prompt_of(1, 64), [prompt_of(seed, 20) for seed in (2, 3, 4)]
    expected = []
    for tail in tails:
        engine.flush()
        expected.append(generate(engine, shared + tail))
    assert engine.cached_tokens == 0
    requests = [engine.submit(shared + tail) for tail in tails]
    drain(engine)
    assert [request.output for request in requests] == expected
    assert engine.cached_tokens > 0
    assert [generate(engine, shared + tail) for tail in tails] == expected
    assert generate(engine, shared + tails[0] + expected[0] + tails[1])  # the next turn finds prompt and answer
    assert generate(engine, shared + tails[0], extra_key="other tenant") == expected[0]


def test_namespaces_share_nothing() -> None:
    """Issue 2: the same prompt under another extra_key is computed anew."""
    engine = make_engine()
    generate(engine, prompt_of(0), extra_key="a")
    generate(engine, prompt_of(0), extra_key="b")
    assert engine.cached_tokens == 0
    generate(engine, prompt_of(0), extra_key="a")
    assert engine.cached_tokens == 69  # all but the last token, whose prediction is wanted


@pytest.mark.parametrize("real_kv", list(RealKvMode))
@layouts
def test_stamps_follow_the_specification(page_size: int, window: int, real_kv: RealKvMode) -> None:
    """Issue 2: the vectorised stamps equal a slot-by-slot recomputation from verify.hashing."""
    engine = make_engine(page_size, window, real_kv=real_kv, dtype=torch.float16 if page_size > 1 else torch.float32)
    shared = prompt_of(1, 40)
    requests = [engine.submit(shared + prompt_of(seed, 20), 40) for seed in (2, 3)]
    drain(engine)
    assert all(len(request.output) == 40 for request in requests)
    assert check_stamps(engine) >= 2 * (96 + 48)  # K and V of at least one whole request and another's tail


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 60), st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("reallocate")),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    max_size=40,
)


@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (4, 0), (1, 16), (4, 16)])
def test_slots_are_conserved(page_size: int, window: int) -> None:
    """Issue 2: free + tree + requests = all, after every step of random schedules that overcommit the memory."""

    @settings(max_examples=15, deadline=None)
    @given(actions=actions)
    @example(
        actions=[("submit", seed, 60, 40) for seed in range(5)]
    )  # more than fits: retracts, whatever else is drawn
    def run(actions: list[tuple]) -> None:
        engine.flush()
        requests: list[Request] = []
        for name, *args in actions:
            if name == "submit":
                seed, length, answer = args
                requests.append(engine.submit((prompt_of(0, 30) + prompt_of(seed, 60))[:length], answer))
            elif name == "abort" and requests:
                engine.abort(requests[args[0] % len(requests)])
            elif name in ("flush", "reallocate"):
                getattr(engine, name)()
            for _ in range(args[0] if name == "step" else 1):
                engine.step()
                check_conservation(engine)
        drain(engine)
        check_conservation(engine)
        check_stamps(engine)
        assert all(request.done.is_set() for request in requests)
        assert all(len(request.tokens) == request.limit for request in requests if not request.aborted)
        retractions.append(engine.retractions)

    retractions: list[int] = []
    engine = make_engine(page_size, window, full_slots=160, swa_slots=120, layers=2, heads=2, head_dim=8)
    run()
    assert retractions[-1] > 0


@pytest.mark.parametrize("window", [0, 16])
def test_retracted_requests_give_the_same_text(window: int) -> None:
    """Issue 2: memory pressure costs time, not text."""
    roomy, tight = make_engine(4, window), make_engine(4, window, full_slots=160, swa_slots=120)
    prompts = [prompt_of(seed, 50) for seed in range(5)]
    expected = [generate(roomy, prompt, 30) for prompt in prompts]
    requests = [tight.submit(prompt, 30) for prompt in prompts]
    drain(tight)
    assert [request.output for request in requests] == expected
    assert tight.retractions > 0


@pytest.mark.parametrize("window", [0, 32])
def test_chunks_enter_the_tree_mid_prefill(window: int) -> None:
    """Issue 2: a long prompt's chunks are in the tree, locked, before its last chunk is computed."""
    engine = make_engine(1, window)
    request = engine.submit(prompt_of(0, 70), 4)
    sizes = []
    while not request.output:
        engine.step()
        sizes.append(sum(len(node.key) for node in engine.tree.nodes()))
        assert all(node.lock_ref for node in engine.tree.nodes())
    assert sizes == [24, 48, 70]


def test_sliding_window_slots_come_back() -> None:
    """Issue 2: a decoding request gives back the window slots it has passed; the tree keeps these as tombstones."""
    engine = make_engine(1, 16)
    request = engine.submit(prompt_of(0, 10), 60)
    drain(engine)
    assert len(request.output) == 60
    resident = sum(len(node.key) for node in engine.tree.nodes() if not node.swa_tombstone)
    assert sum(len(node.key) for node in engine.tree.nodes()) == 69
    assert 16 <= resident < 40 and engine.allocator.swa.available == 1024 - resident


@layouts
def test_journal_knows_before_the_slot_is_free(page_size: int, window: int) -> None:
    """I2: every free is in the journal, and was put there before the allocator could hand the slot out again."""
    engine = make_engine(page_size, window, full_slots=320, swa_slots=320)
    freed: dict[str, set[int]] = {"full": set(), "swa": set()}
    late: list[int] = []

    def watch(pool: object, free: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def inner(slots: torch.Tensor) -> None:
            noted = [entry for entry in engine.journal.drain() if entry.pool == pool.name and entry.slots is not None]
            freed[pool.name] |= {slot for entry in noted for slot in entry.slots.tolist()}
            late.extend(set(slots.tolist()) - freed[pool.name])
            free(slots)

        return inner

    for pool in engine.allocator.pools():
        pool.free = watch(pool, pool.free)
    engine.attach()
    traffic = Traffic(engine, clients=4, system_tokens=48, max_new_tokens=20)
    for _ in range(150):
        traffic.pump()
        engine.step()
    assert not late
    assert len(freed["full"]) > 100 and bool(freed["swa"]) == bool(window)


def test_flush_journals_every_pool() -> None:
    """I2: a flush tells the journal that all slots of both pools are free."""
    engine = make_engine(1, 32)
    generate(engine, prompt_of(0))
    engine.attach()
    engine.flush()
    engine.step()
    assert [(entry.pool, entry.slots) for entry in engine.journal.drain()] == [("full", None), ("swa", None)]


def test_attach_and_detach_leave_nothing() -> None:
    """I8: any number of attach and detach in any order; after detach the allocators are what they were."""
    engine = make_engine(1, 32)
    pools = engine.allocator.pools()
    own_free = pools[1].free  # an instance attribute somebody else has set
    pools[1].free = own_free
    before = [dict(vars(pool)) for pool in pools]
    engine.detach()
    for _ in range(3):
        engine.attach()
        engine.attach()
        pools[0].free(pools[0].alloc(4))
        assert len(engine.journal.drain()) == 1  # hooked once, not twice
        engine.detach()
        engine.detach()
    pools[0].free(pools[0].alloc(4))
    assert not engine.journal.drain()
    for pool, attributes in zip(pools, before, strict=True):
        assert vars(pool).keys() == attributes.keys()
    assert vars(pools[1])["free"] is own_free


def test_reallocation_is_announced() -> None:
    """Issue 2: new KV memory means new tensors and a new pools_generation; the same prompt gives the same text."""
    engine = make_engine(1, 32)
    text, before, generation = generate(engine, prompt_of(0)), engine.pools(), engine.pools_generation
    engine.reallocate()
    engine.step()
    assert engine.pools_generation != generation and engine.pools_ready()
    old = {segment.tensor.data_ptr() for pool in before for segment in pool.segments}
    assert all(segment.tensor.data_ptr() not in old for pool in engine.pools() for segment in pool.segments)
    assert generate(engine, prompt_of(0)) == text


def test_the_loop_serves_and_stops() -> None:
    """Issue 2: `run` in a thread serves prompts from other threads, and ends at the stop event."""
    engine, stop = make_engine(), threading.Event()
    alone = generate(engine, prompt_of(0))
    loop = threading.Thread(target=engine.run, args=(stop,))
    loop.start()
    try:
        assert generate(engine, prompt_of(0)) == alone
        request = engine.submit(prompt_of(1), 200)
        engine.abort(request)
        assert request.done.wait(30) and request.aborted
    finally:
        stop.set()
        loop.join(30)
    assert not loop.is_alive() and not engine.looping
    assert engine.pressure().running == engine.pressure().queued == 0 and engine.pressure().steps > 0
    check_conservation(engine)


def test_traffic_is_deterministic() -> None:
    """Issue 2: the same seed gives the same prompts and answers; another seed gives others; chats share prefixes."""

    def play(seed: int, clients: int = 3) -> tuple[list[list[int]], EmbeddedEngine]:
        engine = make_engine()
        asked: list[Request] = []
        submit = engine.submit
        engine.submit = lambda *args: asked.append(submit(*args)) or asked[-1]
        traffic = Traffic(engine, clients=clients, seed=seed, system_tokens=40, max_new_tokens=8)
        while traffic.finished < 30:
            traffic.pump()
            engine.step()
        return [request.tokens for request in asked if request.done.is_set()], engine

    first, engine = play(0)
    assert first == play(0)[0] != play(1)[0]
    prompt_tokens = sum(map(len, first))
    assert engine.cached_tokens > prompt_tokens / 2
    assert any(a[:40] == b[:40] and a != b for a in first for b in first)


@layouts
def test_synthetic_trees_look_real(page_size: int, window: int) -> None:
    """Issue 2: a synthetic tree has the asked size, right stamps, non-zero KV; its prefixes can be evicted."""
    engine = make_engine(page_size, window, full_slots=4096, swa_slots=1024)
    build_tree(engine, nodes=40, slots=1600)
    assert len(list(engine.tree.nodes())) == 40
    check_conservation(engine)
    resident = sum(len(node.key) for node in engine.tree.nodes() if not node.swa_tombstone)
    assert resident == 1600 if not window else 0 < resident <= 1024
    assert check_stamps(engine) == 2 * (1600 + (resident if window else 0))
    assert all(segment.tensor.view(-1)[-8:].abs().sum() > 0 for pool in engine.pools() for segment in pool.segments)
    assert engine.tree.evict(800) >= 800
    check_conservation(engine)
    with pytest.raises(ValueError, match="full_slots"):
        build_tree(engine, nodes=10, slots=16000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.submit([]), "prompt must be token ids"),
        (lambda engine: engine.submit([64]), "from 0 to 63"),
        (lambda engine: engine.submit([1], 0), "max_new_tokens must be at least 1"),
        (lambda engine: engine.submit([1], 512), "at most 512"),
        (lambda engine: Traffic(engine, system_tokens=500), "system_tokens"),
        (lambda engine: EmbeddedEngine(prefill_chunk=0), "prefill_chunk"),
        (lambda engine: make_engine(3), "max_context must be a multiple of page_size 3"),
        (lambda engine: make_engine(16, full_slots=1000), "pool full: size must be a positive multiple"),
        (lambda engine: make_engine(kv_heads=3), "heads must be a multiple"),
        (lambda engine: make_engine(layers=1, window=4), "at least 2 layers"),
    ],
)
def test_bad_input_says_what_is_accepted(call: Callable[[EmbeddedEngine], object], message: str) -> None:
    """Issue 2: each bad argument is refused with its name and the accepted values."""
    with pytest.raises(ValueError, match=message):
        call(make_engine())
