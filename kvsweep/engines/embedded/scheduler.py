"""The engine: continuous batching over the radix tree, and what kvsweep needs to watch it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from kvsweep.checks.views import AllocatorView, RequestView
from kvsweep.engine import Pressure
from kvsweep.engines.embedded.allocator import KVAllocator, PageAllocator
from kvsweep.engines.embedded.model import DecodeGraph, Model, ModelConfig, chain_hashes
from kvsweep.engines.embedded.tree import Key, Node, RadixTree
from kvsweep.pool import KVPool
from kvsweep.tree import FreeJournal, Gate
from kvsweep.verify import hashing

CHAIN_ROOT = hashing.signed(hashing.s(hashing.CHAIN_ROOT_SEED))


class Request:
    """One prompt and what became of it. Outside the scheduler only `done`, `output`, `aborted` are of interest.

    Attributes:
        done: set when finished or aborted.
        tokens: prompt and output so far.
        row: its row in the model's table, -1 while queued.
        computed: leading tokens whose KV is written.
        prefix_len: leading tokens whose slots the tree owns; `last_node`, where they end, is locked.
        allocated: positions that have a slot in the row.
        swa_evicted: own slots of positions before this one have given their window slots back.
        chain: prev_hash of position `computed`.
    """

    def __init__(self, request_id: str, prompt: Sequence[int], max_new_tokens: int, extra_key: str) -> None:
        self.id = request_id
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.limit = len(prompt) + max_new_tokens
        self.extra_key = extra_key
        self.done = threading.Event()
        self.aborted = False
        self.last_node: Node | None = None
        self.row = -1
        self.computed = self.prefix_len = self.allocated = self.swa_evicted = 0
        self.chain = CHAIN_ROOT

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def key(self, length: int) -> Key:
        return Key(np.array(self.tokens[:length], dtype=np.int64), self.extra_key)


class EmbeddedEngine:
    """A small LLM engine with a prefix cache; implements kvsweep.engine.Engine.

    Any thread may call `submit`, `abort`, `flush` and `reallocate`; they take effect in the next step. Steps are
    made by one thread at a time (`run`, or `step` by hand while nothing runs).

    Args:
        config: shapes.
        device: ``"cpu"`` or ``"cuda"``.
        prefill_chunk: most prompt tokens computed in one step.
        cuda_graph: replay the decode step as a CUDA graph; no effect on the CPU.
        tp_rank: the label, to tell several engines on one host apart.
    """

    name = "embedded"

    def __init__(
        self,
        config: ModelConfig | None = None,
        *,
        device: str | torch.device = "cpu",
        prefill_chunk: int = 64,
        cuda_graph: bool = True,
        tp_rank: int = 0,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        self.config = c = config or ModelConfig()
        self.device = torch.device(device)
        self.prefill_chunk = prefill_chunk
        self.tp_rank = tp_rank
        self.gate = Gate()
        self.journal = FreeJournal()
        self.pools_generation = 0
        on_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._cuda_graph = cuda_graph and on_cuda
        with self.on_stream():
            swa = PageAllocator("swa", c.swa_slots, c.page_size, self.device) if c.window else None
            full = PageAllocator("full", c.full_slots, c.page_size, self.device)
            self.allocator = KVAllocator(full, swa, self.device)
            self.model = Model(c, self.allocator.slot_map, self.device)
            self._graph = DecodeGraph(self.model) if self._cuda_graph else None
        self.tree = RadixTree(self.allocator, c.page_size, c.window)
        self.running: list[Request] = []  # oldest first
        self.retractions = 0
        self.cached_tokens = 0  # tokens that requests found in the tree
        self.looping = False  # a thread is in `run`
        self._queue: deque[Request] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._work = threading.Event()
        self._stepping = threading.Lock()
        self._free_rows = list(range(c.max_batch))
        self._ready = True
        self._submitted = self._steps = 0
        self._last_step_seconds = 0.0
        self._restore: list[Callable[[], None]] = []

    # -- for callers -------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 16, extra_key: str = "") -> Request:
        """Queue a prompt of token ids.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or a sequence no pool can hold.
        """
        c = self.config
        room = min([c.max_context] + [pool.size for pool in self.allocator.pools()])
        if not prompt or min(prompt) < 0 or max(prompt) >= c.vocab:
            raise ValueError(f"prompt must be token ids from 0 to {c.vocab - 1}, at least one")
        if max_new_tokens < 1 or len(prompt) + max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens must be at least 1 and, with the prompt's {len(prompt)} tokens, at most {room} "
                f"(max_context or the smallest pool), got {max_new_tokens}"
            )
        self._submitted += 1
        request = Request(f"r{self._submitted}", prompt, max_new_tokens, extra_key)
        self._command(lambda: self._queue.append(request))
        return request

    def abort(self, request: Request) -> None:
        """Stop a request; its computed tokens are not cached. Nothing happens if it is done."""
        self._command(lambda: self._abort(request))

    def flush(self) -> None:
        """Drop the whole cache; running requests start over."""
        self._command(self._flush)

    def reallocate(self) -> None:
        """Drop the cache and allocate the KV memory anew, as engines do around weight updates."""
        self._command(self._reallocate)

    def run(self, stop_event: threading.Event, before_step: Callable[[], object] | None = None) -> None:
        """Step until `stop_event`; waits for work where there is none. `before_step` runs ahead of each step."""
        self.looping = True
        try:
            while not stop_event.is_set():
                if before_step is not None:
                    before_step()
                self._work.clear()
                if not self.step():
                    self._work.wait(0.02)
        finally:
            self.looping = False

    def step(self) -> bool:
        """Commands, admission, at most one prefill chunk, one decode step. False if there was nothing to do."""
        begin = time.perf_counter()
        with self._stepping, self.on_stream():
            worked = bool(self._commands)
            while self._commands:
                with self.gate:
                    self._commands.popleft()()
            while self._queue and self._free_rows and self._admit(self._queue[0]):
                pass
            prefilling = [request for request in self.running if len(request.tokens) - request.computed > 1]
            if prefilling:
                self._prefill(prefilling[0])
            self._decode()
        worked = worked or bool(prefilling or self.running or self._queue)
        if worked:
            self._steps += 1
            self._last_step_seconds = time.perf_counter() - begin
        return worked

    def on_stream(self) -> AbstractContextManager[object]:
        """Everything that touches the engine's tensors runs in here: on CUDA, on the forward stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # -- kvsweep.engine.Engine ---------------------------------------------------------------------------------

    @property
    def labels(self) -> Mapping[str, str]:
        return {"model_name": "embedded", "tp_rank": str(self.tp_rank), "pp_rank": "0", "dp_rank": "0"}

    def attach(self) -> None:
        """Wrap the allocators' `free` and `clear` so that the journal knows first; nothing if attached already."""
        if not self._restore:
            for pool in self.allocator.pools():
                self._hook(pool, "free", lambda slots, name=pool.name: self.journal.freed(name, slots))
                self._hook(pool, "clear", lambda name=pool.name: self.journal.cleared(name))

    def detach(self) -> None:
        while self._restore:
            self._restore.pop()()

    def _hook(self, owner: object, method: str, note: Callable[..., None]) -> None:
        original, own = getattr(owner, method), vars(owner).get(method)

        def wrapped(*args: torch.Tensor) -> None:
            note(*args)
            original(*args)

        setattr(owner, method, wrapped)
        self._restore.append(lambda: delattr(owner, method) if own is None else setattr(owner, method, own))

    def pools(self) -> Sequence[KVPool]:
        return self.model.pools()

    def pools_ready(self) -> bool:
        return self._ready

    def pressure(self) -> Pressure:
        return Pressure(
            queued=len(self._queue),
            running=len(self.running),
            steps=self._steps,
            last_step_seconds=self._last_step_seconds,
        )

    def streams(self) -> Sequence[torch.cuda.Stream]:
        return [] if self._stream is None else [self._stream]

    def uncovered(self) -> Mapping[str, str]:
        return {}

    def allocators(self) -> Sequence[AllocatorView]:
        return [pool.view() for pool in self.allocator.pools()]

    def requests(self) -> Sequence[RequestView]:
        return [
            RequestView(
                request_id=request.id,
                table=self.model.table,
                row=request.row,
                length=request.allocated,
                prefix_len=request.prefix_len,
                last_node=request.last_node if request.prefix_len else None,
            )
            for request in self.running
        ]

    # -- commands: gate held -----------------------------------------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._work.set()

    def _abort(self, request: Request) -> None:
        if request.done.is_set():
            return
        if request.row >= 0:
            self._release(request)
        else:
            self._queue.remove(request)
        request.aborted = True
        request.done.set()

    def _flush(self) -> None:
        while self.running:
            self._retract(self.running[-1])
        self.tree.reset()
        self.allocator.clear()

    def _reallocate(self) -> None:
        self._ready = False
        self._flush()
        self.model.allocate()
        self._graph = DecodeGraph(self.model) if self._cuda_graph else None
        self.pools_generation += 1
        self._ready = True

    # -- one step ----------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> bool:
        """Give the first queued request a row and the cached part of its prompt; False if memory is short."""
        with self.gate:
            node = self.tree.match(request.key(len(request.tokens) - 1))  # the last token must be computed
            self.tree.lock(node)
            slots = self.tree.slots(node)
            if not self._make_room(self._pages(len(request.tokens) + 1 - len(slots))):
                self.tree.lock(node, -1)
                return False
            self._queue.popleft()
            request.row = self._free_rows.pop()
            self._adopt(request, len(slots), node)
            self.running.append(request)
        request.computed = request.swa_evicted = len(slots)
        request.chain = int(chain_hashes(np.array(request.tokens[: len(slots)], np.int64), 0, CHAIN_ROOT)[-1])
        self.cached_tokens += len(slots)
        return True

    def _prefill(self, request: Request) -> None:
        """Compute the next chunk of one prompt and put it into the tree."""
        start = request.computed
        end = min(start + self.prefill_chunk, len(request.tokens))
        if not self._reserve(request, end):
            return
        chains = chain_hashes(np.array(request.tokens[start:end], np.int64), start, request.chain)
        batch = np.stack([np.array(request.tokens[start:end], np.int64), np.arange(start, end), chains[:-1]])
        rows = torch.tensor([request.row], device=self.device)
        predicted = self.model.forward(torch.from_numpy(batch[:, None]).to(self.device), rows, end).tolist()
        request.computed, request.chain = end, int(chains[-1])
        with self.gate:
            old = request.last_node
            cached, node = self._insert(request)
            self.tree.lock(node)
            if old is not None:
                self.tree.lock(old, -1)
            self._adopt(request, cached, node)
        if end == len(request.tokens):
            self._extend(request, predicted[0])

    def _decode(self) -> None:
        """One token for each running request whose prompt is computed."""
        for request in tuple(self.running):
            if len(request.tokens) - request.computed == 1:
                self._reserve(request, len(request.tokens))  # may retract others, or itself
        ready = [request for request in self.running if len(request.tokens) - request.computed == 1]
        if not ready:
            return
        batch = np.array(
            [[r.tokens[-1] for r in ready], [r.computed for r in ready], [r.chain for r in ready]], np.int64
        )
        inputs = torch.from_numpy(batch[:, :, None]).to(self.device)
        rows = torch.tensor([request.row for request in ready], device=self.device)
        if self._graph is not None:
            predicted = self._graph(inputs, rows).tolist()
        else:
            predicted = self.model.forward(inputs, rows, int(batch[1].max()) + 1).tolist()
        for request, token in zip(ready, predicted, strict=True):
            last = np.array(request.tokens[-1:], np.int64)
            request.chain = int(chain_hashes(last, request.computed, request.chain)[-1])
            request.computed += 1
            self._extend(request, token)

    def _extend(self, request: Request, token: int) -> None:
        """Append a predicted token; a request that reached its limit leaves its computed tokens in the tree."""
        request.tokens.append(token)
        if len(request.tokens) == request.limit:
            with self.gate, self.allocator.free_group():
                cached, _ = self._insert(request)
                self._release(request, kept=cached)
            request.done.set()
        elif self.config.window:
            with self.gate:
                self._evict_window(request)

    # -- memory: gate held -------------------------------------------------------------------------------------

    def _pages(self, tokens: int) -> int:
        """Slots of the pages that `tokens` need."""
        return -(-tokens // self.config.page_size) * self.config.page_size

    def _make_room(self, num_slots: int) -> bool:
        """Evict cached prefixes until this many slots are free in each pool; False if that is not possible."""
        allocator = self.allocator
        if allocator.full.available < num_slots:
            self.tree.evict(num_slots - allocator.full.available)
        if allocator.swa is not None and allocator.swa.available < num_slots:
            self.tree.evict_swa(num_slots - allocator.swa.available)
        return all(pool.available >= num_slots for pool in allocator.pools())

    def _reserve(self, request: Request, length: int) -> bool:
        """Slots for the first `length` positions, retracting the youngest requests if need be (takes the gate).

        False if the request itself was retracted.
        """
        with self.gate:
            while request.row >= 0:
                missing = self._pages(length) - request.allocated
                if missing <= 0:
                    return True
                if self._make_room(missing) and (slots := self.allocator.alloc(missing)) is not None:
                    self.model.table[request.row, request.allocated : request.allocated + missing] = slots
                    request.allocated += missing
                    return True
                self._retract(self.running[-1])
            return False

    def _insert(self, request: Request) -> tuple[int, Node]:
        """Hand the computed whole pages of a request to the tree; see RadixTree.insert."""
        length = request.computed // self.config.page_size * self.config.page_size
        return self.tree.insert(
            request.key(length),
            self.model.table[request.row, :length].clone(),
            owned_from=request.prefix_len,
            swa_evicted=request.swa_evicted,
        )

    def _adopt(self, request: Request, length: int, node: Node) -> None:
        """From now on the first `length` slots of the request are the tree's, on the path to the locked `node`."""
        self.model.table[request.row, :length] = self.tree.slots(node)
        request.prefix_len, request.last_node = length, node
        request.allocated = max(request.allocated, length)

    def _evict_window(self, request: Request) -> None:
        """Give back the window slots of a request's own positions that no later token will attend to."""
        page = self.config.page_size
        begin = max(request.swa_evicted, request.prefix_len)
        end = max(request.computed - self.config.window, 0) // page * page
        if end > begin:
            self.allocator.free_swa(self.model.table[request.row, begin:end])
            request.swa_evicted = end

    def _release(self, request: Request, kept: int | None = None) -> None:
        """Take a request out of the batch; its slots from `kept` on (default: all it owns) are freed."""
        kept = request.prefix_len if kept is None else kept
        if kept < request.allocated:
            self.allocator.free(self.model.table[request.row, kept : request.allocated])
        if request.last_node is not None:
            self.tree.lock(request.last_node, -1)
        self._free_rows.append(request.row)
        self.running.remove(request)
        request.row, request.last_node = -1, None
        request.computed = request.prefix_len = request.allocated = request.swa_evicted = 0

    def _retract(self, request: Request) -> None:
        """Back to the head of the queue; what it has generated is kept as part of its prompt."""
        self._release(request)
        self._queue.appendleft(request)
        self.retractions += 1
