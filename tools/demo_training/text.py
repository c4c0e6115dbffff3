"""Text of this machine as training data: domains of documents, a byte-level BPE vocabulary, arrays of token ids.

Domains matter: the demo model shows experts whose load depends on the text. Without a folder there are two domains,
from the running Python: the code of its standard library, and its docstrings (prose).
Torch-free.
"""

import ast
import html
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS_ID, EOS_ID = 0, 1
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>"]
MIN_CHARS, MAX_CHARS = 400, 400_000  # documents outside are scraps, or data in disguise
VOCABULARY_CHARS = 40_000  # of each document, so that a few large ones do not dominate the vocabulary
VALIDATION_EVERY = 40  # one document in so many is held out
SUFFIXES = (".txt", ".rst", ".md", ".html", ".htm", ".py")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip"}
_NOT_LIBRARY |= {"encodings", "pydoc_data"}  # tables, not code


@dataclass(frozen=True)
class Domain:
    """Documents of one kind."""

    name: str
    documents: list[str]


@dataclass(frozen=True)
class Corpus:
    """Token ids by domain: one long array each, documents between <|bos|> and <|eos|>."""

    vocab_size: int
    train: dict[str, np.ndarray]  # [num_tokens] uint16
    validation: dict[str, np.ndarray]


def stdlib_domains() -> list[Domain]:
    """Returns the domains "python_code" and "python_docstrings" of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    code, prose = [], []
    for path in sorted(root.rglob("*.py")):
        if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts):
            source = path.read_text(encoding="utf-8", errors="ignore")
            code.append(source)
            prose.append(_docstrings(source))
    return [Domain("python_code", _of_fair_size(code)), Domain("python_docstrings", _of_fair_size(prose))]


def folder_domain(name: str, folder: Path) -> Domain:
    """Returns a domain of all text files below a folder. Raises ConfigError when there are none."""
    if not folder.is_dir():
        raise ConfigError(f"--docs {name}: {folder} is not a folder; give one that holds {', '.join(SUFFIXES)} files")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    documents = _of_fair_size(_plain_text(path) for path in paths)
    if len(documents) < 2:
        raise ConfigError(
            f"--docs {name}: {folder} holds {len(documents)} documents of {MIN_CHARS} to {MAX_CHARS} characters, needs "
            f"at least 2 (one is held out); give a folder with more {', '.join(SUFFIXES)} files"
        )
    return Domain(name, documents)


def prepare(
    domains: list[Domain],
    vocab_size: int,
    seed: int,
    work: Path,
    on_document: Callable[[str], None],
    tokenizer_json: Path | None = None,
) -> Corpus:
    """Trains the vocabulary, encodes all documents, writes both into `work`, and returns the corpus.

    on_document: called with the domain's name after each encoded document
    tokenizer_json: a vocabulary to take instead, of at most vocab_size sub-words
    Raises ConfigError for no domains, two of one name, or a vocabulary that cannot work.
    """
    names = [domain.name for domain in domains]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"the domains are {names}, needs at least one and no name twice; change --docs")
    low = 256 + len(SPECIAL_TOKENS)
    if not low <= vocab_size <= 65536:
        raise ConfigError(f"--vocab is {vocab_size}, expected {low} (all bytes and two marks) to 65536")
    from tokenizers import Tokenizer

    shuffled = {domain.name: random.Random(seed).sample(domain.documents, len(domain.documents)) for domain in domains}
    if tokenizer_json is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    else:
        tokenizer = _trained(shuffled, vocab_size)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(work / "tokenizer.json"))
    train, validation = {}, {}
    for name, texts in shuffled.items():
        parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for index, text in enumerate(texts):
            ids = np.array([BOS_ID, *tokenizer.encode(text).ids, EOS_ID], dtype=np.uint16)
            parts[index % VALIDATION_EVERY == 0].append(ids)
            on_document(name)
        train[name], validation[name] = np.concatenate(parts[0]), np.concatenate(parts[1])
        np.save(work / f"train_{name}.npy", train[name])
        np.save(work / f"validation_{name}.npy", validation[name])
    # The model's table has vocab_size rows, also where the text yields fewer sub-words.
    facts = {
        "vocab_size": vocab_size,
        "domains": names,
        "train_tokens": {name: len(ids) for name, ids in train.items()},
    }
    (work / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    return Corpus(vocab_size, train, validation)


def _trained(texts_of: dict[str, list[str]], vocab_size: int) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[:VOCABULARY_CHARS] for texts in texts_of.values() for text in texts), trainer)
    return tokenizer


def load_corpus(work: Path) -> Corpus:
    """Returns what prepare() wrote. Raises ConfigError when it is not there."""
    try:
        facts = json.loads((work / "corpus.json").read_text())
    except OSError:
        raise ConfigError(f"{work} holds no prepared text; run `make_demo_model.py prep --work {work}` first") from None
    arrays = [
        {name: np.load(work / f"{part}_{name}.npy") for name in facts["domains"]} for part in ("train", "validation")
    ]
    return Corpus(facts["vocab_size"], *arrays)


def _of_fair_size(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if MIN_CHARS <= len(text) <= MAX_CHARS]


def _docstrings(source: str) -> str:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def _plain_text(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix.lower() not in (".html", ".htm"):
        return text
    text = re.sub(r"(?is)<(head|script|style|nav)\b.*?</\1>", "", text)
    text = re.sub(r'(?is)<div class="nav(header|footer)".*?</table>', "", text)
    text = re.sub(r"(?i)</(p|h\d|li|tr|dt|pre|div)>|<br ?/?>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text)).replace("\u00a0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
