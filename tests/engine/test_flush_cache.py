"""After a flush no prompt finds its beginning in the cache; while requests are open nothing is flushed."""

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.protocol.messages import FlushCache, Submit
from tests.engine.offline import Script, _serve_on_rank
from tests.ranks import run_ranks

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0)
PROMPT = list(range(3, 43))
IDLE = 10**9  # polls: a message arrives when the engine sleeps


def submit(name: str) -> Submit:
    return Submit(name, 0, PROMPT, PARAMS, seed=0)


def test_after_a_flush_a_prompt_is_computed_anew_with_the_same_tokens(tmp_path) -> None:
    script: Script = [
        (0, submit("first")),
        (0, FlushCache(1)),
        (IDLE, submit("cached")),
        (IDLE, FlushCache(2)),
        (IDLE, submit("anew")),
        (IDLE, FlushCache(3)),
        (IDLE, FlushCache(4)),
    ]
    overrides = ["parallel.num_ranks=1", "cache.memory_gib=0.05", "engine.heartbeat_s=0.02"]
    (served,) = run_ranks(1, _serve_on_rank, [script], overrides, str(tmp_path), None)
    assert served.tokens["first"] == served.tokens["cached"] == served.tokens["anew"]
    assert served.stats["num_cached_prompt_tokens"] == 32, "of the second prompt; of the third none"
    assert [(answer.call_id, answer.ok) for answer in served.answers] == [(1, False), (2, True), (3, True), (4, True)]
    assert served.answers[0].text == "1 requests are open; flush the cache when they have ended"
    assert [answer.text for answer in served.answers[1:]] == ["2 blocks", "2 blocks", "0 blocks"]
