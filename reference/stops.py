"""Stop strings, matched in text as it arrives and whatever the pieces it arrives in.

Sits between `IncrementalDecoder` and the client. One Knuth-Morris-Pratt automaton a stop reads each character
once, so how the text was cut into pieces cannot change the result, and the longest unfinished match is exactly
the text that must wait. It knows no token and no request.

Gates: gates.tokenizer. Proof: tests/test_tokenizer.py. Story: tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.tokenizer import check_withheld_is_stop_prefix


class StopMatcher:
    """One per answer: passes text through, withholding only what can still become a stop.

    The stop that is complete first wins, as if text came one character at a time; of several complete at the same
    character the longest wins, so the answer ends before the earliest of them. The stop itself is never sent.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop: '' is empty; a stop is at least one character")
        self.stops = tuple(stops)
        self.matched: str | None = None
        self._withheld = ""
        self._failures = [_failure_table(stop) for stop in self.stops]
        self._progress = [0] * len(self.stops)  # characters of each stop that the end of the text matches

    def push(self, text: str) -> tuple[str, str | None]:
        """Take new text; return the text that is safe to send and the stop that was matched, if one was.

        After a match everything more is dropped: the answer has ended.
        """
        if self.matched is not None:
            return "", self.matched
        if not self.stops:
            return text, None
        pending = self._withheld + text
        for index, character in enumerate(text):
            found = self._advance(character)
            if found is not None:
                end = len(self._withheld) + index + 1
                self.matched, self._withheld = found, ""
                return pending[: end - len(found)], found
        keep = len(pending) - max(self._progress)
        self._withheld = pending[keep:]
        check_withheld_is_stop_prefix(withheld=self._withheld, stops=self.stops)
        return pending[:keep], None

    def flush(self) -> str:
        """The text still withheld when the answer ends without a stop (EOS, length): it was only text."""
        text, self._withheld = self._withheld, ""
        self._progress = [0] * len(self.stops)
        return text

    def _advance(self, character: str) -> str | None:
        """Feed one character to every stop; the longest stop it completes, or None."""
        found: str | None = None
        for index, stop in enumerate(self.stops):
            length = self._progress[index]
            while length and stop[length] != character:
                length = self._failures[index][length - 1]
            if stop[length] == character:
                length += 1
            self._progress[index] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _failure_table(stop: str) -> list[int]:
    """For each end in `stop`, the length of its longest proper prefix that also ends there."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = table[length - 1]
        if stop[length] == stop[index]:
            length += 1
        table[index] = length
    return table
