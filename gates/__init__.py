"""The invariants of nanoserve, one `check_*` function each, shared by both engines, the server and the tests.

A gate takes plain values and tensors, never an engine, and imports no sibling package: what judges an
engine must not depend on it. The module `core` holds the machinery; one module a subject holds the gates.

Proof: tests/test_gates.py. Story: gates.
"""

from gates.core import CHEAP, FULL, OFF, GateError, counters, enabled, gate, level, require, set_level

__all__ = [
    "CHEAP",
    "FULL",
    "OFF",
    "GateError",
    "counters",
    "enabled",
    "gate",
    "level",
    "require",
    "set_level",
]
