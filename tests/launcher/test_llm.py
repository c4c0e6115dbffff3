"""LLM: the bridge without HTTP. Ranks without torch; the real ones are in demo/test_end_to_end.py."""

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from moe_serve.attention_dp.constraint import Constraint, FormStart
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config, model_dir
from moe_serve.errors import ConfigError, MoeServeError, RequestError
from moe_serve.launcher import background, local
from moe_serve.launcher.llm import LLM, Output, with_overrides
from moe_serve.launcher.local import Death, Replacements, Restarts
from moe_serve.server.requests.open_request import UnavailableError
from tests.conftest import _descendants
from tests.launcher.running import eventually, fake_ranks, gone
from tests.server.served import demo_tokenizer, in_event_loop, serving


@pytest.fixture(scope="module", autouse=True)
def _fake() -> Iterator[None]:
    with fake_ranks():
        yield


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranks end when they lose a peer; fake ones are not waited for."""
    monkeypatch.setattr(background, "_LOSS_GRACE_S", 0.1)


def fake_llm(*overrides: str) -> LLM:
    return LLM.from_config(load_config(overrides=["parallel.num_ranks=2", *overrides]))


@pytest.fixture(scope="module")
def llm():
    with fake_llm() as made:
        yield made


@pytest.fixture(scope="module")
def small():
    """An LLM that holds two requests."""
    with fake_llm("engine.max_running_requests=1", "engine.max_queued_requests=1") as made:
        yield made


def greedy(num_tokens: int, seed: int = 10, **fields) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, seed=seed, **fields)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    outputs = llm.generate([[5], [6, 7], [8]], [greedy(n, seed) for n, seed in ((3, 100), (1, 7), (2, 50))])
    assert [output.token_ids for output in outputs] == [[102, 103, 104], [9], [52, 53]]
    assert [output.prompt_token_ids for output in outputs] == [[5], [6, 7], [8]]
    assert {output.finish_reason for output in outputs} == {"length"}


def test_text_is_tokenized_and_back(llm):
    tokenizer = demo_tokenizer()
    (output,) = llm.generate(["def f"], greedy(4))
    assert output.prompt_token_ids == tokenizer.encode("def f")
    assert output.text == tokenizer.decode([12, 13, 14, 15])


def test_more_prompts_than_the_ranks_hold_are_fed_one_by_one(small):
    outputs = small.generate([[2 + i] for i in range(20)], [greedy(3, seed) for seed in range(20)])
    assert [output.token_ids[0] for output in outputs] == [2 + seed for seed in range(20)]


def test_log_probabilities_of_output_and_prompt_come_by_token_id(llm):
    asked = greedy(3, logprobs=1, prompt_logprobs=2, prompt_logprobs_start=1, logprob_token_ids=[40])
    (output,) = llm.generate([[5, 6, 7]], asked)
    assert output.token_ids == [12, 13, 14]
    assert [list(at) for at in output.logprobs] == [[12, 40], [13, 40], [14, 40]]
    assert [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)] == [
        -12 / 8, -13 / 8, -14 / 8,
    ]  # fmt: skip
    assert output.cumulative_logprob == -39 / 8
    first, at_7 = output.prompt_logprobs
    assert first is None
    assert {token: (each.logprob, each.rank) for token, each in at_7.items()} == {
        7: (-7 / 8, 1), 8: (-1.0, 2), 40: (-5.0, None),
    }  # fmt: skip
    (plain,) = llm.generate([[5, 6, 7]], greedy(3))
    assert (plain.logprobs, plain.prompt_logprobs, plain.cumulative_logprob) == (None, None, None)
    with pytest.raises(RequestError, match="at most 20"):
        llm.generate([[5]], greedy(3, logprobs=21))


def test_the_experts_of_its_tokens_come_as_an_array(llm):
    (output,) = llm.generate([[5, 6, 7]], greedy(3, return_routed_experts=True))
    assert output.routed_experts.tolist() == [[[position, 1], [2, 3]] for position in range(5)]
    (plain,) = llm.generate([[5, 6, 7]], greedy(3))
    assert plain.routed_experts is None


def test_an_embedding_comes_as_an_array_of_length_1(llm):
    (output,) = llm.generate([[5, 6, 7]], greedy(1, return_embedding=True))
    assert output.embedding.tolist() == pytest.approx([3 / 153**0.5, 12 / 153**0.5])
    (plain,) = llm.generate([[5, 6, 7]], greedy(1))
    assert plain.embedding is None


@in_event_loop
async def test_several_outputs_of_a_prompt_are_those_that_http_gives(llm):
    several, best = {"n": 3}, {"n": 2, "best_of": 4}
    outputs = await asyncio.to_thread(llm.generate, [[5, 6], [7]], [greedy(3, 7, **several), greedy(3, 8, **best)])
    async with serving() as served:
        answers = []
        for ids, seed, counts in (([5, 6], 7, several), ([7], 8, best)):
            params = {"max_new_tokens": 3, "sampling_seed": seed, **counts}
            answers += (await served.generate(input_ids=ids, sampling_params=params)).json()
    assert [output.token_ids for output in outputs] == [answer["output_ids"] for answer in answers]
    assert [output.prompt_token_ids for output in outputs] == [[5, 6]] * 3 + [[7]] * 2
    assert len({tuple(output.token_ids) for output in outputs}) == 5
    assert outputs[0].token_ids == (await asyncio.to_thread(llm.generate, [[5, 6]], greedy(3, 7)))[0].token_ids
    assert all(output.logprobs is None for output in outputs), "nobody asked for them"
    assert len(llm._bridge.book) == 0


def test_several_outputs_are_streamed_by_their_place_in_the_list(llm):
    params = [greedy(3, 7, n=2, logprobs=0, prompt_logprobs=0), greedy(3, 8)]
    whole = llm.generate([[5, 6], [7]], params)
    last = dict(llm.stream([[5, 6], [7]], params))
    for index, output in enumerate(whole):
        assert (last[index].token_ids, last[index].logprobs) == (output.token_ids, output.logprobs)
    assert [len(output.prompt_logprobs or ()) for output in whole] == [2, 2, 0], "each has those of the prompt"
    with pytest.raises(RequestError, match=r"best_of is larger than n.*call generate"):
        next(llm.stream([[5]], greedy(3, best_of=2)))
    with pytest.raises(RequestError, match=r"prompts\[0\]: best_of is 2 but n is 3"):
        llm.generate([[5]], greedy(3, n=3, best_of=2))


def test_more_outputs_than_the_ranks_hold_are_fed_one_by_one(small):
    (first, *_) = outputs = small.generate([[5]], greedy(3, n=20, prompt_logprobs=0))
    assert len({tuple(output.token_ids) for output in outputs}) == 20
    assert first.token_ids == [12, 13, 14]


def test_a_stream_shows_growing_outputs(llm):
    seen = list(llm.stream([[5], [6]], greedy(200)))  # 50 rounds of the ranks: some are seen apart
    for index in (0, 1):
        outputs = [output for i, output in seen if i == index]
        assert len(outputs) > 1
        assert outputs[-1].token_ids == list(range(12, 212))
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]


def test_leaving_a_stream_early_frees_the_request(llm):
    for _ in llm.stream([[5]], greedy(200)):
        break
    assert eventually(lambda: len(llm._bridge.book) == 0)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "prompts, params, words",
    [
        ("def f", None, "put it into a list"),
        ([1, 2], None, "put it into a list"),
        ([[1]], [greedy(1), greedy(1)], "2 params for 1 prompts"),
        ([[1], [5000]], None, r"prompts\[1\]: .*5000"),
        ([[]], None, r"prompts\[0\]: .*no tokens"),
        ([[1]], SamplingParams(top_p=2), "top_p"),
        ([[1]], SamplingParams(constraint=Constraint("regex", "x", FormStart((5,)))), "tuples of token ids"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(llm, prompts, params, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)
    assert llm.generate([[1]], greedy(1))[0].token_ids == [12]


@pytest.mark.parametrize(
    "prompts, stop, words",
    [
        (["fine", "caf\udce9"], (), r"prompts\[1\]: text has the lone surrogate U\+DCE9 at character 3.*encoding"),
        (["fine"], ("\ud800",), r"prompts\[0\]: stop has the lone surrogate U\+D800 at character 0"),
        ([None], (), r"prompts\[0\]: None is no prompt; give text or token ids"),
        ([[1, "a"]], (), r"prompts\[0\]: \[1, 'a'\] is no prompt"),
        ([[1, 2.5]], (), r"prompts\[0\]: \[1, 2.5\] is no prompt"),
        (["w" * 100_000], (), r"prompts\[0\]: text has 100000 characters"),
    ],
    ids=["surrogate", "stop", "none", "letters", "fraction", "long"],
)
def test_what_is_no_prompt_is_a_request_error_that_names_it(llm, prompts, stop, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, SamplingParams(stop=stop))
    assert len(llm._bridge.book) == 0


def test_ids_of_numpy_are_ids(llm):
    (output,) = llm.generate([np.array([5, 6])], greedy(1))
    assert output.prompt_token_ids == [5, 6]


def test_a_folder_without_a_tokenizer_serves_ids_and_says_so(tmp_path, caplog):
    folder = model_dir(load_config().model)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, tmp_path)
    with fake_llm(f"model.path={tmp_path}", "model.load_format=dummy") as bare:
        (output,) = bare.generate([[5]], greedy(2))
        assert (output.text, output.token_ids) == ("", [12, 13])
        with pytest.raises(RequestError, match=r"prompts\[0\]: text needs a tokenizer.*no tokenizer\.json.*input_ids"):
            bare.generate(["text"])
        with pytest.raises(RequestError, match=r"prompts\[0\]: stop needs a tokenizer"):
            bare.generate([[5]], greedy(2, stop=("a",)))
    lines = [record.getMessage() for record in caplog.records if "tokenizer" in record.getMessage()]
    assert lines == [f"{tmp_path} has no tokenizer.json: only token ids are served; put it there to serve text"]


def test_a_list_of_stop_strings_is_taken_too(llm):
    (output,) = llm.generate([[5]], SamplingParams(max_new_tokens=3, seed=10, stop=["never there"]))
    assert len(output.token_ids) == 3


def test_it_can_be_used_from_several_threads(llm):
    found = {}

    def one(seed: int) -> None:
        found[seed] = llm.generate([[5]], greedy(5, seed))[0].token_ids[0]

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: 2 + seed for seed in range(8)}


def test_a_call_that_finds_no_room_waits_until_another_leaves_some(small):
    other = small.stream([[5]] * 20, greedy(200))
    next(other)  # holds all places, and is not read on
    found = []
    call = threading.Thread(target=lambda: found.append(small.generate([[5]], greedy(3))), daemon=True)
    call.start()
    call.join(60)
    other.close()
    assert found
    assert found[0][0].token_ids == [12, 13, 14]


@in_event_loop
async def test_a_length_that_does_not_fit_is_refused_in_the_words_of_http(llm):
    limits = llm._bridge.limits
    num_free = min(limits.max_model_len, limits.max_prompt_len + 2) - 2
    async with serving() as served:
        params = {"max_new_tokens": num_free + 1}
        answer = await served.generate(input_ids=[5, 6], sampling_params=params)
    assert answer.status_code == 400
    assert f"ask for at most {num_free}" in answer.json()["error"]["message"]
    with pytest.raises(RequestError) as refused:
        await asyncio.to_thread(llm.generate, [[5], [5, 6]], [greedy(1), greedy(num_free + 1)])
    assert str(refused.value) == f"prompts[1]: {answer.json()['error']['message']}"
    assert refused.value.field == "max_new_tokens"


def test_a_length_that_was_not_asked_for_is_what_fits(llm):
    limits = llm._bridge.limits
    longest = min(limits.max_prompt_len, limits.max_model_len - 1)
    room = min(limits.max_model_len, limits.max_prompt_len + 2) - longest
    for params in (SamplingParams(seed=10), None):
        (output,) = llm.generate([[5] * longest], params)
        assert len(output.token_ids) == room
    (output,) = llm.generate([[5]], SamplingParams(seed=10))
    assert len(output.token_ids) == 128
    (output,) = llm.generate([[5]], SamplingParams(seed=10, min_new_tokens=150))
    assert len(output.token_ids) == 150


def test_numbers_of_numpy_are_numbers(llm):
    params = SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.9), max_new_tokens=3, seed=10)
    assert llm.generate([[5]], params)[0].token_ids == [12, 13, 14]
    assert len(llm._bridge.book) == 0


def test_a_lost_rank_raises_its_name_where_it_is_not_to_be_started_again():
    with fake_llm("launcher.max_restarts=0") as doomed:
        victim = doomed._ranks.ranks.children[1].pid
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=rf"rank 1 \(process {victim}\) was killed by SIGKILL"):
            doomed.generate([[5]] * 2000, greedy(200))
        pids = [child.pid for child in doomed._ranks.ranks.children]
    assert gone(pids)


def test_lost_ranks_are_started_again_and_close_leaves_nothing():
    with fake_llm() as llm:
        before = [child.pid for child in llm._ranks.ranks.children]
        outputs = llm.stream([[5]] * 40, greedy(100))
        next(outputs)
        os.kill(before[1], signal.SIGKILL)
        last = dict(outputs)
        assert [last[index].token_ids for index in range(40)] == [[2 + 10 + i for i in range(100)]] * 40
        after = [child.pid for child in llm._ranks.ranks.children]
        assert not set(before) & set(after)
    assert gone(before + after)


def test_ranks_that_end_at_every_start_end_the_calls_with_the_report(monkeypatch):
    monkeypatch.setenv("FAKE_RANK", "all:slow,1:dies when started again")
    monkeypatch.setattr(local, "_FIRST_PAUSE_S", 0.1)
    with fake_llm("launcher.max_restarts=2") as llm:
        outputs = llm.stream([[5]] * 4, greedy(100))
        next(outputs)
        os.kill(llm._ranks.ranks.children[1].pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"(?s)SIGABRT.*the ranks were lost 3 times within 600 s"):
            dict(outputs)


class Processes:
    """In the place of LocalRanks: what is left of a lost process takes a while to end."""

    def __init__(self):
        self.seen = threading.Event()
        self.started: list[tuple[int, int]] = []  # (rank, in which thread)
        self.was_seen = False

    def finish(self, rank: int) -> None:
        self.was_seen = self.seen.wait(60.0)

    def replace(self, rank: int) -> None:
        self.started.append((rank, threading.get_ident()))


def lose(llm: LLM, monkeypatch: pytest.MonkeyPatch, processes: Processes, max_restarts: int) -> None:
    """Tells the LLM that rank 1 was lost, the way its watch does."""
    config = load_config(overrides=[f"launcher.max_restarts={max_restarts}"])
    monkeypatch.setattr(llm._ranks, "_replacements", Replacements(config, Restarts(config.launcher)))

    async def tell() -> None:
        asyncio.get_running_loop().call_later(0.01, processes.seen.set)
        await llm._ranks._replace(Death(1, 7, -9, ()), processes)

    llm._ranks.call(tell())


def test_streams_go_on_while_what_is_left_of_a_lost_rank_ends(llm, monkeypatch):
    processes = Processes()
    lose(llm, monkeypatch, processes, max_restarts=2)
    assert processes.was_seen
    # The kernel takes the thread that starts it for its parent, and this one stays.
    assert processes.started == [(1, llm._ranks._thread.ident)]


def test_a_rank_that_is_lost_too_often_is_left_out_with_the_line_of_the_launcher(llm, monkeypatch, caplog):
    processes = Processes()
    lose(llm, monkeypatch, processes, max_restarts=0)
    assert not processes.started
    assert "rank 1 is not started again: it was lost too often; the others serve on" in caplog.text


def test_closing_ends_the_ranks_and_closing_again_does_nothing():
    made = fake_llm()
    pids = [child.pid for child in made._ranks.ranks.children]
    made.close()
    made.close()
    assert gone(pids)


def test_ranks_that_cannot_start_raise_their_reason(monkeypatch):
    monkeypatch.setenv("FAKE_RANK", "1:reports why")
    before = _descendants(os.getpid())
    with pytest.raises(MoeServeError, match=r"rank 1.*cache\.memory_gib 0\.001 holds 1 block"):
        fake_llm()
    assert eventually(lambda: set(_descendants(os.getpid())) <= set(before))


def test_overrides_are_sections_or_names_of_single_settings():
    found = with_overrides({"model": {"path": "m"}}, {"engine": {"row_tile": 8}, "max_running_requests": 3})
    assert found == {"model": {"path": "m"}, "engine": {"row_tile": 8, "max_running_requests": 3}}
    assert with_overrides({}, {"speculative_config": {"method": "mtp"}}) == {"speculation": {"method": "mtp"}}
    assert with_overrides({"engine": {"row_tile": 8}}, {"speculative_config": None, "engine": None}) == (
        {"engine": {"row_tile": 8}, "speculation": {}}
    ), "vLLM's default, which scripts pass on"
    with pytest.raises(ConfigError, match="did you mean 'numerics'"):
        with_overrides({}, {"numeric": "fast"})
    with pytest.raises(ConfigError, match=r"LLM\(tensor_parallel_size=...\) asks for tensor .* by num_ranks"):
        with_overrides({}, {"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="is a section"):
        with_overrides({}, {"engine": 3})


def test_names_of_the_package_are_the_real_ones():
    import moe_serve

    assert moe_serve.LLM is LLM
    assert moe_serve.SamplingParams is SamplingParams
    assert moe_serve.Output is Output
