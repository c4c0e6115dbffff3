"""How far `moe-serve simulate` and the cost model are from published figures, and that the document says so."""

from pathlib import Path

import pytest

from moe_serve.eplb.cost.profile_files import load_engine
from tests.eplb import published

SERVING = published.figures("serving", "held out")
FITTED = published.figures("serving", "fitted")
GOAL = 0.15
TABLE_OF_GAINS = published.TABLE["eplb_gain"]
# gb200-decode-june: the conditions of gb200-decode three months before, and no engine with one factor meets both.
# ant-h20-prefill: a factor that was fitted where kernels are seven times as short. The others: one expert a rank, so
# that the assumed load decides.
CLOUDMATRIX = {f"cloudmatrix-decode-{batch}": 0.25 for batch in (96, 8)}
OUTSIDE = {"gb200-decode-june": 0.20, "ant-h20-prefill": 0.24, **CLOUDMATRIX}


@pytest.mark.parametrize("figure", SERVING, ids=lambda figure: figure["id"])
def test_simulate_predicts_a_figure_that_nothing_was_fitted_on(figure: dict) -> None:
    off = published.error(figure)
    print(f"{figure['id']}: {published.rate(figure):,.0f} for {figure['tokens_per_s']:,} tokens/s, {off:+.1%}")
    assert abs(off) <= OUTSIDE.get(figure["id"], GOAL)


def test_the_load_explains_decode_with_one_expert_a_rank() -> None:
    """Were routing balanced, the larger batch would be right; what load these runs had is not published."""
    off = {
        f["id"]: published.error({**f, "balanced": True}) for f in SERVING if f["id"].startswith("cloudmatrix-decode")
    }
    print(off)
    assert abs(off.pop("cloudmatrix-decode-8")) < 0.21
    assert abs(off.pop("cloudmatrix-decode-96")) < 0.06
    assert not off


def test_whole_prompts_and_the_tail_of_a_run_explain_a_quarter_of_what_sglangs_factor_misses_of_tensorrt_llm() -> None:
    """All steps alike, all batches full, and SGLang's factor: 32 % too much on H200, 8 % of it without the factor."""
    (figure,) = (f for f in FITTED if f["id"] == "trtllm-h200")
    alike = published.rate({**figure, "engine": "SGLang", "utilisation": 1}) / figure["tokens_per_s"]
    assert alike == pytest.approx(1.32, abs=0.01)
    factors = load_engine("TensorRT-LLM").step_factor / load_engine("SGLang").step_factor
    assert alike / factors == pytest.approx(1.08, abs=0.01)


@pytest.mark.parametrize("figure", FITTED, ids=lambda figure: figure["id"])
def test_fitted_numbers_meet_the_figure_that_they_were_fitted_on(figure: dict) -> None:
    assert published.error(figure) == pytest.approx(0, abs=0.01), figure["fits"]


def test_overlap_pays_from_where_sglang_found_that_it_pays() -> None:
    """Between 64 and 128 tokens; 27 % are lost at 32. At 256 the model gains 10 points more than SGLang did."""
    for figure in published.figures("overlap_gain", "held out"):
        gain = published.overlap_gain(figure["tokens_per_rank"])
        print(f"overlap at {figure['tokens_per_rank']} tokens: {gain:+.1%}, published {figure['gain']:+.1%}")
        assert gain == pytest.approx(figure["gain"], abs=0.11)
    assert published.overlap_gain(64) < 0 < published.overlap_gain(128)


def test_gain_by_eplb_is_predicted_within_a_third_of_itself() -> None:
    fitted, *held_out = TABLE_OF_GAINS
    assert off_by(fitted) == pytest.approx(0, abs=0.03)
    assert [gain["use"] for gain in held_out] == ["held out"] * 4
    print([off_by(gain) for gain in held_out])
    assert all(abs(off_by(gain)) < 1 / 3 for gain in held_out)


def test_gain_on_eight_ranks_depends_on_the_draw_of_the_load_but_not_by_much() -> None:
    """Experts of one rank weigh by chance; over four draws the gains of MI355X stay within a third on average."""
    for gain in TABLE_OF_GAINS[2:]:
        found = [off_by(gain, seed) for seed in range(4)]
        print(gain, found)
        assert abs(sum(found) / 4) < 1 / 3
        assert max(found) - min(found) < 0.2


def off_by(gain: dict, seed: int = 0) -> float:
    """Returns the predicted gain over the published one - 1."""
    return (published.eplb_gain(gain, seed) - 1) / (gain["gain"] - 1) - 1


def test_the_assumed_load_is_as_uneven_as_one_that_was_published() -> None:
    for figure in published.figures("imbalance", "held out"):
        assert published.imbalance(figure) == pytest.approx(figure["value"], rel=0.1)


def test_every_fitted_number_has_one_figure_of_its_own() -> None:
    assert len({figure["fits"] for figure in FITTED}) == len(FITTED) == 8
    assert len(SERVING) == 27
    assert len(OUTSIDE) < len(SERVING) / 5, "four fifths are within the goal"


def test_every_figure_names_a_known_source_and_a_left_out_one_says_why() -> None:
    for kind in ("low_latency", "normal", "grouped_gemm", "serving", "overlap_gain", "eplb_gain", "imbalance"):
        uses = [len(published.figures(kind, use)) for use in ("fitted", "held out", "not compared")]
        assert sum(uses) == len(published.TABLE[kind])
        assert all(figure["source"] in published.TABLE["sources"] for figure in published.TABLE[kind])
    assert all(figure["why"] for figure in published.figures("serving", "not compared"))


def test_numbers_of_kernels_are_the_best_ones_for_the_figures_they_were_fitted_on() -> None:
    fitted = ("gemm_efficiency", "hbm_efficiency", "nic_efficiency_low_latency", "dispatch_latency_s",
              "combine_latency_s", "nic_efficiency_normal")  # fmt: skip

    def squares(hardware: published.HardwareProfile) -> float:
        return sum(off**2 for off in published.kernel_errors("fitted", hardware).values())

    best = squares(published.H800)
    for name in fitted:
        for factor in (0.98, 1.02):
            assert squares(published.H800.scaled(**{name: factor})) > best, name


def test_the_document_has_the_errors_of_today() -> None:
    """`python -m tests.eplb.published` prints the tables anew."""
    page = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")
    missing = [line for line in published.tables().splitlines() if line not in page]
    assert not missing
