"""A second SGLang plugin, for tests: does what it is asked to in the scheduler process, between two steps.

Put this directory on PYTHONPATH and name a directory in KVSWEEP_TEST_FAULTS. Write a request to `request.json` there
(by rename); the answer appears in `answer.json`. Requests:

    {"do": "flip", "half": "k"|"v", "layer": int, "position": int, "byte": int}  a bit of an idle cached slot's row
    {"do": "unflip"}  the byte back as it was
    {"do": "walk"}  SGLang's own walk: number of slots
    {"do": "release"} / {"do": "resume"}  memory occupation, as the RL endpoints do
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

flipped = []


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("KVSWEEP_TEST_FAULTS"):
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.ingest_requests", before, HookType.BEFORE)


def before(scheduler, *_, **__):
    where = Path(os.environ["KVSWEEP_TEST_FAULTS"])
    request = where / "request.json"
    if not request.exists():
        return
    asked = json.loads(request.read_text())
    request.unlink()
    try:
        answer = globals()["do_" + asked.pop("do")](scheduler, **asked)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    draft = where / "answer.tmp"
    draft.write_text(json.dumps(answer))
    draft.replace(where / "answer.json")


def do_flip(scheduler, half, layer, position, byte=21):
    import torch

    rows = scheduler.tree_cache.tree_core.walk_for_kv_canary(True, False)
    slot = int(rows.slot_indices[rows.positions == position][0])
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    row = getattr(pool, f"{half}_buffer")[layer][slot].view(torch.uint8).view(-1)
    row[byte] ^= 0x40
    flipped.append((row, byte))
    return {"slot": slot, "position": position}


def do_unflip(scheduler):
    while flipped:
        row, byte = flipped.pop()
        row[byte] ^= 0x40
    return {}


def do_walk(scheduler):
    rows = scheduler.tree_cache.tree_core.walk_for_kv_canary(False, False)
    return {"slots": rows.slot_indices.numel()}


def do_release(scheduler):
    scheduler.weight_updater.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    return {}


def do_resume(scheduler):
    scheduler.weight_updater.resume_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    return {}
