"""Has `generate` begin a step before it knows whether the one before it was the last.

After every token `generate` asks whether all sequences have ended, for which the host waits until the device is done.
Then the device waits for the host, which has the next step to prepare. transformers can hear the answer a step late
instead, and undo the step that was one too many (`DeferredStopCheck`), but does so on MPS alone. Here that is done for
caches whose decode steps are replayed too: the host prepares the next step while the device runs this one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils


_Check: Any = getattr(utils, "DeferredStopCheck", None)
# Where this is imported anew, the one below has taken its place.
_Check = getattr(_Check, "in_place_of", _Check)


def runs_ahead(cache: Any, device: torch.device) -> bool:
    """Whether a step of `generate` over a cache is begun before it is known to be needed."""
    return device.type == "cuda" and getattr(cache, "runs_ahead", False)


if _Check is not None:

    class DeferredStopCheck(_Check):
        """transformers' own check, and for a cache that runs ahead one that leaves no trace of a step too many.

        What `generate` returns of it, transformers undoes. Here the cache forgets its token as well, and the random
        numbers that sampling it took are drawn again, so that whatever comes after `generate` is the same. Streamers
        hear of a token while the next one is replayed, and if they raise that one is undone.
        """

        in_place_of = _Check
        is_first_step: bool

        def __init__(
            self, input_ids: Tensor, max_length: int | None, cache: Any, cache_is_returned: bool, streamer: Any = None
        ):
            self.ahead = cache if runs_ahead(cache, input_ids.device) else None
            # Not as one that is returned: then its new tokens would count as drafts.
            super().__init__(input_ids, max_length, cache, cache_is_returned and self.ahead is None, streamer)
            if self.ahead is None:
                return
            self._device = input_ids.device
            self._replayed = cache.graphed.replayed
            """Steps replayed before this one."""
            self._drawn: deque[Tensor] = deque(maxlen=2)
            """The states of the random generator at the end of the last two steps."""

        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
            if not is_assistant and runs_ahead(cache, device):
                return True
            return _Check.is_supported(device, cache, cache_is_returned, is_assistant)

        def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
            if self.ahead is None:
                return super().__call__(unfinished_sequences, tokens, length)
            held_back = not self.is_first_step
            try:
                # Its events are recorded on a stream of the current device, whichever they are of.
                with torch.cuda.device_of(tokens):
                    stopping = super().__call__(unfinished_sequences, tokens, length)
            except BaseException:
                # A streamer's, maybe, of the token before: had it been told at once, this step would not have begun.
                if held_back:
                    self._undo(self._drawn[-1])
                raise
            self._drawn.append(self._generator().get_state())
            before, self._replayed = self._replayed, self.ahead.graphed.replayed
            if stopping or (self._replayed > before and self.ahead.has_room(1)):
                return stopping
            # A step that might be refused, that needs memory, or that the host is no faster with than the device, as
            # where weights are offloaded, is not begun in vain.
            if unfinished_sequences.max() == 0:
                return True
            # Nothing is held back: the next step is as a first one.
            self.is_first_step = True
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            return False

        def finish(self) -> int:
            too_many = super().finish()
            if too_many and self.ahead is not None:
                self._undo(self._drawn[0])
            return too_many

        def _undo(self, drawn: Tensor) -> None:
            """Goes back to before the last step, when the random generator was in the state `drawn`."""
            self.ahead.crop_later(-1)
            self._generator().set_state(drawn)

        def _generator(self) -> torch.Generator:
            if self._device.type == "cpu":
                return torch.default_generator
            return torch.cuda.default_generators[self._device.index]


def defer_stop_checks() -> None:
    """Puts it in the place of transformers' own check, which it is for any other cache. Idempotent."""
    if _Check is not None and utils.DeferredStopCheck is _Check:
        utils.DeferredStopCheck = DeferredStopCheck  # type: ignore[misc]
