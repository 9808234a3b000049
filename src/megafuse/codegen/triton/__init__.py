"""Tile program to Triton text."""

from megafuse.codegen.artifact import KernelSource
from megafuse.codegen.chain_program import ChainProgram
from megafuse.codegen.dot_program import DotProgram
from megafuse.codegen.program import TileProgram
from megafuse.codegen.triton.chain import print_chain
from megafuse.codegen.triton.dot import print_dot
from megafuse.codegen.triton.kernel import print_tiles


def print_kernel(program: TileProgram | DotProgram | ChainProgram, *, assembly: bool = True) -> KernelSource:
    """``program`` as a Triton module; see ``print_tiles``, ``print_dot`` and ``print_chain``."""
    if isinstance(program, DotProgram):
        return print_dot(program, assembly=assembly)
    if isinstance(program, ChainProgram):
        return print_chain(program, assembly=assembly)
    return print_tiles(program, assembly=assembly)


__all__ = ["print_kernel"]
