"""The settings of one workload, checked on construction; every error names its argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rank_mixer_src.gemm import GEMM_BACKENDS

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FFN_TYPES = ("dense_v2", "sparse_moe")
MOE_EXPERTS = (2, 4)


class ConfigError(ValueError):
    """A setting that does not fit. ``argument`` is its name, as in :class:`WorkloadConfig`."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        self.problem = problem


def check_positive(argument: str, value: int) -> None:
    """Raise :class:`ConfigError` unless ``value >= 1``."""
    if value < 1:
        raise ConfigError(argument, f"must be at least 1, got {value}")


def check_shape(tokens: int, dim: int, k: int) -> None:
    """Raise :class:`ConfigError` unless ``T``, ``D`` and ``k`` describe a block: positive, ``D % T == 0``."""
    for argument, value in (("tokens", tokens), ("dim", dim), ("k", k)):
        check_positive(argument, value)
    if dim % tokens != 0:
        raise ConfigError(
            "dim", f"must be a multiple of tokens (token mixing cuts D into T pieces), got {dim} % {tokens}"
        )


def check_ffn_type(ffn_type: str) -> None:
    """Raise :class:`ConfigError` for an FFN type that is unknown or not in this release."""
    if ffn_type == "sparse_moe":
        raise ConfigError("ffn_type", "sparse_moe is an extension and waits for a later release; use dense_v2")
    if ffn_type not in FFN_TYPES:
        raise ConfigError("ffn_type", f"must be one of {FFN_TYPES}, got {ffn_type!r}")


def check_backend(gemm_backend: str) -> None:
    """Raise :class:`ConfigError` for an unknown GEMM backend."""
    if gemm_backend not in GEMM_BACKENDS:
        raise ConfigError("gemm_backend", f"must be one of {sorted(GEMM_BACKENDS)}, got {gemm_backend!r}")


@dataclass(frozen=True)
class WorkloadConfig:
    """Shape, precision and repetition of one benchmark run; the defaults are the production shape.

    Raises:
        ConfigError: for a value that does not fit; it names the argument.
    """

    batch_size: int = 1024
    tokens: int = 64
    dim: int = 1280
    k: int = 2
    ffn_type: str = "dense_v2"
    gemm_backend: str = "bmm"
    dtype: str = "bfloat16"
    tf32: bool = False
    warmup: int = 5
    num_tests: int = 20
    seed: int = 1234

    def __post_init__(self) -> None:
        check_ffn_type(self.ffn_type)
        check_backend(self.gemm_backend)
        check_positive("batch_size", self.batch_size)
        check_shape(self.tokens, self.dim, self.k)
        check_positive("num_tests", self.num_tests)
        for argument, value in (("warmup", self.warmup), ("seed", self.seed)):
            if value < 0:
                raise ConfigError(argument, f"must not be negative, got {value}")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"must be one of {sorted(DTYPES)}, got {self.dtype!r}")

    @property
    def hidden(self) -> int:
        """``H = k * D``."""
        return self.k * self.dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """The working dtype."""
        return DTYPES[self.dtype]
