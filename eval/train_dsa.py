"""Trains a small model with DeepSeek sparse attention to look things up: `python -m eval.train_dsa --seconds 100`.

Random weights test arithmetic; this is a model whose indexer has learned what to select. A sequence is assignments
`name next` scattered among filler, then questions: from a name on, every `next` up to the value that ends the chain.
Chains of one assignment are key-value recall, longer ones variable tracking. A question can only be answered by finding
two adjacent tokens anywhere in the context, which is several times `index_topk`.

The procedure is that of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1.1). The model is trained with dense attention, and
one head of it to look one token back, with which looking up begins. Then, with all else frozen, the indexers learn the
distribution of its attention, summed over heads. Then both are trained with each query's attention limited to its
selection: the model by the language modelling loss alone, and the indexers, whose inputs are detached, by the
divergence on what was selected alone.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, apply_rotary_pos_emb

from eval.common import environment, quiet, table, write_results
from eval.exactness import decode
from hf_hisparse import HierarchicalSparseCache, unpatch_model


ASK = 3
"""The token before a question."""
HOPS = (1, 2, 4)
"""Assignments of a chain."""
FEW = 4
"""Assignments of the first sequences, and the fewest chains of any."""
PHASES = (("dense", 0.45, 5e-4), ("warm-up", 0.25, 2e-3), ("sparse", 0.3, 3e-4))
"""Their names, shares of the time, and highest learning rates."""


def vocabulary(pairs: int) -> tuple[range, range, range]:
    """The tokens that are filler, names and values, for so many assignments."""
    filler = range(ASK + 1, 2 * pairs)
    names = range(filler.stop, filler.stop + 4 * pairs)
    return filler, names, range(names.stop, names.stop + 2 * pairs)


def length(pairs: int) -> int:
    """Tokens of a sequence, questions and all."""
    return 16 * pairs


def make_batch(
    batch: int,
    pairs: int,
    hops: int,
    words: int,
    repeat: bool = False,
    generator: torch.Generator | None = None,
    device: Any = "cpu",
) -> tuple[Tensor, int, Tensor]:
    """Sequences with as many questions as chains.

    Args:
        batch: How many.
        pairs: Assignments of each, a multiple of `hops`.
        hops: Assignments of a chain.
        words: The `pairs` that the vocabulary is for, at least as many.
        repeat: Whether the chain of each question is drawn anew; otherwise each is asked for once, in any order.
        generator: On the device.

    Returns:
        `[batch, length(pairs)]` int64 tokens; how many of them precede the questions; and the positions of the
        answers' tokens, `[chains, hops]`.
    """
    rand = partial(torch.rand, generator=generator, device=device)

    def draw(tokens: range, *shape: int) -> Tensor:
        return torch.randint(tokens.start, tokens.stop, shape, generator=generator, device=device)

    filler, names, values = vocabulary(words)
    chains = pairs // hops
    drawn = names.start + rand(batch, len(names)).argsort(1)[:, :pairs].unflatten(1, (chains, hops))
    chain = torch.cat((drawn, draw(values, batch, chains, 1)), dim=2)
    ask = torch.full((batch, chains, 1), ASK, device=device)
    order = (
        torch.randint(chains, ask.shape, generator=generator, device=device) if repeat else rand(ask.shape).argsort(1)
    )
    questions = torch.cat((ask, chain.take_along_dim(order, 1)), dim=2).flatten(1)
    context = length(pairs) - questions.shape[1]
    tokens = torch.cat((draw(filler, batch, context), questions), dim=1)
    # Filler follows every assignment, so that only one name or value ever follows a name.
    first = rand(batch, context // 3).argsort(1)[:, :pairs] * 3
    tokens.scatter_(1, first, chain[:, :, :-1].flatten(1)).scatter_(1, first + 1, chain[:, :, 1:].flatten(1))
    answers = torch.arange(context, length(pairs), device=device).view(chains, hops + 2)[:, 2:]
    return tokens, context, answers


def make_model(pairs: int, hidden: int, layers: int) -> Any:
    """A model with random weights and no experts, whose indexers select as many tokens as there are assignments."""
    config = AutoConfig.for_model(
        "deepseek_v32",
        vocab_size=vocabulary(pairs)[-1].stop,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=hidden,
        kv_lora_rank=hidden // 2,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=pairs,
        initializer_range=hidden**-0.5,
        # A head that looks one token back, wherever and at whatever, is learned from biases and high frequencies.
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_a_proj.bias", "kv_a_proj_with_mqa.bias")):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def indexers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, DeepseekV32Indexer)]


def select(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The stock indexer's forward over whole sequences, with gradients: its `scores` are left on the module.

    An indexer that is not trained selects everything.

    Returns:
        `[batch, queries, k]` token ids.
    """
    seen = attention_mask >= 0
    if not indexer.wk.weight.requires_grad:
        return torch.arange(seen.shape[-1], device=seen.device).expand(seen.shape)
    hidden_states, rotary = hidden_states.detach(), indexer.qk_rope_head_dim
    query = indexer.wq_b(q_resid.detach()).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    rotated = apply_rotary_pos_emb(query[..., :rotary], key[..., :rotary], *position_embeddings, unsqueeze_dim=2)
    query, key = (torch.cat((r, x[..., rotary:]), dim=-1) for r, x in zip(rotated, (query, key), strict=True))
    heads = (query.flatten(1, 2) @ key.squeeze(2).mT).unflatten(1, query.shape[1:3])
    heads = (heads * indexer.softmax_scale).relu()
    weights = indexer.weights_proj(hidden_states) * indexer.n_heads**-0.5
    scores = (weights.unsqueeze(2) @ heads).squeeze(2).masked_fill(~seen, -torch.inf)
    chosen = scores.detach().topk(min(indexer.index_topk, scores.shape[-1]), sorted=False).indices
    kept = torch.zeros_like(seen).scatter_(-1, chosen, True) & seen
    # Far below any score and yet finite: what was not selected adds 0 to the divergence, not NaN.
    indexer.scores = scores.masked_fill(~kept, -1e4)
    return chosen


def divergence(scores: Tensor, attention: Tensor) -> Tensor:
    """KL of the softmax of an indexer's scores from the heads' attention, a mean over queries.

    Args:
        scores: `[batch, queries, tokens]`.
        attention: `[batch, heads, queries, tokens]`, probabilities.
    """
    target = attention.detach().mean(1)
    return (torch.xlogy(target, target) - target * scores.log_softmax(-1)).sum(-1).mean()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A training step as a CUDA graph, after a few as it is."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def train(model: Any, seconds: float, batch: int, pairs: int, graph: bool) -> list[dict[str, Any]]:
    """Trains in place for so many seconds.

    Sequences are short at first, and twice as long, and half as many, whenever most answers are right.

    Args:
        model: A stock model.
        seconds: How long.
        batch: Sequences of a step, at full length.
        pairs: Assignments of a sequence, at full length.
        graph: Whether steps are captured in CUDA graphs: small ones take as long as the CPU takes to launch them.

    Returns:
        What was reached at the end of each phase.

    Raises:
        FloatingPointError: If the loss is no longer finite.
    """
    device, rng = model.device, random.Random(0)
    top_k, growing = model.config.index_topk, min(FEW, pairs)
    for indexer in indexers(model):
        indexer.forward = partial(select, indexer)
    reached: list[dict[str, Any]] = []
    began, end = time.monotonic(), 0.0
    for phase, share, rate in PHASES:
        start, end = end, end + share * seconds
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(phase == "sparse" or ("indexer" in name) == (phase == "warm-up"))
            parameter.grad = None
        for indexer in indexers(model):
            indexer.index_topk = top_k if phase == "sparse" else length(pairs)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        learning_rate = torch.tensor(0.0, device=device)
        optimizer = torch.optim.AdamW(
            trained, learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True, capturable=graph
        )
        sums = torch.zeros(4, device=device)

        def step(hops: int, growing: int, phase=phase, trained=trained, optimizer=optimizer, sums=sums) -> None:
            tokens, _, answers = make_batch(batch * pairs // growing, growing, hops, pairs, True, device=device)
            at = answers.flatten()
            hidden = torch.full((tokens.shape[1],) * 2, torch.finfo(torch.float32).min, device=device).triu(1)
            output = model(
                tokens,
                attention_mask=hidden.expand(len(tokens), 1, -1, -1),
                use_cache=False,
                logits_to_keep=at - 1,
                output_attentions=True,
            )
            logits, wanted = output.logits.flatten(0, 1), tokens[:, at].flatten()
            loss = torch.nn.functional.cross_entropy(logits, wanted)
            apart = torch.zeros_like(loss)
            if phase == "dense":
                # One head that looks one token back: looking up begins with it, and it is slow to come by itself.
                loss = loss - output.attentions[0][:, 0].diagonal(-1, 1, 2).clamp(min=1e-9).log().mean()
            else:
                for indexer, attention in zip(indexers(model), output.attentions, strict=True):
                    apart = apart + divergence(indexer.scores, attention)
            optimizer.zero_grad()
            (apart if phase == "warm-up" else loss + apart).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            right = (logits.argmax(-1) == wanted).float().mean()
            sums += torch.stack((right, loss.detach(), apart.detach(), torch.ones_like(right)))

        steps: dict[tuple[int, int], Callable[[], None]] = {}
        count, printed = 0, -math.inf
        while (now := time.monotonic() - began) < end:
            done = (now - start) / (end - start)
            learning_rate.fill_(rate * min(1, (count + 1) / 50, 0.05 + math.cos(done * math.pi / 2)))
            kind = rng.choice([hops for hops in HOPS if growing // hops >= FEW]), growing
            if kind not in steps:
                steps[kind] = captured(partial(step, *kind)) if graph else partial(step, *kind)
            steps[kind]()
            count += 1
            if count % 20 == 0:
                accuracy, loss, apart = (sums[:3] / sums[3]).tolist()
                sums.zero_()
                if not math.isfinite(loss + apart):
                    raise FloatingPointError(f"the loss is {loss} and the divergence {apart} in step {count}")
                if now - printed > 2:
                    printed = now
                    print(
                        f"{now:6.1f} s  {phase:8s} step {count:5d}  {growing:3d} assignments  "
                        f"accuracy {accuracy:.3f}  loss {loss:.3f}  divergence {apart:.3f}",
                        flush=True,
                    )
                if accuracy > 0.9:
                    growing = min(2 * growing, pairs)
        reached.append({"phase": phase, "steps": count, "pairs": growing, "seconds": time.monotonic() - began})
        growing = pairs
    for indexer in indexers(model):
        del indexer.forward, indexer.scores
        indexer.index_topk = top_k
    return reached


@contextlib.contextmanager
def selections(model: Any) -> Iterator[list[list[Tensor]]]:
    """What each stock indexer selects for the last token of a forward: for each layer, `[batch, k]` a step."""
    seen: list[list[Tensor]] = [[] for _ in indexers(model)]
    hooks = [
        indexer.register_forward_hook(lambda *call, record=record: record.append(call[-1][:, -1]))
        for indexer, record in zip(indexers(model), seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def overlap(selected: list[Tensor]) -> float:
    """The share of each selection `[batch, k]` that was in the one before, a mean over steps."""
    shared = [(after.unsqueeze(2) == before.unsqueeze(1)).any(2).float().mean() for before, after in pairwise(selected)]
    return float(torch.stack(shared).mean())


def answer(model: Any, tokens: Tensor, context: int, answers: Tensor, cache: Cache) -> Tensor:
    """The model's tokens `[batch, chains, hops]` for the answers, each after the right ones before it.

    A chain that is right throughout is what greedy decoding would have answered.

    Args:
        model: The model.
        tokens, context, answers: From `make_batch`.
        cache: An empty one, which is given the context and then a token at a time.
    """
    logits = decode(model, tokens[:, :context], cache, tokens.shape[1] - context, tokens[:, context:])
    return logits.argmax(-1)[:, answers.cpu() - context]


def evaluate(model: Any, batch: int, seed: int) -> list[dict[str, Any]]:
    """A row for each length of chain and each attention: how many answers are right, token by token and whole.

    "sparse" is the stock model under the stock cache, "dense" the same with everything selected, and "untrained" with
    indexers of random weights. Where selections are seen, `overlap` is the share that was in the step before's, for
    each layer; by chance it is `top_k / context`. `same` is the share of answers equal to those of "sparse".
    """
    pairs, device = model.config.index_topk, model.device
    dense, untrained = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(seed)
    random_model = AutoModelForCausalLM.from_config(model.config)
    for everything, other, fresh in zip(*map(indexers, (dense, untrained, random_model)), strict=True):
        everything.index_topk = length(pairs)
        other.load_state_dict(fresh.state_dict())
    rows = []
    for hops in HOPS:
        generator = torch.Generator(device).manual_seed(seed)
        tokens, context, answers = make_batch(batch, pairs, hops, pairs, generator=generator, device=device)
        wanted = tokens[:, answers].cpu()
        found: dict[str, Tensor] = {}
        for attention, which in (("dense", dense), ("untrained", untrained), ("sparse", model), ("ours", model)):
            row: dict[str, Any] = {"hops": hops, "context": context, "top_k": pairs, "attention": attention}
            if attention == "ours":
                cache = HierarchicalSparseCache(model)
                found[attention] = answer(which, tokens, context, answers, cache)
                row["same"] = float((found["ours"] == found["sparse"]).float().mean())
                row["hit_rate"] = cache.stats().hit_rate
                unpatch_model(model)
            else:
                with selections(which) as seen:
                    found[attention] = answer(which, tokens, context, answers, DynamicCache(config=model.config))
                if attention == "sparse":
                    row["overlap"] = [round(overlap(layer), 4) for layer in seen]
            right = found[attention] == wanted
            row |= {"tokens": float(right.float().mean()), "chains": float(right.all(2).float().mean())}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=100, help="to train for; 0 evaluates what is there")
    parser.add_argument("--pairs", type=int, default=32, help="assignments of a sequence, and tokens of a selection")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a training step at full length")
    parser.add_argument("--prompts", type=int, default=64, help="sequences of the evaluation, for each length of chain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, help="CUDA graphs; default: where there is a GPU"
    )
    parser.add_argument("--output", type=Path, default=Path("tests/data/dsa-recall"), help="folder of the checkpoint")
    args = parser.parse_args()

    if args.graph is None:
        args.graph = args.device.startswith("cuda")
    quiet()
    settings = {name: getattr(args, name) for name in ("seconds", "batch", "seed")}
    phases: list[dict[str, Any]] = []
    if args.seconds:
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        model = make_model(args.pairs, args.hidden, args.layers).to(args.device)
        print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} million parameters")
        phases = train(model, args.seconds, args.batch, args.pairs, args.graph)
        model.to(torch.bfloat16).save_pretrained(args.output)
        torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32).to(args.device).eval()
    rows = evaluate(model, args.prompts, args.seed + 1)
    head = ["hops", "attention", "tokens", "chains", "same", "hit_rate", "overlap"]
    print(table(head, [[row.get(name, "") for name in head] for row in rows]))
    write_results(args.output / "results.json", rows, environment=environment(args.device), **settings, phases=phases)


if __name__ == "__main__":
    main()
