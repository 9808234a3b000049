"""Covers become loop nests with tiles, buffers with layouts, and an order of calls."""
