"""What a load is made of: lengths, arrival times, prompts that repeat, and flags that contradict each other."""

import itertools
import math
import random
import statistics

import pytest

from moe_serve.bench.load import Lengths, Load, Prompts, arrivals, slo_of
from moe_serve.config import ModelConfig, model_dir
from moe_serve.errors import ConfigError
from moe_serve.models.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "text, low, high, median",
    [("7", 7, 7, 7), ("1-1", 1, 1, 1), ("10-20", 10, 20, 15), ("lognormal:100:0.5", 1, 3200, 100)],
)
def test_lengths_keep_to_their_distribution(text, low, high, median):
    draw, lengths = random.Random(0), Lengths.parse("--input-len", text)
    drawn = [lengths.draw(draw) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.median(drawn) == pytest.approx(median, rel=0.08)


def test_a_lognormal_length_spreads_as_its_sigma_says():
    draw, lengths = random.Random(1), Lengths.parse("--input-len", "lognormal:1000:0.4")
    logs = [math.log(lengths.draw(draw)) for _ in range(4000)]
    assert statistics.stdev(logs) == pytest.approx(0.4, rel=0.08)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "9-3", "-4", "lognormal:0:1", "lognormal:5", "lognormal:5:9", "1000001"]
)
def test_lengths_that_make_no_sense_are_refused_with_what_is_expected(text):
    with pytest.raises(ConfigError, match=r"--output-len is .*tokens"):
        Lengths.parse("--output-len", text)


@pytest.mark.parametrize("burstiness, spread", [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness, spread):
    due = arrivals(Load(num_prompts=8000, request_rate=50, burstiness=burstiness), random.Random(2))
    gaps = [b - a for a, b in itertools.pairwise(due)]
    mean_s = statistics.fmean(gaps)
    assert due[0] == 0
    assert mean_s == pytest.approx(1 / 50, rel=0.08)
    assert statistics.pstdev(gaps) / mean_s == pytest.approx(spread, rel=0.1, abs=1e-6)


def test_arrivals_end_with_the_duration_or_the_number_and_a_closed_loop_has_none():
    assert arrivals(Load(num_prompts=None, duration_s=1, request_rate=10, burstiness=math.inf), random.Random(0)) == (
        pytest.approx([index / 10 for index in range(10)])
    )
    assert arrivals(Load(num_prompts=3), random.Random(0)) == [0, 0, 0]
    assert arrivals(Load(num_prompts=3, max_concurrency=2), random.Random(0)) is None


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_prompts": None, "duration_s": 1.0}, "has no end"),
        ({"domains": ("code", "verse")}, "verse"),
        ({"domains": ()}, "one or more"),
        ({"domains": ("code",), "shift_after_s": 1.0}, "two --domains"),
        ({"request_rate": 0.0}, "above 0"),
        ({"request_rate": math.nan}, "above 0"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        Load(**fields).check()


def test_an_slo_is_spelled_as_vllms():
    assert slo_of(["ttft:500 tpot:30.5"]) == {"ttft": 500, "tpot": 30.5}
    assert slo_of(["ttft:500", "e2el:9"]) == {"ttft": 500, "e2el": 9}
    assert slo_of([]) == {}
    for wrong in ("itl:3", "ttft", "ttft:-1", "ttft:x"):
        with pytest.raises(ConfigError, match="--goodput has"):
            slo_of([wrong])


def test_prompts_repeat_with_their_seed_whether_prepared_or_not():
    load = Load(num_prompts=5, input_len=Lengths(20, 60), output_len=Lengths(1, 9))
    first, second, other = Prompts(load, None), Prompts(load, None), Prompts(Load(seed=1), None)
    first.prepare()
    asks = [first.ask(number, "code") for number in range(5)]
    assert asks == [second.ask(number, "code") for number in range(5)]
    assert len({ask.prompt for ask in asks}) == 5
    assert asks[0].prompt != other.ask(0, "code").prompt
    assert asks[0].prompt != first.ask(0, "prose").prompt


def test_prompts_have_their_length_in_the_tokens_of_the_model():
    tokenizer = Tokenizer.from_folder(model_dir(ModelConfig(path="demo")))
    for num_tokens in (1, 50, 3000):
        prompt = Prompts(Load(input_len=Lengths(num_tokens, num_tokens)), tokenizer).ask(0, "prose").prompt
        assert abs(len(tokenizer.encode(prompt)) - num_tokens) <= 2


def test_the_share_of_prompts_with_a_prefix_shares_few_of_them():
    load = Load(num_prompts=200, input_len=Lengths(10, 10), prefix_len=30, prefix_share=0.6, num_prefixes=3)
    prompts = [Prompts(load, None).ask(number, "code").prompt for number in range(200)]
    long = [prompt[:120] for prompt in prompts if len(prompt) == 160]
    assert len(long) == pytest.approx(120, abs=25)
    assert len(set(long)) == 3
    assert {len(prompt) for prompt in prompts} == {40, 160}


def test_the_domain_shifts_with_time():
    load = Load(shift_after_s=2.0)
    assert [load.domain_at(at_s) for at_s in (0, 1.9, 2, 3.9, 4)] == ["code", "code", "prose", "prose", "code"]
    assert Load().domain_at(1e9) == "code"
