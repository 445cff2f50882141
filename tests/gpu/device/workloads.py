"""Calls of every operator through the public functions, on tensors of any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl import Objective

KL = {"kl_coef": 0.1}
OBJECTIVES = {
    "ppo": Objective(),
    "grpo, KL and entropy": Objective.preset("grpo", entropy_coef=0.01, **KL),
    "dual clip": Objective(dual_clip=1.5, clip_high=0.28, delta=2.0),
    "sequence": Objective(level="sequence", kl_gradient="bias-corrected", **KL),
    "sequence-token": Objective(level="sequence-token", kl_gradient="straight-through", **KL),
    "gmpo": Objective.preset("gmpo"),
    "cispo": Objective.preset("cispo"),
    "sapo": Objective.preset("sapo"),
    "reinforce": Objective.preset("reinforce", kl_estimator="k1", **KL),
}
OF_LOGITS = [name for name in OBJECTIVES if name not in ("sequence-token", "gmpo")]
TEMPERATURE = 0.7
#: relative to the largest element; float32 adds up many terms, and takes fast exponentials
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


class Workload(NamedTuple):
    """A call; the leaves are the inputs along which the first result has gradients."""

    name: str
    inputs: dict[str, Tensor]
    call: Callable[[dict[str, Tensor], str], tuple[Tensor, ...]]  # (inputs, backend) -> results
    leaves: tuple[str, ...] = ()
    factor: float = 1.0

    def on(self, device: str) -> Workload:
        """Return the same call on a device."""
        return self._replace(inputs={name: _moved(x, device) for name, x in self.inputs.items()})

    def double(self) -> Workload:
        """Return the same call in float64."""
        wide = {name: x.double() for name, x in self.inputs.items() if x.is_floating_point()}
        return self._replace(inputs={**self.inputs, **wide})

    def run(self, backend: str, call: Callable | None = None) -> tuple[Tensor, ...]:
        """Return the results, and the gradients of the first one times the factor."""
        leaves = {name: self.inputs[name].detach().requires_grad_() for name in self.leaves}
        found = (call or self.call)({**self.inputs, **leaves}, backend)
        of = tuple(leaves.values())
        gradients = torch.autograd.grad(self.factor * found[0], of) if of else ()
        return (*(x.detach() for x in found), *gradients)


def _moved(x: Tensor, device: str) -> Tensor:
    """Copy with the strides, also those of rows that are not adjacent."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def _cu_seqlens(total: int, count: int) -> Tensor:
    """Bounds of sequences of uneven lengths, some of them empty."""
    cuts = (torch.rand(count - 1) * (total + 1)).long().sort().values
    cuts[: count // 8] = 0
    return torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([total])]).int()


def _packed(inputs: dict[str, Tensor], B: int, T: int) -> dict[str, Tensor]:
    flat = {name: x.flatten() for name, x in inputs.items()}
    return {**flat, "cu_seqlens": _cu_seqlens(B * T, B)}


def _of_policies(logprobs: Tensor) -> dict[str, Tensor]:
    """What comes with log-probabilities; no ratio of tokens is near a bound of the objectives."""
    B, T = logprobs.shape
    steps = torch.tensor([-1.2, -0.6, -0.1, 0.1, 0.3, 0.8])[torch.randint(6, (B, T))]
    return {
        "old_logprobs": logprobs - steps,
        "ref_logprobs": logprobs + 0.2 * torch.randn(B, T),
        "advantages": torch.randn(B),
        "mask": torch.arange(T) < torch.randint(T + 1, (B, 1)),
    }


def policy_loss(name: str, B: int, T: int, *, packed: bool = False, factor: float = 1.0):
    objective = OBJECTIVES[name]
    logprobs = -3 * torch.rand(B, T) - 0.01
    inputs = {"logprobs": logprobs, "entropy": torch.rand(B, T), **_of_policies(logprobs)}
    if not objective.kl_coef:
        del inputs["ref_logprobs"]

    def call(inputs, backend):
        result = fastrl.policy_loss(**inputs, objective=objective, backend=backend)
        return (result.loss, *result.metrics.values())

    what = f"policy_loss, {name}, {'packed' if packed else 'padded'}, times {factor}"
    leaves = ("logprobs", "entropy") if objective.entropy_coef else ("logprobs",)
    return Workload(what, _packed(inputs, B, T) if packed else inputs, call, leaves, factor)


def gae(bootstrap: str | None, B: int, T: int, *, packed: bool = False):
    inputs = {"rewards": torch.randn(B, T), "values": torch.randn(B, T)}
    inputs["mask"] = torch.rand(B, T) < 0.9
    if bootstrap != "sequence":
        inputs["terminated"] = torch.rand(B, T) < 1e-3
        inputs["truncated"] = torch.rand(B, T) < 1e-3
    if bootstrap == "token":
        inputs["bootstrap_values"] = torch.randn(B, T)
    if packed:
        inputs = _packed(inputs, B, T)
    if bootstrap == "sequence":
        inputs["bootstrap_values"] = torch.randn(B)

    def call(inputs, backend):
        return tuple(fastrl.gae(**inputs, gamma=0.999, lam=0.97, backend=backend))

    return Workload(f"gae, {bootstrap}, {'packed' if packed else 'padded'}", inputs, call)


def group_advantages(scale: str, groups: int, size: int, *, ids: bool = False):
    baseline = "leave_one_out" if scale == "none" else "mean"
    rewards = torch.randint(5, (groups, size)) * 0.25 + 10
    inputs = {"rewards": rewards}
    if ids:
        rewards = rewards.flatten()
        inputs = {"rewards": rewards, "group_ids": torch.randint(groups, rewards.shape) * 2**33 - 5}

    def call(inputs, backend):
        options = {"scale": scale, "baseline": baseline, "singleton": "zero", "backend": backend}
        return tuple(fastrl.group_advantages(**inputs, **options))

    return Workload(f"group_advantages, {scale}, ids {ids}", inputs, call)


def _logits(B: int, T: int, V: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits whose rows are not adjacent, and policies that differ as in training."""
    wide = (torch.randn(B, T + 1, V + 3) * 3).to(dtype)
    logits, ids = wide[:, :-1, :-3], torch.randint(V, (B, T))
    logprobs = (logits.float() / TEMPERATURE).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return {"logits": logits, "token_ids": ids, **_of_policies(logprobs)}


def token_stats(B: int, T: int, V: int, dtype: torch.dtype, **options: float):
    inputs = _logits(B, T, V, dtype)
    inputs["slopes"] = inputs.pop("old_logprobs")
    names = ("logprobs", "entropy", "logsumexp")

    def call(inputs, backend):
        stats = fastrl.token_stats(
            inputs["logits"], inputs["token_ids"], mask=inputs["mask"], outputs=names,
            backend=backend, **options,
        )  # fmt: skip
        mean = (stats.logprobs * inputs["slopes"] + stats.entropy + 0.5 * stats.logsumexp).mean()
        return mean, stats.logprobs, stats.entropy, stats.logsumexp

    return Workload(f"token_stats {options}, V {V}, {dtype}", inputs, call, ("logits",))


def logits_policy_loss(
    name: str, B: int, T: int, V: int, dtype: torch.dtype, *, inplace=False, factor=1.0
):
    objective, inputs = OBJECTIVES[name], _logits(B, T, V, dtype)
    if not objective.kl_coef:
        del inputs["ref_logprobs"]

    def call(inputs, backend):
        logits = inputs["logits"] * 1 if inplace else inputs["logits"]
        result = fastrl.logits_policy_loss(
            **{**inputs, "logits": logits}, objective=objective, temperature=TEMPERATURE,
            inplace=inplace, backend=backend,
        )  # fmt: skip
        return (result.loss, *result.metrics.values())

    what = f"logits_policy_loss, {name}{', in place' if inplace else ''}, V {V}, {dtype}"
    return Workload(f"{what}, times {factor}", inputs, call, ("logits",), factor)


def of_tokens(B: int, T: int) -> Iterator[Workload]:
    """All calls on log-probabilities, rewards or values."""
    for packed in (False, True):
        for name, objective in OBJECTIVES.items():
            if not packed or objective.aggregation != "seq-mean-token-sum-norm":
                yield policy_loss(name, B, T, packed=packed)
        yield policy_loss("grpo, KL and entropy", B, T, packed=packed, factor=0.5)
        for bootstrap in (None, "sequence", "token"):
            yield gae(bootstrap, B, T, packed=packed)
    for ids in (False, True):
        for scale in ("group", "batch", "none"):
            yield group_advantages(scale, B, T, ids=ids)


def of_logits(B: int, T: int, V: int, dtype: torch.dtype = torch.float32) -> Iterator[Workload]:
    """All calls on logits."""
    shape = B, T, V, dtype
    yield token_stats(*shape, temperature=TEMPERATURE)
    yield token_stats(*shape, logit_softcap=10.0, logit_scale=0.5)
    for name in OF_LOGITS:
        yield logits_policy_loss(name, *shape)
    for inplace, factor in ((False, 0.5), (True, 0.5), (True, 1.0)):
        yield logits_policy_loss("ppo", *shape, inplace=inplace, factor=factor)


def small() -> list[Workload]:
    """A few calls of each kind."""
    return [*of_tokens(3, 17), *of_logits(2, 3, 1001)]


def assert_equals_the_reference(work: Workload, backend: str) -> None:
    """Compare a call on a GPU with the reference in float64."""
    assert_near(work, work.on("cuda").run(backend), work.double().run("reference"))


def assert_near(work: Workload, found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """What has the dtype of 16-bit logits may be rounded to it, all else is float32."""
    for k, (one, wanted) in enumerate(zip(found, exact, strict=True)):
        tolerance, wanted = TOLERANCE.get(one.dtype, 0.0), wanted.double()
        size = float(wanted.abs().max()) if wanted.numel() else 0.0
        of_logits = "logits" in work.inputs
        if wanted.ndim == 2 and of_logits:  # statistics of rows, such as an entropy of 0
            least = 0.5
        elif wanted.ndim:
            least = 1e-3
        else:
            # Losses and metrics are means of values of either sign. Log-probabilities of about -20
            # are rounded to 2e-6, and the loss and the metric of it take their products with
            # advantages.
            least = 1.0 if of_logits and k < 2 else 0.1
        torch.testing.assert_close(
            one.cpu().double(), wanted.cpu(), rtol=0, atol=tolerance * max(size, least),
            msg=lambda text, k=k: f"{work.name}, output {k}: {text}",
        )  # fmt: skip
