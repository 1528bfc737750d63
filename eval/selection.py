"""How much attention a selection keeps: `python -m eval.selection`.

A dense model decodes a real text; at every step, in every layer, each selection method chooses from the layer's true
keys with its true query, and the softmax mass of what it chose is recorded. This is what the defaults were chosen by:
page size, how the query heads of a group are combined, and what is always kept.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eval.common import environment, load_model, write_results
from eval.texts import essays
from hf_hisparse.algorithms import KeyScoring, Quest, RaBitQ
from hf_hisparse.ops.reference import softmax_mass, valid_tokens


class TrueScores(KeyScoring):
    """Scores by the keys themselves: the most that any method can keep."""

    granularity = 1

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"keys": keys.squeeze(2)}

    def score(self, query: Tensor, items: int, scale: float, lengths: Tensor) -> Tensor:
        tokens = min(items * self.page_size, self.representations["keys"].shape[1])
        logits = query.new_full((*query.shape[:2], items * self.page_size), -torch.inf)
        logits[:, :, :tokens] = query.float() @ self.representations["keys"][:, :tokens].float().mT * scale
        valid = valid_tokens(items * self.page_size, lengths)
        return softmax_mass(logits, valid).unflatten(1, (items, self.page_size)).sum(2)


class QuestSum(Quest):
    """Quest with its bounds summed over a group's heads as they are."""

    def score(self, query: Tensor, items: int, scale: float, lengths: Tensor) -> Tensor:
        return self.bound(query, items).sum(1)


class QuestMax(Quest):
    """Quest with the largest bound of a group's heads."""

    def score(self, query: Tensor, items: int, scale: float, lengths: Tensor) -> Tensor:
        return self.bound(query, items).amax(1)


def variants(keep: tuple[int, int]) -> dict[str, Callable[[], KeyScoring]]:
    """The methods compared, by name, with `keep` sink and recent tokens always kept."""
    found: dict[str, Callable[[], KeyScoring]] = {}
    for page in (1, 4):
        found[f"true scores, pages of {page}"] = partial(TrueScores, page, *keep)
    for page in (1, 2, 4, 8):
        found[f"RaBitQ, pages of {page}"] = partial(RaBitQ, page, *keep)
    for page in (8, 16, 32):
        found[f"Quest, pages of {page}"] = partial(Quest, page, *keep)
    found["Quest, pages of 32, bounds summed"] = partial(QuestSum, 32, *keep)
    found["Quest, pages of 32, largest bound"] = partial(QuestMax, 32, *keep)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=6100)
    parser.add_argument("--texts", type=int, default=2, help="essays to read")
    parser.add_argument("--steps", type=int, default=6, help="decode steps an essay")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--essays", type=Path, help="JSON file with the essays; without it, generated prose")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("eval/results/selection.json"))
    args = parser.parse_args()

    model, tokenizer = load_model(args.model, args.device)
    kept: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    nbytes: dict[str, float] = {}

    def measure(module, query, key, value, attention_mask, scaling=None, **kwargs):
        if query.shape[2] == 1:
            _, kv_heads, tokens, width = key.shape
            grouped, keys = query.reshape(kv_heads, -1, width), key.flatten(0, 1)
            true = (grouped.float() @ keys.float().transpose(1, 2) * scaling).softmax(-1)
            lengths = torch.full((kv_heads,), tokens, device=key.device)
            for keep in ((4, 64), (4, 1), (4, 128)):
                for name, make in variants(keep).items():
                    if keep != (4, 64) and name not in ("RaBitQ, pages of 2", "Quest, pages of 32"):
                        continue
                    algorithm = make()
                    algorithm.construct_representations(keys, 0, lengths, torch.zeros_like(lengths))
                    nbytes[name] = algorithm.nbytes / (kv_heads * tokens)
                    page = algorithm.page_size
                    items = -(-tokens // page)
                    padded = torch.nn.functional.pad(true, (0, items * page - tokens))
                    padded = padded.unflatten(2, (items, page)).sum(3)
                    for budget in args.budgets:
                        if budget // page < algorithm.kept_items:
                            continue
                        chosen = algorithm.retrieve_topk(grouped, budget // page, items, scaling, lengths)
                        index = chosen.long().unsqueeze(1).expand(-1, grouped.shape[1], -1)
                        mass = padded.gather(2, index.clamp(min=0)).masked_fill(index < 0, 0).sum(2).mean()
                        kept[name, f"{keep[0]} + {keep[1]}", budget].append(float(mass))
        base = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return base(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("measure", measure)
    stride = 40_000
    for text in tqdm(range(args.texts), desc="texts"):
        prose = essays(args.essays, start=text * stride, characters=6 * args.context)
        ids = tokenizer(prose, return_tensors="pt").input_ids[:, : args.context].to(args.device)
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model.set_attn_implementation("sdpa")
            model(ids[:, : -args.steps], past_key_values=cache, logits_to_keep=1)
            model.set_attn_implementation("measure")
            for step in range(args.steps, 0, -1):
                model(ids[:, ids.shape[1] - step :][:, :1], past_key_values=cache)

    rows = [
        {"method": name, "kept": keep, "gpu_bytes": nbytes[name], "budget": budget, "mass": sum(m) / len(m)}
        for (name, keep, budget), m in kept.items()
    ]
    for row in rows:
        method = f"{row['method']:38s} keep {row['kept']:8s} {row['gpu_bytes']:6.1f} B"
        print(f"{method}  {row['budget']:5d}  {row['mass']:.3f}")
    write_results(args.output, rows, environment=environment(args.device))


if __name__ == "__main__":
    main()
