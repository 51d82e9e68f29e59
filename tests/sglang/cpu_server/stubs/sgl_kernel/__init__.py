"""TEST-SIDE stand-in for sgl_kernel on a CPU-only host.

sglang's CPU path imports a few C++ helper ops from `sgl_kernel` (CPU build,
not on PyPI). Only the ops that the plain Llama path calls are implemented
(pure torch); any other name resolves to a function that raises when called.
"""

import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *_):
    pt = 0
    for r, s, e in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        n = e - s
        req_to_token[r, s:e] = out_cache_loc[pt : pt + n].to(req_to_token.dtype)
        pt += n


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def _missing(*a, **k):
        raise NotImplementedError(f"sgl_kernel stub: {name} not implemented")

    _missing.__name__ = name
    return _missing


# --- shims for --kv-canary on CPU (torch.cpu lacks Stream(device=), no pinned memory) ---
import os as _os

if _os.environ.get("SGL_STUB_CANARY_SHIM", "1") == "1":

    class _Stream(torch.cpu.Stream):
        def __init__(self, device=None, priority=-1, **kw):
            super().__init__(priority)

    torch.cpu.Stream = _Stream
    if not torch.cuda.is_available():
        _empty = torch.empty

        def _empty_nopin(*a, pin_memory=False, **k):
            return _empty(*a, **k)

        torch.empty = _empty_nopin
