"""Ready modules: plain PyTorch parameters, fused at the first call of each situation."""

from megafuse.nn.layers import ACTIVATIONS, Sin, SquaredReLU
from megafuse.nn.mlp import MLP, FusedMLPSoftplus, FusedMLPSoftplusWN

__all__ = ["ACTIVATIONS", "MLP", "FusedMLPSoftplus", "FusedMLPSoftplusWN", "Sin", "SquaredReLU"]
