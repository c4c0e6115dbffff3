"""Ranks placement planners on fixed loads, one command: python -m benchmarks.leaderboard

Ours always run, and every file in benchmarks/leaderboard/entries. Planners of other projects run where a flag says
where they are; they are not part of this repository:

    --deepseek eplb.py                      of github.com/deepseek-ai/EPLB
    --vllm     .../vllm/distributed/eplb/policy
    --sglang   .../sglang/srt/eplb/eplb_algorithms

Each planner plans every window of every instance in a process of its own, with one thread, 8 GiB and --limit seconds.
It runs with your rights: look at a file before you drop it into the folder. Writes NAME.html, NAME.json and NAME.md
into --output.
"""

import argparse
from pathlib import Path

from rich.progress import Progress

from benchmarks.conditions import RESULTS, conditions, save
from benchmarks.leaderboard import page
from benchmarks.leaderboard.entries import FOLDER, find_entries
from benchmarks.leaderboard.instances import HARDWARE, INSTANCES, TOKENS_PER_RANK
from benchmarks.leaderboard.score import Row, measure, shortened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepseek", type=Path, help="DeepSeek's eplb.py")
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's EPLB policies")
    parser.add_argument("--sglang", type=Path, help="folder of SGLang's EPLB algorithms")
    parser.add_argument("--entries", type=Path, default=FOLDER, help="folder of further planners")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument("--plans", type=int, help="plans per instance, in place of its own number: a quick look")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a planner on an instance: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    for flag in ("deepseek", "vllm", "sglang", "entries"):
        path = getattr(arguments, flag)
        if path is not None and not path.exists():
            parser.error(f"--{flag} {path}: there is no such file or folder")
    if arguments.plans is not None and arguments.plans < 1:
        parser.error("--plans is the number of windows to plan for; give at least 1")
    instances = [shortened(one, arguments.plans) for one in INSTANCES if arguments.only in one.name]
    if not instances:
        parser.error(f"--only {arguments.only}: no such instance; there are {', '.join(one.name for one in INSTANCES)}")
    entries = find_entries(arguments.deepseek, arguments.vllm, arguments.sglang, arguments.entries)
    facts = conditions()
    rows: list[Row] = []
    with Progress() as progress:
        task = progress.add_task("", total=len(instances) * len(entries))
        for instance in instances:
            for entry in entries:
                progress.update(task, description=f"{instance.name}: {entry.name}")
                rows.append(measure(entry, instance, arguments.limit))
                progress.advance(task)
    title = "Leaderboard of expert placement planners"
    table = [{"instance": row.instance, **line} for row, line in ((row, _line(row)) for row in _in_order(rows))]
    notes = (
        f"Each planner plans {instances[0].plans} windows one after the other, from the same first placement; what it "
        f"planned is scored on the window after it. Steps on {HARDWARE} by the cost model: "
        f"{TOKENS_PER_RANK['prefill']:,} tokens a rank in prefill, {TOKENS_PER_RANK['decode']} in decode. Plan: median "
        "CPU time of all layers. Between nodes: experts that a node receives from others."
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = save("leaderboard", title, table, facts, notes, folder=arguments.output)
    where = (
        f"{facts['date']} UTC, {facts['cpu']}, one thread a planner, load average {facts['load_average'][0]}. {notes}"
    )
    (arguments.output / "leaderboard.html").write_text(page.to_html(rows, instances, where), encoding="utf-8")
    print(text)
    for line in page.overall(rows):
        print(" | ".join(line.values()))


def _in_order(rows: list[Row]) -> list[Row]:
    names = dict.fromkeys(row.instance for row in rows)
    return [row for name in names for row in page.ranked(one for one in rows if one.instance == name)]


def _line(row: Row) -> dict[str, str]:
    cells = {label: "" if row.failed else form.format(getattr(row, name)) for name, label, form in page.COLUMNS}
    return {"planner": row.entry, **cells, "failed": row.failed}


if __name__ == "__main__":
    main()
