import re
from pathlib import Path

import pytest
import yaml

from moe_serve.config import ServeConfig, load_config, model_dir
from moe_serve.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_taken_as_it_is_written(path: Path) -> None:
    written, taken = yaml.safe_load(path.read_text()), yaml.safe_load(load_config(path).to_yaml())
    assert {name: {key: taken[name][key] for key in section} for name, section in written.items()} == written


def test_the_effective_configuration_reads_back() -> None:
    config = load_config(overrides=["engine.numerics=batch_invariant", "parallel.num_ranks=4"])
    assert ServeConfig.model_validate(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize("text", ["off", "'off'", "false"])
def test_a_mode_of_off_is_a_word_in_yaml_too(text: str) -> None:
    assert load_config(overrides=[f"eplb.mode={text}"]).eplb.mode == "off"
    assert load_config(overrides=[f"speculation.mode={text}"]).speculation.mode == "off"


def test_vllms_keys_of_speculation_mean_ours() -> None:
    ngram = load_config(overrides=['speculation={"method": "ngram", "num_speculative_tokens": 5}']).speculation
    assert (ngram.mode, ngram.max_drafts, ngram.predicted_drafts) == ("auto", 5, 1)
    mtp = load_config(overrides=['speculation={"method": "deepseek_mtp", "num_speculative_tokens": 2}']).speculation
    assert (mtp.mode, mtp.max_drafts, mtp.predicted_drafts) == ("mtp", 8, 2)
    assert load_config(overrides=["speculation.mode=glm4_moe_mtp", "speculation.num_speculative_tokens=3"]) == (
        load_config(overrides=["speculation.mode=mtp", "speculation.predicted_drafts=3"])
    )
    with pytest.raises(ConfigError, match="leave prompt_lookup_max out"):
        load_config(overrides=['speculation={"method": "ngram", "prompt_lookup_max": 4}'])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lokup", "it is 'lokup', expected off, auto, lookup or mtp; did you mean 'lookup'?"),
        ("AUTO", "it is 'AUTO', expected off, auto, lookup or mtp; did you mean 'auto'?"),
        ("Dmtp", "it is 'Dmtp', expected off, auto, lookup or mtp; did you mean 'mtp'?"),
        ("eagle3", "it is 'eagle3', expected off, auto, lookup or mtp; drafts by a model of its own (EAGLE"),
        ("[3]", "it is [3], expected off, auto, lookup or mtp; drafts by a model of its own"),
        ("x" * 99, "xxx', expected off"),
    ],
)
def test_a_mode_that_is_none_is_quoted_whole_with_its_nearest_or_with_what_drafts_come_by(
    name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=[f"speculation.mode={name}"])


def test_names_of_others_for_modes_are_taken_in_any_case() -> None:
    for name, mode in {"MTP": "mtp", "GLM4_MoE_MTP": "mtp", "NEXTN": "mtp", "Ngram": "auto"}.items():
        assert load_config(overrides=[f"speculation.mode={name}"]).speculation.mode == mode


@pytest.mark.parametrize(
    ("written", "overrides", "means"),
    [
        ("mode: mtp", ["num_speculative_tokens=3"], ("mtp", 8, 3)),
        ("num_speculative_tokens: 3", ["method=mtp"], ("mtp", 8, 3)),
        ("{mode: mtp, predicted_drafts: 2}", ["num_speculative_tokens=3"], ("mtp", 8, 3)),
        ("{method: mtp, num_speculative_tokens: 2, max_drafts: 6}", ["predicted_drafts=3"], ("mtp", 6, 3)),
        ("{method: ngram, num_speculative_tokens: 5}", ["mode=mtp"], ("mtp", 8, 5)),
        ("{method: ngram, num_speculative_tokens: 5}", ["mode=off"], ("off", 5, 1)),
        ("{method: mtp, mode: mtp}", ["num_speculative_tokens=4", "max_drafts=9"], ("mtp", 9, 4)),
    ],
)
def test_of_two_names_of_a_setting_the_later_source_wins(
    written: str, overrides: list[str], means: tuple[str, int, int], tmp_path: Path
) -> None:
    (path := tmp_path / "c.yaml").write_text(f"speculation:\n  {written}\n")
    found = load_config(path, [f"speculation.{each}" for each in overrides]).speculation
    assert (found.mode, found.max_drafts, found.predicted_drafts) == means


@pytest.mark.parametrize(
    "override", ["speculation={num_speculative_tokens: 3}", "speculation={mode: off, num_speculative_tokens: 3}"]
)
def test_drafts_asked_for_by_number_alone_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="speculation: num_speculative_tokens asks for drafts, but mode is off; give"):
        load_config(overrides=[override])


def test_an_index_of_texts_has_no_more_places_than_numbers_of_32_bits() -> None:
    assert load_config(overrides=["speculation.index_mib=16384"]).speculation.index_mib * 2**20 // 8 < 2**32
    with pytest.raises(ConfigError, match=r"index_mib.*less than or equal to 16384"):
        load_config(overrides=["speculation.index_mib=16385"])


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("engine:\n  max_running_requests: 8\n  row_tile: 8\ncache:\n")
    config = load_config(path, ["engine.max_running_requests=16"])
    assert (config.engine.max_running_requests, config.engine.row_tile) == (16, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.numeric=fast", "engine.numeric: unknown setting; did you mean 'numerics'"),
        ("engin.numerics=fast", "engin: unknown setting; did you mean 'engine'"),
        ("cache.block_size=0", r"cache.block_size: .* \(is 0\)"),
        ("engine.row_tile=3", "engine.row_tile"),
        ("parallel.pp=2", "pipeline parallelism is not supported; set pp: 1, and num_ranks to the number of ranks"),
        ("engine.max_batch_tokens=8", "raise max_batch_tokens or lower max_running_requests"),
        ("server.port=99999", "server.port"),
        ("server.port=30001", "give them different values"),
        ("dispatch.rows=slabs", "dispatch.rows: .*'packed' or 'masked'"),
        ("dispatch.deadline_s=0", r"dispatch.deadline_s: .* \(is 0\)"),
        (
            "dispatch.backend=low_latency",
            "joins several ranks, but parallel.num_ranks is 1; set dispatch.backend: auto",
        ),
        ("dispatch={backend: cuda_ipc, rows: packed}", "masked slabs only; set dispatch.rows: auto"),
        ("dispatch.rows=masked", "parallel.num_ranks is 1, and one rank's rows are packed; set dispatch.rows: auto"),
        ("eplb={mode: off, record_path: a.jsonl}", "mode is off, which records nothing; set mode: static"),
        ("numerics", "section.key=value"),
        ("engine.numerics=[", "not valid YAML"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[override])


@pytest.mark.parametrize(
    "overrides",
    [
        ["dispatch.backend=local", "parallel.num_ranks=2"],
        ["engine.heartbeat_s=90"],
        ["eplb.init_expert_location=x.json", "eplb.num_redundant_experts=2"],
        ["dispatch.backend=deepep", "engine.numerics=batch_invariant"],
        ["dispatch.combine=rank_sum", "engine.numerics=batch_invariant"],
        ["dispatch.backend=deepep", "parallel.device=cpu"],
        ["dispatch.backend=cuda_ipc", "parallel.device=cpu", "parallel.num_ranks=2"],
    ],
)
def test_settings_that_do_not_fit_together_are_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        load_config(overrides=overrides)


def test_every_mistake_gets_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["cache.block_size=0", "model.pathh=x"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n", "holds a list"), ("a: [", "not valid YAML"), (None, "cannot be read")],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.yaml.*{message}"):
        load_config(path)


def test_a_config_cannot_be_edited() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().engine.numerics = "fast"


def test_the_demo_model_is_in_the_package() -> None:
    assert (model_dir(load_config().model) / "model.safetensors").is_file()
