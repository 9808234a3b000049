"""One benchmark run: build the workload, check the output shape, measure, report."""

from __future__ import annotations

import torch

from rank_mixer_src.config import WorkloadConfig
from rank_mixer_src.timing import CudaTimingDevice, TimingResult, time_step
from rank_mixer_src.worker import Worker, worker_session
from rank_mixer_src.workload import build_workload, check_output_shape

EP_GROUP_SIZE = 1
A2A_BYTES_PER_RANK = 0


def run_benchmark(config: WorkloadConfig, worker: Worker) -> TimingResult:
    """Run ``config`` on the worker's GPU: one untimed step with a shape check, then the timed steps.

    Sets ``torch.backends.cuda.matmul.allow_tf32`` to ``config.tf32``.

    Raises:
        DeviceError: where the worker has no GPU.
        RuntimeError: where the output shape differs from the input shape.
    """
    with worker_session(worker):
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        workload = build_workload(config, rank=worker.rank, device=worker.device)
        check_output_shape(workload.step(), workload.inputs)
        timer = CudaTimingDevice(worker.device)
        return time_step(workload.step, warmup=config.warmup, num_tests=config.num_tests, device=timer)


def format_result(config: WorkloadConfig, worker: Worker, result: TimingResult) -> str:
    """The report of one worker: settings, shape, exchange and times in microseconds, on one line."""
    tokens_local = config.tokens // EP_GROUP_SIZE
    fields = (
        f"RankMixerBlock ffn={config.ffn_type} gemm={config.gemm_backend} dtype={config.dtype}",
        f"tf32={'on' if config.tf32 else 'off'} seed={config.seed} rank={worker.rank}/{worker.world_size}",
        f"B={config.batch_size} T={config.tokens} D={config.dim} k={config.k} H={config.hidden} T_local={tokens_local}",
        f"EP={EP_GROUP_SIZE} A2A_bytes_per_rank={A2A_BYTES_PER_RANK} overlap=none mode=fwd+bwd",
        f"warmup={config.warmup} num_tests={config.num_tests} samples={len(result.samples_s)} {result.format_us()}",
    )
    return " ".join(fields)
