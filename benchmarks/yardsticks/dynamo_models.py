"""The models of PyTorch's ``benchmarks/dynamo``: its lists of Hugging Face and timm, made small.

The lists are read by path (a checkout of PyTorch, whatever its version); the models are those of the installed transformers,
timm and torchvision, with random weights. Made small: two layers, width 64, 32 tokens or 64 pixels; of equal blocks in a row two
are kept. Inputs and labels are those that PyTorch's runner gives them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.yardsticks.exercise import SEED
from benchmarks.yardsticks.whole import Made, Model

BATCH, TOKENS, PIXELS, CLASSES = 2, 32, 64, 10
IMAGES = 4  # a batch norm of two numbers tells their order alone
LARGEST = 40_000_000  # parameters
SAME_MODEL = {
    "AllenaiLongformerBase": "LongformerForMaskedLM",
    "CamemBert": "CamembertForMaskedLM",
    "DistillGPT2": "GPT2LMHeadModel",
    "GoogleFnet": "FNetForMaskedLM",
    "T5Small": "T5ForConditionalGeneration",
    "YituTechConvBert": "ConvBertForMaskedLM",
    "meta-llama/Llama-3.2-1B": "LlamaForCausalLM",
    "google/gemma-2-2b": "Gemma2ForCausalLM",
    "google/gemma-3-4b-it": "Gemma3ForCausalLM",
    "openai/whisper-tiny": "WhisperForConditionalGeneration",
    "Qwen/Qwen3-0.6B": "Qwen3ForCausalLM",
    "mistralai/Mistral-7B-Instruct-v0.3": "MistralForCausalLM",
    "openai/gpt-oss-20b": "GptOssForCausalLM",
}
WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "pooler_hidden_size")
INNER = (
    "intermediate_size",
    "d_ff",
    "d_inner",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_dim",
    "hidden_dim",
    "n_inner",
)
DEPTH = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTH, 64),
    **dict.fromkeys(INNER, 128),
    **dict.fromkeys(DEPTH, 2),
    **dict.fromkeys(HEADS, 4),
    "embedding_size": 64,
    "intra_bottleneck_size": 32,
    "true_hidden_size": 32,
    "d_kv": 16,
    "rotary_dim": 8,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_source_positions": TOKENS // 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "attention_window": 16,
    "attention_types": [[["global", "local"], 1]],
}


def models(root: Path, kind: str) -> list[Model]:
    """Return the models of one list, in an order drawn by a fixed seed. Raises `FileNotFoundError`."""
    return [Model(name, partial(MAKERS[kind], name)) for name in drawn(names(root, kind))]


def names(root: Path, kind: str) -> list[str]:
    """Return the names of one list. Raises `FileNotFoundError`."""
    path = root / "benchmarks" / "dynamo" / f"{kind}_models_list.txt"
    lines = path.read_text(encoding="utf-8").split("\n")
    return [line.replace(",", " ").split()[0] for line in lines if line.strip()]


def drawn(found: list[str]) -> list[str]:
    """Return the names, each once, in an order drawn by a fixed seed."""
    unique = sorted(set(found))
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [unique[i] for i in order]


def _language_model(name: str) -> Made:
    vision()  # which transformers imports
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, SAME_MODEL.get(name, name))
    config = cls.config_class(**_smaller(cls.config_class().to_dict()))
    torch.manual_seed(SEED)
    tokens = torch.randint(3, config.vocab_size, (BATCH, TOKENS))
    inputs = {"input_ids": tokens, **_labels(cls.__name__, config)}
    if cls.main_input_name == "input_features":  # sound, which a convolution of stride 2 reads
        inputs["input_features"] = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
        del inputs["input_ids"]
    if cls.__name__.endswith("ForConditionalGeneration"):
        inputs["decoder_input_ids"] = tokens
    return cls(config), (), inputs


def _smaller(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: SIZES[name] for name, value in config.items() if name in SIZES and value is not None}
    found |= {name: 0.0 for name, value in config.items() if "drop" in name and isinstance(value, float)}
    if isinstance(config.get("attention_window"), list):
        found["attention_window"] = [SIZES["attention_window"]] * 2
    return {**found, "use_cache": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def _labels(name: str, config: Any) -> dict[str, Tensor]:
    if name.endswith("QuestionAnswering"):
        return {f"{end}_positions": torch.randint(0, TOKENS, (BATCH,)) for end in ("start", "end")}
    if name.endswith("SequenceClassification"):
        return {"labels": torch.randint(0, config.num_labels, (BATCH,))}
    return {"labels": torch.randint(3, config.vocab_size, (BATCH, TOKENS))}


def _image_model(name: str) -> Made:
    return _with_image(_timm(), name)


def _timm() -> Callable[..., nn.Module]:
    vision()
    logging.getLogger("timm").setLevel(logging.ERROR)
    create: Callable[..., nn.Module] = importlib.import_module("timm").create_model
    return partial(create, pretrained=False)


def torchvision_model(name: str) -> Made:
    return _with_image(vision().models.get_model, name)


def vision() -> Any:
    """Return torchvision; without its C++ operators, where they are another torch's."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        return importlib.import_module("torchvision")


_KEPT: list[Any] = []  # an operator ends with its library


def _with_image(create: Callable[..., nn.Module], name: str) -> Made:
    size, options = _fitting(create, name)
    torch.manual_seed(SEED)  # the sizes are tried once, and draw numbers
    module = _cut(create(name, num_classes=CLASSES, **options))
    return module, (torch.randn(IMAGES, 3, size, size),), {}


@functools.cache
def _fitting(create: Callable[..., nn.Module], name: str) -> tuple[int, dict[str, Any]]:
    """Return the smallest size of image that a model takes, with what it must be told. Raises `ValueError`."""
    for size, options in ((PIXELS, {}), (PIXELS, {"img_size": PIXELS}), (224, {}), (240, {}), (299, {})):
        try:
            module = _cut(create(name, num_classes=CLASSES, **options)).eval()
            with torch.no_grad():
                module(torch.randn(1, 3, size, size))
        except Exception:
            continue
        if sum(p.numel() for p in module.parameters()) > LARGEST:
            raise ValueError(f"more than {LARGEST} parameters")
        return size, options
    raise ValueError("takes none of the images tried")


def _cut(module: nn.Module) -> nn.Module:
    """Keep two of equal blocks in a row."""
    for part in module.modules():
        if type(part) is nn.Sequential and len(part) > 2:
            kept = [part[i] for i in _kept(list(part))]
            if len(kept) < len(part):
                names = list(part._modules)
                for name in names[len(kept) :]:
                    del part._modules[name]
                for name, block in zip(names, kept, strict=False):
                    part._modules[name] = block
    return module


def _kept(blocks: list[nn.Module]) -> Iterator[int]:
    places = itertools.count()
    for _, group in itertools.groupby(blocks, _kind):
        for count, block in enumerate(group):
            place = next(places)
            if count < 2 or not list(block.parameters()):
                yield place


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return what equal blocks have in common: they take each other's place."""
    shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    return type(block), shapes, str(block) if not shapes else ""


MAKERS = {"huggingface": _language_model, "timm": _image_model}
