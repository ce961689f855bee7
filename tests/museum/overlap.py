"""A step in flight: whose tokens it is fed, what is told after an end, and when its blocks go back."""

from __future__ import annotations

from fast.commit import Commit
from fast.forwards import _late
from fast.scheduler import Scheduler
from tests.museum import scenes
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit, Exhibit

EXHIBITS = (
    Exhibit(
        name="blocks go back when no step writes them",
        thread="vllm-project/vllm#45357",
        story="An answer that ends gives its blocks back at once, while the step in flight still writes one of them.",
        edits=(Edit(Commit._give_back, "if sequence.in_flight == 0:", "if sequence.row is not None:"),),
        scene=scenes.launched_ahead,
        full="overlap.blocks_at_rest",
        says="a step in flight writes block",
        cheap="overlap.blocks_at_rest",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a step is fed the tokens of its own requests",
        thread="sgl-project/sglang-jax#1487",
        story="The ids of a step are taken from the places of the step before, as if nobody had come, gone or moved.",
        edits=(Edit(_late, "[lines[decoding[place]] for place in places]", "places"),),
        scene=scenes.launched_ahead,
        full="overlap.ids_fed",
        says="the step before chose",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="what comes after the end is dropped",
        thread="sgl-project/sglang#24745",
        story="A token that was computed after its answer's end counts as one of the answer.",
        edits=(Edit(Commit.take, "if sequence.ended_at is not None:", "if sequence.ended_at == 0:"),),
        scene=scenes.launched_ahead,
        full="overlap.nothing_after_end",
        says="it holds",
        cheap="overlap.nothing_after_end",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="whoever loses its row has its tokens",
        thread="vllm-project/vllm-ascend#14055",
        story="A request is preempted while a token of it is in flight.",
        edits=(Edit(Scheduler.growth_fits.fget, "return needed <=", "return True or needed <="),),
        scene=scenes.tight_pool_ahead,
        full="overlap.settled_first",
        says="of its tokens are in flight",
        cheap="overlap.settled_first",
        off=HARMLESS,
    ),
)
