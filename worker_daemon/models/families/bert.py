"""BERT (Devlin et al., 2018), and RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al.,
2019), which differ from BERT in positions and heads."""

from dataclasses import replace

from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.encoder import (
    EncoderAttentionSpec,
    EncoderEmbeddingSpec,
    EncoderMLPSpec,
)
from worker_daemon.models.config_fields import (
    encoder_config,
    head_sizes,
    intermediate_size,
    max_length,
    num_layers,
    require_text,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields
from worker_daemon.models.pooling_config import encoder_pooler


def describe(fields: Fields) -> DecoderConfig:
    """Return the configuration of BERT: positions start at 0, and a classifier reads the pooled
    first token."""
    config = _encoder(fields, first_position=0)
    return replace(config, pooler=encoder_pooler(fields, "classifier", "pooler.dense"))


def describe_roberta(fields: Fields) -> DecoderConfig:
    """Return the configuration of RoBERTa: positions start after the padding token's, and a
    classifier reads the first token."""
    config = _encoder(fields, first_position=fields.integer("pad_token_id", 1, minimum=0) + 1)
    return replace(config, pooler=encoder_pooler(fields, "classifier.out_proj", "classifier.dense"))


def _encoder(fields: Fields, first_position: int) -> DecoderConfig:
    require_text(fields, "hidden_act", "gelu")
    require_text(fields, "position_embedding_type", "absolute")
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name, False):
            raise fields.error(name, "is not supported", "use a checkpoint of an encoder")
    eps = fields.number("layer_norm_eps", 1e-12)
    heads: HeadSizes = head_sizes(fields)
    attention = EncoderAttentionSpec(heads, eps)
    mlp = EncoderMLPSpec(intermediate_size(fields), eps)
    num_positions = max_length(fields)
    if num_positions <= first_position:
        raise fields.error("max_position_embeddings", f"must be above {first_position}")
    embedding = EncoderEmbeddingSpec(
        num_positions, first_position, fields.integer("type_vocab_size", 2), eps
    )
    return encoder_config(fields, [LayerSpec(attention, mlp)] * num_layers(fields), embedding)
