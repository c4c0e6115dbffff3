"""Retrains the demo model from text on this machine: prep (text), train, stats (expert load), sample, or all by `make`;
`predict` gives a model a layer for multi-token prediction.

The model is a 6-million-parameter DeepSeek-V3 (MLA, 32 experts top-4). An hour on two CPU cores gives the model in
moe_serve/demo_model; `--size tiny --steps 30` runs everything in seconds. Torch is imported where it is
needed, so that --help is fast.
"""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.table import Table

from moe_serve.errors import ConfigError, MoeServeError

if TYPE_CHECKING:
    from demo_training.model import DemoModel
    from demo_training.prediction import PredictionReport
    from demo_training.text import Domain
    from demo_training.training import StepReport

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help=__doc__)
stderr = Console(stderr=True)

PROMPTS = ("def read(self, size=-1):\n", "The following example shows how to", "class Queue:\n    ", "Return a new ")

Work = Annotated[Path, typer.Option(help="folder for prepared text and the state of an unfinished training")]
Out = Annotated[Path, typer.Option(help="the model folder, in Hugging Face layout")]
Docs = Annotated[
    list[str] | None, typer.Option(help="NAME=FOLDER: one more domain of text (.txt .rst .md .html .py); repeatable")
]
Stdlib = Annotated[bool, typer.Option(help="the running Python's library as domains python_code, python_docstrings")]
Vocab = Annotated[int, typer.Option(help="sub-words of the vocabulary")]
Size = Annotated[str, typer.Option(help="demo: 6 M parameters; tiny: for trying this tool out")]
Steps = Annotated[int, typer.Option(min=1, help="training steps; 2850 with the other defaults read 11.7 M tokens")]
Batch = Annotated[int, typer.Option(min=1, help="sequences of one step")]
Seq = Annotated[int, typer.Option(min=8, help="tokens of a sequence")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads")]
Seed = Annotated[int, typer.Option(min=0, help="equal seeds, text and threads give equal weights")]
Balance = Annotated[bool, typer.Option(help="balance the experts by the gate's bias; without it a few get all tokens")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the training that --work holds")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace a model that is in --out already")]


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with user errors turned into one line and exit code 2 instead of a traceback."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except MoeServeError as error:
            stderr.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None

    return run


@app.command()
@one_line_errors
def make(
    work: Work = Path("demo-work"),
    out: Out = Path("demo-model"),
    docs: Docs = None,
    stdlib: Stdlib = True,
    vocab: Vocab = 2048,
    size: Size = "demo",
    steps: Steps = 2850,
    batch: Batch = 8,
    seq: Seq = 512,
    threads: Threads = 2,
    seed: Seed = 1,
    balance: Balance = True,
    overwrite: Overwrite = False,
) -> None:
    """Everything: prep, train, stats and sample."""
    _refuse_existing(out, overwrite)
    prep(work, docs, stdlib, vocab, seed)
    train(work, out, size, steps, batch, seq, threads, seed, balance, False, overwrite)
    stats(work, out, seq, threads)
    sample(out, threads=threads)


@app.command()
@one_line_errors
def prep(
    work: Work = Path("demo-work"),
    docs: Docs = None,
    stdlib: Stdlib = True,
    vocab: Vocab = 2048,
    seed: Seed = 1,
) -> None:
    """Read text, train the vocabulary on it, and write token ids."""
    from demo_training.text import prepare

    with _progress() as progress:
        task = progress.add_task("reading text", total=None)
        domains = _read_domains(docs or [], stdlib)
        progress.update(task, description="training the vocabulary")
        total = sum(len(domain.documents) for domain in domains)

        def on_document(name: str) -> None:
            progress.update(task, description=f"encoding {name}", total=total, advance=1)

        corpus = prepare(domains, vocab, seed, work, on_document)
    table = Table(
        "domain", "documents", "characters", "tokens to train on", "held out", title=f"text in {escape(str(work))}"
    )
    for domain in domains:
        numbers = (
            len(domain.documents),
            sum(map(len, domain.documents)),
            len(corpus.train[domain.name]),
            len(corpus.validation[domain.name]),
        )
        table.add_row(domain.name, *(f"{number:,}" for number in numbers))
    Console().print(table)


@app.command()
@one_line_errors
def train(
    work: Work = Path("demo-work"),
    out: Out = Path("demo-model"),
    size: Size = "demo",
    steps: Steps = 2850,
    batch: Batch = 8,
    seq: Seq = 512,
    threads: Threads = 2,
    seed: Seed = 1,
    balance: Balance = True,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Train on the prepared text, and export the model."""
    _refuse_existing(out, overwrite)
    import torch
    from demo_training.export import export
    from demo_training.model import named_shape
    from demo_training.text import load_corpus
    from demo_training.training import TrainSettings
    from demo_training.training import train as run_training

    torch.set_num_threads(threads)
    corpus = load_corpus(work)
    shape = named_shape(size, corpus.vocab_size)
    settings = TrainSettings(steps, batch, seq, seed, bias_rate=TrainSettings.bias_rate if balance else 0.0)
    with _progress("{task.fields[numbers]}") as progress:
        task = progress.add_task("training", total=steps, numbers="")

        def on_step(report: "StepReport") -> None:
            progress.update(
                task, completed=report.step, numbers=f"loss {report.loss:.3f} · {report.tokens_per_s:,.0f} tok/s"
            )
            if report.validation is not None:
                losses = ", ".join(f"{name} {loss:.3f}" for name, loss in report.validation.items())
                line = f"step {report.step}: held-out loss {losses}; busiest expert {report.imbalance:.1f} x the mean"
                progress.console.print(line, highlight=False)

        model = run_training(shape, corpus, settings, work / "state.pt", resume, on_step)
    export(model, work / "tokenizer.json", out)
    Console(markup=False, emoji=False).print(f"{_describe(model)}: {out}", highlight=False, soft_wrap=True)


@app.command()
@one_line_errors
def predict(
    work: Work = Path("demo-work"),
    out: Out = Path("demo-model"),
    docs: Docs = None,
    stdlib: Stdlib = True,
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 350,
    batch: Batch = 8,
    seq: Seq = 512,
    threads: Threads = 2,
    seed: Seed = 1,
    overwrite: Overwrite = False,
) -> None:
    """Train a layer for multi-token prediction behind the model in --out, and put it beside the model."""
    import torch
    from demo_training.export import export_prediction, load_exported, prediction_file
    from demo_training.prediction import train_prediction
    from demo_training.text import prepare
    from demo_training.training import TrainSettings

    if prediction_file(out).exists() and not overwrite:
        raise ConfigError(f"{prediction_file(out)} is there already; pass --overwrite to replace it")
    torch.set_num_threads(threads)
    model = load_exported(out)
    with _progress("{task.fields[numbers]}") as progress:
        task = progress.add_task("reading text", total=steps, numbers="")
        domains = _read_domains(docs or [], stdlib)
        vocabulary = out / "tokenizer.json"
        corpus = prepare(domains, model.shape.vocab_size, seed, work, lambda name: None, vocabulary)

        def on_step(report: "PredictionReport") -> None:
            progress.update(
                task, description="training", completed=report.step, numbers=f"{report.loss:.3f} nats above the model"
            )
            if report.agreement is not None:
                same = ", ".join(f"{name} {share:.0%}" for name, share in report.agreement.items())
                line = f"step {report.step}: guesses the model's best token, held out: {same}"
                progress.console.print(line, highlight=False)

        layer = train_prediction(model, corpus, TrainSettings(steps, batch, seq, seed), on_step)
    export_prediction(layer, model, out)


@app.command()
@one_line_errors
def stats(work: Work = Path("demo-work"), out: Out = Path("demo-model"), seq: Seq = 512, threads: Threads = 2) -> None:
    """Count each expert's tokens on held-out text, by domain, into expert_load.json."""
    import numpy as np
    import torch
    from demo_training.export import expert_load, load_exported
    from demo_training.text import load_corpus

    torch.set_num_threads(threads)
    loads = expert_load(load_exported(out), load_corpus(work), seq)
    (out / "expert_load.json").write_text(json.dumps(loads) + "\n")
    first = np.array(next(iter(loads.values())), dtype=np.float64)
    table = Table(
        "domain", "MoE layer", "max / mean", "min / mean", f"moved from {next(iter(loads))}", title="expert load"
    )
    for name, rows in loads.items():
        for layer, counts in enumerate(np.array(rows, dtype=np.float64)):
            moved = 0.5 * np.abs(counts / counts.sum() - first[layer] / first[layer].sum()).sum()
            shares = counts / counts.mean()
            table.add_row(name, str(layer), f"{shares.max():.2f}", f"{shares.min():.2f}", f"{moved:.0%}")
    Console().print(table)


@app.command()
@one_line_errors
def sample(
    out: Out = Path("demo-model"),
    prompt: Annotated[list[str] | None, typer.Option(help="text to continue; repeatable")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to add")] = 60,
    temperature: Annotated[float, typer.Option(min=0.01, help="lower is more repetitive")] = 0.7,
    threads: Threads = 2,
    seed: Seed = 1,
) -> None:
    """Let the model continue some text."""
    import torch
    from demo_training.export import load_exported
    from demo_training.text import BOS_ID
    from tokenizers import Tokenizer

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    model = load_exported(out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in prompt or PROMPTS:
        ids = [BOS_ID, *tokenizer.encode(text).ids]
        for _ in range(tokens):
            with torch.no_grad():
                logits = model(torch.tensor([ids[-model.shape.max_position_embeddings :]]))[0, -1] / temperature
            best = logits.topk(min(40, len(logits)))
            chosen = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
            ids.append(int(best.indices[chosen]))
        continued = tokenizer.decode(ids)[len(text) :]
        Console().print(f"[dim]-----[/]\n[bold]{escape(text)}[/]{escape(continued)}", highlight=False)


def _read_domains(docs: list[str], stdlib: bool) -> "list[Domain]":
    from demo_training.text import folder_domain, stdlib_domains

    domains = stdlib_domains() if stdlib else []
    for text in docs:
        name, equals, folder = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--docs {text!r} is not of the form NAME=FOLDER; e.g. --docs manual=/usr/share/doc")
        domains.append(folder_domain(name, Path(folder).expanduser()))
    return domains


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if (out / "config.json").exists() and not overwrite:
        raise ConfigError(f"{out} holds a model already; choose another --out, or pass --overwrite")


def _describe(model: "DemoModel") -> str:
    total = sum(weight.numel() for weight in model.parameters())
    shape = model.shape
    routed = sum(layer.gate_up.numel() + layer.down.numel() for layer in model.moe_layers)
    active = total - routed * (1 - shape.num_experts_per_tok / shape.n_routed_experts)
    return f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active per token"


def _progress(*more: str) -> Progress:
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
    ]
    return Progress(*columns, TimeElapsedColumn(), TimeLeft(), *map(TextColumn, more), console=stderr)


if __name__ == "__main__":
    app()
