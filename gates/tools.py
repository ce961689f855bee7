"""What must hold of tool calls: however an answer came, in pieces or at once, it holds the same calls and text.

A parser that decides while text is still coming can let the first letters of a call go by as words, or keep words
that were none. Each piece looks right; only the whole answer shows it.

Proof: tests/test_tools.py. Story: tools.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import CHEAP, gate, require

Call = tuple[str, str]  # a function's name, and its arguments as JSON


@gate("tools.stream_is_whole", at=CHEAP)
def check_stream_is_whole(
    *,
    text: str,  # what went out, joined
    calls: Sequence[Call],  # that were told on the way
    whole_text: str,  # the same of the whole answer, read at once
    whole_calls: Sequence[Call],
) -> None:
    """At an answer's end: its pieces hold the text and the calls that the whole answer holds."""
    said = f"{len(calls)} calls and {len(text)} characters of text in pieces"
    require(len(calls) == len(whole_calls), f"{said}, {len(whole_calls)} and {len(whole_text)} read at once")
    wrong = [index for index, pair in enumerate(zip(calls, whole_calls, strict=True)) if pair[0] != pair[1]]
    if wrong:
        told, whole = calls[wrong[0]], whole_calls[wrong[0]]
        require(False, f"call {wrong[0]} is {told} in pieces, {whole} read at once")
    require(text == whole_text, f"{said}, {len(whole_calls)} and {len(whole_text)} read at once")
