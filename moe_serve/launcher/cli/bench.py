"""`moe-serve bench`: parses, calls moe_serve.bench, prints. Flags are vLLM's and SGLang's where they mean the same."""

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_serve.errors import ConfigError
from moe_serve.launcher.cli.command import api_key_of_environment, option, takes
from moe_serve.launcher.preflight import check_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moe_serve.bench.client import Outcome
    from moe_serve.bench.drafts import Drafts
    from moe_serve.bench.load import Load
    from moe_serve.bench.run import Ran
    from moe_serve.models.tokenizer import Tokenizer

HELP = """Load a server, ours or any with OpenAI's API, and measure it: latencies, throughput, goodput, errors.

Without --request-rate a closed loop (--max-concurrency) or all requests at once. An API key is read from
MOE_SERVE_API_KEY, else OPENAI_API_KEY. Needs the extra `bench`. Exit 1: a request failed.

\b
  moe-serve bench --num-prompts 200 --max-concurrency 16 --tokenizer demo
  moe-serve bench --request-rate 8 --duration 60 --goodput ttft:500 tpot:30 --picture run.svg
  moe-serve bench --base-url http://other:8000 --endpoint chat --input-len 64-512 --output-len lognormal:128:0.5
"""
_LENGTHS = "tokens: 128, a range 64-256, or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `moe-serve bench`."""

    goodput_more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None
    base_url: str = option("--base-url", default="http://127.0.0.1:30000")
    model: str | None = option("--model", help="its name on the server; none: the first it lists")
    endpoint: str = option(
        "--endpoint", default="completions", help="completions, chat, or generate (SGLang's and our own)"
    )
    num_prompts: int | None = option("--num-prompts", min=1, help="requests; 100, where --duration is not given either")
    duration: float | None = option("--duration", min=0.001, help="seconds in which to send")
    request_rate: float = option("--request-rate", default=float("inf"), help="per second, an open loop; inf: none")
    burstiness: float = option("--burstiness", default=1.0, help="of a rate: 1 Poisson, below burstier, inf equal gaps")
    max_concurrency: int | None = option("--max-concurrency", min=1, help="open requests, at most")
    input_len: str = option("--input-len", "--random-input-len", default="128", help=_LENGTHS)
    output_len: str = option("--output-len", "--random-output-len", default="128", help=_LENGTHS)
    tokenizer: str | None = option("--tokenizer", help="a model folder, or demo; none: four characters are a token")
    prefix_len: int = option("--random-prefix-len", "--prefix-len", default=0, min=0, help="shared tokens")
    prefix_share: float = option("--prefix-share", default=1.0, min=0, max=1, help="of prompts with a prefix")
    num_prefixes: int = option("--num-prefixes", default=1, min=1, help="different ones")
    domains: str = option("--domains", default="code,prose", help="of prompts' texts, with commas")
    shift_after: float | None = option(
        "--shift-after", min=0.001, help="seconds; the next domain, so expert load moves"
    )
    goodput: list[str] | None = option("--goodput", help="the SLO in ms: ttft:500 tpot:30 e2el:5000, some or all")
    temperature: float = option("--temperature", default=0.0, min=0)
    ignore_eos: bool = option("--ignore-eos", default=False, help="outputs have their whole length")
    extra_body: str = option("--extra-body", default="{}", help="JSON object: more fields of every request")
    num_warmups: int = option("--num-warmups", default=1, min=0, help="requests before the measured ones")
    timeout: float = option("--timeout", default=600.0, min=0.001, help="seconds for one request")
    seed: int = option("--seed", default=0, help="of prompts, lengths and gaps")
    json_file: Path | None = option("--json", help="write everything there, a row per request")
    picture: Path | None = option("--picture", help="draw the run as an .svg file")


@takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Loads a server and prints what it measured."""
    import asyncio

    _need_aiohttp()
    # Before an hour's run whose result would have no place.
    for name, path in (("--json", options.json_file), ("--picture", options.picture)):
        check_output(path, name)
    if options.picture is not None and options.picture.suffix != ".svg":
        raise ConfigError(f"--picture is {options.picture}, but the picture is an SVG; name a file that ends in .svg")
    from moe_serve.bench.load import slo_of
    from moe_serve.bench.report import report_of, table_of

    load, slo = _load_of(options), slo_of([*(options.goodput or ()), *(options.goodput_more or ())])
    if options.goodput_more and not options.goodput:
        raise typer.BadParameter(f"unexpected {options.goodput_more[0]!r}")
    ran, drafts = asyncio.run(_run(options, load, _tokenizer(options.tokenizer), api_key_of_environment()))
    report = report_of(ran, slo, load.request_rate != float("inf"), drafts)
    typer.echo(table_of(report))
    if options.json_file is not None:
        asked = {name: value for name, value in asdict(options).items() if name not in ("json_file", "picture")}
        text = json.dumps({"options": asked, **report.as_json()}, indent=1, default=str)
        _write(options.json_file, text + "\n")
    if options.picture is not None:
        from moe_serve.bench.picture import picture_of

        title = f"{report.num_complete} requests to {options.endpoint}: {report.rate(report.num_output):.0f} tokens/s"
        _write(options.picture, picture_of(report, title))
    raise typer.Exit(1 if report.errors or not report.num_complete else 0)


async def _run(
    options: BenchOptions, load: "Load", tokenizer: "Tokenizer | None", api_key: str | None
) -> "tuple[Ran, Drafts | None]":
    """Returns how the run went, and what drafts of tokens did for it."""
    import asyncio

    from moe_serve.bench.client import Client, Options, model_of
    from moe_serve.bench.drafts import REPORTED_S, drafts_between
    from moe_serve.bench.load import Prompts
    from moe_serve.bench.run import run_load

    extra, model = _extra(options.extra_body), options.model
    if model is None:
        model = "" if options.endpoint == "generate" else await model_of(options.base_url, api_key)
    of_requests = Options(model, options.temperature, options.ignore_eos, extra)
    client = Client(options.base_url, options.endpoint, of_requests, api_key, options.timeout)
    async with client:
        before = await client.metrics()
        with _progress(load.num_prompts) as progress:
            ran = await run_load(load, Prompts(load, tokenizer), client, progress)
        if drafts_between("", before) is None:
            return ran, None
        await asyncio.sleep(REPORTED_S)
        drafts = drafts_between(before, await client.metrics())
        if drafts is None:
            typer.echo(
                "what drafts did is not known: /metrics of the server ended, or began anew, during the run", err=True
            )
        return ran, drafts


def _load_of(options: BenchOptions) -> "Load":
    from moe_serve.bench.client import PATHS
    from moe_serve.bench.load import Lengths, Load

    if options.endpoint not in PATHS:
        raise ConfigError(f"--endpoint is {options.endpoint!r}, expected {', '.join(PATHS)}")
    if not options.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url is {options.base_url!r}, expected http://HOST:PORT or https://HOST:PORT")
    load = Load(
        num_prompts=100 if options.num_prompts is None and options.duration is None else options.num_prompts,
        duration_s=options.duration,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        input_len=Lengths.parse("--input-len", options.input_len),
        output_len=Lengths.parse("--output-len", options.output_len),
        prefix_len=options.prefix_len,
        prefix_share=options.prefix_share,
        num_prefixes=options.num_prefixes,
        domains=tuple(filter(None, options.domains.split(","))),
        shift_after_s=options.shift_after,
        num_warmups=options.num_warmups,
        seed=options.seed,
    )
    load.check()
    return load


def _tokenizer(name: str | None) -> "Tokenizer | None":
    if name is None:
        return None
    from moe_serve.config import ModelConfig, model_dir
    from moe_serve.models.tokenizer import Tokenizer

    return Tokenizer.from_folder(model_dir(ModelConfig(path=name)))


def _extra(text: str) -> tuple[tuple[str, Any], ...]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON ({error}); give an object, such as '{{\"top_k\": 1}}'") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body is {text[:40]!r}; give a JSON object, such as '{{\"top_k\": 1}}'")
    return tuple(value.items())


def _need_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError("moe-serve bench needs aiohttp; run: pip install 'moe-serve[bench]'") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); the table above is all there is") from None


@contextmanager
def _progress(total: int | None) -> "Iterator[Callable[[Outcome], None]]":
    """Yields what counts an outcome in a bar on stderr, which only a terminal shows."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda outcome: bar.advance(task)
