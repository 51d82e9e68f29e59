"""Test-side stand-in for sgl_kernel, whose CPU build is on no registry.

SGLang's CPU path imports C++ helpers from `sgl_kernel`. The one that the plain Llama path calls is made here in
torch; any other name gives a function that raises when called.
"""

import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *_):
    first = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start].to(req_to_token.dtype)
        first += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel stub: {name} not implemented")

    return missing


class _Stream(torch.cpu.Stream):
    """For --kv-canary: torch.cpu.Stream does not take `device`."""

    def __init__(self, device=None, priority=-1, **_):
        super().__init__(priority)


torch.cpu.Stream = _Stream
if not torch.cuda.is_available():
    _empty = torch.empty

    def _empty_unpinned(*args, pin_memory=False, **kwargs):
        return _empty(*args, **kwargs)

    torch.empty = _empty_unpinned
