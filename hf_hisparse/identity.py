"""What must be the same for a history that was saved to mean the same again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from hf_hisparse.placement import weights


CONFIG = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim layer_types sliding_window rope_theta rope_parameters partial_rotary_factor kv_lora_rank q_lora_rank "
    "qk_rope_head_dim qk_nope_head_dim v_head_dim index_topk index_head_dim index_n_heads"
).split()
"""The values of a model's config that its keys and values depend on."""


def describe(model: Any) -> dict[str, Any]:
    """A model as far as its keys and values depend on it, as plain values, each by the name that an error calls it."""
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    found = {f"`{name}`": getattr(config, name) for name in CONFIG if getattr(config, name, None) is not None}
    found["the dtype"] = str(next(decoder.parameters()).dtype)
    found["the weights' checksum"] = checksum(decoder)
    return json.loads(json.dumps(found, default=str))


def checksum(module: nn.Module) -> str:
    """Of the beginning of every weight: two models of the same shape differ in it, whatever device they are on."""
    digest = hashlib.sha256()
    for weight in weights(module):
        # What is made of other tensors has no bytes of its own to read.
        if type(weight) in (nn.Parameter, Tensor) and weight.device.type != "meta":
            start = weight.detach().reshape(-1)[:64].cpu()
            digest.update(bytes(start.view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    """What is not the same, in words; empty if everything is."""
    return "; ".join(
        f"{name} was {saved.get(name)!r} and is {here.get(name)!r}"
        for name in saved | here
        if saved.get(name) != here.get(name)
    )
