"""The only package that knows several stages: ``driver`` runs them in order, ``engine`` serves calls by the result."""

from megafuse.compiler.bound import Bound
from megafuse.compiler.driver import Compiled, compile_call, compile_captured, reschedule
from megafuse.compiler.engine import Engine, NotFusedWarning, Options, dot_rule, resolve_target
from megafuse.compiler.plans import KnownTiles, complete, find_known

__all__ = [
    "Bound",
    "Compiled",
    "Engine",
    "KnownTiles",
    "NotFusedWarning",
    "Options",
    "compile_call",
    "compile_captured",
    "complete",
    "dot_rule",
    "find_known",
    "reschedule",
    "resolve_target",
]
