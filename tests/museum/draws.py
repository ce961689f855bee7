"""Draws: a token that depends on the neighbours, or on a rule that was applied to the wrong ids."""

from __future__ import annotations

from fast.engine import Engine
from fast.rows import Rows, TokenCounts
from fast.sampling import _choose, _forbidden, _has_work
from tests.museum import scenes
from tests.museum.exhibit import LOCKSTEP, Edit, Exhibit

SEEDS = "uniform(rows.seed[at], positions[drawn])"
PROMPT = "for token in sequence.tokens[:num_prompt]:\n        self._find(token)"

EXHIBITS = (
    Exhibit(
        name="a seed is its request's own",
        thread="vllm-project/vllm#51226",
        story="One generator serves the batch, so a seeded answer depends on who else is in it.",
        edits=(Edit(_choose, SEEDS, "uniform(rows.seed[at[:1]].repeat(at.size), positions[drawn])"),),
        scene=scenes.captured_rush,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a draw does not know its row",
        thread="vllm-project/vllm#51226",
        story="The row index goes into the draw, and a compaction changes the answer.",
        edits=(Edit(_choose, SEEDS, "uniform(rows.seed[at] + at, positions[drawn])"),),
        scene=scenes.captured_rush,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a draw's position is its token's",
        thread="vllm-project/vllm#26385",
        story="The draw is made at the last known position and not at the next one.",
        edits=(Edit(Engine._sample, '"positions": stored', '"positions": [n - 1 for n in stored]'),),
        scene=scenes.captured_rush,
        full="sampling.draw_position",
        says="its request holds",
        cheap="sampling.draw_position",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="greedy is the highest logit and no draw",
        thread="FlashML-org/FreeToken#471",
        story="Greedy is imitated by a temperature of 1e-6, so ties are drawn at random.",
        edits=(
            Edit(_has_work, "(rows.temperature[at] > 0.0)", "(rows.temperature[at] >= 0.0)"),
            Edit(_choose, "rows.temperature[at] > 0.0", "rows.temperature[at] >= 0.0"),
            Edit(
                _choose,
                "_probabilities(scores[drawn], rows.temperature[at])",
                "_probabilities(scores[drawn], rows.temperature[at].clip(1e-6))",
            ),
        ),
        scene=scenes.ties,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="presence and frequency count the answer alone",
        thread="vllm-project/vllm-metal#69",
        story="Tokens of the prompt are counted as if the answer held them.",
        edits=(Edit(TokenCounts.__init__, PROMPT, PROMPT.replace("_find", "add")),),
        scene=scenes.captured_rush,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a repetition penalty knows the prompt",
        thread="vllm-project/vllm-metal#69",
        story="Only tokens of the answer are penalised for repeating.",
        edits=(Edit(TokenCounts.__init__, PROMPT, PROMPT.replace("self._find(token)", "pass")),),
        scene=scenes.captured_rush,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a penalty sees every token of the answer",
        thread="vllm-project/vllm#27910",
        story="A token is counted for the row and the row's count is not told.",
        edits=(Edit(Rows.count, "self.counts[row].add(token)", "pass"),),
        scene=scenes.captured_rush,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="min_tokens holds back every id that ends an answer",
        thread="vllm-project/vllm#5849",
        story="Only the first of the ids is masked, and the second ends the answer early.",
        edits=(
            Edit(
                Engine.submit,
                "tuple(sorted({*eos, *params.stop_token_ids}))",
                "tuple(sorted({*eos, *params.stop_token_ids}))[:1]",
            ),
        ),
        scene=scenes.early_ends,
        full="sampling.end_allowed",
        says="min_tokens",
        cheap="sampling.end_allowed",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a mask belongs to its own row",
        thread="vllm-project/vllm#49613",
        story="Whether an answer may end is asked of another row.",
        edits=(Edit(_forbidden, "rows.forbidden[row] if", "rows.forbidden[row - 1] if"),),
        scene=scenes.early_ends,
        full="sampling.end_allowed",
        says="min_tokens",
        cheap="sampling.end_allowed",
        off=LOCKSTEP,
    ),
)
