"""Benchmarks: rivals that validated, timed alternately in one process, with their traffic and memory, kept as records.

Nothing is timed that did not validate, and no figure is kept without its raw samples and the state of the machine.
"""
