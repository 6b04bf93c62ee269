"""The registry: those of ``benchmarks.fidelity``, more classes of transformers, small networks of our own, and libraries'.

Libraries' (torchvision, timm, diffusers, torch_geometric) are there where these are installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from benchmarks.architectures.libraries import LIBRARIES, Library
from benchmarks.architectures.own import OWN, Made
from benchmarks.fidelity.architectures import ARCHITECTURES as FIDELITY
from benchmarks.fidelity.architectures import WIDTH, Architecture
from benchmarks.yardsticks.dynamo_models import vision

# What the options of a class may be called; those that a configuration does not know it keeps to itself.
_NAMES = {
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "d_model": WIDTH, "n_layers": 2,
    "n_heads": 4, "num_layers": 2, "num_heads": 4, "d_ff": 2 * WIDTH, "d_kv": 16, "ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH, "decoder_layers": 2, "decoder_attention_heads": 4, "rotary_dim": 8, "n_positions": 64,
    "n_inner": 2 * WIDTH, "sliding_window": 8,
}  # fmt: skip

_ONE = {"num_hidden_layers": 1, "encoder_layers": 1, "decoder_layers": 1}

# Classes whose family's options suffice, and those that need the names above.
_PLAIN: Mapping[str, str] = {
    "decoder": """ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM BertGenerationDecoder BigBirdForCausalLM
        BioGptForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM DiffLlamaForCausalLM DogeForCausalLM
        Ernie4_5ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM FuyuForCausalLM Gemma3ForCausalLM GlmForCausalLM
        Glm4ForCausalLM GPTBigCodeForCausalLM GPTNeoXJapaneseForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
        GraniteMoeSharedForCausalLM MiniCPM3ForCausalLM ModernBertDecoderForCausalLM NanoChatForCausalLM
        OlmoForCausalLM Olmo3ForCausalLM OpenAIGPTLMHeadModel PersimmonForCausalLM
        SmolLM3ForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM VaultGemmaForCausalLM XGLMForCausalLM
        XLMWithLMHeadModel""",
    "encoder": """BigBirdForMaskedLM CamembertForMaskedLM ConvBertForMaskedLM DebertaV2ForMaskedLM EsmForMaskedLM
        EuroBertForMaskedLM FlaubertWithLMHeadModel IBertForMaskedLM LayoutLMForMaskedLM LongformerForMaskedLM
        MegatronBertForMaskedLM MPNetForMaskedLM MraForMaskedLM NomicBertForMaskedLM NystromformerForMaskedLM
        RemBertForMaskedLM RoFormerForMaskedLM TapasForMaskedLM XLMRobertaXLForMaskedLM YosoForMaskedLM""",
    "encoder-decoder": """BigBirdPegasusForConditionalGeneration BlenderbotForConditionalGeneration
        LEDForConditionalGeneration M2M100ForConditionalGeneration MBartForConditionalGeneration
        NllbMoeForConditionalGeneration PegasusXForConditionalGeneration PLBartForConditionalGeneration""",
    "vision": """BeitForImageClassification Data2VecVisionForImageClassification DeiTForImageClassification
        Dinov2WithRegistersForImageClassification IJepaForImageClassification ViTMSNForImageClassification""",
    "wave": """Data2VecAudioForSequenceClassification HubertForSequenceClassification SEWForSequenceClassification
        SEWDForSequenceClassification UniSpeechForSequenceClassification UniSpeechSatForSequenceClassification
        Wav2Vec2ConformerForSequenceClassification WavLMForSequenceClassification""",
}
_NAMED: Mapping[str, str] = {
    "decoder": """AfmoeForCausalLM BitNetForCausalLM CodeGenForCausalLM DeepseekV2ForCausalLM Exaone4ForCausalLM
        Ernie4_5_MoeForCausalLM Glm4MoeForCausalLM GptOssForCausalLM HeliumForCausalLM HunYuanMoEV1ForCausalLM
        JetMoeForCausalLM Lfm2ForCausalLM Llama4ForCausalLM MiniMaxForCausalLM MinistralForCausalLM MoshiForCausalLM
        NemotronForCausalLM PhimoeForCausalLM Qwen3MoeForCausalLM SeedOssForCausalLM""",
}
_OF_TWO_LAYERS: Mapping[str, str] = {
    "decoder": "OlmoHybridForCausalLM RwkvForCausalLM",
    "encoder-decoder": "LongT5ForConditionalGeneration MT5ForConditionalGeneration UMT5ForConditionalGeneration",
}
_TASK = re.compile(
    r"For(CausalLM|MaskedLM|ConditionalGeneration|ImageClassification|SequenceClassification)|LMHeadModel"
)


class Buildable(Protocol):
    """An architecture."""

    @property
    def family(self) -> str: ...
    def build(self) -> Made: ...


def _name(model: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _TASK.sub("", model)).lower()


def _classes(table: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Buildable]:
    found = [(family, model) for family, models in table.items() for model in models.split()]
    return {_name(model): Architecture(family, model, options) for family, model in found}


def _has(architecture: Buildable) -> bool:
    library = architecture.needs if isinstance(architecture, Library) else architecture.family
    return library not in ("torchvision", "timm", "diffusers", "torch_geometric") or find_spec(library) is not None


def architectures() -> dict[str, Buildable]:
    """Return all that can run here, by name."""
    if find_spec("torchvision") is not None:  # before transformers imports it
        vision()
    more = {**_classes(_PLAIN, _ONE), **_classes(_NAMED, _NAMES | _ONE), **_classes(_OF_TWO_LAYERS, _NAMES)}
    known: dict[str, Buildable] = {**OWN, **more, **FIDELITY, **LIBRARIES}
    return {name: architecture for name, architecture in known.items() if _has(architecture)}
