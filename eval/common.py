"""What the evaluations share: models, the record of where a run was made, and its results as JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import hf_hisparse
from examples.generate import DTYPES as DTYPES
from examples.generate import load_model as load_pretrained
from examples.generate import quiet as quiet


_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TINY_DSA = _TINY | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "index_topk": 32,
    "index_head_dim": 32,
    # Of a few heads, which are rectified, many scores are exactly 0, and which of them the stock model takes is chance.
    "index_n_heads": 32,
}
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tiny": ("llama", _TINY),
    "qwen3-tiny": ("qwen3", _TINY),
    "deepseek-v32-tiny": ("deepseek_v32", _TINY_DSA),
    "glm-moe-dsa-tiny": (
        "glm_moe_dsa",
        _TINY_DSA | {"index_topk_freq": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
}
"""Random models by name: `(model_type, config)`."""


def load_model(
    name: str = "smollm2", device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """A model in evaluation mode and its tokenizer, None for a random model.

    Args:
        name: `"smollm2"`, one of `TINY_MODELS`, or a model on the hub or on disk.
        device, dtype: Where and in what it runs.
    """
    if name in TINY_MODELS:
        model_type, options = TINY_MODELS[name]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    # Random logits have near-ties, which rounding would break; larger weights have none.
                    parameter.mul_(3)
            # The padding token is all zeros, and as a query scores every token 0.
            embeddings = model.get_input_embeddings().weight
            embeddings[0] = embeddings[1].flip(0)
        return model.to(device, dtype).eval(), None
    return load_pretrained(name, device, dtype)


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Versions, device, commit and command of this run."""
    return {
        "hf_hisparse": hf_hisparse.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": _device_name(torch.device(device)),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def write_results(path: str | Path, rows: Sequence[dict[str, Any]], **meta: Any) -> None:
    """Writes `{**meta, "rows": rows}` as JSON, a row a line.

    Args:
        path: The file; its folder is made.
        rows: Measured rows of plain values.
        meta: What holds for all of them, `environment=environment()` above all.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value, default=str)},\n" for key, value in meta.items())
    body = ",\n".join(f"    {json.dumps(row, default=str)}" for row in rows)
    path.write_text(f'{{\n{head}  "rows": [\n{body}\n  ]\n}}\n')


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table whose columns line up."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{name}, {torch.get_num_threads()} threads"


def _commit() -> str | None:
    """What `HISPARSE_COMMIT` says; otherwise the checkout's commit, with `+` where sources differ from it."""
    if said := os.environ.get("HISPARSE_COMMIT"):
        return said
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    sources = ["hf_hisparse", "csrc", "examples", "eval", ":!eval/results"]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", *sources], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
