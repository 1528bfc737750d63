"""A model type of lm-eval (EleutherAI's lm-evaluation-harness) that decodes over a hierarchical cache.

An entry point names it, so that with a version of lm-eval that looks for these nothing else is needed:

    lm_eval --model hisparse --model_args pretrained=Qwen/Qwen3-4B,top_k=1024 --tasks gsm8k

Releases up to 0.4.13 do not, and are started by `python -m hf_hisparse.lm_eval`, with the same arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from hf_hisparse.cache import HierarchicalSparseCache
from hf_hisparse.config import HiSparseConfig
from hf_hisparse.models import cache_argument
from hf_hisparse.stats import CacheStats


logger = logging.getLogger("lm_eval.hf_hisparse")
"""One of lm-eval's, which shows what those below its own say."""

OPTIONS = {field.name for field in fields(HiSparseConfig)}
KINDS = ("default", "causal", "seq2seq")
"""What `backend` is for `hf`, the kind of model; no attention kernels are called that."""


class Usage:
    """What the cache has done, over all batches."""

    def __init__(self) -> None:
        self.hits = self.misses = self.bytes_moved = 0
        self.device_bytes = self.host_bytes = self.dense_bytes = 0

    def add(self, stats: CacheStats) -> None:
        """Counts one batch more."""
        for name in ("hits", "misses", "bytes_moved"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        for name in ("device_bytes", "host_bytes", "dense_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(stats, name)))

    def to_dict(self) -> dict[str, Any]:
        """Hits, misses and bytes moved so far; and the most bytes that a batch held, and would have held dense."""
        selected = self.hits + self.misses
        return {"hit_rate": self.hits / selected if selected else None} | vars(self)

    def __str__(self) -> str:
        selected = self.hits + self.misses
        rate = f"hit rate {self.hits / selected:.1%}" if selected else "no selection: no context was longer than top-k"
        device, host, dense = (count / 2**20 for count in (self.device_bytes, self.host_bytes, self.dense_bytes))
        held = f"{device:.1f} MiB on the device (dense: {dense:.1f}) and {host:.1f} in host memory"
        return f"{rate}; a batch held at most {held}"


@register_model("hisparse")
class HierarchicalLM(HFLM):
    """lm-eval's `hf`, with every argument of it, over a `HierarchicalSparseCache`.

    Log-likelihoods are computed as by `hf`, by one dense forward of context and continuation together, which no decode
    step is part of; `sparse_loglikelihood=True` has them scored as they would be decoded instead.

    Args:
        pretrained: As for `hf`.
        sparse_loglikelihood: Whether a context is cached but for its last token, and that and the continuation are then
            fed token by token, each of which attends to a selection.
        options: All of `HiSparseConfig`, and all of `hf`. `backend` is of both: what names no kind of model names the
            attention kernels. `dense_layers` may be a single index: several take `--model_args` in JSON.

    Raises:
        ValueError: If an option is out of range or does not fit the model.
    """

    def __init__(self, pretrained: Any, *args: Any, sparse_loglikelihood: bool = False, **options: Any):
        if not isinstance(sparse_loglikelihood, bool):
            raise ValueError(f"`sparse_loglikelihood` must be True or False, not {sparse_loglikelihood!r}")
        kind = {"backend": options.pop("backend")} if options.get("backend") in KINDS else {}
        own = {name: options.pop(name) for name in OPTIONS & options.keys()}
        layers = own.get("dense_layers", ())
        own["dense_layers"] = (layers,) if isinstance(layers, int) else layers
        # Before a model is read, which may take minutes.
        HiSparseConfig(**own)
        super().__init__(pretrained, *args, **kind, **options)
        if self.backend != "causal":
            raise ValueError(
                f"`pretrained={pretrained}` is an encoder-decoder; use a decoder-only model, or `--model hf`"
            )
        self.sparse_loglikelihood = sparse_loglikelihood
        self.usage = Usage()
        self._cache = HierarchicalSparseCache(self.model, **own)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        # The memory of one batch serves the next.
        self._cache.reset()
        generation_kwargs[cache_argument(self.model)] = self._cache
        output = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self.usage.add(self._cache.stats())
        return output

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not self.sparse_loglikelihood:
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        # What is left of a context that is too long is its end, as for `hf`.
        asked: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            history = (context + continuation)[-(self.max_length + 1) : -len(continuation)]
            asked.setdefault(tuple(history), []).append(index)
        histories = sorted(asked, key=len, reverse=True)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Decoding continuations") as bar:
            for batch in self._batches(histories, requests, override_bs):
                choices = [[requests[index][2] for index in asked[history]] for history in batch]
                scored = self._score(batch, choices)
                for history, found in zip(batch, scored, strict=True):
                    answers |= dict(zip(asked[history], found, strict=True))
                    bar.update(len(found))
        for index, (text, _, _) in enumerate(requests):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answers[index])
        return [answers[index] for index in range(len(requests))]

    def _batches(
        self, histories: Sequence[tuple[int, ...]], requests: list[Any], override_bs: int | None
    ) -> Iterator[Sequence[tuple[int, ...]]]:
        """Contexts to be read together. Those of one token, of which there is nothing to read, are by themselves."""
        size = self.batch_size if override_bs is None else override_bs
        if size == "auto":
            longest = max(range(len(requests)), key=lambda index: len(requests[index][1]) + len(requests[index][2]))
            size = self._detect_batch_size(requests, longest)
        several = sum(len(history) > 1 for history in histories)
        for part in (histories[:several], histories[several:]):
            for first in range(0, len(part), size):
                yield part[first : first + size]

    @torch.no_grad()
    def _score(
        self, histories: Sequence[tuple[int, ...]], choices: Sequence[Sequence[list[int]]]
    ) -> list[list[tuple[float, bool]]]:
        """The log-likelihood of every choice after its context, and whether greedy decoding takes it."""
        width = max(map(len, histories))
        ids = torch.tensor([[0] * (width - len(own)) + list(own) for own in histories], device=self.device)
        mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in histories], device=self.device)
        document = self._cache
        document.reset()
        if width > 1:
            self._forward(ids[:, :-1], mask[:, :-1], document)
        rounds = max(map(len, choices))
        found: list[list[tuple[float, bool]]] = [[] for _ in histories]
        for turn in range(rounds):
            # Where a context has fewer choices than others, its last one is scored again, and not used.
            chosen = [own[min(turn, len(own) - 1)] for own in choices]
            cache = document if turn == rounds - 1 else document.fork()
            for own, some, score in zip(found, choices, self._decode(ids[:, -1:], mask, chosen, cache), strict=True):
                if turn < len(some):
                    own.append(score)
        return found

    def _decode(
        self, token: Tensor, mask: Tensor, chosen: Sequence[list[int]], cache: HierarchicalSparseCache
    ) -> list[tuple[float, bool]]:
        """Feeds the last token of every context, and then the continuations, to a cache that holds all before it."""
        steps = max(map(len, chosen))
        targets = torch.tensor([own + [0] * (steps - len(own)) for own in chosen], device=self.device)
        counted = torch.tensor([[step < len(own) for step in range(steps)] for own in chosen], device=self.device)
        total = torch.zeros(len(chosen), dtype=torch.float64, device=self.device)
        greedy = torch.ones(len(chosen), dtype=torch.bool, device=self.device)
        for step in range(steps):
            logits = F.log_softmax(self._forward(token, mask, cache), dim=-1, dtype=self.softmax_dtype)
            token = targets[:, step : step + 1]
            total += logits.gather(1, token).squeeze(1) * counted[:, step]
            greedy &= (logits.argmax(-1) == token.squeeze(1)) | ~counted[:, step]
            mask = torch.cat((mask, torch.ones_like(token)), dim=1)
        self.usage.add(cache.stats())
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    def _forward(self, ids: Tensor, mask: Tensor, cache: HierarchicalSparseCache) -> Tensor:
        """The logits after the last of the new tokens, `[batch, vocabulary]`."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        precision = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=precision, enabled=precision is not None):
            output = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(self.model): cache},
            )
        return output.logits[:, -1]

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the scores, when all are there."""
        logger.info("HierarchicalSparseCache: %s", self.usage)
        return super().get_model_info() | {"hisparse": self.usage.to_dict()}
