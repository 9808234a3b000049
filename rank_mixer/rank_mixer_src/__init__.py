"""The RankMixer reference workload: plain eager PyTorch, forward and backward of one full block.

Put the folder ``rank_mixer/`` (the parent of this package) on ``sys.path`` and import ``rank_mixer_src``.

Axis names used in every docstring and shape comment:

* ``B`` batch, ``T`` tokens, ``D`` features of one token, ``H = k * D`` hidden features.
"""

from rank_mixer_src.block import RankMixerBlock
from rank_mixer_src.config import ConfigError, WorkloadConfig
from rank_mixer_src.gemm import GEMM_BACKENDS, grouped_gemm, token_gemm
from rank_mixer_src.initializers import he_uniform, he_uniform_bound
from rank_mixer_src.layers import DensePFFNv2, NezhaLayerNorm, TokenMixer, dense_ffn_v2_compute
from rank_mixer_src.timing import CudaTimingDevice, TimingDevice, TimingResult, time_step
from rank_mixer_src.workload import Workload, build_workload, run_step

__all__ = [
    "GEMM_BACKENDS",
    "ConfigError",
    "CudaTimingDevice",
    "DensePFFNv2",
    "NezhaLayerNorm",
    "RankMixerBlock",
    "TimingDevice",
    "TimingResult",
    "TokenMixer",
    "Workload",
    "WorkloadConfig",
    "build_workload",
    "dense_ffn_v2_compute",
    "grouped_gemm",
    "he_uniform",
    "he_uniform_bound",
    "run_step",
    "time_step",
    "token_gemm",
]
