"""The key with which our tools call a server: from the environment, since others may read a command line."""

import os

VARIABLES = ("MOE_SERVE_API_KEY", "OPENAI_API_KEY")


def api_key_of_environment() -> str | None:
    """Returns the first key that is set; of several in one variable, as servers take them, the first."""
    keys = [key for variable in VARIABLES for key in os.environ.get(variable, "").split()]
    return keys[0] if keys else None
