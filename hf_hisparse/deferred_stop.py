"""Has `generate` begin a step before it knows whether the one before it was the last.

After every token `generate` asks whether all sequences have ended, for which the host waits until the device is done.
Then the device waits for the host, which has the next step to prepare. transformers can take a step too many instead
and undo it (`DeferredStopCheck`), but does so on MPS alone. Here, over a cache whose decode steps are replayed, the
answer is heard within the next forward: when the device has begun it, and before anything is made of it. If all
sequences had ended, the cache forgets that forward, and the loop is left as if it had never been begun.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils


_Check: Any = getattr(utils, "DeferredStopCheck", None)
# Where this is imported anew, the one below has taken its place.
_Check = getattr(_Check, "in_place_of", _Check)

LOOP = "_optimize_model_for_decode"
"""The method of a model whose context `generate` decodes in."""


class Ended(Exception):
    """Ends the loop of `generate` in the course of a forward that it does not need."""


class _Innermost(threading.local):
    """What this thread knows of the loop of `generate` that it is in, the innermost one."""

    inside = False
    asked: Any = None
    """The check that is to be heard in the next forward."""


_loop = _Innermost()


class DecodingLoop:
    """The context that `generate` decodes in, which `Ended` leaves.

    Args:
        model: The model, whose method `LOOP` this replaces.
    """

    def __init__(self, model: Any):
        self.model, self.held = model, vars(model).get(LOOP)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        outer = _loop.inside, _loop.asked
        with getattr(type(self.model), LOOP)(self.model) if self.held is None else self.held():
            _loop.inside, _loop.asked = True, None
            try:
                yield
            except Ended:
                pass
            finally:
                _loop.inside, _loop.asked = outer


def asked(cache: Any) -> Callable[[], bool] | None:
    """What says whether the forward of a cache that is to come is one too many, where that is not known yet. It is
    asked once, and waits for the device to be done with the step before."""
    check = _loop.asked
    if check is None or check.ahead is not cache:
        return None
    _loop.asked = None
    return check.ended


def hears(cache: Any) -> bool:
    """Whether a cache can run ahead, and asks here before it makes anything of a forward. (There may be two of this
    module, where it was imported anew.)"""
    return getattr(cache, "asked", None) is asked and cache.runs_ahead


def runs_ahead(cache: Any, device: torch.device) -> bool:
    """Whether a step of `generate` over a cache may begin before it is known to be needed."""
    return device.type == "cuda" and hears(cache)


if _Check is not None:

    class DeferredStopCheck(_Check):
        """transformers' own check; for a cache that runs ahead, one that the next forward hears of.

        Streamers hear of a token then too. A step that is not replayed, needs memory, or might be refused does not
        begin before it is needed: it is waited for, as ever.
        """

        in_place_of = _Check

        def __init__(
            self, input_ids: Tensor, max_length: int | None, cache: Any, cache_is_returned: bool, streamer: Any = None
        ):
            self.ahead = cache if runs_ahead(cache, input_ids.device) else None
            # Not as one that is returned: then its new tokens would count as drafts.
            super().__init__(input_ids, max_length, cache, cache_is_returned and self.ahead is None, streamer)
            if self.ahead is not None:
                self._replayed = cache.graphed.replayed
                """Steps replayed before this one."""

        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
            if not is_assistant and runs_ahead(cache, device):
                return True
            return _Check.is_supported(device, cache, cache_is_returned, is_assistant)

        def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
            if self.ahead is None:
                return super().__call__(unfinished_sequences, tokens, length)
            before, self._replayed = self._replayed, self.ahead.graphed.replayed
            last = self.max_length is not None and length >= self.max_length
            if last or not (_loop.inside and self._replayed > before and self.ahead.has_room(1)):
                return utils.StopCheck.__call__(self, unfinished_sequences, tokens, length)
            all_ended, told, known = self.slots[0]
            # An event is recorded on a stream of the current device, whichever it is of.
            with torch.cuda.device_of(tokens):
                all_ended.copy_(unfinished_sequences.max() == 0, non_blocking=True)
                if self.streamer is not None:
                    told.copy_(tokens, non_blocking=True)
                known.record()
            _loop.asked = self
            return False

        def ended(self) -> bool:
            """Whether all sequences have ended. Waits for the device, and tells the streamer of the last token."""
            all_ended, told, known = self.slots[0]
            known.synchronize()
            if self.streamer is not None:
                self.streamer.put(told.clone())
            return bool(all_ended)

        def finish(self) -> int:
            return super().finish() if self.ahead is None else 0


def defer_stop_checks(model: Any) -> None:
    """Has a model's `generate` use it. For any other cache it is transformers' own check. Idempotent."""
    if _Check is None or not hasattr(type(model), LOOP):
        return
    if utils.DeferredStopCheck is _Check:
        utils.DeferredStopCheck = DeferredStopCheck  # type: ignore[misc]
    if not isinstance(vars(model).get(LOOP), DecodingLoop):
        vars(model)[LOOP] = DecodingLoop(model)
