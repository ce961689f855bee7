"""The engine you would run: continuous batching over a paged KV cache.

It shares the contract (`reference.config`, `request`, `weights`, `tokenizer`) and the gates with the
reference engine, and no algorithm: an oracle that shares an algorithm agrees with its bugs.
"""
