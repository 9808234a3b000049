"""Tile program to NumPy text."""

from megafuse.codegen.numpy.kernel import print_kernel

__all__ = ["print_kernel"]
