"""Calls of the linear forms on any device, with float64 results and derived error budgets.

What a call is compared with: float64, on the operands as the GEMMs multiply them. On a GPU autocast
casts hidden states and weight to its dtype; on a CPU it has no effect.

Budgets. eps = 2^-23 is float32's, u = 2^-8 the relative error of rounding to bfloat16.

- Products of 16-bit operands are exact and summed in float32, so a logit is off by at most
  d = eps sqrt(H) |h| |w|, with the norms of the two vectors: roundings of H partial sums, each no
  larger than |h| |w|, that add up like random signs.
- A log-probability, the difference of a logit and a log-sum-exp, is off by 2 d, and by what the
  row kernels are allowed: 1e-5, and 2e-7 of its size. An entropy H by 2 d H + 1e-5 (1 + H).
- dL/dlogits = s (onehot - p) - e p (log p + H), with s = dL/dlogprob, e = dL/dentropy. Its error
  in float32 is k = 3 (2 d + 1e-5) of the sum of the terms' sizes: p, s and H each have one such
  error. The s of a loss, in which terms may cancel, is also off by what the error of the
  log-probability makes of it. With 16-bit operands the sum is rounded to bfloat16, u of its size.
- A gradient is a GEMM of dL/dlogits and an operand x: it is off by the product of the absolute
  values, |error of dL/dlogits| |x|, by eps sqrt(terms) |dL/dlogits| |x| for its sums, by
  u |dL/dlogits| |x| where float16 operands are multiplied as bfloat16 (or LoRA's hidden A^T), and
  by one rounding of the result to its dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl import Objective

OBJECTIVE = Objective.preset("grpo", kl_coef=0.05, entropy_coef=0.01)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS, U = 2.0**-23, 2.0**-8
LORA_SCALE = 2.0
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "lora": {"bias": True, "lora": True},
    "transposed": {"transposed": True},
    "frozen": {"frozen": True},
    "temperature": {"temperature": 0.7},
    "three chunks": {"chunks": 3},
}


class Precision(NamedTuple):
    """Dtypes of hidden states and weight, and of autocast."""

    hidden: torch.dtype
    weight: torch.dtype
    autocast: torch.dtype | None = None

    def operand(self, device: torch.device) -> torch.dtype:
        """Return the dtype in which the GEMMs multiply."""
        if self.autocast is not None and device.type == "cuda":
            return self.autocast
        return self.hidden if self.hidden == self.weight else FP32


PRECISIONS = {
    "bf16": Precision(BF16, BF16),
    "fp16": Precision(FP16, FP16),
    "fp32": Precision(FP32, FP32),
    "bf16 states, fp32 weights": Precision(BF16, FP32),
    "fp32 under bf16": Precision(FP32, FP32, BF16),
    "fp32 weights under bf16": Precision(BF16, FP32, BF16),
    "fp32 under fp16": Precision(FP32, FP32, FP16),
    "fp32 weights under fp16": Precision(FP16, FP32, FP16),
}


class LinearWork(NamedTuple):
    """One call: parameters that are leaves, what comes with the tokens, and options."""

    precision: Precision
    parameters: dict[str, Tensor]  # hidden, weight, and bias, lora_a, lora_b if there are any
    tokens: dict[str, Tensor]
    options: dict[str, object]
    frozen: bool

    @property
    def device(self) -> torch.device:
        return self.parameters["hidden"].device

    def on(self, device: str) -> LinearWork:
        """Return the same call on a device."""

        def moved(tensors):
            return {name: x.to(device) for name, x in tensors.items()}

        return self._replace(parameters=moved(self.parameters), tokens=moved(self.tokens))

    def leaves(self) -> dict[str, Tensor]:
        """Return new leaves with the same values and strides."""
        return {
            name: x.detach().requires_grad_(not self.frozen or name == "hidden")
            for name, x in self.parameters.items()
        }

    def autocast(self) -> contextlib.AbstractContextManager:
        dtype = self.precision.autocast
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)


def linear_work(
    precision: Precision,
    shape: tuple[int, int, int, int],
    *,
    bias: bool = False,
    lora: bool = False,
    transposed: bool = False,
    frozen: bool = False,
    chunks: int = 0,
    **options: object,
) -> LinearWork:
    """Return a call on random values; NaN in the hidden states of masked rows."""
    B, T, H, V = shape
    parameters = {
        "hidden": torch.randn(B, T, H).to(precision.hidden),
        "weight": (torch.randn(V, H) * (3 / H**0.5)).to(precision.weight),
    }
    if transposed:
        parameters["weight"] = parameters["weight"].t().contiguous().t()
    if bias:
        parameters["bias"] = torch.randn(V).to(BF16).to(precision.weight)
    if lora:  # values that bfloat16 holds, so that a cast of them changes nothing
        parameters["lora_a"] = (torch.randn(3, H) / H**0.5).to(BF16).to(precision.weight)
        parameters["lora_b"] = torch.randn(V, 3).to(BF16).to(precision.weight)
    mask = torch.rand(B, T) < 0.8
    mask[0, 0] = True
    ids = torch.randint(V, (B, T))
    logits = _logits({name: x.double() for name, x in parameters.items()})
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    # no ratio near a clip, where the slope would depend on the last bit
    steps = torch.tensor([-0.5, -0.1, 0.1, 0.4])[torch.randint(4, (B, T))]
    tokens = {
        "token_ids": ids,
        "advantages": torch.randn(B),
        "mask": mask,
        "old_logprobs": (logprobs - steps).float(),
        "ref_logprobs": (logprobs + 0.2 * torch.randn(B, T)).float(),
    }
    parameters["hidden"][~mask] = torch.nan
    if chunks:
        options["chunk_tokens"] = max(1, int(mask.sum()) // chunks)
    return LinearWork(precision, parameters, tokens, options, frozen)


def policy_loss(work: LinearWork, leaves: dict[str, Tensor], backend: str):
    """Call `linear_policy_loss`."""
    with work.autocast():
        return loss_of(leaves, work.tokens, work.options, backend)


def loss_of(
    leaves: dict[str, Tensor], tokens: dict[str, Tensor], options: dict[str, object], backend: str
):
    """Call `linear_policy_loss`, in a form that torch.compile takes."""
    return fastrl.linear_policy_loss(
        leaves["hidden"], leaves["weight"], **tokens, **_head(leaves), objective=OBJECTIVE,
        backend=backend, **options,
    )  # fmt: skip


def token_stats(work: LinearWork, leaves: dict[str, Tensor], backend: str):
    """Call `linear_token_stats`."""
    with work.autocast():
        return fastrl.linear_token_stats(
            leaves["hidden"], leaves["weight"], work.tokens["token_ids"], mask=work.tokens["mask"],
            **_head(leaves), backend=backend, **work.options,
        )  # fmt: skip


def _head(leaves: dict[str, Tensor]) -> dict[str, object]:
    lora = (leaves["lora_a"], leaves["lora_b"], LORA_SCALE) if "lora_a" in leaves else None
    return {"bias": leaves.get("bias"), "lora": lora}


def gradients(scalar: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of all leaves that need one."""
    needed = {name: x for name, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(scalar, list(needed.values()))
    return dict(zip(needed, found, strict=True))


def _logits(p: dict[str, Tensor]) -> Tensor:
    logits = p["hidden"] @ p["weight"].t()
    if "lora_a" in p:
        logits = logits + LORA_SCALE * (p["hidden"] @ p["lora_a"].t()) @ p["lora_b"].t()
    return logits + p["bias"] if "bias" in p else logits


class Exact:
    """A call in float64, and how far off its float32 computation may be."""

    def __init__(self, work: LinearWork) -> None:
        operand = work.precision.operand(work.device)
        self.narrow, self.of_float16 = operand.itemsize == 2, operand == FP16
        self.work, self.mask, ids = work, work.tokens["mask"], work.tokens["token_ids"][..., None]
        self.gain = 1.0 / float(work.options.get("temperature", 1.0))  # type: ignore[arg-type]
        rounded = dict(work.parameters)
        for name in ("hidden", "weight"):
            rounded[name] = rounded[name].to(operand)
        rounded["hidden"] = rounded["hidden"].masked_fill(~self.mask[..., None], 0.0)
        self.p = p = {name: x.double().requires_grad_() for name, x in rounded.items()}
        self.logits = _logits(p)
        self.logp = (self.logits * self.gain).log_softmax(-1)
        self.taken = torch.zeros_like(self.logp).scatter_(-1, ids, 1.0)
        self.logprobs = (self.logp * self.taken).sum(-1) * self.mask
        self.entropy = -(self.logp.exp() * self.logp).sum(-1) * self.mask
        with torch.no_grad():
            length = p["weight"].norm(dim=-1).max()
            if "lora_a" in p:
                length = length + LORA_SCALE * p["lora_a"].norm() * p["lora_b"].norm(dim=-1).max()
            if "bias" in p:  # one more term of the sum
                length = length + p["bias"].abs().max()
            off = self.gain * EPS * p["weight"].shape[1] ** 0.5
            self.d = off * p["hidden"].norm(dim=-1) * length
            self.logprob_budget = 2 * self.d + 1e-5 + 2e-7 * self.logprobs.abs()
            self.entropy_budget = 2 * self.d * self.entropy + 1e-5 * (1 + self.entropy)

    def gradients(self, s: Tensor, e: Tensor, s_off: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return gradient and budget of each leaf; `s_off`: the error of s, `[B, T]` as s and e."""
        of = (self.logits, *self.p.values())
        g, *exact = torch.autograd.grad((self.logprobs, self.entropy), of, (s, e))
        with torch.no_grad():
            off = self._off(*(self.gain * x[..., None] for x in (s, e, s_off)))
            budgets = self._budgets(g, off)
        return {
            name: (value, budgets[name].view_as(value))
            for name, value in zip(self.p, exact, strict=True)
        }

    def _off(self, s: Tensor, e: Tensor, s_off: Tensor) -> Tensor:
        """Return the error of dL/dlogits in float32."""
        p = self.logp.exp()
        terms = s.abs() * (self.taken + p)
        terms += e.abs() * p * (self.logp.abs() + self.entropy[..., None] + 1)
        return 3 * (2 * self.d[..., None] + 1e-5) * terms + s_off * (self.taken + p)

    def _budgets(self, g: Tensor, off: Tensor) -> dict[str, Tensor]:
        off = (off + U * self.narrow * (g.abs() + off)).flatten(0, 1)
        g, p = g.flatten(0, 1), {**self.p, "hidden": self.p["hidden"].flatten(0, 1)}

        def of_product(left, left_off, right):
            """For a product whose sums have as many terms as `right` has rows."""
            sums = EPS * len(right) ** 0.5 + U * self.of_float16
            return left_off @ right.abs() + sums * (left.abs() @ right.abs())

        found = {
            "weight": of_product(g.t(), off.t(), p["hidden"]),
            "hidden": of_product(g, off, p["weight"]),
            "bias": off.sum(0) + EPS * len(g) ** 0.5 * g.abs().sum(0),
        }
        if "lora_a" in p:
            h, a, b = p["hidden"], LORA_SCALE * p["lora_a"].t(), LORA_SCALE * p["lora_b"]
            low, back = h @ a, g @ b
            low_off = of_product(h, torch.zeros_like(h), a) + U * self.narrow * low.abs()
            found["lora_b"] = of_product(g.t(), off.t(), low) + g.abs().t() @ low_off
            back_off = of_product(g, off, b)
            found["lora_a"] = of_product(back.t(), back_off.t(), h)
            found["hidden"] += of_product(back, back_off, p["lora_a"])
        return found

    def loss(self) -> tuple[Tensor, Tensor, dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return loss, its budget, metrics, and s and e of `gradients` with the error of s."""
        loss, metrics, s, e = self._loss(0)
        moved = [self._loss(sign * self.logprob_budget)[2] for sign in (-1, 1)]
        s_off = torch.stack([(other - s).abs() for other in moved]).amax(0)
        budget = (s.abs() * self.logprob_budget + e.abs() * self.entropy_budget).sum()
        return loss, budget + 2e-6, metrics, (s, e, s_off)

    def _loss(self, shift: Tensor | int) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        logprobs = (self.logprobs + shift).detach().requires_grad_()
        entropy = self.entropy.detach().requires_grad_()
        tokens = {
            name: x.double() if x.is_floating_point() else x
            for name, x in self.work.tokens.items()
            if name != "token_ids"
        }
        result = fastrl.policy_loss(
            logprobs, **tokens, entropy=entropy, objective=OBJECTIVE, backend="reference"
        )
        slopes = torch.autograd.grad(result.loss, (logprobs, entropy))
        return result.loss.detach(), result.metrics, *slopes


def assert_within(name: str, found: Tensor, exact: Tensor, budget: Tensor) -> None:
    """Compare with a budget and a rounding to the dtype."""
    dtype = torch.finfo(found.dtype)
    allowed = budget + dtype.eps / 2 * (exact.abs() + budget) + dtype.tiny * dtype.eps
    times = ((found.detach().double() - exact).abs() / allowed).nan_to_num(torch.inf).max()
    assert times <= 1, f"{name}: {float(times):.3g} times its budget"


def assert_policy_loss(work: LinearWork, backend: str) -> None:
    """Compare loss, metrics, outputs and gradients of `linear_policy_loss` with float64."""
    leaves = work.leaves()
    result = policy_loss(work, leaves, backend)
    assert_result(work, result, gradients(result.loss, leaves))


def assert_result(work: LinearWork, result, grads: dict[str, Tensor]) -> None:
    """Compare a result of `linear_policy_loss` and the gradients of its loss with float64."""
    exact = Exact(work)
    loss, budget, metrics, slopes = exact.loss()
    assert_within("loss", result.loss, loss, budget)
    _assert_rows(exact, result, exact.mask)
    slack = 8 * float(exact.logprob_budget.max())  # k3 and ratios have slopes of a few
    for name, value in result.metrics.items():
        assert abs(value - metrics[name]) <= slack * (1 + abs(metrics[name])), name
    _assert_gradients(work, grads, exact.gradients(*slopes))


def assert_token_stats(work: LinearWork, backend: str) -> None:
    """Compare the outputs and gradients of `linear_token_stats` with float64."""
    exact, leaves = Exact(work), work.leaves()
    stats = token_stats(work, leaves, backend)
    _assert_rows(exact, stats, torch.ones_like(exact.mask))
    s, e = (torch.randn(exact.mask.shape).to(work.device) * exact.mask for _ in range(2))
    total = (stats.logprobs * s + 0.1 * stats.entropy * e).sum()
    wanted = exact.gradients(s.double(), 0.1 * e.double(), torch.zeros_like(s))
    _assert_gradients(work, gradients(total, leaves), wanted)


def _assert_rows(exact: Exact, found, where: Tensor) -> None:
    logprobs, entropy = exact.logprobs.detach()[where], exact.entropy.detach()[where]
    assert_within("logprobs", found.logprobs[where], logprobs, exact.logprob_budget[where])
    assert_within("entropy", found.entropy[where], entropy, exact.entropy_budget[where])


def _assert_gradients(work, found, wanted) -> None:
    assert set(found) == ({"hidden"} if work.frozen else set(work.parameters))
    for name, gradient in found.items():
        assert gradient.dtype == work.parameters[name].dtype, name
        assert_within(f"gradient of {name}", gradient, *wanted[name])
    assert (found["hidden"][~work.tokens["mask"]] == 0).all()


def run_compiled(works: Iterable[LinearWork], kernels: str, **options: object) -> None:
    """Make the same compiled call on several inputs and compare each with float64."""
    loss = torch.compile(loss_of, **options)
    for work in works:
        leaves = work.leaves()
        torch.compiler.cudagraph_mark_step_begin()
        with work.autocast():
            result = loss(leaves, work.tokens, work.options, kernels)
        assert_result(work, result, gradients(result.loss, leaves))
