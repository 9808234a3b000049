"""Tile program to NumPy text."""

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.dot_program import DotProgram
from megafuse.codegen.numpy.chain import print_chain
from megafuse.codegen.numpy.dot import print_dot
from megafuse.codegen.numpy.kernel import print_tiles
from megafuse.codegen.program import TileProgram


def print_kernel(program: TileProgram | DotProgram | ChainProgram) -> KernelSource:
    """``program`` as a NumPy module; see ``print_tiles``, ``print_dot`` and ``print_chain``."""
    if isinstance(program, DotProgram):
        return print_dot(program)
    if isinstance(program, ChainProgram):
        return print_chain(program)
    return print_tiles(program)


__all__ = ["print_kernel"]
