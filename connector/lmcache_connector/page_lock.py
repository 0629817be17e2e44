"""The server's pool, page-locked for the engine's device: only then does a chunk cross in one asynchronous copy.

Once per process and pool, however many copiers use it; a pool takes the place of the one of the server before it. What
cannot be locked is copied all the same, only slower. IT HAS NOT RUN ON A GPU YET; on a CPU there is nothing to do.
"""

import logging

import torch

__all__ = ["PageLock"]

logger = logging.getLogger(f"vllm.{__name__}")


class PageLock:
    """Keeps one memory locked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: torch.Tensor | None = None

    def lock(self, memory: torch.Tensor) -> None:
        """Lock `memory` instead of what was locked before."""
        if self._device.type != "cuda":
            return
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if self._locked is not None:
                torch.cuda.synchronize()  # copies that still use it
                cudart.cudaHostUnregister(self._locked.data_ptr())
                self._locked = None
            error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            logger.warning("the server's pool could not be page-locked (CUDA error %d): copies are slower", error)
        else:
            self._locked = memory
