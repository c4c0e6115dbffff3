"""The command line: quick help, flags of other engines as settings, one line for every mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from moe_serve import __version__
from moe_serve.config import load_config, model_dir
from moe_serve.engine.model.predictor_plan import why_no_predictor
from moe_serve.errors import ConfigError
from moe_serve.launcher import preflight, system
from moe_serve.launcher.cli import app as cli
from moe_serve.launcher.cli import command as commands
from moe_serve.launcher.cli import options
from moe_serve.launcher.cli.app import add_balancer_commands
from moe_serve.launcher.cli.options import DEMO_SETTINGS, ModelOptions, ServeOptions
from moe_serve.launcher.preflight import refusal, refuse_unsupported
from moe_serve.models.families.registry import read_spec

CONFIGS = Path(__file__).parents[3] / "configs"


def moe_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def served(monkeypatch):
    """The configurations that `serve` was about to serve."""
    found = []
    monkeypatch.setattr(system, "serve_on_this_machine", lambda config, display: found.append(config) or 0)
    return found


def serve(*arguments: str) -> int:
    return CliRunner().invoke(cli.app, ["serve", *arguments], catch_exceptions=False).exit_code


def test_help_does_not_import_what_is_heavy():
    code = (
        "import sys; sys.argv = ['moe-serve', '--help']\n"
        "import moe_serve.launcher.cli.app as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'scipy', 'zmq', 'tokenizers', 'yaml', 'pydantic_core'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for command in ("serve", "frontend", "generate", "check"):
        assert command in result.stdout


def test_the_package_can_be_run_as_the_command_and_loads_only_what_that_one_does():
    code = (
        "import runpy, sys; sys.argv = ['moe_serve', 'serve', '--num-ranks', 'none']\n"
        "try: runpy.run_module('moe_serve', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'scipy', 'zmq', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code]
    module = subprocess.run(command, capture_output=True, text=True, timeout=60)
    script = moe_serve("serve", "--num-ranks", "none")
    assert module.returncode == script.returncode == 2, module.stderr
    assert module.stderr.splitlines()[-3:] == script.stderr.splitlines()[-3:]


def test_serving_does_not_pay_for_the_balancers_commands():
    code = (
        "import sys; sys.argv = ['moe-serve', 'serve', '--help']\n"
        "import moe_serve.launcher.cli.app as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "assert 'numpy' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_serving_from_the_command_line_needs_no_torch_in_the_parent_or_the_front_end():
    code = (
        "import sys\n"
        "import moe_serve.launcher.system, moe_serve.launcher.frontend, moe_serve.launcher.llm, moe_serve.server.app\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_arguments_the_demo_model_is_served_on_two_ranks(served):
    assert serve() == 0
    (config,) = served
    assert (config.model.path, config.parallel.num_ranks, config.parallel.device) == ("demo", 2, "cpu")
    assert (config.server.host, config.server.port) == ("127.0.0.1", 30000)


@pytest.mark.parametrize("flags", [("--speculation", "mtp"), ("--speculative-config", '{"method": "mtp"}')], ids=str)
def test_the_demo_models_layer_predicts_with_one_flag(served, flags, caplog, monkeypatch):
    monkeypatch.setattr(
        options,
        "DEMO_SETTINGS",
        {**(demo := options.DEMO_SETTINGS), "engine": {**demo["engine"], "max_running_requests": 7}},
    )
    assert serve(*flags) == 0
    (config,) = served
    assert config.engine.max_running_requests == 7, "the other settings of the demo stay"
    (said,) = [record.getMessage() for record in caplog.records]
    assert "/chat shows none" in said
    assert (config.speculation.mode, config.engine.return_routed_experts) == ("mtp", False)
    spec = read_spec(model_dir(config.model))
    assert why_no_predictor(config, spec, model_dir(config.model), on_gpu=False) is None


@pytest.mark.parametrize("tokens", [("--spec-tokens", "3"), ("-sc", '{"num_speculative_tokens": 3}')], ids=str)
def test_vllms_number_of_drafts_goes_with_the_mode_of_another_flag_or_the_file(served, tokens, tmp_path):
    (file := tmp_path / "c.yaml").write_text("speculation: {mode: mtp, predicted_drafts: 2}\n")
    for mode in (("--spec-method", "mtp"), ("--config", str(file))):
        assert serve(*tokens, *mode) == 0
        drafts = served.pop().speculation
        assert (drafts.mode, drafts.max_drafts, drafts.predicted_drafts) == ("mtp", 8, 3)


def test_the_demo_configuration_file_says_what_serve_does_without_arguments():
    assert load_config(CONFIGS / "demo-cpu.yaml") == load_config(base=DEMO_SETTINGS)


@pytest.mark.parametrize(
    "arguments, section, values",
    [
        (["--ep-size", "4"], "parallel", {"num_ranks": 4}),
        (["--ep", "4", "--attn-dp-size", "4"], "parallel", {"num_ranks": 4}),
        (["--dp-size", "3"], "parallel", {"num_ranks": 3}),
        (["--host", "0.0.0.0", "--port", "8000"], "server", {"host": "0.0.0.0", "port": 8000}),
        (["--load-format", "dummy", "--dtype", "bfloat16"], "model", {"load_format": "dummy", "dtype": "bfloat16"}),
        (["--skip-tokenizer-init", "--max-model-len", "99"], "model", {"skip_tokenizer": True, "max_model_len": 99}),
        (["--served-model-name", "x", "--served-model-name", "y"], "model", {"served_name": ("x", "y")}),
        (["--ep-num-redundant-experts", "2"], "eplb", {"num_redundant_experts": 2}),
        (["--enable-eplb", "--eplb-algorithm", "greedy"], "eplb", {"mode": "dynamic", "policy": "greedy"}),
        (["--eplb-min-rebalancing-utilization-threshold", "0.8"], "eplb", {"trigger": 0.8}),
        (["--expert-distribution-recorder-mode", "per_pass"], "eplb", {"recorder_mode": "per_pass"}),
        (["--max-running-requests", "7"], "engine", {"max_running_requests": 7}),
        (["--max-num-seqs", "7", "--max-queued-requests", "9"], "engine", {"max_queued_requests": 9}),
        (["--chunked-prefill-size", "256"], "engine", {"max_batch_tokens": 256}),
        (["--max-num-batched-tokens", "256"], "engine", {"max_batch_tokens": 256}),
        (["--page-size", "4", "--disable-radix-cache"], "cache", {"block_size": 4, "prefix_cache": False}),
        (["--block-size", "8"], "cache", {"block_size": 8}),
        (["--attention-backend", "FLASHINFER"], "engine", {"attention_backend": "flashinfer"}),
        (["--kv-cache-dtype", "int8"], "cache", {"dtype": "int8"}),
        (["--kv-cache-dtype", "fp8"], "cache", {"dtype": "fp8_e4m3"}),
        (
            ["--speculative-algorithm=NEXTN", "--speculative-num-steps=3", "--speculative-num-draft-tokens=4"],
            "speculation",
            {"mode": "mtp", "predicted_drafts": 3, "max_drafts": 4},
        ),
        (["--port", "1", "--set", "server.port=2"], "server", {"port": 2}),
        (["--set", "engine.numerics=batch_invariant"], "engine", {"numerics": "batch_invariant"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_of_sglang_and_vllm_become_settings(served, arguments, section, values):
    assert serve(*arguments) == 0
    settings = getattr(served[0], section)
    assert {name: getattr(settings, name) for name in values} == values


def test_a_flag_wins_over_the_file_and_nothing_else_changes(served):
    assert serve("--config", str(CONFIGS / "identity-cpu.yaml"), "--port", "0") == 0
    expected = load_config(CONFIGS / "identity-cpu.yaml", ["server.port=0"])
    assert served == [expected]


def test_another_model_is_not_tied_to_the_cpu():
    config = ModelOptions(model_path="/models/x").effective_config()
    assert (config.parallel.device, config.parallel.num_ranks) == ("auto", 2)


def test_sizes_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="given as 2 and 4"):
        ServeOptions(num_ranks=2, attn_dp_size=4).effective_config()
    assert ServeOptions(attn_dp_size=4).flags() == {"parallel": {"num_ranks": 4}}


def test_text_values_arrive_unchanged():
    config = ServeOptions(served_model_name=["yes: [no] #1"]).effective_config()
    assert config.model.served_name == ("yes: [no] #1",)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["serve", "--config", "/nowhere.yaml"], ["/nowhere.yaml", "existing YAML file"]),
        (["serve", "--model-path", "/nowhere"], ["model.path (--model-path) is '/nowhere'", "no such folder"]),
        (["serve", "--init-expert-location", "/nowhere.json"], ["eplb.init_expert_location", "no such file"]),
        (["serve", "--set", "engine.numeric=fast"], ["did you mean 'numerics'"]),
        (["serve", "--ep-size", "0"], ["parallel.num_ranks", "is 0"]),
        (["serve", "--ep-size", "2", "--dp-size", "4"], ["parallel.num_ranks (--ep-size) is given as 2 and 4"]),
        (["frontend", "--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
        (["generate", "x", "--model", "/nowhere"], ["no such folder"]),
        (["generate", "x", "--top-p", "3"], ["top_p is 3.0"]),
        (["check", "--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
        (["serve", "--tp", "2"], ["moe-serve: --tp asks for tensor parallelism, which is not supported", "--ep"]),
        (["serve", "--port", "1", "--tp-size=8"], ["--tp-size asks for tensor parallelism"]),
        (["generate", "x", "-tp", "2"], ["-tp asks for tensor parallelism"]),
        (["check", "--pipeline-parallel-size", "2"], ["pipeline parallelism, which is not supported", "--ep"]),
        (["serve", "--enable-lora"], ["LoRA adapters, which are not supported; merge"]),
        (["serve", "--speculative-algorithm", "EAGLE"], ["speculation.mode", "'EAGLE', expected off", "not supported"]),
        (
            ["serve", "--speculative-draft-model-path", "x"],
            ["drafts by a model of its own, which", "--speculation auto"],
        ),
        (
            ["serve", "--speculative-config", '{"method": "eagle"}'],
            ["speculation.mode", "'eagle'", "is auto", "by mtp"],
        ),
        (["serve", "-sc", '{"model": "x"}'], ["it names a model", "not supported", "leave model out"]),
        (["serve", "-sc", '{"method": "ngram", "prompt_lookup_max": 4}'], ["leave prompt_lookup_max out"]),
        (["serve", "--spec-method", "suffix"], ["'suffix'", "from text they come by ngram, which is auto"]),
        (
            ["serve", "--speculation=auto", "--spec-tokens", "3", "--speculative-num-draft-tokens=4"],
            ["is 3", "is 4", "give one"],
        ),
        (
            ["serve", "--spec-tokens", "3"],
            ["num_speculative_tokens (--spec-tokens) asks", "mode (--speculation) is off"],
        ),
        (["serve", "-sc", '{"num_speculative_tokens": 3}', "--spec-tokens", "4"], ["given as 3 and 4: give it once"]),
        (["serve", "--spec-model", "x"], ["--spec-model asks for drafts by a model of its own"]),
        (["check", "-sc", '{"method": "medusa"}'], ["speculation.mode", "'medusa'", "not supported"]),
        (["generate", "x", "--speculative-eagle-topk=1"], ["as with 1; leave it out", "by --speculative-num-steps"]),
        (["serve", "--speculative-ngram-max-bfs-breadth=1"], ["longest match in text", "leave it out"]),
        (["serve", "--speculative-config", "{method"], ["speculation", "expected JSON"]),
        (
            ["serve", "--speculative-config", '{"method": "ngram"}', "--speculation", "lookup"],
            ["method is ngram and mode", "is lookup", "give one"],
        ),
        (["serve", "--quantization", "fp8"], ["model.expert_weights"]),
        (["serve", "--enable-expert-parallel"], ["is not needed", "--ep"]),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["moe-serve", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err


@pytest.mark.parametrize("command", ["serve", "generate", "check"])
def test_no_option_of_ours_is_among_those_that_are_refused(command):
    parameters = typer.main.get_command(cli.app).commands[command].params
    names = [name for each in parameters for name in (*each.opts, *each.secondary_opts)]
    assert {"--ep", "-sc", "--spec-method", "--speculative-algorithm"} <= set(names)
    assert [name for name in names if refusal(name) is not None] == []


def test_what_follows_two_dashes_is_text_and_no_option():
    refuse_unsupported(["--model", "demo", "--", "--tp"])
    with pytest.raises(ConfigError, match="--tp asks for"):
        refuse_unsupported(["--model", "demo", "--tp"])


def test_the_command_as_a_process_ends_with_one_line_too():
    result = moe_serve("serve", "--config", "/nowhere.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_a_folder_without_weights_is_named_and_one_without_a_tokenizer_serves_ids(tmp_path, caplog):
    from moe_serve.config import ModelConfig, model_dir
    from moe_serve.launcher.preflight import load_tokenizer, look_for_files

    (tmp_path / "config.json").write_bytes((model_dir(ModelConfig()) / "config.json").read_bytes())
    config = load_config(overrides=[f"model.path={tmp_path}"])
    with pytest.raises(Exception, match=r"no \*\.safetensors.*load_format: dummy"):
        look_for_files(config)
    config = load_config(overrides=[f"model.path={tmp_path}", "model.load_format=dummy"])
    look_for_files(config)
    assert load_tokenizer(config) is None
    assert "no tokenizer.json: only token ids are served" in caplog.text
    caplog.clear()
    config = load_config(overrides=[f"model.path={tmp_path}", "model.load_format=dummy", "model.skip_tokenizer=true"])
    assert load_tokenizer(config) is None
    assert caplog.text == "", "who asked for it knows"


def test_help_keeps_its_brackets():
    app = typer.Typer()
    app.registered_commands += cli.app.registered_commands
    add_balancer_commands(app)
    group = typer.main.get_command(app)
    assert len(group.commands) >= 8
    for command in group.commands.values():
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            written = (text or "").replace("\b", "")  # click's mark of a paragraph that is not wrapped
            assert Text.from_markup(written).plain == written, f"{command.name}: write \\[ for a bracket"


def test_flags_for_keys_hosts_and_certificates_are_settings_and_keys_are_not(served, monkeypatch):
    certificate = CONFIGS.parent / "tests/server/edge/tls"
    monkeypatch.setenv("MOE_SERVE_API_KEY", "before")
    monkeypatch.delenv("MOE_SERVE_ADMIN_API_KEY", raising=False)
    arguments = ["--api-key", "a-secret", "--allowed-hosts", "a.example", "--allowed-hosts", "b.example"]
    arguments += ["--ssl-certfile", f"{certificate}/cert.pem", "--ssl-keyfile", f"{certificate}/key.pem"]
    assert serve(*arguments, "--cors-origins", "https://c.example") == 0
    (config,) = served
    assert config.server.allowed_hosts == ("a.example", "b.example")
    assert config.server.cors_origins == ("https://c.example",)
    assert config.server.ssl_certfile.endswith("cert.pem")
    assert os.environ["MOE_SERVE_API_KEY"] == "a-secret"
    assert "a-secret" not in config.to_yaml()


def test_secrets_are_looked_at_before_anything_starts(served, tmp_path):
    (tmp_path / "keys").write_text("k")
    (tmp_path / "keys").chmod(0o644)
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match="chmod 600"):
            serve("--device", device, "--api-key-file", str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match=r"server\.ssl_certfile"):
        serve("--ssl-certfile", str(tmp_path / "none.pem"))
    assert served == []


def test_a_gpu_is_asked_for_only_where_there_is_one(served, monkeypatch):
    monkeypatch.setattr(preflight, "_GPU_DEVICES", ("/none",))
    with pytest.raises(ConfigError, match="no GPU"):
        serve("--device", "cuda")
    assert served == []


def test_the_model_may_be_the_one_argument_and_the_version_is_printed(served):
    serve("demo")
    (config,) = served
    assert config.model.path == "demo"
    with pytest.raises(ConfigError, match="given as other and demo: give it once"):
        serve("demo", "--model", "other")
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"moe-serve {__version__}\n"


def test_work_that_takes_long_says_how_far_it_is_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(commands, "_LINE_EVERY_S", 0.0)
    with commands.progress_bar("reading") as show:
        show(1, 4)
        show(2, None)
        show(4, 4)
    assert capsys.readouterr().err == "reading: 25 %\nreading: 100 %\n"
