"""How many lines each model family takes, counted in the files: its reader, its tiny models, its published models.

What several families share is counted for none of them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
READERS = ROOT / "moe_serve/models/families"
MODELS = (ROOT / "tests/models/families.py", ROOT / "tests/models/published.py")


def family_lines() -> dict[str, tuple[int, int]]:
    """Returns, by name of the reader's file, lines of the reader and lines of the models in tests."""
    families = {path.stem: model_types(path.stem) for path in sorted(READERS.glob("*.py"))}
    return {
        name: (_num_lines(READERS / f"{name}.py"), sum(_lines_of_models(path, types) for path in MODELS))
        for name, types in families.items()
        if types
    }


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def model_types(reader: str) -> set[str]:
    """Returns the keys of READERS in a reader's file."""
    for name, value in _assignments(READERS / f"{reader}.py"):
        if name == "READERS" and isinstance(value, ast.Dict):
            return {key.value for key in value.keys if isinstance(key, ast.Constant)}
    return set()


def _assignments(path: Path) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and value is not None:
            yield target.id, value


def _lines_of_models(path: Path, model_types: set[str]) -> int:
    """Returns the lines of the entries of these model types in the file's last table, and of what they alone name."""
    constants = dict(_assignments(path))
    table = constants[list(constants)[-1]]
    assert isinstance(table, ast.Dict)
    mine, others, lines = set(), set(), 0
    for key, value in zip(table.keys, table.values, strict=True):
        assert key is not None
        names = _names(value, constants)
        text = " ".join(ast.unparse(each) for each in (value, *(constants[name] for name in names)))
        if any(f"'{model_type}'" in text for model_type in model_types):
            mine |= names
            lines += _span(value)[1] - key.lineno + 1
        else:
            others |= names
    return lines + sum(_span(constants[name])[1] - _span(constants[name])[0] + 1 for name in mine - others)


def _names(node: ast.expr, constants: dict[str, ast.expr]) -> set[str]:
    """Returns the constants of the file that an expression is made of."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in constants}
    return found.union(*(_names(constants[name], constants) for name in found))


def _span(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None
    return node.lineno, node.end_lineno
