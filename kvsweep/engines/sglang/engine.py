"""SGLang as kvsweep's `Engine`: one scheduler's tree, allocators and pools, watched through wrapped methods."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from kvsweep.checks.views import AllocatorView, RequestView
from kvsweep.engine import PassInterrupted, Pressure
from kvsweep.engines.sglang.hooks import Patches, UnsupportedSGLang, gated, journal_frees
from kvsweep.engines.sglang.mirror import RustMirror
from kvsweep.engines.sglang.pools import read_pools, read_stamps
from kvsweep.engines.sglang.tree import MAMBA, ClassicReader, NodeTree, UnifiedReader
from kvsweep.pool import KVPool, StampBuffer
from kvsweep.tree import FreeJournal, Gate
from kvsweep.verify.device import pause_for_capture

logger = logging.getLogger("kvsweep")

# Methods of a tree core that change the tree: each runs with the gate entered.
CORE_CHANGES = (
    "match_prefix",  # splits
    "begin_insert",
    "resume_insert",
    "end_insert",
    "insert_host",
    "evict_device_next_node",
    "evict_device_leaf",
    "finish_mamba_state_eviction",
    "finish_swa_state_eviction",
    "demote",
    "drop_subtree_no_host",
    "drive_host_eviction",
    "evict_excess_path_states",
    "dec_swa_lock_only",
    "dec_window_lock_only",
    "commit_hicache_transfers",
    "commit_load_back",
    "finish_load_back",
    "attach_swa_window",
    "set_component_device_value",
    "reset",
)
CLASSIC_CHANGES = ("match_prefix", "touch_prefix", "insert", "evict", "reset")
# Phases of the scheduler loop in which tree, allocators and requests change together: the gate is kept for the whole
# phase, so that a snapshot (taken while a batch runs, or in between) finds every slot with an owner. Not
# process_input_requests, which may load weights for a minute: what it does to the cache is short, and gated by itself.
PHASES = ("get_next_batch_to_run", "process_batch_result")

KV_CACHE = "kv_cache"  # sglang.srt.constants.GPU_MEMORY_TYPE_KV_CACHE


class SGLangEngine:
    """See `kvsweep.engine.Engine`.

    Args:
        tree_cache: the prefix cache, UnifiedRadixCache (either core) or RadixCache.
        allocator: its `token_to_kv_pool_allocator`.
        scheduler: the Scheduler; None for a cache that stands alone (tests), which has no requests and no load.
        labels: model_name and ranks.

    Raises:
        UnsupportedSGLang: for a cache, core, allocator or pool kvsweep does not know; says what is supported.
    """

    name = "sglang"

    def __init__(
        self, tree_cache: Any, allocator: Any, scheduler: Any = None, labels: Mapping[str, str] | None = None
    ) -> None:
        self.gate = Gate()
        self.journal = FreeJournal()
        self._cache = tree_cache
        self._allocator = allocator
        self._scheduler = scheduler
        self._labels = {"model_name": "", "tp_rank": "", "pp_rank": "", "dp_rank": "", **(labels or {})}
        self._leaf_allocators = _leaf_allocators(allocator)
        self._patches = Patches()
        self._released = False  # KV memory is unmapped (release_memory_occupation)
        self._generation = 0
        self._plan: Any = None  # what the scheduler decided last; it may not be in any of its batches yet
        self._last_result = 0.0  # perf_counter() at the end of the last process_batch_result
        self._step_seconds = 0.0
        self._stamps, self._gaps = self._find_stamps()
        self.tree = self._make_tree()
        self.pools()  # fails now rather than in the sweeper if nothing can be read

    # ---- what it is ----

    @property
    def labels(self) -> Mapping[str, str]:
        return self._labels

    def pools(self) -> Sequence[KVPool]:
        return read_pools(self._allocator.get_kvcache(), self._allocator, self._stamps)

    @property
    def pools_generation(self) -> int:
        return self._generation

    def pools_ready(self) -> bool:
        return not self._released

    def uncovered(self) -> Mapping[str, str]:
        gaps = dict(self._gaps)
        if getattr(self._cache, "disable", False):
            gaps["prefix cache"] = "the server runs with --disable-radix-cache: there is no tree to sweep"
        if MAMBA in getattr(self._cache, "tree_components", ()):
            gaps["mamba"] = "the state slots of Mamba layers are not verified yet"
        if getattr(self._cache, "cache_controller", None) is not None:
            gaps["host tier"] = "HiCache's copies in host memory and storage are not verified"
        draft = _draft_pool(self._scheduler)
        if draft is not None:
            gaps["draft"] = f"the draft model's pool ({type(draft).__name__}) is not verified"
        return gaps

    # ---- hooks ----

    def attach(self) -> None:
        """Wrap what changes the tree and what frees slots, on these objects only.

        Raises:
            UnsupportedSGLang: if a method is missing; nothing stays wrapped then.
        """
        earlier = list(self.tree.loading)
        if self.tree.broken is not None:  # begin anew
            self.tree.reset()
            self.tree.broken = None
        try:
            journal_frees(self._patches, self._leaf_allocators, self.journal)
            self._follow_tree()
            if self._scheduler is not None:
                self._follow_scheduler()
            for anchor in earlier:  # nobody told of loads that ended while nothing was hooked
                if anchor not in getattr(self._cache, "ongoing_load_back", ()):
                    self.tree.loading.end(anchor)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        self._patches.restore()

    def _follow_tree(self) -> None:
        tree, wrap = self.tree, self._patches.wrap
        if isinstance(tree.reader, ClassicReader):
            wrap(self._cache, "reset", self._after(lambda *_: tree.reset()))
            for name in CLASSIC_CHANGES:
                wrap(self._cache, name, gated(self.gate))
            return
        core = self._cache.tree_core
        if isinstance(tree.reader, RustMirror):
            self._follow_rust_core(core, tree.reader)
        # Notes below name their parameters as SGLang does: it passes some by keyword.
        wrap(core, "reset", self._after(lambda *_: tree.reset()))
        wrap(core, "commit_load_back", self._before(self._begin_load))
        wrap(core, "finish_load_back", self._after(lambda _, anchor_node_id: tree.loading.end(anchor_node_id)))
        for name in CORE_CHANGES:
            wrap(core, name, gated(self.gate))
        # The cache's own methods span several calls of the core and the frees they cause.
        for name in ("insert", "evict", "evict_for_alloc", "reset"):
            wrap(self._cache, name, gated(self.gate))

    def _begin_load(self, node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: Any) -> None:
        transfers = [kv_xfer, *(transfer for of_type in comp_xfers.values() for transfer in of_type)]
        nodes = [node for transfer in transfers for node in transfer.nodes_to_load or ()]
        self.tree.loading.begin(node_id, nodes, self.tree.reader.newest())
        self.tree.changes += 1

    def _follow_rust_core(self, core: Any, mirror: RustMirror) -> None:
        wrap = self._patches.wrap
        keys: list[Any] = []  # of the insert under way; inserts are single-flight

        def insert_step(step: Any, params: Any = None) -> None:
            if params is not None:
                keys[:] = [params.key]
            if step.result is not None:
                for key in keys:  # none if kvsweep came in the middle of an insert
                    mirror.learn(step.result.last_device_node, key)
                keys.clear()
                self.tree.changes += 1

        def matched(result: Any, params: Any) -> None:
            mirror.learn(result.last_visited_node_id, params.key)

        def window_attached(_: Any, key: Any, *args: Any, **kwargs: Any) -> None:
            mirror.learn(core.match_full_device_prefix(key)[1], key)

        def host_inserted(result: Any, node_id: int, key: Any, host_value: Any, hash_value: Any) -> None:
            mirror.learn(result.inserted_host_node, key, mirror.end(node_id))  # the key begins below that node

        def leaving(node_id: int, *args: Any, **kwargs: Any) -> None:
            mirror.repair(node_id)

        def left(_: Any, node_id: int, *args: Any, **kwargs: Any) -> None:
            mirror.forget(node_id)
            self.tree.changes += 1

        wrap(core, "begin_insert", self._after(insert_step))
        wrap(core, "resume_insert", self._after(insert_step))
        wrap(core, "match_prefix", self._after(matched))
        wrap(core, "attach_swa_window", self._after(window_attached))
        wrap(core, "insert_host", self._after(host_inserted))
        wrap(core, "drive_host_eviction", self._after(lambda *_, **__: mirror.prune()))
        for name in ("evict_device_leaf", "demote", "drop_subtree_no_host"):
            wrap(core, name, self._before(leaving))
            wrap(core, name, self._after(left))

    def _follow_scheduler(self) -> None:
        scheduler, wrap = self._scheduler, self._patches.wrap
        wrap(scheduler, "get_next_batch_to_run", self._after(lambda plan, *_, **__: setattr(self, "_plan", plan)))
        wrap(scheduler, "process_batch_result", self._after(lambda *_, **__: self._time_step()))
        for name in PHASES:
            wrap(scheduler, name, gated(self.gate))
        # The weight updater's own methods were handed to SGLang's dispatcher long ago; these two it looks up.
        saver = scheduler.weight_updater.memory_saver_adapter
        wrap(saver, "pause", self._before(self._before_release))
        wrap(saver, "resume", self._after(self._after_resume))
        # Weight updates may capture the decode graph anew; other threads' CUDA calls would break a capture.
        wrap(scheduler.tp_worker.model_runner, "init_decode_cuda_graph", _captured)

    def _before(self, note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Call `note(*args, **kwargs)` before the method. What it raises breaks kvsweep and never the scheduler."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                self._guard(note, *args, **kwargs)
                return original(*args, **kwargs)

            return method

        return wrap

    def _after(self, note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Call `note(result, *args, **kwargs)` after the method; as `_before` otherwise."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                self._guard(note, result, *args, **kwargs)
                return result

            return method

        return wrap

    def _guard(self, note: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            note(*args, **kwargs)
        except Exception as error:
            if self.tree.broken is None:
                logger.exception("kvsweep: a hook into SGLang failed")
            self.tree.broken = f"a hook into SGLang failed: {type(error).__name__}: {error}"

    def _before_release(self, tag: str) -> None:
        """KV memory is about to be unmapped: nothing may read it any more, not even a launch under way."""
        if tag != KV_CACHE:
            return
        with pause_for_capture():  # a launch is either enqueued by now, and waited for below, or `streams` stops it
            self._released = True
        self.journal.cleared("*")
        if self._allocator_device().type == "cuda":
            torch.cuda.synchronize()

    def _after_resume(self, _: Any, tag: str) -> None:
        if tag == KV_CACHE:
            self._generation += 1
            self._released = False

    # ---- what it is doing ----

    def pressure(self) -> Pressure:
        scheduler = self._scheduler
        if scheduler is None:
            return Pressure()
        running = scheduler.running_batch
        return Pressure(
            queued=len(scheduler.waiting_queue),
            running=len(running.reqs) if running is not None else 0,
            steps=int(scheduler.forward_ct),
            last_step_seconds=self._step_seconds,
        )

    def _time_step(self) -> None:
        """A step is timed from result to result; the first one after an idle time is not counted."""
        now = time.perf_counter()
        running = self._scheduler.running_batch
        self._step_seconds = now - self._last_result if running is not None and running.reqs else 0.0
        self._last_result = now

    def streams(self) -> Sequence[torch.cuda.Stream]:
        """The streams that write KV. Read lazily: SGLang replaces its schedule stream when its loop starts.

        Raises:
            PassInterrupted: if the KV memory has been released; a backend asks in the very turn in which it launches.
        """
        if self._scheduler is None or self._allocator_device().type != "cuda":
            return ()
        if self._released:
            raise PassInterrupted("the engine has released its KV memory")
        controller = getattr(self._cache, "cache_controller", None)
        streams = (
            self._scheduler.forward_stream,
            self._scheduler.schedule_stream,
            getattr(controller, "load_stream", None),
        )
        return [stream for stream in streams if isinstance(stream, torch.cuda.Stream)]

    def _allocator_device(self) -> torch.device:
        return torch.device(self._allocator.device)

    # ---- for the light pass, gate held ----

    def allocators(self) -> Sequence[AllocatorView]:
        views = []
        for pool, allocator in self._leaf_allocators:
            if allocator.free_group is not None:
                return ()  # a group of frees is open: some slots are on no list yet
            paged = allocator.page_size > 1
            rest = tuple(allocator.staged_pages) if paged else (allocator.release_pages,)
            views.append(
                AllocatorView(
                    pool=pool,
                    size=int(allocator.num_pages) * int(allocator.page_size) if paged else int(allocator.size),
                    page_size=int(allocator.page_size),
                    free=(allocator.free_pages, *rest),
                    free_unit="page" if paged else "slot",
                )
            )
        return views

    def requests(self) -> Sequence[RequestView] | None:
        """Requests that hold slots. None where slots may also have owners that no batch shows: disaggregation,
        speculative decoding, pipeline stages, open sessions, or no scheduler at all."""
        scheduler = self._scheduler
        if scheduler is None or self._has_hidden_owners():
            return None
        table = scheduler.req_to_token_pool.req_to_token
        views = []
        for req in {id(req): req for req in self._requests_in_flight()}.values():
            if not req.kv.holds_kv:
                continue
            views.append(
                RequestView(
                    request_id=str(req.rid),
                    table=table,
                    row=int(req.kv.req_pool_idx),
                    length=int(req.kv.kv_allocated_len),
                    prefix_len=int(req.kv.cache_protected_len),
                    last_node=self.tree.reader.node(req.last_node) if req.lock is not None else None,
                )
            )
        return views

    def _has_hidden_owners(self) -> bool:
        scheduler = self._scheduler
        session = getattr(self._cache, "session", None)
        return (
            scheduler.disaggregation_mode.value != "null"
            or not scheduler.spec_algorithm.is_none()
            or int(self._labels["pp_rank"] or 0) > 0
            or bool(getattr(session, "slots", None))
        )

    def _requests_in_flight(self) -> Iterable[Any]:
        scheduler, plan = self._scheduler, self._plan
        batches = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug]
        batches += [batch for batch, _ in getattr(scheduler, "result_queue", ())]
        if plan is not None:
            batches += [plan.running_batch, plan.batch_to_run]
        for batch in batches:
            if batch is not None:
                yield from batch.reqs
        if getattr(scheduler, "chunked_req", None) is not None:
            yield scheduler.chunked_req

    # ---- finding the parts ----

    def _make_tree(self) -> NodeTree:
        cache = self._cache
        name = type(cache).__name__
        if name == "RadixCache":
            return NodeTree(lambda loading: ClassicReader(cache))
        if name != "UnifiedRadixCache":
            raise UnsupportedSGLang(f"prefix cache {name} is not supported (supported: UnifiedRadixCache, RadixCache)")
        core = cache.tree_core
        if type(core).__name__ == "UnifiedTreeCore":
            return NodeTree(lambda loading: UnifiedReader(core, loading))
        if type(core).__name__ == "RustUnifiedTreeCore":
            return NodeTree(lambda loading: RustMirror(core, loading))
        raise UnsupportedSGLang(
            f"tree core {type(core).__name__} is not supported (supported: UnifiedTreeCore, RustUnifiedTreeCore)"
        )

    def _find_stamps(self) -> tuple[dict[str, tuple[StampBuffer, ...]], dict[str, str]]:
        canary = _canary(self._scheduler)
        if canary is None:
            return {}, {"stamps": "SGLang writes none (start it with --kv-canary log to have them verified too)"}
        if getattr(self._cache, "cache_controller", None) is not None:
            return {}, {"stamps": "HiCache loads KV back without its stamps, so they prove nothing"}
        from sglang.srt.environ import envs

        return read_stamps(canary, v_written=bool(envs.SGLANG_KV_CANARY_ENABLE_MHA_V.get()))


def _leaf_allocators(allocator: Any) -> list[tuple[str, Any]]:
    """(pool, allocator) of each free list."""
    plain = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    name = type(allocator).__name__
    if name in plain:
        return [("full", allocator)]
    if name == "SWATokenToKVPoolAllocator" and not allocator.swa_req_ring:
        leaves = [("full", allocator.full_attn_allocator), ("swa", allocator.swa_attn_allocator)]
        if all(type(leaf).__name__ in plain for _, leaf in leaves):
            return leaves
    what = f"{name} with a ring per request" if getattr(allocator, "swa_req_ring", False) else name
    why = "unified-memory allocators relocate slots" if name.startswith("Unified") else "it is not known how it frees"
    raise UnsupportedSGLang(
        f"allocator {what} is not supported: {why} (supported: {', '.join(plain)}, SWATokenToKVPoolAllocator)"
    )


def _captured(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        with pause_for_capture():
            return original(*args, **kwargs)

    return method


def _canary(scheduler: Any) -> Any:
    return scheduler.tp_worker.model_runner.canary_manager if scheduler is not None else None


def _draft_pool(scheduler: Any) -> Any:
    draft = getattr(scheduler, "draft_worker", None)
    for path in (("model_runner",), ("draft_runner",), ("draft_worker", "draft_runner"), ("draft_worker",)):
        found = draft
        for part in path:
            found = getattr(found, part, None)
        pool = getattr(found, "token_to_kv_pool", None)
        if pool is not None:
            return pool
    return draft
