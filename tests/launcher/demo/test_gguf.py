"""The demo model as a GGUF file: examined, served by two ranks, its answers those of its folder."""

from pathlib import Path

import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.config import ModelConfig, load_config, model_dir, served_name
from moe_serve.launcher.examination.check import examine
from moe_serve.launcher.facts import facts_of, first_difference, front_end_facts
from tests.models.gguf_checkpoint import Kind, matrices_in, write_bpe, write_gguf

DEMO = model_dir(ModelConfig())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (DEMO / "chat_template.jinja").read_text()
    vocabulary = write_bpe(DEMO / "tokenizer.json", "gpt-2", bos=0, eos=1, template=template)
    return write_gguf(DEMO, tmp_path_factory.mktemp("gguf") / "demo-model.gguf", matrices_in(Kind.BF16), vocabulary)


def test_answers_are_those_of_the_folder(demo: Path) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
    prompts = ["def add(a, b):", "import os\n"]
    answers = []
    for path in (demo, DEMO):
        with LLM(str(path)) as llm:
            answers.append([(each.text, each.token_ids, each.logprobs) for each in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_check_describes_it_and_its_memory_is_that_of_the_folder(demo: Path) -> None:
    free = ["server.port=0", "server.worker_port=0", "parallel.device=cpu"]
    of_file, of_folder = (examine(load_config(overrides=[*free, f"model.path={path}"])) for path in (demo, DEMO))
    assert of_file.problems == []
    of_routers = 4 * 32 * 192 * 2  # which files have in float32
    dense, *others = ((each.name, each.num_bytes) for each in of_folder.memory)
    assert [(each.name, each.num_bytes) for each in of_file.memory] == [(dense[0], dense[1] + of_routers), *others]
    assert served_name(ModelConfig(path=str(demo))) == "demo-model"


def test_ranks_and_front_ends_compare_header_and_values(demo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = demo.read_bytes()
    facts = []
    for changed in (data, data[:-1] + b"x", data.replace(b"<|eos|>", b"<|end|>", 1)):
        other.write_bytes(changed)
        facts.append(facts_of(load_config(overrides=[f"model.path={other}"]), "cpu"))
    assert first_difference([facts[0], facts[0]]) is None
    assert "the files of weights: their values" in str(first_difference([facts[0], facts[1]]))
    assert "the header of the GGUF file" in str(first_difference([facts[0], facts[2]]))
    assert list(front_end_facts(load_config(overrides=[f"model.path={other}"]))) == [
        "version", "the header of the GGUF file",
    ]  # fmt: skip
