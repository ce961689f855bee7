"""What must hold between a server and its engine: whoever is told that all is well has an engine that runs.

A thread that ends in silence takes nothing down with it. Requests go into a queue that nobody reads, health says
200, and clients wait until their own patience ends.

Proof: tests/test_app.py. Story: app.
"""

from __future__ import annotations

from gates.core import CHEAP, gate, require


@gate("app.engine_runs", at=CHEAP)
def check_engine_runs(*, status: str, thread_alive: bool) -> None:
    """Before a request is taken: a status of `ok` is that of a thread that lives.

    `thread_alive` has to be read first, so that an end between the two readings is found in the status.
    """
    require(status != "ok" or thread_alive, f"the status is {status!r}, the thread that runs the engine is over")
