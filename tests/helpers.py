"""Tiny models, and what several test files do with them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


DEVICE = torch.device("cpu")
"""Where the tests' models, inputs and caches are. `pytest --device` sets it before the first test is imported."""

VOCABULARY = 128

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = (
    BASE
    | MOE
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "head_dim": 16,
        "index_topk": 32,
        "index_head_dim": 32,
        # With fewer, many tokens score exactly zero, and which of them are selected is chance.
        "index_n_heads": 16,
    }
)
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # Attention over keys and values.
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": BASE | HEAD,
    "phi": BASE,
    "phi3": BASE,
    "smollm3": BASE,
    "mistral": BASE | HEAD | {"sliding_window": 32},
    "ministral": BASE | HEAD | HYBRID,
    "gemma2": BASE | HEAD | HYBRID | {"query_pre_attn_scalar": 16},
    "gemma3_text": BASE | HEAD | HYBRID | {"query_pre_attn_scalar": 16},
    "gpt_oss": BASE | HEAD | HYBRID | MOE | {"num_local_experts": 4},
    "qwen3_next": BASE | HEAD | MOE | LINEAR,
    "deepseek_v3": LATENT,
    # Hands its attention the cache as `layer_past`.
    "gpt_neox": BASE,
    # Keeps a recurrent state beside the keys and values of every layer.
    "falcon_h1": BASE | HEAD,
    # Latent attention with an indexer.
    "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT | {"index_topk_freq": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "axk2": LATENT,
    "hy_v4": LATENT,
    "mistral_large4": {
        "text_config": LATENT,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": 28,
        },
    },
    "dots3_note_text": LATENT
    | {
        "head_dim": 32,
        "sliding_window": 16,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 24,
    },
    # With an indexer that cannot be served.
    "glm5_next": {
        "text_config": LATENT
        | {
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "hc_mult": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "out_hidden_size": 64,
            "intermediate_size": 32,
            "projection_intermediate_size": 32,
        },
    },
    "qwen4_exp_text": BASE
    | HEAD
    | MOE
    | LINEAR
    | {
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
}


GQA = {"top_k": 40, "page_size": 4, "sink_tokens": 2, "recent_tokens": 6}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-quest": ("llama", GQA | {"algorithm": "quest"}),
    "llama-rabitq": ("llama", GQA | {"algorithm": "rabitq"}),
    "deepseek": ("deepseek_v32", {}),
}
"""Models, and the options that select from them a small part of a context of some 150 tokens."""


def make_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The tiny config of a model type; skips the test where this transformers has no such model."""
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {name}")
    options = dict(CONFIGS[name])
    if "text_config" in options:
        options["text_config"] = options["text_config"] | overrides
    else:
        options |= overrides
    return AutoConfig.for_model(name, **options)


def make_model(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> nn.Module:
    """A model with random weights, the matrices three times as large as usual: then greedy tokens have no near-ties.

    It is made on the CPU, so that the weights are the same on every device.
    """
    config = make_config(name, **overrides)
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if "text_config" in CONFIGS[name] else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return model.to(DEVICE, dtype)


def random_ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator).to(DEVICE)


def dense_cache(model: nn.Module) -> DynamicCache:
    """The cache that `generate` would make."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def generate(
    model: nn.Module, ids: Tensor | None, cache: Any, new: int, mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """Greedy generation of exactly `new` tokens, with the logits of every step."""
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids) if mask is None else mask,
        "max_new_tokens": new,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    with warnings.catch_warnings():
        # Newer transformers call it `cache`; both names must work, and the other one is tested by itself.
        warnings.simplefilter("ignore", FutureWarning)
        return model.generate(ids, **(options | {"past_key_values": cache} | kwargs))


@torch.no_grad()
def forward(model: nn.Module, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    """The logits of one forward over new tokens, at the positions that `generate` would give them."""
    positions = {}
    if mask is not None:
        positions["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **positions).logits


def decode(model: nn.Module, ids: Tensor, cache: Any, prompt: int, mask: Tensor | None = None) -> Tensor:
    """The logits of every step of a teacher-forced decode: a prompt, then one token at a time."""
    steps = [forward(model, ids[:, :prompt], cache, None if mask is None else mask[:, :prompt])[:, -1]]
    for t in range(prompt, ids.shape[1]):
        steps.append(forward(model, ids[:, t : t + 1], cache, None if mask is None else mask[:, : t + 1])[:, -1])
    return torch.stack(steps, dim=1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, and numbers throughout."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(a.isfinite().all()) and torch.equal(a, b)


def close(a: Tensor, b: Tensor) -> None:
    """Logits equal but for the rounding of their dtype, compounded over a few layers."""
    assert a.dtype == b.dtype
    tolerance = 32 * torch.finfo(a.dtype).eps
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def logits_of(output: Any) -> Tensor:
    return torch.stack(output.logits, dim=1)


def left_padding(batch: int, tokens: int) -> Tensor:
    """A mask that pads all but the first sequence on the left, each by another length."""
    mask = torch.ones(batch, tokens, dtype=torch.int64, device=DEVICE)
    for row in range(1, batch):
        mask[row, : 7 * row + 2] = 0
    return mask


def padding(kind: str, batch: int, prompt: int, tokens: int) -> Tensor:
    """A mask over `tokens` tokens that pads a prompt, in all but the first sequence, each by another length: on the
    "left", on the "right", with "holes", or "mixed": one after the other.
    """
    generator = torch.Generator().manual_seed(prompt)
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    for row in range(1, batch):
        how = ("right", "left", "holes")[row % 3] if kind == "mixed" else kind
        if how == "left":
            mask[row, : 7 * row + 2] = 0
        elif how == "right":
            mask[row, prompt - 5 * row - 1 : prompt] = 0
        else:
            mask[row, torch.randperm(prompt - 1, generator=generator)[: prompt // 4 + row]] = 0
    return mask.to(DEVICE)


def interpret(file: str, kernels: str) -> None:
    """Runs a file of tests in a process where Triton's kernels run on the CPU, which importing the package does not
    import: those are in the module `kernels`."""
    if Version(version("triton")) < Version("3.8") and Version(version("numpy")) >= Version("2.5"):
        pytest.skip("this Triton's interpreter makes numbers of arrays in a way that this NumPy has given up")
    program = (
        f"import sys, pytest, hf_hisparse\nassert {kernels!r} not in sys.modules\nsys.exit(pytest.main(sys.argv[1:]))\n"
    )
    root = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    arguments = [str(Path(file).relative_to(root)), "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=root,
        env=environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-10000:]
