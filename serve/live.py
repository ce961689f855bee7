"""The engine's picture for people who watch: rows, blocks by owner, buckets, moves and queue, as server-sent events.

While anybody watches, the engine tells of its steps and they are folded into one picture; some times a second it is
encoded once and offered to every viewer. A frame holds the whole picture, so a viewer that reads slowly misses frames
and nothing else: its buffer is a few frames long, and neither the engine nor another viewer waits for it. Without
viewers the engine records nothing. It knows request ids, never a prompt or an answer.

Gates: gates.live. Proof: tests/test_live.py. Story: live.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from gates.live import check_viewers_bounded
from gates.trace import MIXED
from serve.errors import ApiError
from serve.events import sse
from serve.loop import EngineLoop
from serve.replies import to_json
from serve.stream import EventStream

FRAME_SECONDS = 0.08
MAX_VIEWERS = 16
VIEWER_FRAMES = 4  # offered and not yet sent to one viewer
FRAME_STEPS = 64  # told one by one in a frame; of more, the newest


class Picture:
    """What the step records add up to: the schedule of the newest, without the requests that have ended since."""

    def __init__(self, *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.buckets: Counter[tuple[int, int, bool]] = Counter()  # (rows, width, replayed) -> decode steps
        self.steps: deque[dict[str, Any]] = deque(maxlen=FRAME_STEPS)  # since the last frame
        self.changed = False
        self._rows: dict[int, str] = {}
        self._blocks: Mapping[int, tuple[int, ...]] = {}
        self._tokens: dict[str, int] = {}  # K/V and answer, of requests admitted while somebody watched
        self._waiting = 0
        self._bucket: tuple[int, int] | None = None

    def add(self, record: Any) -> None:
        """Fold one `StepRecord` in, in order."""
        self.changed = True
        if record.rows is not None:
            self._rows = dict(record.rows)
        # Rows that ended keep their blocks here, as they do in the trace, until a record says otherwise.
        self._blocks = dict(record.dump) if record.dump is not None else {**self._blocks, **record.blocks}
        self._waiting = record.waiting
        self._tokens.update({name: tokens for _, name, tokens in record.admitted})
        ended = {name for name, _, reason in record.events if reason is not None}
        for name, token, _ in record.events:
            if token is not None and name in self._tokens:
                self._tokens[name] += 1
        for name in (*ended, *record.preempted):
            self._tokens.pop(name, None)
        self._rows = {row: name for row, name in self._rows.items() if name not in ended}
        if record.decode_rows:
            self._bucket = record.bucket
            rows, width = record.bucket or (0, 0)
            if record.reason != MIXED:
                self.buckets[rows, width, record.replayed] += 1
        self.steps.append(_told(record, ended=len(ended)))

    def frame(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """The picture for JSON, with the engine's own totals; the steps since the last frame are taken."""
        blocks = {row: self._blocks.get(row, ()) for row in self._rows}
        used = len({block for held in blocks.values() for block in held})
        steps = list(self.steps)
        self.steps.clear()
        self.changed = False
        return {
            "rows": self._rows,
            "tokens": {row: self._tokens.get(name) for row, name in self._rows.items()},
            "blocks": blocks,
            "free_blocks": self.num_blocks - used,
            "running": len(self._rows),
            "waiting": self._waiting,
            "bucket": self._bucket if self._rows else None,
            "buckets": self._bucket_counts(),
            "steps": steps,
            "totals": {
                "tokens": stats.get("decode_tokens", 0),
                **{name: stats.get(name, 0) for name in ("steps", "decode_steps", "replayed", "moves", "preemptions")},
            },
        }

    def _bucket_counts(self) -> list[tuple[int, int, int, int]]:
        """(rows, width, replayed, eager) of each bucket used so far."""
        shapes = sorted({(rows, width) for rows, width, _ in self.buckets})
        return [(*shape, self.buckets[(*shape, True)], self.buckets[(*shape, False)]) for shape in shapes]


class LiveSteps:
    """The viewers of one engine loop; it lives on the event loop's thread."""

    def __init__(self, loop: EngineLoop, *, boot: Mapping[str, Any], keep_alive_s: float = 15.0) -> None:
        """`boot` is the engine's `describe()`."""
        pool = boot.get("pool") or {}
        self._loop = loop
        self._keep_alive_s = keep_alive_s
        self._shape = {
            "rows": pool.get("max_batch_size", 1),
            "blocks": pool.get("num_blocks", 0),
            "block_size": pool.get("block_size", 0),
        }
        self._viewers: set[Viewer] = set()
        self._picture = Picture(num_blocks=self._shape["blocks"])
        self._ticker: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        """Streams that are open."""
        return len(self._viewers)

    def open(self) -> EventStream:
        """A stream of frames for one more viewer.

        Raises:
            ApiError: 501 for an engine that tells nothing of its steps, 429 for too many viewers, 503 while down.
        """
        self._loop.check_up()
        if not self._loop.can_watch:
            raise ApiError(501, "this engine keeps no record of its steps", type="server_error", code="not_recorded")
        if len(self._viewers) >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} viewers are watching, the server's limit"
            headers = {"retry-after": "10"}
            raise ApiError(429, message, type="overloaded_error", code="too_many_viewers", headers=headers)
        viewer = Viewer()
        viewer.offer(sse(to_json({"shape": self._shape})))
        viewer.offer(self._encoded())
        self._viewers.add(viewer)
        if self._ticker is None:
            self._picture = Picture(num_blocks=self._shape["blocks"])
            self._loop.watch(self._picture.add)
            self._ticker = asyncio.create_task(self._tick())
        return EventStream(viewer.frames(), on_end=lambda: self._leave(viewer), keep_alive_s=self._keep_alive_s)

    def offer(self, frame: bytes) -> None:
        """A frame to every viewer; none of them is waited for."""
        for viewer in self._viewers:
            viewer.offer(frame)
        check_viewers_bounded(waiting=(viewer.waiting for viewer in self._viewers), most=VIEWER_FRAMES)

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self._loop.watch(None)

    async def _tick(self) -> None:
        """Offer a frame whenever something changed; when the server stops, or a gate speaks, end every stream."""
        try:
            while self._loop.status == "ok":
                await asyncio.sleep(FRAME_SECONDS)
                if self._picture.changed:
                    self.offer(self._encoded())
        finally:
            for viewer in self._viewers:
                viewer.end()

    def _encoded(self) -> bytes:
        return sse(to_json(self._picture.frame(self._loop.stats)))


class Viewer:
    """One stream's frames: a few wait, and what does not fit is counted and told."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._arrival = asyncio.Event()
        self._ended = False
        self.skipped = 0

    @property
    def waiting(self) -> int:
        """Frames offered and not yet sent."""
        return len(self._waiting)

    def offer(self, frame: bytes) -> None:
        """Take a frame, or count it when the viewer is that far behind."""
        if len(self._waiting) >= VIEWER_FRAMES:
            self.skipped += 1
            return
        self._waiting.append(frame)
        self._arrival.set()

    def end(self) -> None:
        """No more frames will come."""
        self._ended = True
        self._arrival.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """What to send, until the end."""
        while True:
            await self._arrival.wait()
            while self._waiting:
                yield self._waiting.popleft()
            if self.skipped:
                told, self.skipped = self.skipped, 0
                yield sse(to_json({"skipped": told}))
            if self._ended:
                return
            if not self._waiting:
                self._arrival.clear()


def _told(record: Any, *, ended: int) -> dict[str, Any]:
    """One step in a frame."""
    return {
        "step": record.step,
        "prefills": len(record.chunks),
        "decode": len(record.decode_rows),
        "moves": record.moves,
        "preempted": len(record.preempted),
        "bucket": record.bucket,
        "replayed": record.replayed,
        "reason": record.reason,
        "ended": ended,
        "us": sum(record.timings_us.values()),
    }
