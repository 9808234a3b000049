"""Tile program to NumPy text."""

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.dot_program import DotProgram
from megafuse.codegen.numpy.dot import print_dot
from megafuse.codegen.numpy.kernel import print_tiles
from megafuse.codegen.program import TileProgram


def print_kernel(program: TileProgram | DotProgram) -> KernelSource:
    """``program`` as a NumPy module; see ``kernel.print_tiles`` and ``dot.print_dot``."""
    if isinstance(program, DotProgram):
        return print_dot(program)
    return print_tiles(program)


__all__ = ["print_kernel"]
