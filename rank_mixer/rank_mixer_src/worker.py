"""Who this process is among independent workers, one GPU each; the workers share nothing but the timing barrier."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


class DeviceError(RuntimeError):
    """The machine lacks a device that the run needs."""


@dataclass(frozen=True)
class Worker:
    """Rank, number of workers and local GPU index. ``launched`` is true under ``torchrun``."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False

    @property
    def device(self) -> torch.device:
        """The GPU of this worker."""
        return torch.device("cuda", self.local_rank)


def read_worker(environ: Mapping[str, str] = os.environ) -> Worker:
    """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` as set by ``torchrun``; a lone worker without them."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return Worker()
    rank = int(environ["RANK"])
    return Worker(rank, int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", rank)), launched=True)


def require_gpu(worker: Worker) -> None:
    """Raise :class:`DeviceError` where this worker has no CUDA GPU of its own."""
    if not torch.cuda.is_available():
        raise DeviceError(
            f"this needs a CUDA GPU and a CUDA build of PyTorch (found PyTorch {torch.__version__}, no usable GPU); "
            "without a GPU run: python preflight.py --target cpu"
        )
    count = torch.cuda.device_count()
    if worker.local_rank >= count:
        raise DeviceError(f"worker {worker.local_rank} has no GPU: {count} visible; set NPROC to at most {count}")


@contextmanager
def worker_session(worker: Worker) -> Iterator[None]:
    """Select the worker's GPU; under ``torchrun`` hold an NCCL process group for the timing barrier."""
    require_gpu(worker)
    torch.cuda.set_device(worker.device)
    if not worker.launched:
        yield
        return
    dist.init_process_group("nccl", rank=worker.rank, world_size=worker.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
