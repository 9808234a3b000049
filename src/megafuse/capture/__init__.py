"""Capture: a PyTorch callable becomes one joint forward+backward graph, through AOTAutograd on meta tensors."""
