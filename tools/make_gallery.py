"""Takes the pictures of docs/planning.md: replays drawn loads, and photographs parts of the reports' pages.

python tools/make_gallery.py docs/gallery

Needs playwright (pip install -e '.[test]') and a Chromium. The numbers are the same on every machine, except measured
planning times, which are left out of the pictures; fonts are the machine's.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.replay import replay, with_redundancy_curve
from moe_serve.eplb.replay.report import to_html, to_json
from moe_serve.eplb.replay.report_against import against_page, read_report
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

WIDTH = 1000
MOST_BYTES = 200_000  # of a picture in the repository
TOPOLOGY = Topology(4, 8)
LOAD = SyntheticLoad(family="jumps", num_windows=40, period=20, tokens_per_step=16384 * 32, steps_per_window=10,
                     phase="prefill", seed=7)  # fmt: skip
# picture -> the button to press (group, key) or None, and the element to photograph
PARTS: dict[str, tuple[tuple[str, str] | None, str]] = {
    "verdict": (None, "#verdict"),
    "balance": (None, "section:has(> #balance)"),
    "ranks": (("time", "ranks"), "section:has(#before)"),
    "layers": (("time", "layers"), "section:has(#before)"),
    "replicas": (("shown", "replicas"), "section:has(#heat)"),
    "moved": (("shown", "received"), "section:has(#heat)"),
    "gain-and-cost": (None, "#layers-section"),
    "curves": (None, "#curves-section"),
    "against": (None, "#against-section"),
}


def main() -> None:
    """Replays twice, the second time with more slots, and photographs the second page beside the first report."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    before, report = replayed(288), replayed(320)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "before.json").write_text(json.dumps(to_json(before)), encoding="utf-8")
        against = against_page(report, read_report(Path(name) / "before.json"))
        page = to_html(with_redundancy_curve(report, TOPOLOGY), "Replay", against=against)
        (Path(name) / "page.html").write_text(page, encoding="utf-8")
        photograph((Path(name) / "page.html").as_uri(), folder)


def replayed(num_slots: int) -> ReplayReport:
    """Returns the replay of a load that drifts and jumps: prefill of DeepSeek-V3 on four nodes of H800."""
    model = CostModel(load_hardware("H800"), load_model_profile("DeepSeek-V3"), TOPOLOGY)
    costs = ProfileCosts(model, Serving("prefill"))
    settings = ReplaySettings(TOPOLOGY, num_slots, costs=costs)
    report = replay(synthetic_trace(LOAD), ("deepseek", "incremental"), settings)
    return replace(report, conditions={**report.conditions, "prices": costs.words()})


def photograph(url: str, folder: Path) -> None:
    """Writes each of PARTS in light and dark."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no chromium on this machine (Debian: apt-get install --no-install-recommends chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            context: dict[str, Any] = {"color_scheme": scheme, "viewport": {"width": WIDTH, "height": 900}}
            page = browser.new_page(**context)
            page.goto(url)
            for name, (button, selector) in PARTS.items():
                take(page, button, selector, folder / f"{name}-{scheme}.png")
        browser.close()


def take(page: Page, button: tuple[str, str] | None, selector: str, path: Path) -> None:
    """Writes one picture. Ends the program if it is too large to be committed."""
    if button is not None:
        page.click(f".switch[data-for={button[0]}] [data-key={button[1]}]")
        page.mouse.move(0, 0)
    page.locator(selector).screenshot(path=path)
    size = path.stat().st_size
    print(f"{path}: {size:,} bytes")
    if size > MOST_BYTES:
        sys.exit(f"{path} has {size:,} bytes, and pictures here at most {MOST_BYTES:,}; make WIDTH smaller")


if __name__ == "__main__":
    main()
