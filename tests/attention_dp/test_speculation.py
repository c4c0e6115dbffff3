"""Where drafts come from, and how many of them are worth their rows."""

from collections.abc import Callable

import pytest

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.speculation import FORM, MTP, OWN, SHARED, Speculator

MIB = 2**20


def request(name: str, prompt: list[int], output: list[int] | None = None, salt: str = "") -> Request:
    return Request(name, 0, prompt, output or [], SamplingParams(100), seed=0, salt=salt)


def test_a_request_drafts_what_followed_in_its_own_text_and_in_others():
    speculator = Speculator(4, MIB, shares_text=True, always=True)
    mine = request("a", [7, 8, 9, 10, 11, 12, 13], [7, 8, 9])
    assert speculator.draft([mine], 99) == [(10, 11, 12, 13)]
    speculator.verified(mine, 4, 4)
    mine.output_ids += [10, 11, 12, 13, 50]
    assert speculator.draft([mine], 99) == [()], "what follows 12, 13, 50 is not known"
    other = request("b", [5, 13, 7, 8], [9])
    assert speculator.draft([other], 99) == [(10, 11, 12, 13)]
    speculator.verified(other, 4, 1)
    other.output_ids += [10, 40]
    assert speculator.draft([other], 99) == [()]
    stranger = request("c", [5, 13, 7, 8], [9], salt="other")
    assert speculator.draft([stranger], 99) == [()]
    assert speculator.counters.num_drafts == {OWN: 4, SHARED: 4, FORM: 0, MTP: 0}
    assert speculator.counters.num_accepted == {OWN: 4, SHARED: 1, FORM: 0, MTP: 0}
    assert speculator.counters.totals()["num_draft_proposals"] == 2


def test_what_a_form_forces_is_drafted_before_what_text_suggests():
    forms = {"a": (20, 21, 22, 23, 24), "b": (30,), "c": ()}
    speculator = Speculator(4, MIB, shares_text=False, always=True, forced=lambda each: forms[each.request_id])
    params = SamplingParams(100, constraint=Constraint("regex", "x"))
    mine, plain, free = (Request(name, 0, [7, 8, 9, 10, 7, 8], [9], params, seed=0) for name in "abc")
    plain.params = SamplingParams(100)
    assert speculator.draft([mine, plain, free], 99) == [(20, 21, 22, 23), (10, 7, 8, 9), (10, 7, 8, 9)]
    speculator.verified(mine, 4, 3)
    assert speculator.counters.num_accepted == {OWN: 0, SHARED: 0, FORM: 3, MTP: 0}


def test_without_a_prefix_cache_requests_see_no_other_text():
    speculator = Speculator(4, MIB, shares_text=False, always=True)
    assert speculator.draft([request("a", [7, 8, 9, 10, 11, 12, 13], [7, 8, 9])], 99) == [(10, 11, 12, 13)]
    assert speculator.draft([request("b", [5, 13, 7, 8], [9])], 99) == [()]


def test_a_text_that_is_being_repeated_is_followed_past_runs_that_came_elsewhere_later():
    speculator = Speculator(3, MIB, shares_text=True, always=True)
    prompt = [1, 2, 3, 4, 5, 6, 90, 91, 3, 4, 5, 77, 78, 1, 2]
    mine = request("a", prompt, [3])
    assert speculator.draft([mine], 99) == [(4, 5, 6)]
    mine.output_ids += [4, 5]
    assert speculator.draft([mine], 99) == [(6, 90, 91)], "not 77, which came after the last 3, 4, 5"


def test_a_long_prompt_is_indexed_over_several_steps():
    speculator = Speculator(2, 64 * MIB, shares_text=True, always=True)
    long = request("a", [*range(9000), 5, 6], [7])
    assert speculator.draft([long], 99) == [()]
    assert speculator.draft([long], 99) == [(8, 9)]


def test_drafts_of_all_requests_have_no_more_rows_than_there_are():
    speculator = Speculator(8, MIB, shares_text=False, always=True)
    both = [request(name, [1, 2, 3, 4, 5, 6, 7, 1, 2], [3]) for name in "ab"]
    assert [len(each) for each in speculator.draft(both, 9)] == [8, 1]
    assert speculator.draft(both, 0) == [(), ()]


def steps(speculator: Speculator, mine: Request, row_s: float, num_tokens: int, is_right: bool) -> list[int]:
    """Returns how many drafts each step of one request verified, until it has so many tokens.

    Its text repeats the run 1, 2, 3 or counts up, so that drafts are always wrong, or right.
    """
    verified: list[int] = []
    while len(mine.output_ids) < num_tokens:
        drafts: tuple[int, ...] = ()
        if speculator.gate.is_due:
            (drafts,) = speculator.draft([mine], 99)
        verified.append(len(drafts))
        right = len(drafts) if is_right else 0
        if drafts:
            speculator.verified(mine, len(drafts), right)
        speculator.ended(1, 1 + right, 1 + row_s * len(drafts))
        if is_right:
            mine.output_ids += [mine.output_ids[-1] + 1 + i for i in range(1 + len(drafts))]
        else:
            mine.output_ids += [900 + len(verified), 1, 2, 3]
    return verified


def test_drafts_that_are_always_wrong_are_given_up():
    mine = request("a", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3])
    speculator = Speculator(4, MIB, shares_text=False)
    verified = steps(speculator, mine, 0.3, 8000, is_right=False)
    assert sum(map(bool, verified)) < 20
    assert not any(verified[100:])


def test_drafts_that_are_right_are_verified_as_long_as_rows_cost_little():
    for row_s, is_worth_it in ((0.05, True), (1.5, False)):
        mine = request("a", [*range(1, 600), *range(1, 4)], [4])
        verified = steps(Speculator(4, MIB, shares_text=False), mine, row_s, 500, is_right=True)
        assert (len(verified) < 200) == is_worth_it
        assert sum(map(bool, verified)) < 12 or is_worth_it, "they are tried rarely"


def test_a_look_of_a_step_that_was_void_is_no_part_of_the_next_one():
    speculator = Speculator(4, MIB, shares_text=False, always=True)
    speculator.draft([request("a", [1, 2, 3], [4])], 99)
    speculator.ended(1, 1, 1e-9)
    assert speculator.gate.costs.plain_s(1) == 1e-9


class Waits:
    """What a thread has waited for its processor, as a test says."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def seconds(self) -> float:
        return self.waited_s


def with_waits(speculator: Speculator, monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(speculator, "_waits", waits)
    return waits


@pytest.mark.parametrize("layer_waits_s", [0.0, 3.0], ids=["left out", "counted as the layer's"])
def test_a_wait_while_the_layer_runs_changes_no_time_of_steps(layer_waits_s, monkeypatch):
    speculator = Speculator(4, MIB, shares_text=False, predicted_drafts=2, reads_text=False)
    waits, mine = with_waits(speculator, monkeypatch), request("a", [1], [2])
    for number in range(300):
        speculator.draft([mine], 99)
        is_waiting = number % 100 == 50
        waits.waited_s += 3.0 * is_waiting
        speculator.ended(1, 1, 0.7 + 3.0 * is_waiting, 0.2 + layer_waits_s * is_waiting)
    assert speculator.gate.costs.plain_s(1) == pytest.approx(0.5, rel=0.05)
    assert abs(speculator.totals()["speculation_saved_seconds"]) < 100


def test_the_time_of_the_layer_has_no_waits(monkeypatch):
    speculator = Speculator(4, MIB, shares_text=False, predicted_drafts=2, reads_text=False)
    waits, before_s = with_waits(speculator, monkeypatch), speculator.own_s()
    waits.waited_s += 1000.0
    assert speculator.own_s() < before_s - 900


def test_waits_of_steps_that_were_not_measured_are_not_taken_out_of_one_that_is(monkeypatch):
    speculator = Speculator(4, MIB, shares_text=False)
    waits = with_waits(speculator, monkeypatch)
    for num_requests, num_steps in ((1, 21), (2, 3), (3, 40), (1, 40)):
        for _ in range(num_steps):
            waits.waited_s += 0.25
            speculator.ended(num_requests, num_requests, 5.0)
        assert speculator.gate.costs.plain_s(num_requests) == 4.75


def test_a_request_that_has_left_is_forgotten():
    speculator = Speculator(4, MIB, shares_text=True)
    mine = request("a", [1, 2, 3, 4], [5])
    speculator.draft([mine], 99)
    speculator.end(mine)
    speculator.end(mine)
    assert not speculator._followers


def test_a_request_takes_the_drafts_of_which_more_are_right():
    speculator = Speculator(4, MIB, shares_text=False, always=True, predicted_drafts=1)
    mine, taken = request("a", [], [7]), []
    for number in range(60):  # text is wrong, later right; the layer is right two times of three
        mine.output_ids += [1, 2, 3]
        coming = 60 + number if number < 30 else 4
        speculator.predict(mine, [coming if number % 3 else 99])
        (drafts,) = speculator.draft([mine], 99)
        taken.append(len(drafts))
        if drafts:
            speculator.verified(mine, len(drafts), int(drafts[0] == coming))
        mine.output_ids.append(coming)
    counters = speculator.counters
    assert counters.num_drafts[MTP] > 0 < counters.num_drafts[OWN]
    assert set(taken[10:30]) == {1}, "of the layer"
    assert max(taken[-10:]) > 1, "text, which is right again, has more"


def test_the_layer_is_judged_by_requests_that_began_while_it_ran():
    """Others have none of its keys: of eight requests that decode one began since, and its drafts are right."""
    speculator = Speculator(1, MIB, shares_text=False, predicted_drafts=1, reads_text=False)
    requests, layer_s, ran = [request(str(number), [1], [2]) for number in range(8)], 0.2, []

    def run(num_steps: int, begun: Request | None, right_of: Callable[[Request], bool]) -> None:
        for number in range(num_steps):
            has_prompt = number == 0 and begun is not None
            going_on = [each for each in requests if each is not begun or number]
            runs = speculator.num_predictions(has_prompt, going_on) > 0
            drafts = speculator.draft(requests, 99) if speculator.gate.is_due else [()] * len(requests)
            num_right = 0
            for each, found in zip(requests, drafts, strict=True):
                if found:
                    speculator.verified(each, 1, int(right_of(each)))
                    num_right += right_of(each)
                each.output_ids += [5] * (1 + (bool(found) and right_of(each)))
                if runs:
                    speculator.predict(each, [5])
            seconds = 1 + 0.01 * sum(map(len, drafts)) + layer_s * runs
            speculator.ended(len(requests), len(requests) + num_right, seconds, layer_s * runs)
            ran.append(runs)

    run(700, None, lambda each: False)
    assert not any(ran[20:]), "it has lost, and no request begins"
    requests[-1] = begun = request("new", [1], [2])
    ran.clear()
    run(300, begun, lambda each: each is begun)
    assert all(ran)
    requests[-1] = requests[0]
    speculator.end(begun)
    requests.pop()
    ran.clear()
    run(100, None, lambda each: True)
    assert not any(ran[40:]), "nobody is left whom it could help"


def test_time_saved_is_not_told_where_all_drafts_are_verified():
    """It would say 0 s while each step takes twice its time."""
    speculator = Speculator(2, MIB, shares_text=False, always=True)
    mine = request("a", [1, 2, 3, 4, 5, 6, 1, 2], [3])
    for _ in range(50):
        (drafts,) = speculator.draft([mine], 99)
        speculator.verified(mine, len(drafts), 0)
        speculator.ended(1, 1, 2.0)
        mine.output_ids += [1, 2, 3]
    assert "speculation_saved_seconds" not in speculator.totals()


def test_counters_have_the_place_of_drafts_that_were_right():
    speculator = Speculator(3, MIB, shares_text=False, always=True)
    mine = request("a", [1, 2, 3, 4, 5, 6, 1, 2], [3])
    assert speculator.draft([mine], 99) == [(4, 5, 6)]
    speculator.verified(mine, 3, 2)
    totals = speculator.totals()
    assert [totals[f"num_accepted_at_{place}"] for place in range(3)] == [1, 1, 0]
    assert (totals["num_drafts_own_right"], totals["num_drafts_own_wrong"]) == (2, 1)
