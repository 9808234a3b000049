"""megafuse: a PyTorch module in, the same module with fused, checked forward and backward GPU kernels out."""

__version__ = "0.1.0"
