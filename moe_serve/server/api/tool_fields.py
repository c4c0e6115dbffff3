"""The tools and the reasoning of a chat: which functions there are, and whether one must be called."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.errors import RequestError
from moe_serve.server.api.params import schema_constraint
from moe_serve.server.edge.body import show
from moe_serve.structured.json_schema import LENIENT, lenient, moved

MAX_TOOLS = 128
MAX_BYTES = 1 << 20  # of all tools, as JSON
EXAMPLE = 'send {"type": "function", "function": {"name": "f", "parameters": {…}}}'
EXAMPLE_CHOICE = '{"type": "function", "function": {"name": "f"}}'
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


@dataclass(frozen=True)
class ToolUse:
    """How an answer may call the client's functions.

    schemas:  of the parameters of each function, by name
    choice:   "named": `name` must be called, once;  "required": at least one must
    parallel: whether there may be several calls
    """

    schemas: dict[str, dict[str, Any]]
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the answer consists of calls alone."""
        return self.choice in ("named", "required")

    @property
    def _options(self) -> dict[str, Any]:
        """llguidance's options of all functions' schemas, merged: a form has one set, lenient where all of them are."""
        given = [schema.get("x-guidance") or {} for schema in self.schemas.values()]
        named = [each for each in given if isinstance(each, dict)]
        options = {name: value for each in named for name, value in each.items()}
        return {name: options[name] for name in options if name not in LENIENT or all(name in each for each in named)}

    def constraint(self) -> Constraint | None:
        """Returns the form of the output; None if it is free."""
        if self.choice == "named":
            path = f"tools[{list(self.schemas).index(self.name)}].function.parameters"
            return schema_constraint(_object_schema(self.schemas[self.name]), path)
        if self.choice != "required":
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name in self.schemas
        ]
        most = {} if self.parallel else {"maxItems": 1}
        schemas = {name: moved(_object_schema(schema), name) for name, schema in self.schemas.items()}
        return schema_constraint(
            {
                "type": "array",
                "minItems": 1,
                **most,
                "items": {"anyOf": calls},
                "$defs": schemas,
                "x-guidance": self._options,
            },
            "tools",
        )


@dataclass(frozen=True)
class ReasoningUse:
    """How the client wants the reasoning. separate: apart from the content;  included: at all;  streamed: at once"""

    separate: bool = True
    included: bool = True
    streamed: bool = True


def allowed(tools: list[dict[str, Any]] | None, choice: Any) -> tuple[list[dict[str, Any]] | None, Any]:
    """Returns the tools that OpenAI's tool_choice {"type": "allowed_tools"} allows, and its mode; others as they are.

    Raises RequestError where it is none, or names no tool of the call.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    given = choice.get("allowed_tools", choice)  # chats have an object inside, responses do not
    mode, chosen = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(chosen, list):
        raise RequestError(
            'tool_choice.allowed_tools is not as expected; send {"mode": "auto" or "required", "tools": [{"type": '
            '"function", "function": {"name": "f"}}]}',
            field="tool_choice",
        )
    by_name = {_name_of(tool): tool for tool in tools or ()}
    names = [_name_of(tool) for tool in chosen]
    unknown = next((name for name in names if name is None or name not in by_name), None) if names else "no tool"
    if unknown is not None or not names:
        raise RequestError(f"tool_choice allows {show(unknown)}, which is none of the tools", field="tool_choice")
    return [by_name[name] for name in dict.fromkeys(names)], mode


def _name_of(tool: Any) -> Any:
    """Returns the name of a function in the form of chats, or of responses."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """Returns the meaning of tools, tool_choice and parallel_tool_calls. Raises RequestError."""
    schemas = _schemas(tools or [])
    is_parallel = parallel is not False
    if choice is None:
        return ToolUse(schemas, "auto" if schemas else "none", parallel=is_parallel)
    if choice in ("none", "auto", "required") and isinstance(choice, str):
        if choice == "required" and not schemas:
            raise RequestError("tool_choice is 'required' but there are no tools; send tools", field="tool_choice")
        known: Any = choice if schemas else "none"
        return ToolUse(schemas, known, parallel=is_parallel)
    return ToolUse(schemas, "named", _named(choice, schemas), parallel=False)


def _named(given: Any, schemas: dict[str, dict[str, Any]]) -> str:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {show(given)}, expected none, auto, required, or an object such as " + EXAMPLE_CHOICE,
            field="tool_choice",
        )
    if name not in schemas:
        raise RequestError(f"tool_choice names {name[:80]!r}, which is none of the tools", field="tool_choice")
    return name


def _schemas(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    if tools and len(msgspec.json.encode(tools)) > MAX_BYTES:
        raise RequestError(f"tools has more than {MAX_BYTES} bytes as JSON; send less", field="tools")
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        function, kind = tool.get("function"), tool.get("type", "function")
        if kind != "function":
            raise RequestError(f"{path}.type is {show(kind)}, but only functions are served; {EXAMPLE}", f"{path}.type")
        if not isinstance(function, dict):
            raise RequestError(f"{path}.function is {show(function)}; {EXAMPLE}", field=f"{path}.function")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.match(name):
            raise RequestError(
                f"{path}.function.name is {show(name)}, expected up to 64 letters, digits, and any of _ - . :",
                field=f"{path}.function.name",
            )
        if name in schemas:
            raise RequestError(f"{path}.function.name is {name!r}, as of a tool before it", f"{path}.function.name")
        if not isinstance(parameters, dict | None):
            raise RequestError(
                f"{path}.function.parameters is {show(parameters)}, expected a JSON schema",
                field=f"{path}.function.parameters",
            )
        schemas[name] = (parameters or {}) if function.get("strict") else lenient(parameters or {})
    return schemas


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose values are objects: arguments always are."""
    kind = schema.get("type", "object")
    is_one_of = isinstance(kind, list) and "object" in kind
    return schema if "$ref" in schema else {**schema, "type": "object" if is_one_of else kind}
