"""Who waits is served by time of arrival minus the head start of its priority; so nobody starves. Pure."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.server.requests.admission import MAX_PRIORITY, WaitingLine

PRIORITIES = st.integers(-MAX_PRIORITY, MAX_PRIORITY)


def drained(line: WaitingLine) -> list[str]:
    return [line.pop() for _ in range(len(line))]


def test_equal_priorities_are_served_as_they_came_and_a_head_start_counts_in_seconds():
    line = WaitingLine(head_start_s=2.0)
    for name, arrival_s, priority in [("a", 0.0, 0), ("b", 1.0, 0), ("c", 3.0, 1), ("d", 3.0, 2), ("e", 1.0, -1)]:
        line.push(name, arrival_s, priority, 10)
    assert line.num_tokens == 50
    assert drained(line) == ["d", "a", "b", "c", "e"]
    assert (len(line), line.num_tokens, line.first_due_s()) == (0, 0, float("inf"))


def test_without_head_starts_priorities_mean_nothing():
    line = WaitingLine(head_start_s=0.0)
    line.push("a", 1.0, -5, 1)
    line.push("b", 2.0, 100, 1)
    assert drained(line) == ["a", "b"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), PRIORITIES, st.integers(1, 3)), max_size=60), PRIORITIES)
def test_nobody_is_overtaken_after_the_longest_head_start(others, own):
    """One request against a flood that never ends: it leaves within a time that no flood can lengthen."""
    line = WaitingLine(head_start_s=0.5)
    line.push("own", 0.0, own, 1)
    now_s, num_ahead = 0.0, 0
    flood = others or [(1.0, MAX_PRIORITY, 1)]
    for turn in range(10_000):
        gap_s, priority, count = flood[turn % len(flood)]
        for each in range(count):
            line.push(f"{turn}.{each}", now_s, priority, 1)
        num_ahead += count if now_s < (priority - own) * 0.5 else 0
        if line.pop() == "own":
            assert turn <= num_ahead
            return
        now_s += gap_s + 0.05
    raise AssertionError("it starved")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.floats(0, 100), PRIORITIES, st.integers(0, 5000)),
            st.tuples(st.just("pop")),
            st.tuples(st.just("remove"), st.integers(0, 200)),
        ),
        max_size=200,
    )
)
def test_the_line_is_a_sorted_list_and_its_memory_is_bounded(actions):
    line, model = WaitingLine(1.0), {}
    for number, action in enumerate(actions):
        if action[0] == "push":
            _, arrival_s, priority, num_tokens = action
            line.push(str(number), arrival_s, priority, num_tokens)
            model[str(number)] = (arrival_s - priority, number, num_tokens)
        elif action[0] == "remove":
            line.remove(str(action[1]))
            model.pop(str(action[1]), None)
        elif model:
            first = min(model, key=model.__getitem__)
            assert line.first_due_s() == model[first][0]
            assert line.pop() == first
            del model[first]
        assert len(line) == len(model)
        assert line.num_tokens == sum(entry[2] for entry in model.values())
        assert len(line._heap) <= 2 * len(line) + 65
    assert drained(line) == sorted(model, key=model.__getitem__)
