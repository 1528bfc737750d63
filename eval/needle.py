"""Answers kept, of those that the dense cache gets right: `python -m eval.needle --text essays`.

One needle in a long text, a question about it, and the answer decoded greedily. A prompt is read once, by the dense
cache; every other row of the table continues from a copy of that cache, so that only the decode steps differ.
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from eval.common import environment, load_model, quiet, write_results
from eval.texts import TOPICS, answer_prefix, essays, filler, prompt, with_needle
from hf_hisparse import HierarchicalSparseCache, unpatch_model


METHODS: dict[str, dict[str, Any]] = {
    "rabitq": {"algorithm": "rabitq"},
    "quest": {"algorithm": "quest"},
}


TOKENS = 9
"""Tokens of an answer: a space, seven digits, and what ends them."""


def make_prompts(tokenizer, kind: str, count: int, shortest: int, longest: int, source: Path | None) -> list[dict]:
    """Prompts of one kind of text, with the number that answers each. The same for the same arguments."""
    rng = random.Random(kind)
    prompts = []
    for _ in range(count):
        topic, number, tokens = rng.choice(TOPICS), rng.randint(1_000_000, 9_999_999), rng.randint(shortest, longest)
        text = essays(source, rng.randrange(1_000_000), 8 * tokens) if kind == "essays" else filler(8 * tokens)
        question = 120  # Tokens of the question, its template and the needle.
        text = tokenizer.decode(tokenizer(text).input_ids[: tokens - question])
        messages = [{"role": "user", "content": prompt(with_needle(text, topic, number, rng.random()), topic)}]
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append({"text": asked + answer_prefix(topic), "number": str(number)})
    return prompts


def answers(model, tokenizer, inputs, cache, tokens: int) -> list[str]:
    """Continues greedily from a cache that holds all but the last token of every prompt."""
    step, mask = inputs.input_ids[:, -1:], inputs.attention_mask
    output = []
    with torch.inference_mode():
        for _ in range(tokens):
            positions = mask.sum(1, keepdim=True) - 1
            logits = model(step, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            step = logits[:, -1:].argmax(-1)
            mask = torch.cat((mask, torch.ones_like(step)), dim=1)
            output.append(step)
    return tokenizer.batch_decode(torch.cat(output, dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, nargs=2, default=[6000, 7000], help="shortest and longest, in tokens")
    parser.add_argument("--text", choices=["essays", "filler"], default="filler", help="what the needle is put in")
    parser.add_argument("--prompts", type=int, default=20, help="prompts that the dense cache gets right")
    parser.add_argument("--batch", type=int, default=1, help="prompts read at once")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--essays", type=Path, help="JSON file with the essays; without it, generated prose")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True, help="answers are the same")
    parser.add_argument("--output", type=Path, help="default: eval/results/needle-TEXT.json")
    args = parser.parse_args()

    quiet()
    shortest, longest = args.context
    model, tokenizer = load_model(args.model, args.device)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows, kind = [], args.text
    right = tried = 0
    kept = {(name, budget): 0 for name in METHODS for budget in args.budgets}
    prompts = make_prompts(tokenizer, kind, 3 * args.prompts, shortest, longest, args.essays)
    bar = tqdm(total=args.prompts, desc=kind)
    while right < args.prompts and tried < len(prompts):
        some = prompts[tried : tried + args.batch]
        tried += len(some)
        texts = [p["text"] for p in some]
        inputs = tokenizer(texts, return_tensors="pt", add_special_tokens=False, padding=True).to(args.device)
        dense = DynamicCache(config=model.config)
        with torch.inference_mode():
            positions = (inputs.attention_mask.cumsum(1) - 1).clamp(min=0)
            model(
                inputs.input_ids[:, :-1],
                attention_mask=inputs.attention_mask[:, :-1],
                position_ids=positions[:, :-1],
                past_key_values=dense,
                logits_to_keep=1,
            )
        said = answers(model, tokenizer, inputs, copy.deepcopy(dense), TOKENS)
        good = [p["number"] in answer for p, answer in zip(some, said, strict=True)]
        right += sum(good)
        bar.update(sum(good))
        for (name, budget), _ in kept.items() if any(good) else ():
            cache = HierarchicalSparseCache.from_dense(
                model, copy.deepcopy(dense), top_k=budget, offload=args.offload, **METHODS[name]
            )
            said = answers(model, tokenizer, inputs, cache, TOKENS)
            kept[name, budget] += sum(
                was and p["number"] in answer for was, p, answer in zip(good, some, said, strict=True)
            )
        unpatch_model(model)
    bar.close()
    for (name, budget), count in kept.items():
        row = {"text": kind, "method": name, "budget": budget}
        rows.append(row | {"dense_right": right, "kept": count, "tried": tried})
        print(f"{kind:7s} {name:20s} {budget:5d}  {count} of {right}")
    write_results(args.output or Path(f"eval/results/needle-{kind}.json"), rows, environment=environment(args.device))


if __name__ == "__main__":
    main()
