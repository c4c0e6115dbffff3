"""What the documentation names exists: linked pages, files and tests."""

import re
from pathlib import Path

import pytest

from tests.models.family_lines import family_lines, model_types

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
FILE = re.compile(r"(?<![*\w./-])[\w./-]*\w\.(?:py|md)\b")
OF_OTHERS = {"eplb.py"}  # DeepSeek's


def code_spans(text: str) -> list[str]:
    """Returns what stands in `code` spans; blocks of commands are left out, since they name files of users."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"\]\(([^)#]+)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)"', text)
    targets = [target for target in named if not target.startswith("http")]
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    spans = code_spans((ROOT / page).read_text(encoding="utf-8"))
    named = {name for span in spans for name in FILE.findall(span) if "FILE" not in name} - OF_OTHERS
    folders = ("moe_serve", "tests", "benchmarks", "docs", "configs", "tools")
    files = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.*")}
    missing = [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in files)]
    assert missing == [], f"{page} names files that do not exist"


def test_the_page_on_models_names_every_family_with_the_lines_that_it_takes() -> None:
    rows = [row for row in (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    for name, (reader, models) in family_lines().items():
        row = next((row for row in rows if f"| `{name}.py` |" in row), None)
        assert row is not None, f"docs/models.md has no row for models/families/{name}.py"
        assert row.endswith(f"| {reader} + {models} = {reader + models} |"), (
            f"{name}: {reader} + {models}, not {row[-20:]}"
        )
        missing = [model_type for model_type in model_types(name) if f"`{model_type}`" not in row]
        assert not missing, f"docs/models.md does not name {missing}"
