"""What a GPU's prefill hands out: tiles of neighbouring tokens, planned on the host, checked before they are launched.

A task is a tile of one chunk's tokens; with the query heads that share a K/V head it is one program of the kernel
(fast/kernels/gpu/prefill.py). How a chunk is cut changes no bit of it: a query's keys begin at position 0 whatever
tile it is in. It knows positions and counts, and no tensor on a device.

Gates: gates.gpu. Proof: tests/test_gpu_tasks.py. Story: gpu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gates.gpu import check_tasks_cover

TASK_FIELDS = 4
Run = tuple[int, int, int]  # a chunk: (position of its first token, tokens, where its table of slots begins)


def checked_tasks(chunks: Sequence[Run], *, group: int, tile: int) -> NDArray[np.int64]:  # [N, 4]
    """`plan_tasks`, held to cover every token once. Raises GateError when it does not."""
    tasks = plan_tasks(chunks, group=group, tile=tile)
    check_tasks_cover(tasks=tasks.tolist(), chunks=chunks, most=max(1, tile // group))
    return tasks


def plan_tasks(chunks: Sequence[Run], *, group: int, tile: int) -> NDArray[np.int64]:  # [N, 4]
    """Tasks of chunks, in order: (first token in the flat list, tokens, position of the first, where its table begins).

    A tile has `tile` rows, and `group` query heads of each of its tokens.
    """
    most = max(1, tile // group)
    tasks, flat = [], 0
    for start, tokens, base in chunks:
        tasks += [(flat + i, min(most, tokens - i), start + i, base) for i in range(0, tokens, most)]
        flat += tokens
    return np.array(tasks, np.int64).reshape(-1, TASK_FIELDS)
