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
_KERNELS = {"cpu": ("cpu",), "cuda": ("triton", "cuda")}
DISTRIBUTIONS = tuple(sorted({pip for _, pip in PEERS.values()} - {"torch"}))
Forward = Callable[[Inputs], Any]
Logprobs = Callable[..., Any]


class Participants(NamedTuple):
    """The device of a run, the backends of fastrl and the peers."""

    device: torch.device
    backends: tuple[Backend, ...]
    peers: tuple[str, ...]

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
    return importlib.util.find_spec(PEERS[peer][0]) is not None


@functools.cache
def imported(peer: str, module: str, name: str) -> Any:
    """Return a library's function, the one of the first call: some libraries replace others'."""
    top, distribution = PEERS[peer]
    if not is_installed(peer):
        raise ImportError(f"{top} is not installed: pip install {distribution}")
    return getattr(importlib.import_module(module), name)


def _called(function: Callable[..., Any], names: Sequence[str]) -> Forward:
    return lambda inputs: function(*(inputs[name] for name in names))


def _form(function: Callable[..., Any], *, upcast: bool) -> Callable[..., Any]:
    def form(*tensors: Tensor) -> Any:
        return function(*tensors, upcast=upcast)

    return form


def _unless_available(name: str) -> Callable[[Inputs], Inputs] | None:
    reason = unavailable(name)
    return None if reason is None else _refused(reason)


def _refused(reason: str) -> Callable[[Inputs], Inputs]:
    def prepare(inputs: Inputs) -> Inputs:
        raise RuntimeError(reason)

    return prepare


def trl_stats(who: Participants) -> list[Provider]:
    """Return TRL's log-probability and entropy, a kernel on GPUs."""

    def forward(inputs: Inputs) -> Any:
        function = imported("trl", "trl.trainer.utils", "selective_log_softmax_and_entropy")
        return function(inputs["logits"], inputs["token_ids"])

    return who.peer("trl", "TRL selective_log_softmax_and_entropy", forward)


def logits_peers(who: Participants, *, loss: bool = False) -> list[Provider]:
    """Return log-probabilities of ids ``[B, T]`` from logits, or the loss of these."""

    def provider(peer: str, name: str, function: Logprobs, *, on_gpu: bool = False) -> None:
        def forward(inputs: Inputs) -> Tensor:
            found = function(inputs["logits"], inputs["token_ids"])
            return _mean_loss(found, inputs) if loss else found

        found.extend(who.peer(peer, name, forward, on_gpu=on_gpu))

    def trl(logits: Tensor, ids: Tensor) -> Any:
        return imported("trl", "trl.trainer.utils", "selective_log_softmax")(logits, ids)

    def verl(logits: Tensor, ids: Tensor) -> Any:
        function = imported("verl", "verl.utils.torch_functional", "logprobs_from_logits")
        return function(logits, ids, inplace_backward=False)

    def unsloth(logits: Tensor, ids: Tensor) -> Any:
        return _unsloth("chunked_selective_log_softmax")(logits, ids).view(ids.shape)

    def quack(logits: Tensor, ids: Tensor) -> Any:
        function = imported("quack", "quack.cross_entropy", "cross_entropy")
        return -function(logits.flatten(0, -2), ids.flatten(), reduction="none").view(ids.shape)

    found: list[Provider] = []
    provider("trl", "TRL selective_log_softmax", trl)
    provider("verl", "verl logprobs_from_logits", verl)
    provider("unsloth", "Unsloth chunked_selective_log_softmax", unsloth)
    provider("quack", "QuACK cross_entropy", quack, on_gpu=True)
    return found


def linear_peers(who: Participants, *, loss: bool = False) -> list[Provider]:
    """Return log-probabilities of ids from hidden states and a head, or the loss of these."""

    def provider(peer: str, name: str, function: Logprobs, *, on_gpu: bool = False) -> None:
        def forward(inputs: Inputs) -> Tensor:
            ids = inputs["token_ids"]
            rows = function(inputs["hidden"].flatten(0, 1), inputs["weight"], ids.flatten())
            return _mean_loss(rows.view(ids.shape), inputs) if loss else rows.view(ids.shape)

        found.extend(who.peer(peer, name, forward, on_gpu=on_gpu))

    def trl(hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
        function = imported("trl", "trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
        tile = 32768  # TRL's default
        return function.apply(hidden, weight, None, ids, 1.0, tile, None, 1.0, ())[0]

    def unsloth(hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
        function = _unsloth("grpo_chunked_hidden_states_logprobs")
        return function(hidden[None], weight, ids[None])

    def cut_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
        function = imported("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy")
        return -function(hidden, weight, ids, reduction="none")

    def quack(hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
        function = imported("quack", "quack.linear_cross_entropy", "linear_cross_entropy_func")
        return -function(hidden, weight, None, ids, reduction="none")

    def verl(hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
        module = "verl.utils.kernel.linear_cross_entropy"
        return imported("verl", module, "linear_cross_entropy")(hidden, weight, ids, 1.0, "none")[0]

    def of_torch(hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
        function = imported("torch", "torch.nn.functional", "linear_cross_entropy")  # from 2.13
        options = imported("torch", "torch.nn", "LinearCrossEntropyOptions")()
        return -function(hidden, weight, ids, reduction="none", options=options)

    found: list[Provider] = []
    provider("trl", "TRL ChunkedLogProbFunction", trl)
    provider("unsloth", "Unsloth grpo_chunked_hidden_states_logprobs", unsloth)
    provider("cut-cross-entropy", "cut-cross-entropy", cut_cross_entropy, on_gpu=True)
    provider("quack", "QuACK linear_cross_entropy_func", quack, on_gpu=True)
    provider("verl", "verl linear_cross_entropy", verl, on_gpu=True)
    provider("torch", "torch linear_cross_entropy", of_torch)
    return found


def liger_grpo(who: Participants) -> list[Provider]:
    """Return Liger's loss from logits, over which it writes the gradient."""

    def prepare(inputs: Inputs) -> Inputs:
        """Append the position that Liger takes and ignores."""
        return {**inputs, "logits": torch.nn.functional.pad(inputs["logits"], (0, 0, 0, 1))}

    def forward(inputs: Inputs) -> Tensor:
        losses = imported("liger", "liger_kernel.transformers.grpo_loss", "triton_grpo_loss")(
            inputs["logits"], inputs["old_logprobs"], None, inputs["token_ids"],
            inputs["sequence_advantages"], inputs["mask"].int(), temperature=1.0, beta=0.0,
            eps_low=0.2, eps_high=0.2, inplace=True,
        )  # fmt: skip
        return masked_mean(losses[0], inputs)

    def backward(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        return (torch.autograd.grad(loss, inputs["logits"])[0][:, :-1],)

    return who.peer(
        "liger", "Liger triton_grpo_loss in place", forward, on_gpu=True, backward=backward,
        prepare=prepare,
    )  # fmt: skip


def liger_linear_grpo(who: Participants) -> list[Provider]:
    """Return Liger's loss from hidden states; ``bnpo`` is the mean over all tokens."""

    def forward(inputs: Inputs) -> Any:
        kind = imported("liger", "liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")
        loss = kind(beta=0.0, use_ref_model=False, loss_type="bnpo")
        names = ("hidden", "weight", "token_ids", "mask", "sequence_advantages")
        hidden, weight, ids, mask, advantages = (inputs[name] for name in names)
        old = inputs["old_logprobs"]
        return loss(hidden, weight, ids, mask.int(), advantages, old_per_token_logps=old)[0]

    return who.peer("liger", "Liger LigerFusedLinearGRPOLoss", forward)


def divergence_peers(who: Participants, beta: float) -> list[Provider]:
    """Return the mean divergence from a teacher, from hidden states and heads."""
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")

    def trl(inputs: Inputs) -> Any:
        module = "trl.trainer.distillation_trainer"
        hidden, weight, states, head = (inputs[name] for name in names)
        function = imported("trl", module, "_chunked_divergence_loss")
        return function(hidden, states, weight, head, inputs["mask"], beta)[0]

    def liger(inputs: Inputs) -> Any:
        kind = imported("liger", "liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")
        loss = kind(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
        hidden, weight, states, head = (inputs[name] for name in names)
        ids = inputs["token_ids"].flatten()
        return loss(hidden.flatten(0, 1), weight, states.flatten(0, 1), head, ids)

    found = who.peer("trl", "TRL _chunked_divergence_loss", trl)
    return [*found, *who.peer("liger", "Liger LigerFusedLinearJSDLoss", liger)]


def torchrl_gae(who: Participants, gamma: float, lam: float) -> list[Provider]:
    """Return torchrl's advantages; an episode ends at the last token of the mask."""

    def prepare(inputs: Inputs) -> Inputs:
        mask = inputs["mask"]
        following = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        values = torch.nn.functional.pad(inputs["values"][:, 1:], (0, 1))
        return inputs | {"done": (mask & ~following)[..., None], "next": values[..., None]}

    def forward(inputs: Inputs) -> Any:
        module, name = "torchrl.objectives.value.functional", "vec_generalized_advantage_estimate"
        values, rewards = inputs["values"][..., None], inputs["rewards"][..., None]
        following, done = inputs["next"], inputs["done"]
        function = imported("torchrl", module, name)
        found = function(gamma, lam, values, following, rewards, done, done)[0][..., 0]
        return found * inputs["mask"]

    return who.peer(
        "torchrl", "torchrl vec_generalized_advantage_estimate", forward, prepare=prepare
    )


def _mean_loss(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return masked_mean(clipped(logprobs, inputs), inputs)


def _unsloth(name: str) -> Any:
    imported("unsloth", "unsloth", "__version__")  # unsloth_zoo can only be imported after it
    return imported("unsloth", "unsloth_zoo.rl_replacements", name)
