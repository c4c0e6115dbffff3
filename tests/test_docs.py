"""What the documentation names exists: linked pages, files and tests."""

import re
from pathlib import Path

import pytest

from moe_serve.models.families.registry import FAMILIES
from tests.models.families import ON_CPUS_ALONE, WITH_STATES

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/leaderboard/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
FILE = re.compile(r"(?<![*\w./-])[\w./-]*\w\.(?:py|md)\b")
FOLDER = re.compile(r"\w[\w/-]*/")
OF_OTHERS = {"eplb.py"}  # DeepSeek's


def code_spans(text: str) -> list[str]:
    """Returns what stands in `code` spans; blocks of commands are left out, since they name files of users."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)"', text)
    targets = [target for target in named if not target.startswith("http")]
    assert [target for target in targets if not leads_somewhere(ROOT / page, target)] == []


def leads_somewhere(page: Path, target: str) -> bool:
    """Whether a link's file exists and, where it names a section, that section's heading."""
    name, _, section = target.partition("#")
    path = page.parent / name if name else page
    return path.exists() and (not section or section in sections(path.read_text(encoding="utf-8")))


def sections(text: str) -> list[str]:
    """Returns the anchors of a page's headings, as hosts of markdown make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_pages_that_code_and_settings_name_exist() -> None:
    """Error messages, --help, comments and configurations send readers to pages."""
    folders = ("moe_serve", "tests", "benchmarks", "tools", "configs", "deploy")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".c", ".yaml")
    ]
    named = {
        (page, str(path.relative_to(ROOT)))
        for path in [*files, ROOT / "pyproject.toml"]
        if "published" not in path.name and "profiles/hardware" not in str(path)  # these name pages of others
        for page in re.findall(r"\bdocs/[\w-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert sorted((page, path) for page, path in named if not (ROOT / page).is_file()) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_that_a_page_names_exist(page: str) -> None:
    spans = code_spans((ROOT / page).read_text(encoding="utf-8"))
    named = {name for span in spans for name in FILE.findall(span) if "FILE" not in name} - OF_OTHERS
    named |= {span.rstrip("/") for span in spans if FOLDER.fullmatch(span)}
    folders = ("moe_serve", "tests", "benchmarks", "docs", "configs", "deploy", "tools")
    paths = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*")} | {*folders}
    missing = [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in paths)]
    assert missing == [], f"{page} names what does not exist"


def rows_of_families() -> list[str]:
    """Returns the rows of docs/models.md that name a file of models/families/ in their last column."""
    lines = (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.search(r"^\|.*\| `\w+\.py` \|$", line)]


def test_the_front_page_counts_the_families_of_the_page_on_models() -> None:
    types = [set(re.findall(r"`(\w+)`", row.split("|")[2])) for row in rows_of_families()]
    assert all(types)
    assert sorted(name for each in types for name in each) == sorted(FAMILIES), "each in one row"
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d+) \[model families\]", front) == [str(len(types))]


def test_the_families_without_states_that_no_gpu_runs_are_named() -> None:
    apart = set(ON_CPUS_ALONE) - set(WITH_STATES)
    names = {row.split("|")[1].strip() for row in rows_of_families() for each in apart if f"| `{each}` |" in row}
    assert len(names) == len(apart)
    for page, row in (("README.md", r"\[model families\].*"), ("docs/status.md", r".*\| refused \|")):
        rows = " ".join(re.findall(row, (ROOT / page).read_text(encoding="utf-8")))
        assert [name for name in sorted(names) if name not in rows] == [], page


def test_the_page_on_models_names_every_family() -> None:
    rows = rows_of_families()
    readers: dict[str, list[str]] = {}
    for model_type, read in FAMILIES.items():
        readers.setdefault(f"{read.__module__.rpartition('.')[2]}.py", []).append(f"`{model_type}`")
    for reader, model_types in readers.items():
        named = "".join(row for row in rows if f"| `{reader}` |" in row)
        assert named, f"docs/models.md has no row for models/families/{reader}"
        assert [name for name in model_types if name not in named] == [], (
            f"docs/models.md does not name these of {reader}"
        )


def test_the_page_on_models_says_what_fits_where_as_check_counts_it() -> None:
    from tools.what_fits import MODELS, line_of

    lines = (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
    assert all(any(line.startswith(f"| {name} |") and "GiB |" in line for line in lines) for name in MODELS)
    for name in ("Granite-3.1-1B-A400M", "gpt-oss-20b"):  # the others by `python -m tools.what_fits`
        assert line_of(name) in lines
