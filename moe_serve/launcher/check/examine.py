"""`moe-serve check`: explains a configuration without starting it.

It calls the functions by which the ranks choose and size things, so its report is what they will do.
"""

import torch

from moe_serve.config import ServeConfig, model_dir
from moe_serve.launcher.check.choices import describe_choices
from moe_serve.launcher.check.machine import describe_machine
from moe_serve.launcher.check.model import describe_model
from moe_serve.launcher.check.report import Report
from moe_serve.launcher.preflight import look_for_files


def examine(config: ServeConfig) -> Report:
    """Returns the findings about a configuration, as far as its files can be read."""
    report = Report()
    with report.noting_problems():
        look_for_files(config)
    device = config.parallel.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if (model_dir(config.model) / "config.json").is_file():
        with report.noting_problems():
            describe_model(report, config, device)
    describe_choices(report, config, device)
    describe_machine(report, config, device)
    return report
