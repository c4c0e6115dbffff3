"""Reads the configuration: a YAML file with overrides on top. Each mistake becomes one line that says the fix."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from moe_serve.config.sections import NO_DRAFT_MODEL, ServeConfig, mode_of
from moe_serve.errors import ConfigError


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str | Mapping[str, Any]] = (),
    base: Mapping[str, Any] | None = None,
) -> ServeConfig:
    """Returns the configuration of a YAML file with overrides on top.

    path:      YAML file; None: all defaults
    overrides: "section.key=value" strings, as `--set` takes them, values are read as YAML; or nested values
    base:      nested values that the file overrides, for callers with their own defaults
    Raises ConfigError with one line per mistake: the file, the dotted key, and what to do.
    """
    where = str(path) if path is not None else "configuration"
    sources: list[Mapping[str, Any]] = [base or {}, {} if path is None else _read_yaml(Path(path))]
    sources += [_parse_override(each) if isinstance(each, str) else each for each in overrides]
    try:
        values = reduce(_merge, _with_our_names(sources))
    except ValueError as error:
        raise ConfigError(f"{where}: speculation: {error}") from None
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(where, item) for item in error.errors())) from None


def _with_our_names(sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns sources, each over those before it, with our names for vLLM's keys of speculation: `method` is mode, and
    `num_speculative_tokens` predicted_drafts with mode mtp and max_drafts with others, whichever source has the mode.

    Raises ValueError for keys without a meaning here, two names of one setting in a source, and drafts without a mode.
    """
    named: list[dict[str, Any]] = []
    mode: object = "off"
    is_asked_for = False
    for source in sources:
        section = source.get("speculation")
        if isinstance(section, dict):
            section = _renamed(_without_models(section), "method", "mode")
            is_asked_for = "num_speculative_tokens" in section or (is_asked_for and "mode" not in section)
            mode = mode_of(section.get("mode", mode))
            source = {**source, "speculation": section}
        named.append(dict(source))
    if is_asked_for and mode == "off":
        raise ValueError("num_speculative_tokens asks for drafts, but mode is off; give a mode, or vLLM's method")
    for source in named:
        if isinstance(section := source.get("speculation"), dict):
            own = "predicted_drafts" if mode == "mtp" else "max_drafts"
            source["speculation"] = _renamed(section, "num_speculative_tokens", own)
    return named


def _without_models(section: dict[str, Any]) -> dict[str, Any]:
    for key in section:
        if key == "model":
            raise ValueError(f"it names a model, but {NO_DRAFT_MODEL}; leave model out")
        if str(key).startswith("prompt_lookup_"):
            raise ValueError(f"the last three tokens are looked up, and then the longest match taken; leave {key} out")
    return section


def _renamed(section: dict[str, Any], theirs: str, own: str) -> dict[str, Any]:
    if theirs in section and section.get(own, section[theirs]) != section[theirs]:
        raise ValueError(f"{theirs} is {section[theirs]} and {own} is {section[own]}, the same setting; give one")
    return {own if key == theirs else key: value for key, value in section.items()}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give --config an existing YAML file") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; expected sections of settings") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid YAML ({' '.join(str(error).split())}); correct the file") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds a {type(loaded).__name__}, expected sections such as 'model:' and 'engine:'")
    return loaded


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r} is not of the form section.key=value; e.g. --set engine.numerics=fast")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"override {text!r}: the value is not valid YAML; quote it") from None
    for part in reversed(parts):
        nested = {part: nested}
    return dict(nested)


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Returns low with high's values over it, section by section."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def _explain(where: str, item: Any) -> str:
    """Returns one line for one pydantic error: file, dotted key, what is and what is needed."""
    location = [str(part) for part in item["loc"]]
    key = ".".join(location) or "the sections together"
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{where}: {key}: unknown setting; {hint}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {key}: {message}" + ("" if item["type"] == "value_error" else f" (is {item['input']!r})")


def _known_keys(location: list[str]) -> list[str]:
    fields = ServeConfig.model_fields
    for part in location:
        section = fields[part].annotation if part in fields else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return []
        fields = section.model_fields
    return list(fields)
