"""A message of `serve` names the flag of each setting that has one."""

import pytest
import yaml
from typer.testing import CliRunner

from moe_serve.config import ServeConfig
from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.app import app
from moe_serve.launcher.cli.options import flags, with_flags


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "raise cache.block_size; cache.block_size is 0",
            "raise cache.block_size (--page-size); cache.block_size is 0",
        ),
        ("no such thing: cache.num_blocks", "no such thing: cache.num_blocks"),
        ("set eplb.mode: dynamic.", "set eplb.mode (--enable-eplb): dynamic."),
        ("server.port (--port) is taken", "server.port (--port) is taken"),
        (
            "configuration: engine: max_running_requests is 5 but max_batch_tokens is 4",
            "configuration: engine: max_running_requests (--max-running-requests) is 5 but max_batch_tokens "
            "(--chunked-prefill-size) is 4",
        ),
        ("the file a.model.path is not there", "the file a.model.path is not there"),
        ("max_running_requests alone could be a request's", "max_running_requests alone could be a request's"),
        ("", ""),
    ],
)
def test_a_setting_is_followed_by_its_flag_once(message: str, said: str) -> None:
    assert with_flags(message) == said


def test_every_flag_is_an_option_of_serve_and_every_setting_exists() -> None:
    shown = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1"}).invoke(app, ["serve", "--help"]).output
    settings = ServeConfig().model_dump()
    for setting, flag in flags().items():
        section, _, key = setting.partition(".")
        assert key in settings[section] or key == "num_speculative_tokens", "of the layer, or of all drafts"
        assert flag in shown, flag


def test_the_printed_configuration_is_a_file_for_the_next_start(tmp_path) -> None:
    runner = CliRunner()
    first = runner.invoke(app, ["serve", "--max-running-requests", "7", "--print-config"])
    assert first.exit_code == 0
    file = tmp_path / "own.yaml"
    file.write_text(first.stdout)
    assert runner.invoke(app, ["serve", "--config", str(file), "--print-config"]).stdout == first.stdout
    assert "max_running_requests: 7" in first.stdout


def test_settings_that_differ_from_their_defaults_are_told() -> None:
    assert ServeConfig().changed() == []
    config = ServeConfig.model_validate({"engine": {"max_running_requests": 7}, "model": {"path": "/m"}})
    assert config.changed() == ['model.path="/m"', "engine.max_running_requests=7"]


TWO_HOSTS = ["--prefill-ranks", "2", "--decode-ranks", "1", "--nnodes", "2", "--dist-init-addr", "10.0.0.1:20000"]
THREE_HOSTS = [*TWO_HOSTS, "--nnodes", "3", "--decode-ranks", "2"]


@pytest.mark.parametrize(
    ("role", "hosts", "node_rank"),
    [
        ("decode", TWO_HOSTS, 0),
        ("prefill", TWO_HOSTS, 1),
        ("prefill", THREE_HOSTS, 2),
        ("decode", [*THREE_HOSTS, "--node-rank", "1"], 1),
        ("decode", [*THREE_HOSTS, "--set", "launcher.node_rank=1"], 1),
        ("null", [*TWO_HOSTS, "--node-rank", "1"], 1),
    ],
)
def test_the_role_of_a_host_by_sglangs_name_is_its_node_rank(role: str, hosts: list[str], node_rank: int) -> None:
    said = CliRunner().invoke(app, ["serve", "--print-config", *hosts, "--disaggregation-mode", role])
    assert said.exit_code == 0
    assert ServeConfig.model_validate(yaml.safe_load(said.stdout)).launcher.node_rank == node_rank


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--decode-ranks", "2"], "there are no prefill ranks; give --prefill-ranks as well"),
        (["--decode-ranks", "0", "--prefill-ranks", "1"], "with its first token alone; give at least 1"),
        (["--disaggregation-mode", "prefill"], "leave it out, and give --prefill-ranks and --decode-ranks"),
        ([*TWO_HOSTS, "--disaggregation-mode", "both"], "is 'both', expected prefill, decode or null"),
        ([*TWO_HOSTS, "--disaggregation-mode", "prefill", "--node-rank", "0"], "are on node rank 1; give one of"),
        ([*TWO_HOSTS, "--disaggregation-mode=prefill", "--set=launcher.node_rank=0"], "--node-rank is 0, but these"),
        (
            [*THREE_HOSTS, "--disaggregation-mode", "decode"],
            "--node-rank is not given, but these ranks are on node rank 0, 1;",
        ),
        (["--set=cache.host_gb=0"], "leave it out for no such tier, or give it some GB"),
        (["--set=cache.disk_gb=0", "--set=cache.path=pages"], "leave it out for no such tier, or give it some GB"),
    ],
)
def test_roles_and_tiers_that_are_not_whole_are_refused_at_start_with_the_fix(flags: list[str], words: str) -> None:
    runner = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1"})
    said = runner.invoke(app, ["serve", "--print-config", *flags])
    assert isinstance(said.exception, ConfigError)
    assert words in str(said.exception)
