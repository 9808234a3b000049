"""Leaf layer: errors, settings, dtypes, device tables. Imports nothing of ours, neither torch nor triton."""
