"""Who takes part in a run: backends of fastrl, torch itself, and other libraries.

One that is not installed, or whose call raises, fails with that reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from fastrl.backend import BACKENDS, Backend, unavailable
from fastrl.bench.case import Inputs, Provider

#: What a user types: the label of its functions, what Python imports and what pip installs.
PEERS = {
    "eager": ("", "torch", "torch"),
    "compile": ("", "torch", "torch"),
    "torch": ("torch", "torch", "torch"),
    "trl": ("TRL", "trl", "trl"),
    "liger": ("Liger", "liger_kernel", "liger-kernel"),
    "unsloth": ("Unsloth", "unsloth", "unsloth"),
    "cut-cross-entropy": ("", "cut_cross_entropy", "cut-cross-entropy"),
    "quack": ("QuACK", "quack", "quack-kernels"),
    "verl": ("verl", "verl", "verl"),
    "torchrl": ("torchrl", "torchrl", "torchrl"),
}
_KERNELS = {"cpu": ("cpu",), "cuda": ("triton", "cuda")}
Ours = Callable[..., Any]  # of the inputs and ``backend``


class Peer(NamedTuple):
    """A function of another library, called as its documentation says.

    ``call`` takes the function, ``module:name``, which is imported when it is called.
    """

    peer: str  # of PEERS
    source: str
    call: Callable[[Any, Inputs], Any]
    on_gpu: bool = False  # only there
    suffix: str = ""  # of its name
    backward: Callable[[Any, Inputs], Any] | None = None
    prepare: Callable[[Inputs], Inputs] | None = None


class Participants(NamedTuple):
    """The device of a run, the backends of fastrl and the peers."""

    device: torch.device
    backends: tuple[Backend, ...]
    peers: tuple[str, ...]
    narrow: bool = True  # in 16 bits, torch also computes without a cast to float32

    def fastrl(self, function: Ours, suffix: str = "") -> list[Provider]:
        """Return a provider for each backend."""
        return [
            Provider(
                f"fastrl {name}{suffix}",
                "fastrl",
                functools.partial(function, backend=name),
                prepare=_refused(why) if (why := unavailable(name)) else None,
            )
            for name in self.backends
        ]

    def torch(
        self, function: Callable[..., Any], names: Sequence[str], dtype: torch.dtype
    ) -> Iterator[Provider]:
        """Yield eager and compiled torch; in 16 bits cast to float32, as trainers do, and not.

        ``function`` takes the tensors with these names and ``upcast``.
        """
        narrow = f" in {str(dtype).removeprefix('torch.')}"
        for suffix, upcast in (("", True), (narrow, False)):
            if suffix and (not self.narrow or dtype in (torch.float32, torch.float64)):
                continue
            form = functools.partial(function, upcast=upcast)
            if "eager" in self.peers:
                yield Provider(f"eager{suffix}", "eager", _called(form, names))
            if "compile" in self.peers:
                yield Provider(f"torch.compile{suffix}", "compile", _called(_compiled(form), names))

    def others(self, peers: Sequence[Peer]) -> Iterator[Provider]:
        """Yield the providers of the libraries that take part."""
        for one in peers:
            if one.peer in self.peers:
                refused = one.on_gpu and self.device.type != "cuda"
                prepare = _refused("its kernels need a CUDA device") if refused else one.prepare
                label = PEERS[one.peer][0]
                name = f"{label} {one.source.split(':')[1]}{one.suffix}" if label else one.peer
                yield Provider(name, "peer", _imported_then(one), one.backward, prepare)


def participants(
    device: torch.device, backends: Sequence[str] | None, peers: Sequence[str] | None
) -> Participants:
    """Return who takes part.

    None is all peers that are installed, and all kernels here or else the reference. A peer that is
    named and not installed takes part, and fails.

    Raises:
        ValueError: a name is unknown.
    """
    known = [name for name in BACKENDS if name != "auto"]
    for argument, given, names in (("backends", backends, known), ("peers", peers, [*PEERS])):
        for name in given or ():
            if name not in names:
                raise ValueError(f"{argument} must be among {', '.join(names)}, got {name!r}")
    if backends is None:
        kernels = [name for name in _KERNELS[device.type] if unavailable(name) is None]
        backends = kernels or ["reference"]
    if peers is None:
        peers = [name for name in PEERS if is_installed(name)]
    return Participants(device, tuple(cast("list[Backend]", backends)), tuple(peers))


def is_installed(peer: str) -> bool:
    """Return whether the module of a peer can be found."""
    return importlib.util.find_spec(PEERS[peer][1]) is not None


@functools.cache
def imported(peer: str, source: str) -> Any:
    """Return a library's function, the one of the first call: some libraries replace others'."""
    _, top, distribution = PEERS[peer]
    if not is_installed(peer):
        raise ImportError(f"{top} is not installed: pip install {distribution}")
    importlib.import_module(top)  # before others that need it, as unsloth_zoo does
    module, name = source.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ImportError(f"this version of {distribution} has no {module}.{name}") from None


def _imported_then(one: Peer) -> Callable[[Inputs], Any]:
    return lambda inputs: one.call(imported(one.peer, one.source), inputs)


def _called(function: Callable[..., Any], names: Sequence[str]) -> Callable[[Inputs], Any]:
    return lambda inputs: function(*(inputs[name] for name in names))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as torch.compile makes it at the first call: before, it is not imported.

    Each shape for itself; a graph break is an error, never eager in silence. The default mode:
    autotuning a GEMM of this size takes minutes, and CUDA graphs would hide what a call costs the
    host.
    """
    made = functools.cache(lambda: torch.compile(function, dynamic=False, fullgraph=True))
    return lambda *tensors: made()(*tensors)


def _refused(reason: str) -> Callable[[Inputs], Inputs]:
    def prepare(inputs: Inputs) -> Inputs:
        raise RuntimeError(reason)

    return prepare
