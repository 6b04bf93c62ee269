"""The architectures: transformers' model classes with tiny random configurations, torchvision's where it is installed.

Weights are the class's own random ones, dropout is off, the batch is random. Two or so layers, 64 wide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, BATCH, SEQ, WIDTH, CLASSES = 99, 2, 24, 64, 10
IMAGES = 8  # batch norm over two says nothing
PADDING = 1  # an ordinary token, left out of the batches: some classes mask it

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """One model class and what makes it tiny."""

    family: str
    """A key of `BATCHES`, or ``"torchvision"``."""
    model: str
    """The class in transformers, or the function in torchvision.models."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, over those of the family; None leaves one out."""

    def build(self) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        """Return the float32 model, and the loss of a model (compiled or not) on a fixed batch.

        Both random from torch's generator. Raises what the library does.
        """
        if self.family == "torchvision":
            return _torchvision(self.model, self.options)
        model, batch = _transformers(self), BATCHES[self.family]()
        return model, lambda called: called(**batch).loss


def _tokens(rows: int = BATCH, length: int = SEQ) -> Tensor:
    return torch.randint(PADDING + 1, VOCAB, (rows, length))


def _shifted() -> Batch:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _masked() -> Batch:
    return {"input_ids": _tokens(), "labels": _tokens()}


def _pair() -> Batch:
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens(length=16), "labels": _tokens(length=16)}


def _image(size: int = 32) -> Batch:
    return {"pixel_values": torch.randn(IMAGES, 3, size, size), "labels": torch.randint(0, CLASSES, (IMAGES,))}


def _wave() -> Batch:
    return {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(0, CLASSES, (BATCH,))}


def _spectrum() -> Batch:
    return {"input_features": torch.randn(BATCH, 16, 2 * SEQ), "decoder_input_ids": _tokens(), "labels": _tokens()}


BATCHES: dict[str, Callable[[], Batch]] = {
    "decoder": _shifted,
    "state-space": _shifted,
    "experts": _shifted,
    "encoder": _masked,
    "encoder-decoder": _pair,
    "vision": _image,
    "wave": _wave,
    "spectrum": _spectrum,
}

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 64,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_HALVES = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 64,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 0,
}
_STAGES = {"image_size": 32, "num_labels": CLASSES}
_WAVE = _TEXT | {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_labels": CLASSES}
_WAVE |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 32}
_WAVE |= {"num_feat_extract_layers": 2, "apply_spec_augment": False}

_SWIN = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
_SWIN |= {"num_hidden_layers": None, "num_attention_heads": None}

FAMILY: dict[str, dict[str, Any]] = {
    "decoder": _TEXT,
    "state-space": {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2},
    "experts": _TEXT | {"num_key_value_heads": 2, "head_dim": 16},
    "encoder": _TEXT,
    "encoder-decoder": _HALVES,
    "vision": _TEXT | _STAGES | {"patch_size": 8},
    "wave": _WAVE,
    "spectrum": _HALVES | {"num_mel_bins": 16, "max_source_positions": SEQ, "max_target_positions": 64},
}


def _no_dropout(options: Mapping[str, Any]) -> dict[str, float]:
    words = ("drop", "layerdrop", "jitter_noise", "mask_time_prob", "mask_feature_prob")
    return {k: 0.0 for k, v in options.items() if isinstance(v, float) and any(word in k for word in words)}


def _transformers(architecture: Architecture) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    made = getattr(transformers, architecture.model)
    options = FAMILY[architecture.family] | dict(architecture.options)
    options = {name: value for name, value in options.items() if value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = _no_dropout(made.config_class(**options).to_dict())
        model: nn.Module = made(made.config_class(**options | quiet))
    if architecture.family == "decoder" and model.loss_type is None:
        model.loss_type = "ForCausalLM"  # what it falls back to, less a log message that cuts the graph
    return _without_dropout(model.train())


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _torchvision(name: str, options: Mapping[str, Any]) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    import torchvision

    model = _without_dropout(getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **options).train())
    batch = _image(size=64)

    def loss(called: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(called(batch["pixel_values"]), batch["labels"])

    return model, loss


def _decoder(model: str, **options: Any) -> Architecture:
    return Architecture("decoder", model, options)


def _encoder(model: str, **options: Any) -> Architecture:
    return Architecture("encoder", model, options)


def _experts(model: str, **options: Any) -> Architecture:
    return Architecture("experts", model, options)


def _halves(model: str, **options: Any) -> Architecture:
    return Architecture("encoder-decoder", model, options)


def _vision(model: str, **options: Any) -> Architecture:
    return Architecture("vision", model, options)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _decoder("LlamaForCausalLM", num_key_value_heads=2),
    "gpt2": _decoder("GPT2LMHeadModel"),
    "gptj": _decoder("GPTJForCausalLM", rotary_dim=8),
    "gpt_neo": _decoder("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], num_layers=2, window_size=8),
    "gpt_neox": _decoder("GPTNeoXForCausalLM"),
    "qwen2": _decoder("Qwen2ForCausalLM", num_key_value_heads=2),
    "qwen3": _decoder("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=16),
    "gemma": _decoder("GemmaForCausalLM", num_key_value_heads=2, head_dim=16),
    "gemma2": _decoder("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=16),  # norms before and after the GEMMs
    "mistral": _decoder("MistralForCausalLM", num_key_value_heads=2, head_dim=16, sliding_window=8),
    "phi": _decoder("PhiForCausalLM"),
    "phi3": _decoder("Phi3ForCausalLM"),
    "opt": _decoder("OPTForCausalLM", ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    "bloom": _decoder("BloomForCausalLM"),
    "falcon": _decoder("FalconForCausalLM"),
    "mpt": _decoder("MptForCausalLM", d_model=WIDTH, n_heads=4, n_layers=2, max_seq_len=64, expansion_ratio=2),
    "olmo2": _decoder("Olmo2ForCausalLM"),  # norms after the GEMMs
    "cohere": _decoder("CohereForCausalLM", num_key_value_heads=2),
    "stablelm": _decoder("StableLmForCausalLM", num_key_value_heads=2),
    "xlnet": _decoder(
        "XLNetLMHeadModel", d_model=WIDTH, n_head=4, n_layer=2, d_inner=2 * WIDTH, max_position_embeddings=None
    ),
    "reformer": _decoder(
        "ReformerModelWithLMHead",
        attn_layers=["lsh", "local"],
        attention_head_size=16,
        feed_forward_size=2 * WIDTH,
        axial_pos_embds=False,
        is_decoder=True,
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        num_buckets=4,
        hash_seed=0,
    ),  # hashed attention
    "bert": _encoder("BertForMaskedLM"),
    "roberta": _encoder("RobertaForMaskedLM"),
    "roberta_prenorm": _encoder("RobertaPreLayerNormForMaskedLM"),
    "deberta": _encoder("DebertaForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "electra": _encoder("ElectraForMaskedLM", embedding_size=32),
    "albert": _encoder("AlbertForMaskedLM", embedding_size=32),
    "distilbert": _encoder("DistilBertForMaskedLM", dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=2 * WIDTH),
    "modernbert": _encoder("ModernBertForMaskedLM", cls_token_id=0, sep_token_id=0),
    "fnet": _encoder("FNetForMaskedLM"),
    "t5": _halves("T5ForConditionalGeneration", d_kv=16, d_ff=2 * WIDTH, num_layers=2, num_heads=4),
    "bart": _halves("BartForConditionalGeneration"),
    "marian": _halves("MarianMTModel", decoder_vocab_size=VOCAB),
    "pegasus": _halves("PegasusForConditionalGeneration"),
    "mamba": Architecture("state-space", "MambaForCausalLM", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": Architecture(
        "state-space",
        "Mamba2ForCausalLM",
        {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "mixtral": _experts("MixtralForCausalLM", num_local_experts=4),
    "qwen2_moe": _experts(
        "Qwen2MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=WIDTH,
    ),
    "olmoe": _experts("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "wav2vec2": Architecture("wave", "Wav2Vec2ForSequenceClassification"),
    "whisper": Architecture("spectrum", "WhisperForConditionalGeneration"),
    "vit": _vision("ViTForImageClassification"),
    "dinov2": _vision("Dinov2ForImageClassification", mlp_ratio=2),
    "swin": _vision("SwinForImageClassification", **_SWIN),
    "swinv2": _vision("Swinv2ForImageClassification", **_SWIN),  # norms after the GEMMs
    "convnext": _vision("ConvNextForImageClassification", num_stages=2, hidden_sizes=[32, 64], depths=[1, 1]),
    "resnet": _vision(
        "ResNetForImageClassification",
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        layer_type="basic",
    ),
    "regnet": _vision(
        "RegNetForImageClassification",
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        groups_width=16,
        num_hidden_layers=None,
    ),
    "poolformer": _vision(
        "PoolFormerForImageClassification",
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[32, 64],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        mlp_ratio=2.0,
    ),
    "segformer": _vision(
        "SegformerForImageClassification",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[32, 64],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    "tv_resnet18": Architecture("torchvision", "resnet18"),
    "tv_efficientnet": Architecture("torchvision", "efficientnet_b0", {"stochastic_depth_prob": 0.0}),
    "tv_vgg11_bn": Architecture("torchvision", "vgg11_bn"),
}


def names() -> list[str]:
    """Return what can run here: torchvision's architectures where it is installed."""
    from importlib.util import find_spec

    return [n for n, a in ARCHITECTURES.items() if a.family != "torchvision" or find_spec("torchvision")]
