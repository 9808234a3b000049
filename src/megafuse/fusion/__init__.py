"""What may share a kernel, what is worth sharing, and what is saved for the backward pass."""
