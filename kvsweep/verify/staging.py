"""Where the arrays of a plan lie: in memory of their own, or, for a GPU, in blocks allocated once and used in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvsweep.verify.device import Device

BLOCKS = 2
ALIGNED = 16  # bytes: Triton compiles a kernel anew for an address that is not, in the middle of a pass
DEVICE_BYTES_A_ROW = 96  # of a block; a row of an SWA pool takes 75 and each slot copied of a parent 27
HOST_BYTES_A_ROW = 48  # a row takes 32, and 8 more where the tree's values are in host memory


class Staging:
    """Memory of one `Verifier.planning()`, on the pool's device. This one asks torch for each array anew.

    Args:
        device: the pool's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """[n], to be filled by work on the pool's device."""
        return torch.empty(n, dtype=dtype, device=self.device)

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """These int64 arrays, all [n], on the device; nothing waits for the copies. On the CPU they are the arrays."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        return [torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True) for array in arrays]

    def join(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        """Concatenate tensors of any int dtype, which may all lie elsewhere, into `out` (int64, on the device)."""
        if parts[0].device == out.device:
            torch.cat(parts, out=out)
        else:
            (on_device,) = self.upload(torch.cat(parts).to("cpu", torch.int64).numpy())
            out.copy_(on_device)


class _Block:
    """Attributes:
    memory: uint8 [bytes] on the GPU.
    host: int64 [words], pinned; `words` is numpy's view of it.
    token: behind everything that read the block when it was last in use; None before that.
    """

    def __init__(self, device: Device, rows: int) -> None:
        self.memory = device.allocate((rows * DEVICE_BYTES_A_ROW,), torch.uint8)
        self.host = device.allocate((rows * HOST_BYTES_A_ROW // 8,), torch.int64, pinned=True)
        self.words = self.host.numpy()
        self.token: Any = None


class BlockStaging(Staging):
    """Two blocks in turn, each rewritten only after all that was given to the side stream while it was in use has run.

    What does not fit (a node much longer than a chunk, hundreds of long parents), and all of it while the block whose
    turn it is is still being read, is allocated as in `Staging`: that costs an allocation, never a wait.

    Args:
        device: the side stream.
        pool_device: where `device` allocates.
        rows: of all plans made in one `planning()`.

    Raises:
        torch.OutOfMemoryError: if there is no room for the blocks.
    """

    def __init__(self, device: Device, pool_device: torch.device, rows: int) -> None:
        super().__init__(pool_device)
        self._side = device
        self._blocks = [_Block(device, rows) for _ in range(BLOCKS)]
        self._turn = 0
        self._ready = True
        self._used = self._words = 0  # of the block in use: bytes of `memory`, elements of `host`

    @property
    def device_bytes(self) -> int:
        return sum(block.memory.numel() for block in self._blocks)

    def next(self) -> None:
        """The other block's turn. No plan made of the one in use will be given to a launch again."""
        self._blocks[self._turn].token = self._side.done()
        self._turn = (self._turn + 1) % BLOCKS
        token = self._blocks[self._turn].token
        self._ready = token is None or self._side.query(token)
        self._used = self._words = 0

    def empty(self, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        size, memory = n * dtype.itemsize, self._blocks[self._turn].memory
        if not self._ready or self._used + size > memory.numel():
            return super().empty(n, dtype)
        begin = self._used
        self._used += -(-size // ALIGNED) * ALIGNED
        return memory[begin : begin + size].view(dtype)

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        block, n = self._blocks[self._turn], arrays[0].size
        width = n + n % (ALIGNED // 8)
        begin, end = self._words, self._words + len(arrays) * width
        if not self._ready or end > block.words.size:
            return super().upload(*arrays)
        self._words = end
        np.stack(arrays, out=block.words[begin:end].reshape(len(arrays), width)[:, :n])
        joined = self.empty(end - begin)
        self._side.copy(joined, block.host[begin:end])
        return list(joined.view(len(arrays), width)[:, :n].unbind())
