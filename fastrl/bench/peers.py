"""Who takes part in a run: backends of fastrl, torch itself, and other libraries.

Each library is called as its documentation says. One that is not installed, or whose call raises,
fails with that reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastrl.backend import BACKENDS, Backend, unavailable
from fastrl.bench.case import Inputs, Provider
from fastrl.bench.error import clipped, masked_mean

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
Forward = Callable[[Inputs], Any]


class Participants(NamedTuple):
    """The device of a run, the backends of fastrl and the peers."""

    device: torch.device
    backends: tuple[Backend, ...]
    peers: tuple[str, ...]
    narrow: bool = True  # in 16 bits, torch also computes without a cast to float32

    def fastrl(self, function: Callable[[Inputs, Backend], Any]) -> list[Provider]:
        """Return a provider for each backend."""

        def forward(backend: Backend) -> Forward:
            return lambda inputs: function(inputs, backend)

        return [
            Provider(f"fastrl {name}", "fastrl", forward(name), prepare=_unless_available(name))
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
            if suffix and (not self.narrow or dtype in (torch.float32, torch.float64)):
                continue
            if "eager" in self.peers:
                yield Provider(f"eager{suffix}", "eager", _called(form, names))
            if "compile" in self.peers:
                yield Provider(f"torch.compile{suffix}", "compile", _called(_Compiled(form), names))

    def peer(
        self,
        peer: str,
        source: str,
        call: Callable[[Any, Inputs], Any],
        *,
        suffix: str = "",
        on_gpu: bool = False,
        backward: Callable[[Any, Inputs], Any] | None = None,
        prepare: Callable[[Inputs], Inputs] | None = None,
    ) -> list[Provider]:
        """Return the provider of a library if it takes part; ``on_gpu``: only there.

        ``call`` takes its function, ``module:name``, which is imported when it is called.
        """
        if peer not in self.peers:
            return []
        if on_gpu and self.device.type != "cuda":
            prepare = _refused("its kernels need a CUDA device")
        label = PEERS[peer][0]
        name = f"{label} {source.split(':')[1]}{suffix}" if label else peer

        def forward(inputs: Inputs) -> Any:
            return call(imported(peer, source), inputs)

        return [Provider(name, "peer", forward, backward, prepare)]


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


def _called(function: Callable[..., Any], names: Sequence[str]) -> Forward:
    return lambda inputs: function(*(inputs[name] for name in names))


def _form(function: Callable[..., Any], *, upcast: bool) -> Callable[..., Any]:
    def form(*tensors: Tensor) -> Any:
        return function(*tensors, upcast=upcast)

    return form


class _Compiled:
    """A function as torch.compile makes it at the first call: before, it is not imported.

    Each shape for itself; a graph break is an error, never eager in silence. The default mode:
    autotuning a GEMM of this size takes minutes, and CUDA graphs would hide what a call costs the
    host.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.function, dynamic=False, fullgraph=True)

    def __call__(self, *tensors: Tensor) -> Any:
        return self.compiled(*tensors)


def _unless_available(name: str) -> Callable[[Inputs], Inputs] | None:
    reason = unavailable(name)
    return None if reason is None else _refused(reason)


def _refused(reason: str) -> Callable[[Inputs], Inputs]:
    def prepare(inputs: Inputs) -> Inputs:
        raise RuntimeError(reason)

    return prepare


def trl_stats(who: Participants) -> list[Provider]:
    """Return TRL's log-probability and entropy, a kernel on GPUs."""

    def call(function: Any, inputs: Inputs) -> Any:
        return function(inputs["logits"], inputs["token_ids"])

    return who.peer("trl", "trl.trainer.utils:selective_log_softmax_and_entropy", call)


def logits_peers(who: Participants, *, loss: bool = False) -> list[Provider]:
    """Return log-probabilities of ids ``[B, T]`` from logits, or the loss of these."""
    of = _scored(who, lambda inputs: (inputs["logits"], inputs["token_ids"]), loss=loss)
    return [
        *of("trl", "trl.trainer.utils:selective_log_softmax", lambda f, x, ids: f(x, ids)),
        *of("verl", "verl.utils.torch_functional:logprobs_from_logits",
            lambda f, x, ids: f(x, ids, inplace_backward=False)),
        *of("unsloth", "unsloth_zoo.rl_replacements:chunked_selective_log_softmax",
            lambda f, x, ids: f(x, ids)),
        *of("quack", "quack.cross_entropy:cross_entropy", on_gpu=True,
            call=lambda f, x, ids: -f(x.flatten(0, -2), ids.flatten(), reduction="none")),
    ]  # fmt: skip


def linear_peers(who: Participants, *, loss: bool = False) -> list[Provider]:
    """Return log-probabilities of ids from hidden states and a head, or the loss of these."""

    def arguments(inputs: Inputs) -> tuple[Tensor, ...]:
        return inputs["hidden"].flatten(0, 1), inputs["weight"], inputs["token_ids"].flatten()

    def of_torch(function: Any, x: Tensor, head: Tensor, ids: Tensor) -> Any:
        options = imported("torch", "torch.nn:LinearCrossEntropyOptions")()
        return -function(x, head, ids, reduction="none", options=options)

    of, tile = _scored(who, arguments, loss=loss), 32768  # TRL's default
    return [
        *of("trl", "trl.kernels.chunked_logprob:ChunkedLogProbFunction",
            lambda f, x, head, ids: f.apply(x, head, None, ids, 1.0, tile, None, 1.0, ())[0]),
        *of("unsloth", "unsloth_zoo.rl_replacements:grpo_chunked_hidden_states_logprobs",
            lambda f, x, head, ids: f(x[None], head, ids[None])),
        *of("cut-cross-entropy", "cut_cross_entropy:linear_cross_entropy", on_gpu=True,
            call=lambda f, x, head, ids: -f(x, head, ids, reduction="none")),
        *of("quack", "quack.linear_cross_entropy:linear_cross_entropy_func", on_gpu=True,
            call=lambda f, x, head, ids: -f(x, head, None, ids, reduction="none")),
        *of("verl", "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy", on_gpu=True,
            call=lambda f, x, head, ids: f(x, head, ids, 1.0, "none")[0]),
        *of("torch", "torch.nn.functional:linear_cross_entropy", of_torch),  # from 2.13
    ]  # fmt: skip


def _scored(
    who: Participants, arguments: Callable[[Inputs], tuple[Tensor, ...]], *, loss: bool
) -> Callable[..., list[Provider]]:
    """Return what makes the provider of a function from these arguments to log-probabilities."""

    def of(
        peer: str, source: str, call: Callable[..., Any], *, on_gpu: bool = False
    ) -> list[Provider]:
        def scored(function: Any, inputs: Inputs) -> Tensor:
            logprobs = call(function, *arguments(inputs)).view(inputs["token_ids"].shape)
            return masked_mean(clipped(logprobs, inputs), inputs) if loss else logprobs

        return who.peer(peer, source, scored, on_gpu=on_gpu)

    return of


def liger_grpo(who: Participants) -> list[Provider]:
    """Return Liger's loss from logits, over which it writes the gradient."""

    def prepare(inputs: Inputs) -> Inputs:
        """Append the position that Liger takes and ignores."""
        return {**inputs, "logits": torch.nn.functional.pad(inputs["logits"], (0, 0, 0, 1))}

    def call(function: Any, inputs: Inputs) -> Tensor:
        losses = function(
            inputs["logits"], inputs["old_logprobs"], None, inputs["token_ids"],
            inputs["sequence_advantages"], inputs["mask"].int(), temperature=1.0, beta=0.0,
            eps_low=0.2, eps_high=0.2, inplace=True,
        )  # fmt: skip
        return masked_mean(losses[0], inputs)

    def backward(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        return (torch.autograd.grad(loss, inputs["logits"])[0][:, :-1],)

    return who.peer(
        "liger", "liger_kernel.transformers.grpo_loss:triton_grpo_loss", call, suffix=" in place",
        on_gpu=True, backward=backward, prepare=prepare,
    )  # fmt: skip


def liger_linear_grpo(who: Participants) -> list[Provider]:
    """Return Liger's loss from hidden states; ``bnpo`` is the mean over all tokens."""

    def call(kind: Any, inputs: Inputs) -> Any:
        loss = kind(beta=0.0, use_ref_model=False, loss_type="bnpo")
        names = ("hidden", "weight", "token_ids", "mask", "sequence_advantages")
        hidden, weight, ids, mask, advantages = (inputs[name] for name in names)
        old = inputs["old_logprobs"]
        return loss(hidden, weight, ids, mask.int(), advantages, old_per_token_logps=old)[0]

    return who.peer("liger", "liger_kernel.chunked_loss:LigerFusedLinearGRPOLoss", call)


def divergence_peers(who: Participants, beta: float) -> list[Provider]:
    """Return the mean divergence from a teacher, from hidden states and heads."""
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")

    def trl(function: Any, inputs: Inputs) -> Any:
        hidden, weight, states, head = (inputs[name] for name in names)
        return function(hidden, states, weight, head, inputs["mask"], beta)[0]

    def liger(kind: Any, inputs: Inputs) -> Any:
        loss = kind(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
        hidden, weight, states, head = (inputs[name] for name in names)
        ids = inputs["token_ids"].flatten()
        return loss(hidden.flatten(0, 1), weight, states.flatten(0, 1), head, ids)

    return [
        *who.peer("trl", "trl.trainer.distillation_trainer:_chunked_divergence_loss", trl),
        *who.peer("liger", "liger_kernel.chunked_loss:LigerFusedLinearJSDLoss", liger),
    ]


def torchrl_gae(who: Participants, gamma: float, lam: float) -> list[Provider]:
    """Return torchrl's advantages; an episode ends at the last token of the mask."""

    def prepare(inputs: Inputs) -> Inputs:
        mask = inputs["mask"]
        following = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        values = torch.nn.functional.pad(inputs["values"][:, 1:], (0, 1))
        return inputs | {"done": (mask & ~following)[..., None], "next": values[..., None]}

    def call(function: Any, inputs: Inputs) -> Any:
        values, rewards = inputs["values"][..., None], inputs["rewards"][..., None]
        following, done = inputs["next"], inputs["done"]
        found = function(gamma, lam, values, following, rewards, done, done)[0][..., 0]
        return found * inputs["mask"]

    source = "torchrl.objectives.value.functional:vec_generalized_advantage_estimate"
    return who.peer("torchrl", source, call, prepare=prepare)
