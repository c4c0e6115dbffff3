"""The `moe-serve` command line: parsing and printing. Nothing below it imports it."""


def main() -> None:
    """Runs the console script. Loads its commands here, so that importing one part does not load them all."""
    from moe_serve.launcher.cli.app import main as run

    run()
