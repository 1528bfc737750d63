"""What runs beside something else while a graph is captured.

Streams that know what each of their kernels may rely on stand for a GPU's; on one, see `test_compile`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_hisparse import HierarchicalSparseCache, branch
from hf_hisparse.branch import Branch
from tests.helpers import make_model


pytestmark = pytest.mark.cpu


class Stream:
    """What has surely been done when its next kernel runs."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.done: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done


class Capture:
    """Stands for a device: `captures` whether a graph is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = True
        self.current, self.side = Stream(), Stream()
        monkeypatch.setattr(branch, "_captured", lambda device: self.captures)
        monkeypatch.setattr(branch, "_side", lambda index: self.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def kernel(self, name: str) -> set[str]:
        """Runs a kernel. Returns what it may rely on."""
        before = set(self.current.done)
        self.current.done.add(name)
        return before


@pytest.fixture
def capture(monkeypatch) -> Capture:
    return Capture(monkeypatch)


def test_what_runs_beside_follows_what_was_before_and_comes_before_what_is_after_the_join(capture):
    side = Branch()
    for turn in "ab":
        earlier = capture.kernel(f"before {turn}") | {f"before {turn}"}
        assert side.run(lambda _, turn=turn: capture.kernel(f"beside {turn}"), torch.ones(1)) == earlier
        assert side.busy
        assert capture.kernel(f"meanwhile {turn}") == earlier
        side.join()
        assert not side.busy
        assert capture.kernel(f"after {turn}") == earlier | {f"meanwhile {turn}", f"beside {turn}"}


def test_what_comes_while_something_runs_beside_is_run_at_once(capture):
    side = Branch()
    side.run(lambda _: capture.kernel("first"), torch.ones(1))
    assert side.run(lambda _: capture.kernel("second"), torch.ones(1)) == set()
    assert capture.kernel("meanwhile") == {"second"} and side.busy
    side.join()
    assert capture.kernel("after") == {"first", "second", "meanwhile"}


def test_outside_of_a_capture_all_is_run_at_once(capture):
    capture.captures = False
    side = Branch()
    side.run(lambda _: capture.kernel("beside"), torch.ones(1))
    assert capture.kernel("meanwhile") == {"beside"} and not side.busy
    side.join()
    assert not capture.side.done


def test_what_is_read_beside_is_held_until_the_join(capture):
    def read(*tensors: Tensor) -> Tensor:
        return torch.stack(tensors)

    side, tensors = Branch(), [torch.ones(1), torch.ones(1)]
    held = [weakref.ref(tensor) for tensor in tensors]
    side.run(read, *tensors)
    tensors.clear()
    # Neither is given up for what comes meanwhile.
    side.run(read, torch.ones(1))
    assert all(tensor() is not None for tensor in held)
    side.join()
    assert all(tensor() is None for tensor in held)


def test_nothing_waits_for_what_was_beside_when_a_capture_failed(capture):
    """The stream that it was on is that of the next capture too, which must not wait for another one's work."""
    coordinator = HierarchicalSparseCache(make_model("llama")).layers[0].coordinator
    for _ in range(2):
        coordinator.enter()
        assert not coordinator._branch.busy
        coordinator.beside(torch.clone, torch.ones(1))
        assert coordinator._branch.busy
        coordinator.leave()
    side = Branch()
    side.run(lambda _: capture.kernel("beside"), torch.ones(1))
    capture.captures = False
    side.join()
    assert not side.busy and not capture.kernel("eager")
