"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose indexer chooses the tokens that each one attends."""

from dataclasses import replace

from moe_serve.models.attention_spec import IndexerSpec, MlaSpec
from moe_serve.models.families import deepseek_v3
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    spec = deepseek_v3.read(config, eos_token_ids)
    attention = spec.attention
    assert isinstance(attention, MlaSpec)
    if attention.q_lora_rank is None:
        raise config.refuse("q_lora_rank null (the indexer reads the compressed queries)")
    if not spec.rope.interleaved:
        raise config.refuse("rope_interleave false")
    indexer = IndexerSpec(config.size("index_n_heads"), config.size("index_head_dim"), config.size("index_topk"))
    if indexer.width < spec.rope.dim:
        raise config.wrong("index_head_dim", indexer.width, f"at least qk_rope_head_dim, {spec.rope.dim}")
    return replace(spec, attention=replace(attention, indexer=indexer))


DEFAULTS = {"deepseek_v32": deepseek_v3.V3_DEFAULTS}
READERS = {"deepseek_v32": read}
