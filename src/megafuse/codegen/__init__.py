"""Schedules become tile programs, tile programs become text. Imports neither torch nor triton."""
