"""Each line of the threat model in SECURITY.md is held by a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_line_of_the_threat_model_names_a_test_that_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 20
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"SECURITY.md names {path}::{name}"


def test_every_row_of_a_table_of_attacks_names_its_test() -> None:
    in_table = False
    for line in TEXT.splitlines():
        if line.startswith("| ") and line.rstrip().endswith("| test |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("| ---"):
            assert "::test_" in line.split("|")[-2], line
