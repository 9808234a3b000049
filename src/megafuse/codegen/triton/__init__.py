"""Tile program to Triton text."""

from megafuse.codegen.triton.kernel import print_kernel

__all__ = ["print_kernel"]
