"""Small tokenizers of the three kinds that models have, made with the `tokenizers` library.

byte_level():    every token is bytes (GPT-2, Qwen, DeepSeek); a character may be cut between tokens
byte_fallback(): words of a metaspace vocabulary, and byte tokens for what it lacks (Llama, Mixtral); a run of byte
                 tokens decodes to one U+FFFD per byte while it is not valid UTF-8
metaspace():     words only; the first word of a text loses its leading space
"""

from collections.abc import Callable

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers as norms

from moe_serve.models.tokenizer import Tokenizer

SPECIALS = ("<unk>", "<s>", "</s>")
EOS = 2
WORDS = ("▁", "▁a", "▁b", "▁the", "re", "a", "b", "c", "e", "h", "t", ".", "\n", "é", "▁▁", "stop")


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *alphabet, "th", "ab", "Ġa", "Ġð"))}
    backend = Backend(models.BPE(vocabulary, [("t", "h"), ("a", "b"), ("Ġ", "a"), ("Ġ", "ð")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend)


def byte_fallback() -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *byte_tokens, *WORDS))}
    backend = Backend(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend)


def metaspace() -> Tokenizer:
    backend = Backend(models.Unigram([(token, -1.0) for token in (*SPECIALS, *WORDS, "\ufffd", "漢")], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Metaspace()
    return _finished(backend)


KINDS: tuple[Callable[[], Tokenizer], ...] = (byte_level, byte_fallback, metaspace)


def _finished(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return Tokenizer(backend)


def vocab_size(tokenizer: Tokenizer) -> int:
    return tokenizer._backend.get_vocab_size()
