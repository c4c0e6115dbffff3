"""Writes the Grafana board of a serving system, deploy/grafana/moe_serve.json: a panel for each thing to watch.

    python tools/make_grafana_board.py [FILE]

The board is made here and not by hand, so that all panels look alike and a changed metric is changed once. Every query
takes all series of the chosen instances; names and labels are held against a server's own by a test.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "moe_serve.json"
WHICH = 'instance=~"$instance"'
_WIDTH, _HEIGHT = 8, 8  # of a panel; a row of the grid is 24 wide


@dataclass(frozen=True)
class Panel:
    """One picture. queries: PromQL by legend;  unit: as Grafana names it"""

    title: str
    text: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False


def rate(metric: str, by: str = "") -> str:
    """Returns the sum of a counter's rates, by labels."""
    return f"sum{_by(by)} (rate({metric}{{{WHICH}}}[$__rate_interval]))"


def total(metric: str, by: str = "") -> str:
    """Returns the sum of a gauge, by labels."""
    return f"sum{_by(by)} ({metric}{{{WHICH}}})"


def quantiles(metric: str) -> dict[str, str]:
    """Returns the median and two high quantiles of a histogram."""
    return {
        f"p{round(100 * q)}": f"histogram_quantile({q}, {rate(metric + '_bucket', 'le')})" for q in (0.5, 0.9, 0.99)
    }


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Open requests", "Running on a rank, waiting for one in a front end, waiting on a rank.", "short", {
            "running": total("moe_serve_requests_running"),
            "running, rank {{rank}}": f"max by (rank) (moe_serve_rank_requests_running{{{WHICH}}})",
            "waiting here": total("moe_serve_requests_waiting"),
            "waiting on ranks": f"sum (max by (rank) (moe_serve_rank_requests_waiting{{{WHICH}}}))",
        }),
        Panel("Requests that end", "By reason, a second.", "reqps",
              {"{{reason}}": rate("moe_serve_requests_finished_total", "reason")}, stacked=True),
        Panel("Refused, degraded, moved", "A second; refusals by reason.", "reqps", {
            "refused: {{reason}}": rate("moe_serve_requests_refused_total", "reason"),
            "degraded: {{step}}": rate("moe_serve_degraded_calls_total", "step"),
            "moved to another rank": rate("moe_serve_requests_moved_total"),
        }),
        Panel("Where prompts are computed", "With prefill ranks: there, or why not, a second.", "reqps",
              {"{{route}}": rate("moe_serve_requests_routed_total", "route")}, stacked=True),
        Panel("Time to the first token", "From the request, read and checked.", "s",
              quantiles("moe_serve_time_to_first_token_seconds")),
        Panel("Time between tokens", "Of one request.", "s", quantiles("moe_serve_inter_token_latency_seconds")),
        Panel("Time of a request", "To its end; without errors.", "s",
              quantiles("moe_serve_e2e_request_latency_seconds")),
        Panel("Queue time", "Until a rank began with the request.", "s", quantiles("moe_serve_queue_time_seconds")),
        Panel("Time per output token", "Mean of each request, after its first token.", "s",
              quantiles("moe_serve_request_time_per_output_token_seconds")),
        Panel("Lengths", "Tokens of a request, mean.", "short", {
            "prompt": f"{rate('moe_serve_request_prompt_tokens_sum')} / "
                      f"{rate('moe_serve_request_prompt_tokens_count')}",
            "output": f"{rate('moe_serve_request_generation_tokens_sum')} / "
                      f"{rate('moe_serve_request_generation_tokens_count')}",
        }),
        Panel("Hand-overs", "From a prefill rank's token to the next, mean, by part.", "s", {
            "{{part}}": f"{rate('moe_serve_handover_seconds_sum', 'part')} / "
                        f"{rate('moe_serve_handover_seconds_count', 'part')}",
        }),
    ],
    "Tokens and cache": [
        Panel("Tokens a second", "Of prompts, of those from a prefix cache, and out.", "short", {
            "prompt": rate("moe_serve_prompt_tokens_total"),
            "cached prompt": rate("moe_serve_cached_prompt_tokens_total"),
            "output": rate("moe_serve_generation_tokens_total"),
        }),
        Panel("Tokens of each rank", "Rows of decodes and prefills, a second.", "short", {
            "rank {{rank}} {{kind}}":
                f"max by (rank, kind) (rate(moe_serve_rank_computed_tokens_total{{{WHICH}}}[$__rate_interval]))",
        }),
        Panel("Share of KV blocks in use", "Of each rank.", "percentunit", {
            "rank {{rank}}": f"max by (rank) (moe_serve_rank_kv_blocks_used{{{WHICH}}} / (moe_serve_rank_kv_blocks_used"
                             f"{{{WHICH}}} + moe_serve_rank_kv_blocks_free{{{WHICH}}}))",
        }),
        Panel("Prefix cache", "Share of prompt tokens found there.", "percentunit", {
            "hits": f"{rate('moe_serve_rank_prefix_cache_hits_total')} / "
                    f"{rate('moe_serve_rank_prefix_cache_queries_total')}",
        }),
        Panel("Preemptions", "Requests that lost blocks; tokens computed again.", "short", {
            "rank {{rank}}": rate("moe_serve_rank_preemptions_total", "rank"),
            "tokens again, rank {{rank}}": rate("moe_serve_rank_recomputed_tokens_total", "rank"),
        }),
        Panel("Pages outside the KV cache", "By what became of them, a second.", "short",
              {"{{fate}}": rate("moe_serve_rank_cache_pages_total", "fate")}, stacked=True),
        Panel("Pages that came up", "Of each rank, from memory, files and other hosts, a second.", "short", {
            "rank {{rank}} {{fate}}": "max by (rank, fate) (rate(moe_serve_rank_cache_pages_total"
                                      f"{{{WHICH}, fate=~\"from_.*\"}}[$__rate_interval]))",
        }),
        Panel("Where prompts begin", "What front ends knew of the pages of prompts that they sent, a second.", "reqps",
              {"{{where}}": rate("moe_serve_requests_prefix_total", "where")}, stacked=True),
        Panel("Pages of other hosts", "What fetching one takes over computing it.", "short", {
            "rank {{rank}}": f"max by (rank) (moe_serve_rank_page_cost{{{WHICH}}})",
        }),
        Panel("Drafts", "Of tokens, verified by steps: right ones were drawn.", "short", {
            "{{source}}, {{outcome}}": rate("moe_serve_rank_drafts_total", "source, outcome"),
        }),
        Panel("Decode steps with drafts", "Share of the decode steps.", "percentunit", {
            "{{drafts}} drafts": f"{rate('moe_serve_rank_decode_steps_total', 'drafts')} / ignoring(drafts) group_left "
                                 f"{rate('moe_serve_rank_decode_steps_total')}",
        }, stacked=True),
        Panel("Tokens of a request in a step", "Of decode steps, with drafts of tokens and without.", "short", {
            "{{drafts}} drafts": f"{rate('moe_serve_rank_decode_tokens_total', 'drafts')} / "
                                 f"{rate('moe_serve_rank_decode_requests_total', 'drafts')}",
        }),
        Panel("Experts read for a token", "Of all layers, in decode steps with drafts and without.", "short", {
            "{{drafts}} drafts": f"{rate('moe_serve_rank_decode_experts_total', 'drafts')} / "
                                 f"{rate('moe_serve_rank_decode_tokens_total', 'drafts')}",
        }),
        Panel("Time saved by drafts", "Seconds in a second; below 0: they cost more than they saved.", "short", {
            "rank {{rank}}": "max by (rank) (deriv(moe_serve_rank_speculation_saved_seconds"
                             f"{{{WHICH}}}[$__rate_interval]))",
        }),
        Panel("Tokens to be prefilled", "Of each rank.", "short",
              {"rank {{rank}}": f"max by (rank) (moe_serve_rank_pending_tokens{{{WHICH}}})"}),
    ],
    "Steps": [
        Panel("Time of a step", "Median over ranks, by phase.", "s", {
            "{{phase}}": f"histogram_quantile(0.5, {rate('moe_serve_rank_step_seconds_bucket', 'le, phase')})",
        }),
        Panel("Time of a step, p99", "By phase.", "s", {
            "{{phase}}": f"histogram_quantile(0.99, {rate('moe_serve_rank_step_seconds_bucket', 'le, phase')})",
        }),
        Panel("Parts of a step", "Share of the ranks' time, waits for peers included.", "percentunit", {
            "{{part}}": f"{rate('moe_serve_rank_step_part_seconds_total', 'part')} / ignoring(part) group_left "
                        f"{rate('moe_serve_rank_step_part_seconds_total')}",
        }, stacked=True),
        Panel("Parts of decode steps", "Seconds of a step.", "s", {
            "{{part}}": f"sum by (part) (rate(moe_serve_rank_step_part_seconds_total{{{WHICH}, phase=\"decode\"}}"
                        "[$__rate_interval])) / ignoring(part) group_left sum (rate(moe_serve_rank_step_seconds_count"
                        f"{{{WHICH}, phase=\"decode\"}}[$__rate_interval]))",
        }, stacked=True),
        Panel("Waiting for a rank", "Share of their time that the others wait for its rows.", "percentunit", {
            "for rank {{peer}}":
                f"avg by (peer) (rate(moe_serve_all_to_all_wait_seconds_total{{{WHICH}}}[$__rate_interval]))",
        }),
        Panel("Steps", "Done, and given up for a lost peer, a second.", "short", {
            "rank {{rank}}": rate("moe_serve_rank_steps_total", "rank"),
            "voided, rank {{rank}}": rate("moe_serve_rank_voided_steps_total", "rank"),
        }),
    ],
    "Experts": [
        Panel("Balancedness", "Mean over max of the ranks' load, newest window.", "percentunit", {
            "mean": f"max (moe_serve_eplb_balancedness_mean{{{WHICH}}})",
            "median layer": f"max (moe_serve_eplb_balancedness_p50{{{WHICH}}})",
            "worst layer": f"max (moe_serve_eplb_balancedness_min{{{WHICH}}})",
        }),
        Panel("Tokens of the experts", "Of each rank, a second.", "short", {
            "rank {{rank}}": f"max by (rank) (rate(moe_serve_eplb_rank_tokens_total{{{WHICH}}}[$__rate_interval]))",
        }),
        Panel("Decisions and moves", "A minute.", "short", {
            "{{kind}}": f"60 * max by (kind) (rate(moe_serve_eplb_decisions_total{{{WHICH}}}[$__rate_interval]))",
            "experts moved": f"60 * max (rate(moe_serve_eplb_experts_moved_total{{{WHICH}}}[$__rate_interval]))",
        }),
    ],
    "Processes": [
        Panel("Memory", "Resident, of front ends and ranks.", "bytes", {
            "front end {{instance}}": f"process_resident_memory_bytes{{{WHICH}}}",
            "rank {{rank}}": f"max by (rank) (moe_serve_rank_resident_memory_bytes{{{WHICH}}})",
        }),
        Panel("Open files", "Of front ends and ranks.", "short", {
            "front end {{instance}}": f"process_open_fds{{{WHICH}}}",
            "rank {{rank}}": f"max by (rank) (moe_serve_rank_open_fds{{{WHICH}}})",
        }),
        Panel("Warnings and errors", "Lines of the logs, a minute.", "short", {
            "front end, {{level}}": f"60 * {rate('moe_serve_log_lines_total', 'level')}",
            "rank {{rank}}, {{level}}":
                f"60 * max by (rank, level) (rate(moe_serve_rank_log_lines_total{{{WHICH}}}[$__rate_interval]))",
        }),
        Panel("Ranks that serve", "1, or 0 while a rank is out.", "short",
              {"rank {{rank}}": f"max by (rank) (moe_serve_rank_serving{{{WHICH}}})"}),
        Panel("CPU of the front ends", "Cores.", "short",
              {"{{instance}}": f"rate(process_cpu_seconds_total{{{WHICH}}}[$__rate_interval])"}),
        Panel("Requests with values that are not finite", "A minute.", "short", {
            "rank {{rank}}": f"60 * {rate('moe_serve_rank_failed_requests_total', 'rank')}",
        }),
    ],
}  # fmt: skip


def board() -> dict[str, Any]:
    """Returns the board as Grafana's JSON (schema of Grafana 10 and later)."""
    return {
        "title": "moe_serve",
        "uid": "moe-serve",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _instances()]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instances() -> dict[str, Any]:
    query = "label_values(moe_serve_rank_serving, instance)"
    return {
        "name": "instance", "label": "front end", "type": "query", "query": query, "definition": query,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "multi": True, "includeAll": True, "allValue": ".+", "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row, panels in ROWS.items():
        number += 1
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": row, "collapsed": False, "gridPos": place, "panels": []}
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            x, y = index % 3 * _WIDTH, top + index // 3 * _HEIGHT
            yield _panel(panel, number, {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y})
        top += -(-len(panels) // 3) * _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"lineWidth": 1, "fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
    custom |= {"stacking": {"mode": "normal"}} if panel.stacked else {}
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": source}
        for index, (legend, expression) in enumerate(panel.queries.items())
    ]
    return {
        "id": number, "type": "timeseries", "title": panel.title, "description": panel.text, "datasource": source,
        "gridPos": place, "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list", "placement": "bottom"},
        },
    }  # fmt: skip


def as_text() -> str:
    """Returns the file's text."""
    return json.dumps(board(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else BOARD
    path.write_text(as_text(), encoding="utf-8")
    print(f"wrote {path}: {sum(map(len, ROWS.values()))} panels")
