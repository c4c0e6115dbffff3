"""Step times that an engine has measured: a CSV, or the lines that vLLM and SGLang log.

    phase,tokens,step_s,context,decoding    tokens that a rank computes in the step; context may be left out
    decode,128,0.0411,3000                  context: tokens of a request in the cache;  prefill: of a prompt
    mixed,2048,0.161,3000,96                decoding: of the tokens, those that decode beside prompts;  context: both

vLLM (--enable-logging-iteration-details): `Iteration(515): 0 context requests, 0 context tokens, 20 generation
requests, 20 generation tokens, iteration elapsed time: 10.99 ms`.

SGLang: `Decode batch, #running-req: 32, #token: 11179, …, gen throughput (token/s): 1635.11`, a mean over the steps
since the last such line, so it counts only if no prefill came between. With drafts a step takes as long as the tokens
that it accepts (`accept len`). `Prefill batch, …, #new-token: 8192, …, input throughput (token/s): 9610.84` has the
rate of the batch before it, so it counts where that one had as many tokens, and no decode came between.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from moe_serve.eplb.load import PHASES, Phase
from moe_serve.errors import TraceError

_VLLM = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\d{1,9}) context tokens, \d+ generation requests, "
    r"(\d{1,9}) generation tokens, iteration elapsed time: (\d{1,9}(?:\.\d{1,20})?) ms"
)
_SGLANG = re.compile(r"\[[^\]]*?((?: (?:DP|TP|EP|PP)\d+)*)\] (Decode|Prefill) batch, (.*)")
_NUMBER = re.compile(r"(#?[a-z][a-z -]*(?:\(token/s\))?): (\d{1,9}(?:\.\d{1,20})?)(?!\.?\d)")  # 1.2.3 is none
_COLUMNS = ("phase", "tokens", "step_s")
MAX_TOKENS = 1 << 31  # of a step, or of a request in the cache
MAX_LINES = 10_000_000
MAX_LINE = 1 << 16  # characters of a line that are read


@dataclass(frozen=True)
class StepTime:
    """A measured step.

    tokens:   that one rank computes;  decoding: of these, in a mixed step
    context:  of a decoding request in the cache, or of a prompt, or of both; None: not known
    """

    phase: Phase
    tokens: int
    step_s: float
    context: float | None = None
    decoding: int = 0


def read_step_times(path: Path) -> list[StepTime]:
    """Returns the steps of a CSV, or of an engine's log; what the file is, its lines say.

    Raises TraceError for a file that cannot be read or holds no step, and for a wrong line of a CSV.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(MAX_LINE).lstrip("\ufeff")
            file.seek(0)
            names = [name.strip() for name in first.split(",")]
            steps = list(_of_csv(path, file)) if set(_COLUMNS) <= set(names) else list(_of_log(_lines(file)))
    except OSError as problem:
        raise TraceError(f"{path}: cannot be read ({problem.strerror})") from None
    except csv.Error as problem:
        raise TraceError(f"{path}: no CSV ({problem}); give lines of phase, tokens, step_s") from None
    if not steps:
        raise TraceError(
            f"{path}: no step times; give a CSV with the columns {', '.join(_COLUMNS)} (and context, decoding), or a "
            "log with vLLM's lines 'Iteration(…): …' or SGLang's 'Decode batch, …' and 'Prefill batch, …'"
        )
    return steps


def _lines(file: TextIO) -> Iterator[str]:
    """Yields the lines, a longer one than MAX_LINE in parts."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), "")):
        if number >= MAX_LINES:
            raise TraceError(f"the log has more than {MAX_LINES:,} lines; cut out a part of it")
        yield line


def _of_csv(path: Path, file: TextIO) -> Iterator[StepTime]:
    rows = csv.DictReader(line.lstrip("\ufeff") for line in _lines(file))
    rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
    for row in rows:
        where = f"{path}, line {rows.line_num}"
        phase = next((name for name in PHASES if name == str(row["phase"]).strip()), None)
        if phase is None:
            raise TraceError(f"{where}: phase is {row['phase']!r}; give {', '.join(PHASES)}")
        try:
            context = (row.get("context") or "").strip()
            decoding = int((row.get("decoding") or "0").strip() or 0)
            length = float(context) if context else None
            step = StepTime(phase, int(row["tokens"]), float(row["step_s"]), length, decoding)
        except (TypeError, ValueError) as problem:
            raise TraceError(f"{where}: {problem}; give phase, tokens (a whole number), step_s (seconds)") from None
        if not 1 <= step.tokens <= MAX_TOKENS or not 0 < step.step_s < math.inf:
            raise TraceError(
                f"{where}: {_few_digits(step.tokens)} tokens in {step.step_s:g} s; give 1 to {MAX_TOKENS:,} tokens and "
                "a time above 0"
            )
        if step.context is not None and not 1 <= step.context <= MAX_TOKENS:
            raise TraceError(f"{where}: a context of {step.context:g} tokens; give 1 to {MAX_TOKENS:,}")
        if (phase == "mixed") != (step.decoding > 0) or not 0 <= step.decoding < step.tokens:
            raise TraceError(
                f"{where}: {_few_digits(step.decoding)} tokens of {step.tokens} in a {phase} step decode; give some, "
                "but not all, of a mixed step in the column decoding, and none of others"
            )
        yield step


def _few_digits(number: int) -> str:
    """Returns a number of a file for a message: a long one in short."""
    return str(number) if abs(number) < 10**18 else f"a number of {len(str(abs(number)))} digits of"


def _of_log(lines: Iterator[str]) -> Iterator[StepTime]:
    before: dict[str, tuple[str, int]] = {}  # of each rank: the kind of its last line, and its new tokens
    for line in lines:
        if (match := _VLLM.search(line)) is not None:
            prompt, answer, step_s = int(match[1]), int(match[2]), float(match[3]) / 1e3
            if (prompt or answer) and step_s > 0:
                phase: Phase = "mixed" if prompt and answer else "prefill" if prompt else "decode"
                yield StepTime(phase, prompt + answer, step_s, decoding=answer if prompt else 0)
        elif (match := _SGLANG.search(line)) is not None:
            rank, kind = match[1], match[2]
            said = {name.strip(" #"): float(value) for name, value in _NUMBER.findall(match[3])}
            last = before.get(rank)
            new = int(said.get("new-token", 0))
            before[rank] = (kind, new)
            if last is None or last[0] != kind:
                continue
            if kind == "Decode":
                requests, rate = int(said.get("running-req", 0)), said.get("gen throughput (token/s)", 0)
                accepted = said.get("accept len", 1)
                if requests and rate and accepted:
                    context = said.get("token", said.get("full token", 0)) / requests
                    yield StepTime("decode", requests, requests * accepted / rate, context if context >= 1 else None)
            elif new and new == last[1] and said.get("input throughput (token/s)"):
                yield StepTime("prefill", new, new / said["input throughput (token/s)"])
