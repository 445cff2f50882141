"""Who takes part in a run: backends of fastrl, torch itself, and other libraries.

Each library is called as its documentation says. One that is not installed, or whose call raises,
fails with that reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend import BACKENDS, unavailable
from fastrl.bench.case import Inputs, Provider

#: What a user types, what Python imports and what pip installs.
PEERS = {
    "eager": ("torch", "torch"),
    "compile": ("torch", "torch"),
    "torch": ("torch", "torch"),
    "trl": ("trl", "trl"),
    "liger": ("liger_kernel", "liger-kernel"),
    "unsloth": ("unsloth", "unsloth"),
    "cut-cross-entropy": ("cut_cross_entropy", "cut-cross-entropy"),
    "quack": ("quack", "quack-kernels"),
    "verl": ("verl", "verl"),
    "torchrl": ("torchrl", "torchrl"),
}
_OF_DEVICE = {"cpu": ("cpu", "reference"), "cuda": ("triton", "cuda", "reference")}
Forward = Callable[[Inputs], Any]


class Participants(NamedTuple):
    """The device of a run, the backends of fastrl and the peers."""

    device: torch.device
    backends: tuple[str, ...]
    peers: tuple[str, ...]

    def fastrl(self, forward: Callable[[str], Forward], *, named: str = "") -> list[Provider]:
        """Return a provider for each backend, from its name."""
        return [
            Provider(f"fastrl {name}{named}", "fastrl", forward(name), prepare=_of_backend(name))
            for name in self.backends
        ]

    def eager(
        self, function: Callable[..., Any], names: Sequence[str], dtype: torch.dtype
    ) -> Iterator[Provider]:
        """Yield eager and compiled torch; in 16 bits cast to float32, as trainers do, and not.

        ``function`` takes the tensors with these names and ``upcast``.
        """
        narrow = f" in {str(dtype).removeprefix('torch.')}"
        for suffix, upcast in (("", True), (narrow, False)):
            form = _form(function, upcast=upcast)
            if suffix and dtype in (torch.float32, torch.float64):
                continue
            if "eager" in self.peers:
                yield Provider(f"eager{suffix}", "eager", _called(form, names))
            if "compile" in self.peers:
                # Each shape for itself; a graph break is an error, never eager in silence. The
                # default mode: autotuning a GEMM of this size takes minutes, and CUDA graphs
                # would hide what a call costs the host.
                compiled = torch.compile(form, dynamic=False, fullgraph=True)
                yield Provider(f"torch.compile{suffix}", "compile", _called(compiled, names))

    def peer(
        self,
        peer: str,
        name: str,
        forward: Forward,
        *,
        on_gpu: bool = False,
        backward: Callable[[Any, Inputs], Any] | None = None,
        prepare: Callable[[Inputs], Inputs] | None = None,
    ) -> list[Provider]:
        """Return the provider of another library if it takes part; ``on_gpu``: only there."""
        if peer not in self.peers:
            return []
        if on_gpu and self.device.type != "cuda":
            prepare = _refused("its kernels need a CUDA device")
        return [Provider(name, "peer", forward, backward, prepare)]


def participants(
    device: torch.device, backends: Sequence[str] | None, peers: Sequence[str] | None
) -> Participants:
    """Return who takes part; None: all backends that are available here, or all peers.

    Raises:
        ValueError: a name is unknown.
    """
    known = [name for name in BACKENDS if name != "auto"]
    for argument, given, names in (("backends", backends, known), ("peers", peers, [*PEERS])):
        for name in given or ():
            if name not in names:
                raise ValueError(f"{argument} must be among {', '.join(names)}, got {name!r}")
    if backends is None:
        backends = [name for name in _OF_DEVICE[device.type] if unavailable(name) is None]
    return Participants(device, tuple(backends), tuple(PEERS if peers is None else peers))


@functools.cache
def imported(peer: str, module: str, name: str) -> Any:
    """Return a library's function, the one of the first call: some libraries replace others'."""
    top, distribution = PEERS[peer]
    if importlib.util.find_spec(top) is None:
        raise ImportError(f"{top} is not installed: pip install {distribution}")
    return getattr(importlib.import_module(module), name)


def _called(function: Callable[..., Any], names: Sequence[str]) -> Forward:
    return lambda inputs: function(*(inputs[name] for name in names))


def _form(function: Callable[..., Any], *, upcast: bool) -> Callable[..., Any]:
    def form(*tensors: Tensor) -> Any:
        return function(*tensors, upcast=upcast)

    return form


def _of_backend(name: str) -> Callable[[Inputs], Inputs] | None:
    reason = unavailable(name)
    return None if reason is None else _refused(reason)


def _refused(reason: str) -> Callable[[Inputs], Inputs]:
    def prepare(inputs: Inputs) -> Inputs:
        raise RuntimeError(reason)

    return prepare


class LogprobPeer(NamedTuple):
    """A library's log-probabilities ``[N]`` of token ids ``[N]``."""

    peer: str
    name: str
    function: Callable[..., Tensor]
    on_gpu: bool = False


def _trl(logits: Tensor, ids: Tensor) -> Tensor:
    found: Tensor = imported("trl", "trl.trainer.utils", "selective_log_softmax")(logits, ids)
    return found


def _verl(logits: Tensor, ids: Tensor) -> Tensor:
    function = imported("verl", "verl.utils.torch_functional", "logprobs_from_logits")
    found: Tensor = function(logits, ids, inplace_backward=False)
    return found


def _unsloth(logits: Tensor, ids: Tensor) -> Tensor:
    imported("unsloth", "unsloth", "__version__")  # unsloth_zoo must come after it
    module, name = "unsloth_zoo.rl_replacements", "chunked_selective_log_softmax"
    found: Tensor = imported("unsloth", module, name)(logits, ids)
    return found.view(ids.shape)


def _quack(logits: Tensor, ids: Tensor) -> Tensor:
    function = imported("quack", "quack.cross_entropy", "cross_entropy")
    return -function(logits.flatten(0, -2), ids.flatten(), reduction="none").view(ids.shape)


#: From logits ``[B, T, V]`` and ids ``[B, T]``.
LOGITS_PEERS = (
    LogprobPeer("trl", "TRL selective_log_softmax", _trl),
    LogprobPeer("verl", "verl logprobs_from_logits", _verl),
    LogprobPeer("unsloth", "Unsloth chunked_selective_log_softmax", _unsloth),
    LogprobPeer("quack", "QuACK cross_entropy", _quack, on_gpu=True),
)


def liger_inputs(inputs: Inputs) -> Inputs:
    """Append the position that Liger takes and ignores; it writes the gradient over the logits."""
    return {**inputs, "logits": torch.nn.functional.pad(inputs["logits"], (0, 0, 0, 1))}


def liger_loss(inputs: Inputs) -> Tensor:
    """Return the mean of Liger's losses, which come one per token."""
    losses = imported("liger", "liger_kernel.transformers.grpo_loss", "triton_grpo_loss")(
        inputs["logits"], inputs["old_logprobs"], None, inputs["token_ids"],
        inputs["of_sequences"], inputs["mask"].int(), temperature=1.0, beta=0.0, eps_low=0.2,
        eps_high=0.2, inplace=True,
    )  # fmt: skip
    mean: Tensor = (losses[0] * inputs["mask"]).sum() / inputs["mask"].sum()
    return mean


def liger_gradient(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the gradient without the additional position."""
    return (torch.autograd.grad(loss, inputs["logits"])[0][:, :-1],)
