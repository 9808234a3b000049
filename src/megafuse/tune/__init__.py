"""Measured tiles: candidates for each kernel of a step, compiled, timed and checked; the best is kept."""

from megafuse.tune.search import KernelResult, StepResult
from megafuse.tune.step import DEFAULT_SECONDS, entries_of, tune_step, tuner

__all__ = ["DEFAULT_SECONDS", "KernelResult", "StepResult", "entries_of", "tune_step", "tuner"]
