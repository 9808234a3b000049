"""Load, bind and launch generated kernels; the cache, autograd binding and the Triton shim live here."""
