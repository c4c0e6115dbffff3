"""Names the flag of each setting that a message speaks of: who typed a flag need not know its place in a file."""

import re
from functools import cache
from typing import get_type_hints

from moe_serve.launcher.cli.serve_options import FLAGS, SETTINGS, ServeOptions

_SETTING = re.compile(r"(?<![\w.-])([a-z]+\.)?[a-z_]+\b(?![.]\w)")
_SECTION = re.compile(r"configuration: ([a-z]+): ")  # then its settings are named without it


@cache
def flags() -> dict[str, str]:
    """Returns the flag of `moe-serve serve` for each setting that has one."""
    hints = get_type_hints(ServeOptions, include_extras=True)
    settings = SETTINGS | {option: setting for option, (setting, _) in FLAGS.items()}
    found: dict[str, str] = {}
    for option, setting in settings.items():
        given = hints[option].__metadata__[0]  # typer takes the first name for a default, and looks at it later
        names = [name for name in (given.default, *given.param_decls) if isinstance(name, str)]
        found.setdefault(setting, names[0] if names else "--" + option.replace("_", "-"))
    return found


def with_flags(message: str) -> str:
    """Returns a message in which each setting that has a flag is followed by it, where it is first named."""
    known, named = flags(), set[str]()
    section = _SECTION.search(message)

    def add(match: re.Match[str]) -> str:
        setting = match[0] if match[1] or section is None else f"{section[1]}.{match[0]}"
        flag = known.get(setting)
        if flag is None or setting in named or flag in message:
            return match[0]
        named.add(setting)
        return f"{match[0]} ({flag})"

    return _SETTING.sub(add, message)
