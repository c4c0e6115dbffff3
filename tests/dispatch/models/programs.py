"""The calls that a rank makes in a step of two halves, from the code that makes them.

Models of SPIN and the twin over OpenSHMEM are written in these words.
"""

from moe_serve.ep.moe_layer import Turns, take_turns

# What a half of a step does in a layer between two yields of ep/moe_layer.py. test_recorded_runs.py
# holds the first against recorded calls.
OVER_SHARED_MEMORY = (
    ("send(COUNTS, {})",),
    ("receive(COUNTS, {})", "send(ROWS, {})"),
    ("receive(ROWS, {})", "compute({})", "send(RESULTS, {})"),
    ("add({})",),
)
OVER_SLABS = (("dispatch({})",), ("receive({})", "answer({})"), ("add({})",))


def program(num_layers: int, turns: tuple[tuple[str, ...], ...]) -> str:
    """Returns the calls of a rank in a step of two halves, in their order. turns: of a half in a layer"""
    calls: list[str] = []

    def half(number: int) -> Turns[None]:
        for layer in range(num_layers):
            for turn, made in enumerate(turns):
                calls.extend(call.format(2 * layer + number + 1) for call in made)
                if turn < len(turns) - 1:
                    yield

    take_turns([half(0), half(1)])
    return "; ".join(calls)
