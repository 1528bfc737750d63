"""A model's forward, captured once in a CUDA graph and replayed.

A graph is a list of kernels on fixed addresses. It stands for the forward as long as everything that chose those
kernels and addresses is the same: the shapes of the inputs, the settings, the model's modules and where their weights
lie, the buffers of the cache. `GraphedForward` knows all of that as one key, captures when the key is new, replays
while it is the same, and leaves to the model what cannot be captured, with a warning that says why. What a forward
changes on the host is not replayed; that is the cache's to do.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache
from transformers.utils import ModelOutput, logging

from hf_hisparse.capturing import capturing, synchronize


logger = logging.get_logger(__name__)

INPUTS = ("input_ids", "inputs_embeds", "position_ids", "cache_position")
"""Tensors that are copied into a graph before it is replayed. Masks are not among them: what a new token attends to is
on the device already."""
SETTINGS = ("use_cache", "return_dict", "logits_to_keep")
"""Other arguments that a graph may be captured with."""
_alone = threading.RLock()
"""Held while a step is warmed up or captured. What that watches or turns off is of the whole process: the warnings, how
PyTorch reports that the host waits, garbage collection. One thread at a time does it."""

SYNCHRONISING = "synchronizing CUDA operation"
"""In the warning of PyTorch's that the host waits for the device."""

AT_ONCE, WAITING = "batched_mm", ("eager", "grouped_mm")
"""How a step multiplies a mixture of experts, and what that stands for: in these the host may wait for the device."""

HOOKS = ("hf_hisparse.", "transformers.utils.output_capturing")
"""Modules whose hooks do nothing that a replay leaves undone. The second records layers' outputs, when asked to."""


class Uncapturable(Exception):
    """Why a forward cannot be captured."""


class Stepping(Protocol):
    """What a cache whose forwards are graphed does."""

    def begin_forward(self, decoder: nn.Module, batch: int, tokens: int, mask: Any) -> None: ...

    def end_forward(self, failed: bool) -> None: ...

    def replays(self, tokens: int, device: torch.device) -> bool:
        """Whether a forward of so many new tokens on a device is a decode step, which the device takes alone."""

    def make_room(self, tokens: int) -> None:
        """Has room for so many more tokens, for which buffers may move."""

    def layout(self) -> Hashable:
        """Equal for as long as the buffers of a decode step lie where they are. Raises `Uncapturable` if they move."""

    def advance(self) -> None:
        """Does what a decode step changes on the host."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Within it a forward changes nothing on the host."""

    def compiled(self, decoder: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within it a decode step runs over compiled layers."""


class Recorder:
    """Captures functions in CUDA graphs, on a stream that no other recorder has as long as it lives."""

    device_type = "cuda"

    _idle: ClassVar[dict[torch.device, list[torch.cuda.Stream]]] = defaultdict(list)
    """Streams of recorders that are gone. Libraries keep memory for every stream that they were ever called on, cuBLAS
    32 MiB on Hopper: there are to be no more streams than recorders at a time. Nor fewer: a graph goes on using that
    memory, and graphs may be replayed at once."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._give_back: Callable[[], object] = lambda: None

    def _own_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None or self._stream.device != device:
            self._give_back()
            idle = self._idle[device]
            if idle:
                # The last graph of the recorder that is gone may still run.
                synchronize(device)
            self._stream = idle.pop() if idle else torch.cuda.Stream(device)
            self._give_back = weakref.finalize(self, idle.append, self._stream)
        return self._stream

    @contextlib.contextmanager
    def _aside(self, device: torch.device) -> Iterator[torch.cuda.Stream]:
        """The stream of its own, behind what the current one does, which waits for it in turn."""
        stream, current = self._own_stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.device(device):
            try:
                yield stream
            finally:
                # A capture that fails leaves its stream the current one. Setting it sets the current device too.
                torch.cuda.set_stream(current)
        current.wait_stream(stream)

    def warm_up(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, str | None]:
        """Runs a function where it will be captured, so that what is made at first use is there.

        Returns:
            Its result, and where it waited for the device, which a capture forbids; None if it did not.
        """
        with self._aside(device) as stream, torch.cuda.stream(stream), waits() as found:
            result = function()
        # The caller's stream has a copy of its own: the result is freed on the one that it was made on.
        return convert(result, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf), next(iter(found), None)

    def record(self, function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Captures a function. Returns what replays it, and its result, which every replay overwrites."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        collecting = gc.isenabled()
        # Garbage may hold pinned memory, whose release waits for the device.
        gc.disable()
        try:
            with (
                capturing,
                self._aside(device) as stream,
                torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
            ):
                result = function()
        except BaseException:
            # PyTorch, up to some version, goes on as if it captured: its generator refuses to draw, which a copy of it
            # does not, and its allocator to give memory back.
            generator = torch.cuda.default_generators[device.index]
            generator.graphsafe_set_state(generator.clone_state())
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, pool)
            raise
        finally:
            if collecting:
                gc.enable()
        return graph.replay, result


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Lists the places at which this thread waits for a CUDA device within it, as far as PyTorch notices."""
    found: list[str] = []
    mode, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
    with warnings.catch_warnings():
        shown = warnings.showwarning
        mine: list[warnings.WarningMessage] = []

        def show(*args: Any, **kwargs: Any) -> None:
            # Other threads warn of what they do; that they wait, of which nobody but this one has asked to hear.
            if threading.get_ident() == thread:
                mine.append(warnings.WarningMessage(*args, **kwargs))
            elif mode or SYNCHRONISING not in str(args[0]):
                shown(*args, **kwargs)

        warnings.showwarning = show
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(max(mode, 1))
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in mine:
        if SYNCHRONISING in str(warning.message):
            found.append(f"the host waits for the device at {warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class GraphedForward:
    """Runs the decode steps of one cache, as a graph where it can.

    The first step of every key runs eagerly, on the stream that the second is captured on. If it waits for the device,
    so does a second one, and if that waits too, which no graph can, so do all.

    Args:
        recorder: What captures and replays.
        compiles: Whether graphs are of compiled layers, which are compiled when the first step of a key runs. What
            runs as it does without a graph is not compiled.
    """

    def __init__(self, recorder: Recorder | None = None, compiles: bool = False):
        self.recorder = Recorder() if recorder is None else recorder
        self.compiles = compiles
        self.captured = self.replayed = 0
        """Graphs captured and steps replayed so far."""
        self._drop()

    def __deepcopy__(self, memo: Any) -> GraphedForward:
        """A copy of a cache captures for itself: its buffers lie elsewhere."""
        return type(self)(compiles=self.compiles)

    def _drop(self) -> None:
        self._key: Hashable = None
        self._snapshot: Any = None
        self._replay: Callable[[], None] | None = None
        self._inputs: dict[str, Tensor] = {}
        self._output: Any = None
        self._warm_ups = 0
        self._failed = False

    def __call__(
        self, cache: Stepping, model: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """What `forward(*args, **kwargs)` returns, with all that it does to `cache`."""
        try:
            given = dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs if args else kwargs
            tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
            if not isinstance(tokens, Tensor) or not cache.replays(tokens.shape[1], tokens.device):
                return forward(*args, **kwargs)
            inputs, settings = separate(given)
            cache.make_room(tokens.shape[1])
            key = (
                tuple((name, value.shape, value.dtype, value.device) for name, value in inputs.items()),
                tuple(settings.items()),
                environment(),
                cache.layout(),
            )
            same = key == self._key and self._snapshot.in_place(model)
            # A graph is replayed first, and this asked then.
            if not same or (self._replay is None and not self._snapshot.holds()):
                self._drop()
                self._snapshot = Snapshot(model, tokens.device)
                self._key, self._warm_ups = key, 2
            if self._warm_ups:
                result, reason = self._warm_up(cache, model, lambda: forward(*args, **kwargs), tokens.device)
                self._warm_ups -= 1
                if reason is None:
                    self._warm_ups = 0
                elif not self._warm_ups:
                    self._give_up(reason)
                return result
            if self._failed:
                return forward(*args, **kwargs)
        except Uncapturable as reason:
            self._warn(reason)
            return forward(*args, **kwargs)

        batch, new = tokens.shape[:2]
        cache.begin_forward(self._snapshot.decoder, batch, new, given.get("attention_mask"))
        failed = True
        try:
            if self._replay is None:
                self._capture(cache, model, forward, inputs, settings | caches(given), tokens.device)
            if self._replay is not None:
                torch._foreach_copy_(list(self._inputs.values()), list(inputs.values()), non_blocking=True)
                self._replay()
                # While the device is busy. A step that was another model's is undone.
                if not self._snapshot.holds():
                    self._drop()
            if self._replay is not None:
                cache.advance()
                self.replayed += 1
                failed = False
        finally:
            cache.end_forward(failed)
        if failed:
            return self(cache, model, forward, args, kwargs)
        return convert(self._output, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else cache)

    def _layers(self, cache: Stepping, model: Any) -> contextlib.AbstractContextManager[None]:
        return cache.compiled(model.get_decoder()) if self.compiles else contextlib.nullcontext()

    def _warm_up(
        self, cache: Stepping, model: Any, function: Callable[[], Any], device: torch.device
    ) -> tuple[Any, str | None]:
        """`Recorder.warm_up`, over compiled layers if they can be compiled."""
        try:
            with _alone, self._layers(cache, model):
                return self.recorder.warm_up(function, device)
        except Exception as error:  # Whatever it is, such as a compiler that is missing, there is another way to run.
            if not self.compiles:
                raise
            reason = error
        # What the model or the cache refuses, compiled or not, is raised here.
        with _alone:
            result = self.recorder.warm_up(function, device)
        self.compiles = False
        logger.warning_once(f"Decoder layers are not compiled: {describe(getattr(reason, 'inner_exception', reason))}")
        return result

    def _capture(
        self,
        cache: Stepping,
        model: Any,
        forward: Callable[..., Any],
        inputs: dict[str, Tensor],
        constants: dict[str, Any],
        device: torch.device,
    ) -> None:
        self._inputs = {name: value.clone(memory_format=torch.contiguous_format) for name, value in inputs.items()}
        static = self._inputs

        def step() -> Any:
            with cache.recording(), self._layers(cache, model):
                # The cache is taken out of what is kept: it holds this graph.
                return convert(
                    forward(**static, **constants), lambda leaf: leaf if isinstance(leaf, Tensor) else _CACHE
                )

        try:
            with _alone:
                self._replay, self._output = self.recorder.record(step, device)
            self.captured += 1
        except Exception as error:  # Whatever a model does that cannot be captured, it can be run.
            # Where a capture fails, PyTorch raises that it did, in the course of which.
            self._give_up(describe(error.__context__ or error))

    def _give_up(self, reason: str) -> None:
        self._failed = True
        self._warn(reason)

    @staticmethod
    def _warn(reason: Any) -> None:
        logger.warning_once(f"Decode steps run eagerly, and not as a CUDA graph: {reason}")


def describe(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def separate(given: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arguments of a decode step as tensors to copy in and settings. Masks and caches are left out.

    Raises:
        Uncapturable: If there is an argument that a graph cannot stand for.
    """
    inputs, settings = {}, {}
    for name, value in given.items():
        if isinstance(value, Cache):
            continue
        if name in INPUTS and isinstance(value, Tensor):
            inputs[name] = value
        elif name == "attention_mask" and isinstance(value, Tensor) and value.ndim == 2:
            continue
        elif value is None or value is False or (name in SETTINGS and isinstance(value, int)):
            settings[name] = value
        else:
            raise Uncapturable(f"the model is given `{name}`")
    if "position_ids" not in inputs:
        raise Uncapturable("the model is given no `position_ids`, and would count them on the host")
    return inputs, settings


def caches(given: dict[str, Any]) -> dict[str, Cache]:
    """The arguments that are caches."""
    return {name: value for name, value in given.items() if isinstance(value, Cache)}


def environment() -> Hashable:
    """PyTorch's own settings, as far as they choose kernels.

    Raises:
        Uncapturable: If gradients or automatic casts are on.
    """
    if torch.is_grad_enabled():
        raise Uncapturable("gradients are enabled; call the model under `torch.no_grad()`")
    if torch.is_autocast_enabled():
        raise Uncapturable("`torch.autocast` is on; load the model in the dtype that it should run in")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise Uncapturable("a forward hook is registered for all modules")
    return (
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def has_address(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own: quantised ones may be made of others, which can change unseen."""
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def pieces(tensor: Any) -> list[Tensor]:
    """What a tensor is made of: itself, or the tensors that its kind says hold its values, as quantised weights may."""
    # What is spread over processes takes more than their kernels.
    if not is_traceable_wrapper_subclass(tensor) or type(tensor).__module__.startswith("torch.distributed."):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return list(chain.from_iterable(pieces(getattr(tensor, name)) for name in names))


class Snapshot:
    """Everything about a model that its kernels depend on: its modules, where their weights lie, its active adapters.

    Weights that change in place are the same weights. Taking one walks the model; what every step asks goes over flat
    lists. As long as the weights are `in_place` a graph can be replayed: what it reads is there, since a snapshot keeps
    modules and parameters. Whether all else `holds`, which takes longer, can be asked when it has been.

    Args:
        model: The model.
        device: Where it should be.

    Raises:
        Uncapturable: If a module trains, has hooks of others, or is not on the device for good.
    """

    def __init__(self, model: Any, device: torch.device):
        self.model = model
        self.decoder = model.get_decoder()
        self.modules: list[nn.Module] = list(model.modules())
        self.states: list[dict[str, Any]] = [vars(module) for module in self.modules]
        for module, state in zip(self.modules, self.states, strict=True):
            if module.training:
                raise Uncapturable("the model is in training mode; call `model.eval()`")
            if "_hf_hook" in state:
                raise Uncapturable("accelerate moves the model's weights or inputs as it runs")
            for hook in (*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()):
                if not (getattr(hook, "__module__", None) or "").startswith(HOOKS):
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    raise Uncapturable(f"{type(module).__name__} has a forward hook, `{name}`")
        tables = ("_parameters", "_buffers", "_modules")
        # An attribute more may be a `forward` of its own; a member more of an empty table, a parametrization.
        self._sized = [*self.states, *(state[name] for state in self.states for name in tables)]
        self._tables = [table for table in self._sized[len(self.states) :] if table]
        self._members = list(chain.from_iterable(map(dict.values, self._tables)))
        weights = [member for member in self._members if isinstance(member, Tensor)]
        self._made = [weight for weight in weights if pieces(weight)[0] is not weight]
        self._pieces = self._take_apart()
        self._tensors = list(chain.from_iterable(map(pieces, weights)))
        for tensor in self._tensors:
            if tensor.device != device:
                raise Uncapturable(f"not all of the model is on {device}, where its inputs are")
            if not has_address(tensor):
                raise Uncapturable(f"the model has weights of the kind `{type(tensor).__name__}`, without an address")
        self._hooks = [state[name] for state in self.states for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._adapters = [state for state in self.states if "_active_adapter" in state]
        self._addresses = self._locate()
        self._facts = self._read()

    def _take_apart(self) -> list[Tensor]:
        return list(chain.from_iterable(map(pieces, self._made)))

    def _locate(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _read(self) -> list[Any]:
        return [
            list(map(type, self.modules)),
            list(map(len, self._sized)),
            # That of a compiled module is the original's.
            list(map(attrgetter("training"), self.modules)),
            # Every hook has a number that no other has.
            list(chain.from_iterable(self._hooks)),
            [tensor.dtype for tensor in self._tensors],
            # PEFT: what of a layer's adapters is applied, and how strongly, is told by Python alone.
            [
                repr(
                    [state.get(name) for name in ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")]
                )
                for state in self._adapters
            ],
            [
                # Within a step that is captured these three are one.
                AT_ONCE if value in WAITING else value
                for config in (self.model.config, self.decoder.config)
                for value in (
                    getattr(config, "_experts_implementation", None),
                    getattr(config, "output_hidden_states", None),
                )
            ],
        ]

    def in_place(self, model: Any) -> bool:
        """Whether it is the same model, and its weights lie where they did."""
        return model is self.model and self._locate() == self._addresses

    def holds(self) -> bool:
        """Whether the model is otherwise as it was."""
        members, made = list(chain.from_iterable(map(dict.values, self._tables))), self._take_apart()
        return (
            len(members) == len(self._members)
            and all(map(is_, members, self._members))
            and len(made) == len(self._pieces)
            and all(map(is_, made, self._pieces))
            and self._read() == self._facts
        )


_CACHE = object()
"""Where a cache was in an output that is kept."""


def convert(output: Any, function: Callable[[Any], Any]) -> Any:
    """A model's output with `function` applied to its tensors and its caches."""
    if isinstance(output, (Tensor, Cache)) or output is _CACHE:
        return function(output)
    if isinstance(output, ModelOutput):
        return type(output)(**{name: convert(value, function) for name, value in output.items()})
    if isinstance(output, (tuple, list)):
        return type(output)(convert(value, function) for value in output)
    return output
