"""`/generate` bodies: SGLang's forms are accepted, everything else is refused with one error that names the field."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.attention_dp.sampling_params import MAX_SAMPLES
from moe_serve.errors import RequestError
from moe_serve.server.api.native import parse_generate
from moe_serve.server.edge.errors import error_of, json_bytes


def parse(**fields):
    return parse_generate(json.dumps(fields).encode(), max_prompts=8)


def params(**fields) -> SamplingParams:
    return parse(text="x", sampling_params=fields).prompts[0].params


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_a_batch_that_never_fits_is_refused(field):
    prompt = "a" if field == "text" else [5]
    assert len(parse(**{field: [prompt] * 8}).prompts) == 8
    with pytest.raises(RequestError, match=f"{field} has 9 prompts but at most 8 requests") as caught:
        parse(**{field: [prompt] * 9})
    assert caught.value.field == field


def test_cache_salt_and_extra_key_are_taken_alone_and_together():
    assert parse(text="x").salt == ""
    assert parse(text="x", cache_salt="a").salt == parse(text="x", extra_key="a").salt == "a"
    both = parse(text="x", cache_salt="a", extra_key="b").salt
    assert both not in ("a", "b", parse(text="x", cache_salt="b", extra_key="a").salt)


def test_a_field_name_of_a_megabyte_is_refused_in_short():
    with pytest.raises(RequestError, match="is not a field") as caught:
        parse(text="a", **{"x" * 2**20: 1})
    assert len(str(caught.value)) < 1000


def test_a_long_single_prompt_is_not_a_batch():
    assert parse(input_ids=[5] * 9).prompts[0].token_ids == [5] * 9


def test_a_single_text_has_sglangs_defaults():
    request = parse(text="hello")
    (prompt,) = request.prompts
    assert (prompt.text, prompt.token_ids) == ("hello", None)
    assert prompt.params == SamplingParams(max_new_tokens=128, temperature=1.0, top_k=-1, top_p=1.0)
    assert not request.is_batch
    assert not request.stream


def test_sampling_parameters_arrive():
    taken = params(
        max_new_tokens=5, temperature=0, top_p=0.5, top_k=3, min_p=0.1, stop="a", stop_token_ids=[4], sampling_seed=9
    )
    assert taken == SamplingParams(
        max_new_tokens=5, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, stop=("a",), stop_token_ids=(4,), seed=9
    )
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -1.0, "repetition_penalty": 1.1}
    assert params(**penalties, logit_bias={"5": 1, "0": -2.5}) == SamplingParams(
        **penalties, logit_bias={5: 1.0, 0: -2.5}
    )
    assert params(stop_regex=r"\d+").stop_regex == (r"\d+",)
    assert params(stop_regex="") == params(stop_regex=[]) == SamplingParams()
    words = params(bad_words="a", bad_words_ids=[[5, 6], [7]], allowed_token_ids=[1, 2])
    assert words == SamplingParams(bad_words=("a",), bad_words_ids=((5, 6), (7,)), allowed_token_ids=(1, 2))
    assert params(stop=["a", "b"], ignore_eos=True, skip_special_tokens=False).stop == ("a", "b")


def test_a_batch_shares_parameters_or_brings_one_for_each():
    shared = parse(input_ids=[[1, 2], [3]], sampling_params={"max_new_tokens": 2}, rid=["a", "b"])
    assert [prompt.token_ids for prompt in shared.prompts] == [[1, 2], [3]]
    assert [prompt.params.max_new_tokens for prompt in shared.prompts] == [2, 2]
    assert [prompt.rid for prompt in shared.prompts] == ["a", "b"]
    each = parse(text=["a", "b"], sampling_params=[{"max_new_tokens": 1}, None])
    assert [prompt.params.max_new_tokens for prompt in each.prompts] == [1, 128]


def test_a_batch_of_one_and_several_samples_answer_with_a_list():
    assert parse(text=["a"]).is_batch
    assert parse(input_ids=[[1]]).is_batch
    assert parse(text="a", sampling_params={"n": 2}).is_batch
    assert not parse(input_ids=[1]).is_batch


def test_null_and_neutral_values_of_unsupported_fields_pass():
    request = parse(
        text="x",
        input_ids=None,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        lora_path=None,
        image_data=None,
        bootstrap_room=None,
        sampling_params={
            "min_p": 0.0,
            "frequency_penalty": 0,
            "repetition_penalty": 1.0,
            "regex": None,
            "n": None,
            "no_stop_trim": False,
        },
    )
    assert len(request.prompts) == 1


BAD = [
    ({}, "text", "neither"),
    ({"text": "a", "input_ids": [1]}, "text", "both"),
    ({"text": 5}, "text", "is 5"),
    ({"text": []}, "text", "empty list"),
    ({"text": ["a", 3]}, "text[1]", "is 3"),
    ({"input_ids": "1 2"}, "input_ids", "list of token ids"),
    ({"input_ids": []}, "input_ids", "empty"),
    ({"input_ids": [1, True]}, "input_ids[1]", "is true"),
    ({"input_ids": [1, 2.5]}, "input_ids[1]", "is 2.5"),
    ({"input_ids": [[1], [1, "2"]]}, "input_ids[1][1]", '"2"'),
    ({"input_ids": [[1], 2]}, "input_ids[1]", "is 2"),
    ({"input_ids": [1, [2]]}, "input_ids[1]", "a list of 1"),
    ({"text": "a", "stream": "yes"}, "stream", "true or false"),
    ({"text": "a", "stream": 1}, "stream", "true or false"),
    ({"text": "a", "sampling_params": 3}, "sampling_params", "expected an object"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params", "one prompt"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "1 entries for 2 prompts"),
    ({"text": "a", "rid": ["x"]}, "rid", "single value"),
    ({"text": "a", "rid": ""}, "rid", "1 to 256"),
    ({"text": "a", "session_id": 4}, "session_id", "is 4"),
    ({"text": "a", "routed_dp_rank": -1}, "routed_dp_rank", "at least 0"),
    ({"text": "a", "return_hidden_states": True}, "return_hidden_states", "not supported"),
    ({"text": "a", "lora_path": "x"}, "lora_path", "not supported"),
    ({"text": "a", "bootstrap_room": 5}, "bootstrap_room", "to this server alone"),
    ({"text": "a", "strem": True}, "strem", "did you mean stream?"),
    ({"prompt": "a", "text": "b"}, "prompt", "did you mean text?"),
    ({"text": "a", "zzz": 1}, "zzz", "known here"),
]
BAD_PARAMS = [
    ({"max_new_tokens": -5}, "max_new_tokens", "at least 0"),
    ({"max_new_tokens": "5"}, "max_new_tokens", "whole number"),
    ({"max_new_tokens": 1.5}, "max_new_tokens", "whole number"),
    ({"max_new_tokens": True}, "max_new_tokens", "whole number"),
    ({"max_new_tokens": 10**30}, "max_new_tokens", "too large"),
    ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens", "lower min_new_tokens"),
    ({"temperature": -1}, "temperature", "0 (greedy) or more"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": 10**400}, "temperature", "too large"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"min_p": 1.5}, "min_p", "to 1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"sampling_seed": -1}, "sampling_seed", "at least 0"),
    ({"n": 0}, "n", "1 to"),
    ({"n": MAX_SAMPLES + 1}, "n", "1 to"),
    ({"stop": 5}, "stop", "a list of strings"),
    ({"stop": ["a", 5]}, "stop[1]", "a string"),
    ({"stop": [""]}, "stop[0]", "not empty"),
    ({"stop": "x" * 2000}, "stop", "1024"),
    ({"stop": ["x"] * 100}, "stop", "at most 64"),
    ({"stop_regex": ["a", 5]}, "stop_regex[1]", "a string"),
    ({"stop_regex": ["a"] * 5}, "stop_regex", "at most 4"),
    ({"stop_token_ids": 5}, "stop_token_ids", "list of token ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "at least 0"),
    ({"ignore_eos": 1}, "ignore_eos", "true or false"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "-2 to 2"),
    ({"presence_penalty": "2"}, "presence_penalty", "a number"),
    ({"bad_words": [5]}, "bad_words[0]", "a string"),
    ({"bad_words": [" "]}, "bad_words", "spaces alone"),
    ({"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
    ({"bad_words_ids": [5]}, "bad_words_ids[0]", "list of token ids"),
    ({"bad_words_ids": [[]]}, "bad_words_ids[0]", "empty list"),
    ({"bad_words_ids": [[-1]]}, "bad_words_ids[0][0]", "at least 0"),
    ({"bad_words_ids": [[1] * 65]}, "bad_words_ids[0]", "at most 64"),
    ({"allowed_token_ids": {"5": 1}}, "allowed_token_ids", "list of token ids"),
    ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids", "at most 16384"),
    ({"regex": ""}, "regex", "not empty"),
    ({"logit_bias": [5]}, "logit_bias", "an object"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "expected token ids"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "expected token ids"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "expected token ids"),
    ({"logit_bias": {"5": None}}, "logit_bias.5", "expected a number"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "-100 to 100"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"no_stop_trim": 1}, "no_stop_trim", "true or false"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "did you mean no_stop_trim?"),
    ({"max_tokens": 5}, "max_tokens", "did you mean max_new_tokens?"),
    ({"seed": 5}, "seed", "did you mean sampling_seed?"),
]


@pytest.mark.parametrize("fields, field, words", BAD, ids=[f"{field}-{words}" for _, field, words in BAD])
def test_a_bad_field_is_named_with_what_is_expected(fields, field, words):
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("fields, field, words", BAD_PARAMS, ids=[f"{field}-{words}" for _, field, words in BAD_PARAMS])
def test_a_bad_sampling_parameter_is_named_with_what_is_expected(fields, field, words):
    with pytest.raises(RequestError) as caught:
        params(**fields)
    assert caught.value.field == f"sampling_params.{field}"
    assert f"sampling_params.{field}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"{", b"[1]", b'"text"', b"null", b'{"text": NaN}', b'{"text": "\\ud800"}', b'"\xff"', b"[" * 100_000,
     b'{"text": 1e999}'],
    ids=lambda body: body[:12].decode(errors="replace"),
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_refused(body):
    with pytest.raises(RequestError, match="body"):
        parse_generate(body, max_prompts=8)


def check_parsed(body: bytes) -> None:
    """A body is a request that can be served, or refused in a sentence that can be sent."""
    refused: RequestError | None = None
    try:
        request = parse_generate(body, max_prompts=8)
    except RequestError as error:
        refused = error
    if refused is not None:
        assert str(refused)
        assert json.loads(json_bytes(error_of(refused)))["error"]["code"] == 400
        return
    assert 1 <= len(request.prompts) <= 8
    for prompt in request.prompts:
        assert (prompt.text is None) != (prompt.token_ids is None)
        prompt.params.validate()


@given(st.binary(max_size=200))
def test_any_bytes_give_a_request_or_a_request_error(body):
    check_parsed(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=st.dictionaries(
        st.sampled_from(["text", "input_ids", "sampling_params", "rid", "stream", "priority", "return_logprob"]),
        json_values,
        max_size=4,
    ),
    inner=st.dictionaries(
        st.sampled_from(["n", "stop", "temperature", "top_k", "top_p", "max_new_tokens", "stop_token_ids", "min_p"]),
        json_values,
        max_size=4,
    ),
)
def test_any_values_give_a_request_or_a_request_error(fields, inner):
    for values in (fields, {"text": "x", "sampling_params": inner}):
        check_parsed(json.dumps(values).encode())
