"""Makes a `tokenizers` tokenizer from the metadata of a GGUF file, and the settings of a tokenizer_config.json.

A file names the kind of its vocabulary and, for byte-level BPE, the rules by which text is split first
(`tokenizer.ggml.pre`). These rules are those of the models' own tokenizers; names are those that llama.cpp's converter
writes. Others are refused by name, since other ids would come out of the same text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError
from moe_serve.models.gguf_file import read_gguf
from moe_serve.models.gguf_model import TOKENS
from moe_serve.models.model_files import shown
from moe_serve.models.tokenizer_conversion import (
    CONTROL,
    LARGEST_VOCABULARY,
    PATTERN,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    convert_sentencepiece,
)

_UNUSED = 5  # the type of a token: an id without a token
_MERGES = "tokenizer.ggml.merges"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS, _SIGNS, _SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"  # as DeepSeek's own file has it
_DEEPSEEK_LLM = (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}""",
)


@dataclass(frozen=True)
class _Rules:
    """patterns: each splits the pieces of the one before;  whole: a piece that is a token is that token, unmerged

    adds_bos: where the file does not say;  composed: text is brought into Unicode's form NFC first
    """

    patterns: tuple[str, ...]
    whole: bool = False
    adds_bos: bool = False
    composed: bool = False


_RULES: Mapping[str, _Rules] = {
    "qwen2": _Rules((_QWEN2,), composed=True),
    "hunyuan": _Rules((_QWEN2,)),
    "llama-bpe": _Rules((_LLAMA3,), whole=True, adds_bos=True),
    "chatglm-bpe": _Rules((_LLAMA3,)),
    "glm4": _Rules((_LLAMA3,), whole=True),
    "gpt-2": _Rules((_GPT2,)),
    "olmo": _Rules((_GPT2,)),
    "refact": _Rules((r"\p{N}", _GPT2)),
    "gpt-4o": _Rules((_GPT4O,)),
    "llama4": _Rules((_GPT4O,)),
    "minimax-m2": _Rules((_GPT4O,)),
    "deepseek-llm": _Rules(_DEEPSEEK_LLM),
    "deepseek-coder": _Rules(_DEEPSEEK_CODER),
    "deepseek-v3": _Rules(_DEEPSEEK_V3),
    "kimi-k2": _Rules((PATTERN,), whole=True),
}


def gguf_settings(path: Path) -> dict[str, Any]:
    """Returns what tokenizer_config.json would say: special tokens, whether text begins with one, chat templates."""
    metadata = read_gguf(path, lists=(TOKENS, "tokenizer.chat_templates")).metadata
    tokens = metadata.get(TOKENS)
    settings: dict[str, Any] = {"add_bos_token": _adds_bos(metadata)}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and type(token_id) is int and 0 <= token_id < len(tokens):
            settings[name] = tokens[token_id]
    templates = {"default": metadata.get("tokenizer.chat_template")}
    names = metadata.get("tokenizer.chat_templates", [])
    templates |= {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names if isinstance(names, list)}
    settings["chat_template"] = [
        {"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)
    ]
    return settings


def gguf_backend(path: Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of a GGUF file. Raises ModelError for a vocabulary that is not read."""
    metadata = read_gguf(path, lists=(TOKENS, _MERGES)).metadata
    tokens, kind = metadata.get(TOKENS), metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= LARGEST_VOCABULARY:
        raise ModelError(f"{path}: holds no list of tokens; set model.skip_tokenizer: true and send input_ids")
    types = _list(path, metadata, "tokenizer.ggml.token_type", len(tokens), default=[1] * len(tokens))
    if kind == "llama":
        scores = _list(path, metadata, "tokenizer.ggml.scores", len(tokens))
        return _of_sentencepiece(metadata, list(zip(tokens, scores, types, strict=True)), path)
    if kind == "gpt2":
        return _of_bpe(path, metadata, tokens, types)
    raise ModelError(
        f"{path}: has a vocabulary of the kind {shown(kind)}, and read are llama (sentencepiece's BPE) and gpt2 "
        "(byte-level BPE); set model.skip_tokenizer: true and send input_ids"
    )


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    given = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(given, bool):
        return given
    rules = _RULES.get(str(metadata.get("tokenizer.ggml.pre")))
    return metadata.get("tokenizer.ggml.model") == "llama" or (rules is not None and rules.adds_bos)


def _list(
    path: Path, metadata: Mapping[str, Any], key: str, length: int, default: list[Any] | None = None
) -> list[Any]:
    values = metadata.get(key, default)
    if not isinstance(values, list) or len(values) != length:
        raise ModelError(f"{path}: {key} is no list of {length} entries, one for each token; download the file again")
    return values


def _of_sentencepiece(metadata: Mapping[str, Any], pieces: list[tuple[str, float, int]], path: Path) -> Any:
    model = SentencePieceModel(
        pieces=pieces,
        model_type=2,  # BPE
        byte_fallback=True,
        add_dummy_prefix=metadata.get("tokenizer.ggml.add_space_prefix") is not False,
        remove_extra_whitespaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces") is True,
    )
    if not any(kind == UNKNOWN for *_, kind in pieces):
        raise ModelError(f"{path}: its vocabulary has no token for unknown text; download or convert it again")
    return convert_sentencepiece(model, legacy=True)


def _of_bpe(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    rules = _RULES.get(str(name))
    if rules is None:
        raise ModelError(
            f"{path}: its text is split by the rules {shown(name)} (tokenizer.ggml.pre), and known are "
            f"{', '.join(_RULES)}; set model.skip_tokenizer: true and send input_ids"
        )
    ids: dict[str, int] = {}
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _UNUSED:
            ids.setdefault(text, token_id)
    lines = metadata.get(_MERGES, [])
    merges = [tuple(line.split(" ")) for line in lines] if isinstance(lines, list) else []
    if any(len(pair) != 2 or any(part not in ids for part in (*pair, "".join(pair))) for pair in merges):
        raise ModelError(f"{path}: {_MERGES} holds a merge of what are no tokens; download or convert it again")
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=rules.whole))
    if rules.composed:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(text, special=special[kind], normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in special and text
        ]
    )
    return backend
