"""Compiled CPU kernels: each file holds a kernel, the naive version that judges it, and nothing of an engine."""
