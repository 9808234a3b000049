"""The only package that knows several stages: ``driver`` runs them in order, ``engine`` serves calls by the result."""

from megafuse.compiler.bound import Bound
from megafuse.compiler.driver import Compiled, compile_call, compile_captured
from megafuse.compiler.engine import Engine, NotFusedWarning, Options, resolve_target

__all__ = [
    "Bound",
    "Compiled",
    "Engine",
    "NotFusedWarning",
    "Options",
    "compile_call",
    "compile_captured",
    "resolve_target",
]
