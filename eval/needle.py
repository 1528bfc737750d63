"""Answers kept, of those that the dense cache gets right: `python -m eval.needle`.

One needle in a long text, a question about it, and the answer decoded greedily. A prompt is read once, by the dense
cache; every other row of the table continues from a copy of that cache, so that only the decode steps differ.
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

from eval.common import environment, load_model, write_results
from eval.texts import TOPICS, answer_prefix, essays, filler, prompt, with_needle
from hf_hisparse import HierarchicalSparseCache, unpatch_model


METHODS = {
    "rabitq": {"algorithm": "rabitq"},
    "quest, pages of 16": {"algorithm": "quest", "page_size": 16},
    "quest, pages of 32": {"algorithm": "quest", "page_size": 32},
}


def answer(model, tokenizer, ids, cache, tokens: int) -> str:
    """Continues from a cache that holds all but the last of `ids`."""
    output = []
    step = ids[:, -1:]
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(step, past_key_values=cache, use_cache=True).logits
            step = logits[:, -1:].argmax(-1)
            output.append(int(step))
    return tokenizer.decode(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, nargs=2, default=[6000, 7000], help="shortest and longest, in tokens")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of each kind that the dense cache gets right")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--essays", type=Path, help="JSON file with the essays; without it, generated prose")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True, help="answers are the same")
    parser.add_argument("--output", type=Path, default=Path("eval/results/needle.json"))
    args = parser.parse_args()

    model, tokenizer = load_model(args.model, args.device)
    rng = random.Random(0)
    rows = []
    for kind in ("essays", "filler"):
        right = tried = 0
        kept = {(name, budget): 0 for name in METHODS for budget in args.budgets}
        bar = tqdm(total=args.prompts, desc=kind)
        while right < args.prompts and tried < 3 * args.prompts:
            tried += 1
            topic, number = rng.choice(TOPICS), rng.randint(1_000_000, 9_999_999)
            tokens = rng.randint(*args.context)
            text = essays(args.essays, rng.randrange(1_000_000), 8 * tokens) if kind == "essays" else filler(8 * tokens)
            overhead = 120
            text = tokenizer.decode(tokenizer(text, return_tensors="pt").input_ids[0, : tokens - overhead])
            messages = [{"role": "user", "content": prompt(with_needle(text, topic, number, rng.random()), topic)}]
            full = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(full + answer_prefix(topic), return_tensors="pt", add_special_tokens=False).input_ids
            ids = ids.to(args.device)
            dense = DynamicCache(config=model.config)
            with torch.inference_mode():
                model(ids[:, :-1], past_key_values=dense, logits_to_keep=1)
            said = answer(model, tokenizer, ids, copy.deepcopy(dense), 10)
            if str(number) not in said:
                continue
            right += 1
            bar.update()
            for (name, budget), _ in kept.items():
                cache = HierarchicalSparseCache.from_dense(
                    model, copy.deepcopy(dense), top_k=budget, offload=args.offload, **METHODS[name]
                )
                kept[name, budget] += str(number) in answer(model, tokenizer, ids, cache, 10)
            unpatch_model(model)
        bar.close()
        for (name, budget), count in kept.items():
            rows.append({"text": kind, "method": name, "budget": budget, "dense_right": right, "kept": count, "tried": tried})
            print(f"{kind:7s} {name:20s} {budget:5d}  {count} of {right}")
    write_results(args.output, rows, environment=environment(args.device))


if __name__ == "__main__":
    main()
