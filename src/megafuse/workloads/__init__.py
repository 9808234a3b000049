"""Plain eager modules to fuse: the RankMixer block, mutations of it, and modules that have nothing to do with it."""

from megafuse.workloads import mlps, mutations, rank_mixer_block, recommenders, strangers
from megafuse.workloads.types import Workload, get, names, register, registry

__all__ = [
    "Workload",
    "get",
    "mlps",
    "mutations",
    "names",
    "rank_mixer_block",
    "recommenders",
    "register",
    "registry",
    "strangers",
]
