"""The exercises of the course: a function to write, a workload that judges it, and the real function as the answer.

`lesson` holds the machinery, `whiteboard`, `path` and `edge` the exercises of the reference, the fast path and what
stands around them. `nanoserve learn` is the door.

Proof: tests/test_learn.py.
"""
