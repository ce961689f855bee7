"""From measurements to medians, ratios and a table; a peer without measurements is a line with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from tests.bench.peers.install import Arm

Shape = tuple[str, int, int]  # kind, context, batch
Timed = tuple[float, int]  # median seconds, and of how many samples
Results = dict[str, list[dict[str, Any]]]  # arm: what `workload.measure` gave, one for each process


def summary(arms: Sequence[Arm], results: Results, reasons: dict[str, str]) -> list[dict[str, Any]]:
    """One entry an arm: its status, and medians over all steps of all its processes, with ratios to its counterpart.

    A ratio is this arm's time over nanoserve's: above 1, nanoserve is faster. A shape that one side lacks has none.
    `ratio_by_round` has one ratio for each time that both ran it: how far they lie apart is how sure the ratio is.
    """
    medians = {arm.name: _medians(results.get(arm.name, [])) for arm in arms}
    rounds = {arm.name: [_medians([run]) for run in results.get(arm.name, [])] for arm in arms}
    entries = []
    for arm in arms:
        runs = results.get(arm.name, [])
        reason = reasons.get(arm.name, "" if runs else "not run")
        entry: dict[str, Any] = {"arm": arm.name, "note": arm.note, "status": "failed" if reason else "ok"}
        entry |= {"reason": reason, "against": arm.against, "versions": runs[-1]["versions"] if runs else {}}
        entry["start_s"] = median(run["start_s"] for run in runs) if runs else None
        entry["figures"] = [
            {"kind": kind, "context": context, "batch": batch, "seconds": seconds, "tokens_per_s": tokens / seconds}
            | {"samples": samples, "ratio": _ratio(seconds, medians[arm.against].get((kind, context, batch)))}
            | {"ratio_by_round": _by_round((kind, context, batch), rounds[arm.name], rounds[arm.against])}
            for (kind, context, batch), (seconds, samples) in medians[arm.name].items()
            for tokens in [batch if kind == "decode" else context]
        ]
        entry["same_tokens"] = _same_tokens(runs, results.get(arm.against, []))
        entries.append(entry)
    return entries


def markdown(entries: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The page's tables: tokens a second, and in brackets how many times as fast nanoserve is."""
    shapes = sorted({(f["kind"], f["context"], f["batch"]) for entry in entries for f in entry["figures"]})
    parts = [", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for context in sorted({context for kind, context, _ in shapes if kind == "decode"}):
        batches = [batch for kind, at, batch in shapes if kind == "decode" and at == context]
        parts += _table(f"Decode at context {context}, tokens/s", entries, [("decode", context, b) for b in batches], 2)
    prefills = [shape for shape in shapes if shape[0] == "prefill"]
    if prefills:
        parts += _table("Prefill of one prompt, tokens/s", entries, prefills, 1)
    parts += ["| arm | what it is | versions | same tokens |", "|---|---|---|---|"]
    for entry in entries:
        versions = " ".join(f"{name} {v}" for name, v in entry["versions"].items() if len(str(v)) < 20)
        same = "failed: " + entry["reason"] if entry["status"] == "failed" else entry["same_tokens"]
        parts.append(f"| {entry['arm']} | {entry['note']} | {versions} | {same} |")
    return "\n".join(parts) + "\n"


def _table(title: str, entries: Sequence[dict[str, Any]], shapes: Sequence[Shape], column: int) -> list[str]:
    head = " | ".join(f"{'batch' if column == 2 else 'tokens'} {shape[column]}" for shape in shapes)
    lines = [f"**{title}**", "", f"| arm | {head} |", "|---|" + "---:|" * len(shapes)]
    for entry in entries:
        found = {(f["kind"], f["context"], f["batch"]): f for f in entry["figures"]}
        if entry["status"] == "ok" and not any(shape in found for shape in shapes):
            continue  # it takes no part here; one that failed has its line everywhere
        lines.append(f"| {entry['arm']} | " + " | ".join(_cell(found.get(shape), entry) for shape in shapes) + " |")
    return [*lines, ""]


def _cell(figure: dict[str, Any] | None, entry: dict[str, Any]) -> str:
    if figure is None:
        return "failed" if entry["status"] == "failed" else "-"
    shown = f"{figure['tokens_per_s']:.0f}"
    own = entry["arm"] == entry["against"] or figure["ratio"] is None
    return shown if own else f"{shown} ({figure['ratio']:.2f}x)"


def _medians(runs: Iterable[dict[str, Any]]) -> dict[Shape, Timed]:
    times: dict[Shape, list[float]] = {}
    for run in runs:
        for context, by_batch in run["decode"].items():
            for batch, seconds in by_batch.items():
                times.setdefault(("decode", int(context), int(batch)), []).extend(seconds)
        for tokens, seconds in run["prefill"].items():
            times.setdefault(("prefill", int(tokens), 1), []).extend(seconds)
    return {shape: (median(seconds), len(seconds)) for shape, seconds in sorted(times.items()) if seconds}


def _ratio(seconds: float, ours: Timed | None) -> float | None:
    return None if ours is None else seconds / ours[0]


def _by_round(shape: Shape, theirs: Sequence[dict[Shape, Timed]], ours: Sequence[dict[Shape, Timed]]) -> list[float]:
    """One ratio for each round in which both sides have the shape."""
    times = [[run[shape][0] for run in runs if shape in run] for runs in (theirs, ours)]
    return [one / other for one, other in zip(*times, strict=False)]


def _same_tokens(runs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> str:
    """How many of the first row's tokens agree up to the first that does not, over the contexts both ran."""
    theirs = {context: ids for run in runs for context, ids in run["tokens"].items()}
    wanted = {context: ids for run in ours for context, ids in run["tokens"].items()}
    pairs = [pair for at in theirs.keys() & wanted.keys() for pair in zip(theirs[at], wanted[at], strict=False)]
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return f"{same} of {len(pairs)}"
