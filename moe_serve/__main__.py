"""`python -m moe_serve` is `moe-serve`, also where its script is not on the path."""

from moe_serve.launcher.cli import main

if __name__ == "__main__":
    main()
