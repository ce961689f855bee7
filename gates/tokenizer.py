"""Gates of text: what a client was sent is what the answer says, and nothing is withheld without a reason.

Text leaves the server piece by piece while characters and stop strings are still open. These gates compare the
joined pieces with one decode of all the ids, and the withheld part with the stops it waits for. They take
strings; they know no tokenizer and no request.

Proof: tests/test_tokenizer.py. Story: tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import CHEAP, gate, require

SHOWN = 40  # characters of context in a message; an answer may be long


@gate("tokenizer.stream", at=CHEAP)
def check_text_is_stream(*, streamed: str, decoded: str, stop: str | None = None) -> None:
    """The joined pieces equal the decode of all ids, cut where the matched stop begins.

    `streamed` is every piece sent, joined; `decoded` is one decode of every id of the answer; `stop` is the stop
    string that ended it, if one did.
    """
    expected = decoded if stop is None else decoded[: len(streamed)]
    if streamed != expected:
        at = _first_difference(streamed, expected)
        require(
            False,
            f"streamed text has {streamed[at : at + SHOWN]!r} at character {at} where the decode of all ids has "
            f"{expected[at : at + SHOWN]!r} ({len(streamed)} characters sent, {len(decoded)} decoded)",
        )
    follows = decoded[len(streamed) :]
    require(
        stop is None or follows.startswith(stop),
        f"the answer was cut at character {len(streamed)} for stop {stop!r} and there stands {follows[:SHOWN]!r}",
    )


@gate("tokenizer.withheld", at=CHEAP)
def check_withheld_is_stop_prefix(*, withheld: str, stops: Sequence[str]) -> None:
    """Text is withheld only while it is the unfinished beginning of a stop string."""
    require(
        not withheld or any(len(withheld) < len(stop) and stop.startswith(withheld) for stop in stops),
        f"{len(withheld)} characters withheld ({withheld[:SHOWN]!r}), the beginning of none of {len(stops)} stops",
    )


def _first_difference(left: str, right: str) -> int:
    """Index of the first character where two strings part; the shorter length when one begins the other."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
