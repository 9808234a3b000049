"""Modules that the command line's tests name by --module."""

import torch
from torch import nn


def gated():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.SiLU())


def sorts():
    return sort_after_silu


def sort_after_silu(x):
    return torch.sort(nn.functional.silu(x))[0]


def takes_arguments(width):
    return nn.Linear(width, width)


def returns_nothing():
    return None


def embedding():
    return nn.Embedding(4, 8)


def adds_a_string():
    return lambda x: x + "a string"


NUMBER = 3


def raises():
    raise ValueError("first line\nsecond line")


def type_error_inside():
    return nn.Linear("a", 3)


class Two(nn.Module):
    def forward(self, a, b):
        return a.sin() + b


def two_shapes():
    return nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 8))
