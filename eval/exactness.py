"""Whether the output is what it must be: `python -m eval.exactness --model llama-tiny --context 1024 --new-tokens 64`.

The same prompt runs through the dense cache, the resident oracle (the same selection and attention, with the whole
history on the device) and the hierarchical cache. The dense cache decodes greedily; the others are fed its tokens, so
that every step compares. The exit status is 1 when a guarantee is broken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from eval.common import DTYPES, TINY_MODELS, environment, load_model, quiet, table, write_results
from examples.generate import logbook
from hf_hisparse import HierarchicalSparseCache, unpatch_model
from hf_hisparse.models import cache_argument


def make_prompt(model: Any, tokenizer: Any, batch: int, context: int) -> Tensor:
    """Token ids `[batch, context]`: different parts of a text, or random ids where there is no tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, model.config.vocab_size, (batch, context), generator=generator).to(model.device)
    ids = tokenizer(logbook(batch * context // 16 + 16), return_tensors="pt").input_ids
    return ids[:, : batch * context].view(batch, context).to(model.device)


@torch.inference_mode()
def decode(model: Any, prompt: Tensor, cache: Cache, new_tokens: int, follow: Tensor | None = None) -> Tensor:
    """The logits of each new token, `[batch, new_tokens, vocabulary]` on the CPU.

    Args:
        model: A causal language model.
        prompt: `[batch, context]` token ids.
        cache: An empty one.
        new_tokens: How many tokens to decode.
        follow: `[batch, new_tokens]`, the tokens to feed; None for the model's own greedy choice.
    """
    logits = []
    tokens = prompt
    for step in range(new_tokens):
        logits.append(model(tokens, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache}).logits[:, -1])
        tokens = (logits[-1].argmax(-1) if follow is None else follow[:, step]).unsqueeze(1)
    return torch.stack(logits, dim=1).cpu()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, which `==` does not say of NaN and of zeros."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def first_difference(tokens: Tensor, expected: Tensor) -> int | None:
    """The first step at which any sequence of the batch takes another token."""
    steps = (tokens != expected).any(0).nonzero()
    return int(steps[0]) if len(steps) else None


def measure(model: Any, prompt: Tensor, new_tokens: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each cache, in the order dense, resident oracle, hierarchical.

    Args:
        model: A causal language model.
        prompt: `[batch, context]` token ids.
        new_tokens: How many tokens to decode.
        options: As for `HierarchicalSparseCache`.
    """
    dense = decode(model, prompt, DynamicCache(config=model.config), new_tokens)
    expected = dense.argmax(-1)
    rows: list[dict[str, Any]] = [{"cache": "dense", "first_difference": None, "largest_logit_difference": 0.0}]
    results = {}
    for name, offload in (("resident oracle", False), ("hierarchical", True)):
        cache = HierarchicalSparseCache(model, **options, offload=offload)
        logits = results[name] = decode(model, prompt, cache, new_tokens, expected.to(prompt.device))
        stats = cache.stats()
        rows.append(
            {
                "cache": name,
                "first_difference": first_difference(logits.argmax(-1), expected),
                "largest_logit_difference": float((logits.float() - dense.float()).abs().max()),
                "hit_rate": stats.hit_rate,
                "bytes_moved": stats.bytes_moved,
                "device_bytes": stats.device_bytes,
                "host_bytes": stats.host_bytes,
            }
        )
    unpatch_model(model)
    rows[0]["device_bytes"] = stats.dense_bytes
    rows[2]["bits_of_oracle"] = same_bits(results["hierarchical"], results["resident oracle"])
    return rows


def broken_guarantees(rows: list[dict[str, Any]], must_equal_dense: str | None) -> list[str]:
    """What the rows of `measure` show to be broken.

    Args:
        rows: From `measure`.
        must_equal_dense: Why the tokens must be those of the dense cache; None where they need not.
    """
    broken = [] if rows[2]["bits_of_oracle"] else ["the hierarchical cache differs from the resident oracle"]
    if must_equal_dense:
        broken += [
            f"the {row['cache']} takes another token at step {row['first_difference']}, although {must_equal_dense}"
            for row in rows
            if row["first_difference"] is not None
        ]
    return broken


def report(rows: list[dict[str, Any]]) -> str:
    """The rows as a table to read."""

    def mib(count: int | None) -> str:
        return "" if count is None else f"{count / 2**20:.2f} MiB"

    def line(row: dict[str, Any]) -> list[str]:
        step, rate, bits = row["first_difference"], row.get("hit_rate"), row.get("bits_of_oracle")
        return [
            row["cache"],
            "equal" if step is None else f"differ from step {step}",
            f"{row['largest_logit_difference']:.3g}",
            "" if bits is None else "identical" if bits else "DIFFERENT",
            "" if rate is None else f"{rate:.1%}",
            mib(row.get("bytes_moved")),
            mib(row["device_bytes"]),
            mib(row.get("host_bytes")),
        ]

    head = ["cache", "tokens", "largest logit difference", "bits of the oracle", "hit rate", "moved", "device", "host"]
    return table(head, [line(row) for row in rows])


def main() -> int:
    """Measures, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help=f"smollm2, {', '.join(TINY_MODELS)}, or any on the hub")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--top-k", type=int, help="default: 256, or the model's own for one with an indexer")
    parser.add_argument("--buffer-size", type=int, help="default: 2 x top-k")
    parser.add_argument("--page-size", type=int, help="default: the algorithm's")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    args = parser.parse_args()
    quiet()

    model, tokenizer = load_model(args.model, args.device, getattr(torch, args.dtype))
    prompt = make_prompt(model, tokenizer, args.batch, args.context)
    native = getattr(model.config, "index_topk", None)
    top_k = args.top_k or (None if native else 256)
    names = ("buffer_size", "page_size", "algorithm")
    rows = measure(model, prompt, args.new_tokens, {"top_k": top_k} | {name: getattr(args, name) for name in names})

    reason = None
    if native:
        reason = "the model selects its own tokens, under any cache"
    elif top_k and top_k >= args.context + args.new_tokens:
        reason = f"top-k is {top_k} and the context {args.context + args.new_tokens}"
    broken = broken_guarantees(rows, reason)

    print(f"{args.model}, {args.dtype}, batch {args.batch}, {args.context} tokens and {args.new_tokens} new ones\n")
    print(report(rows))
    print("\n" + ("\n".join(f"BROKEN: {line}" for line in broken) or "Every guarantee holds."))
    if args.json:
        settings = {name: getattr(args, name) for name in ("model", "dtype", "batch", "context", "new_tokens", *names)}
        write_results(
            args.json, rows, environment=environment(args.device), **settings, top_k=top_k or native, broken=broken
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
