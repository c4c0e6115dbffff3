"""Finds the file of a model folder that holds the vocabulary, and reads it, of whichever kind it is. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError
from moe_serve.models.model_files import read_bytes, read_json

_COPY_AGAIN = "copy the file again"
_LARGEST_TOKENIZER = 256 << 20  # bytes; real ones have up to 35 MB
_KINDS = ("tokenizer.json", "tokenizer.model", "tiktoken.model")  # the first that a folder has is read
# Vocabularies that cannot be read: the rules that belong to them are only in Python code beside them.
_OTHER_KINDS = ("*.tiktoken", "tekken.json", "vocab.json")


def tokenizer_file(folder: str | Path) -> Path | None:
    """Returns the file from which the tokenizer of a model folder is read, None where there is none.

    Raises ModelError where the only vocabulary is of a kind that cannot be read.
    """
    folder = Path(folder)
    found = next((folder / name for name in _KINDS if (folder / name).exists()), None)
    if found is not None:
        return found
    other = next((path for pattern in _OTHER_KINDS for path in sorted(folder.glob(pattern))), None)
    if other is not None:
        raise ModelError(
            f"{other}: is a vocabulary that cannot be read; read are {', '.join(_KINDS)}: put a tokenizer.json there "
            "(such as transformers' save_pretrained writes), or set model.skip_tokenizer: true and send input_ids"
        )
    return None


def tokenizer_settings(folder: str | Path) -> dict[str, Any]:
    """Returns what tokenizer_config.json of a model folder says; nothing where it is missing."""
    path = Path(folder) / "tokenizer_config.json"
    return read_json(path, _COPY_AGAIN) if path.exists() else {}


def read_backend(path: Path, settings: Mapping[str, Any]) -> Any:
    """Returns the `tokenizers.Tokenizer` in a file that `tokenizer_file` found. settings: `tokenizer_settings`

    Raises ModelError for a file that cannot be read.
    """
    data = read_bytes(path, _COPY_AGAIN, _LARGEST_TOKENIZER)
    try:
        match path.name:
            case "tokenizer.model":
                from moe_serve.models.sentencepiece_model import sentencepiece_backend

                backend = sentencepiece_backend(data, str(path), settings.get("legacy") is not False)
            case "tiktoken.model":
                from moe_serve.models.tiktoken_model import tiktoken_backend

                backend = tiktoken_backend(data, str(path), settings)
            case _:
                from tokenizers import Tokenizer

                backend = Tokenizer.from_buffer(data)
    except ModelError:
        raise
    except Exception as error:  # the Rust library raises bare Exception for everything
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: cannot be read as a tokenizer ({reason}); {_COPY_AGAIN}") from None
    _add_tokens(backend, settings, path)
    return backend


def adds_bos(path: Path, settings: Mapping[str, Any]) -> bool | None:
    """Returns whether text is encoded with the beginning-of-sequence token; None = as tokenizer.json itself says."""
    given = settings.get("add_bos_token")
    if isinstance(given, bool):
        return given
    # What transformers' class for sentencepiece files does where nothing is said.
    is_llama = str(settings.get("tokenizer_class", "LlamaTokenizer")).startswith("Llama")
    return True if path.name == "tokenizer.model" and is_llama else None


def _add_tokens(backend: Any, settings: Mapping[str, Any], path: Path) -> None:
    """Adds the tokens that only tokenizer_config.json names, each with the id that it has there."""
    from tokenizers import AddedToken

    given = settings.get("added_tokens_decoder")
    if not isinstance(given, dict):
        return
    where = path.with_name("tokenizer_config.json")
    try:
        tokens = sorted((int(key), value) for key, value in given.items())
        known = [(token_id, str(value["content"]), bool(value.get("special", False))) for token_id, value in tokens]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{where}: added_tokens_decoder cannot be read; {_COPY_AGAIN}") from None
    for token_id, text, special in known:
        if backend.token_to_id(text) == token_id:
            continue
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
        if backend.token_to_id(text) != token_id:
            raise ModelError(
                f"{where}: the added token {text[:80]!r} has the id {token_id} there and {backend.token_to_id(text)} "
                f"in {path.name}; copy both files again from the same model"
            )
