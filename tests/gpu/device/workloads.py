"""Calls of every operator through the public functions, on tensors of any device."""

from collections.abc import Callable
from typing import NamedTuple

import torch

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
BY_TOKEN = [name for name, o in OBJECTIVES.items() if o.level == "token" and o.surrogate != "gmpo"]
#: relative to the largest element; float32 adds up many terms, and takes fast exponentials
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


TEMPERATURE = 0.7
#: Places of the loss, and of the metric without KL and entropy, in what a loss of logits returns.
LOSSES = (0, 2)


class Workload(NamedTuple):
    name: str
    inputs: dict[str, torch.Tensor]
    run: Callable[..., tuple[torch.Tensor, ...]]  # (inputs, backend) -> what it computes


def _lengths(total, count):
    """The cu_seqlens of `count` sequences of uneven lengths, some of them empty."""
    cuts = (torch.rand(count - 1) * (total + 1)).long().sort().values
    cuts[: count // 8] = 0
    return torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([total])]).int()


def _tokens(B, T):
    lengths = torch.randint(T + 1, (B, 1))
    return {
        "logprobs": -torch.rand(B, T) * 3,
        "old_logprobs": -torch.rand(B, T) * 3,
        "ref_logprobs": -torch.rand(B, T) * 3,
        "entropy": torch.rand(B, T),
        "advantages": torch.randn(B),
        "mask": torch.arange(T) < lengths,
    }


def _policy_loss(objective, packed, factor=1.0):
    def run(inputs, backend):
        given = dict(inputs)
        logprobs = given.pop("logprobs").detach().requires_grad_()
        entropy = given.pop("entropy").detach().requires_grad_()
        if not objective.kl_coef:
            del given["ref_logprobs"]
        result = fastrl.policy_loss(
            logprobs, **given, entropy=entropy, objective=objective, backend=backend
        )
        of = [logprobs, entropy] if objective.entropy_coef else [logprobs]
        grads = torch.autograd.grad(factor * result.loss, of)
        return (result.loss, *grads, *result.metrics.values())

    def make(B, T):
        inputs = _tokens(B, T)
        if packed:
            inputs = {name: x.flatten() for name, x in inputs.items()}
            inputs["cu_seqlens"] = _lengths(B * T, B)
        return inputs

    return make, run


def _gae(bootstrap, ends, packed):
    def run(inputs, backend):
        return tuple(fastrl.gae(**inputs, gamma=0.999, lam=0.97, backend=backend))

    def make(B, T):
        inputs = {"rewards": torch.randn(B, T), "values": torch.randn(B, T)}
        inputs["mask"] = torch.rand(B, T) < 0.9
        if ends:
            inputs["terminated"] = torch.rand(B, T) < 1e-3
            inputs["truncated"] = torch.rand(B, T) < 1e-3
        if bootstrap == "token":
            inputs["bootstrap_values"] = torch.randn(B, T)
        if packed:
            inputs = {name: x.flatten() for name, x in inputs.items()}
            inputs["cu_seqlens"] = _lengths(B * T, B)
        if bootstrap == "sequence":
            inputs["bootstrap_values"] = torch.randn(B)
        return inputs

    return make, run


def _group_advantages(ids, **options):
    def run(inputs, backend):
        return tuple(fastrl.group_advantages(**inputs, **options, backend=backend))

    def make(groups, size):
        rewards = torch.randint(5, (groups * size,)) * 0.25 + 10
        if not ids:
            return {"rewards": rewards.view(groups, size)}
        return {"rewards": rewards, "group_ids": torch.randint(groups, rewards.shape) * 2**33 - 5}

    return make, run


def _logits(B, T, V, dtype):
    inputs = _tokens(B, T)
    del inputs["logprobs"], inputs["entropy"]
    inputs["wide"] = (torch.randn(B, T + 1, V + 3) * 3).to(dtype)
    inputs["token_ids"] = torch.randint(V, (B, T))
    # policies that differ as in training: a gradient of a ratio of e^10 is no float16
    logits = _leaf(inputs["wide"]).detach().float() / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(-1, inputs["token_ids"][..., None])[..., 0]
    for name in ("old_logprobs", "ref_logprobs"):
        inputs[name] = logprobs + 0.3 * torch.randn(B, T)
    return inputs


def _leaf(wide):
    """Logits as a view whose rows are not adjacent."""
    return wide[:, :-1, :-3].detach().requires_grad_()


def _token_stats(**options):
    def run(inputs, backend):
        logits = _leaf(inputs["wide"])
        stats = fastrl.token_stats(
            logits,
            inputs["token_ids"],
            mask=inputs["mask"],
            outputs=("logprobs", "entropy", "logsumexp"),
            backend=backend,
            **options,
        )
        total = (stats.logprobs * inputs["old_logprobs"]).sum() + stats.entropy.sum()
        total = total + 0.5 * stats.logsumexp.sum()
        (grad,) = torch.autograd.grad(total, logits)
        return stats.logprobs, stats.entropy, stats.logsumexp, grad

    return run


def _logits_policy_loss(objective, factor=1.0, **options):
    def run(inputs, backend):
        given = dict(inputs)
        leaf = _leaf(given.pop("wide"))
        logits = leaf * 1 if options.get("inplace") else leaf
        if not objective.kl_coef:
            del given["ref_logprobs"]
        result = fastrl.logits_policy_loss(
            logits, **given, objective=objective, backend=backend, **options
        )
        (grad,) = torch.autograd.grad(factor * result.loss, leaf)
        return (result.loss, grad, *result.metrics.values())

    return run


def of_tokens(B, T):
    """All calls on log-probabilities, rewards or values."""
    for packed in (False, True):
        layout = "packed" if packed else "padded"
        for name, objective in OBJECTIVES.items():
            if packed and objective.aggregation == "seq-mean-token-sum-norm":
                continue
            make, run = _policy_loss(objective, packed)
            yield Workload(f"policy_loss, {name}, {layout}", make(B, T), run)
        make, run = _policy_loss(OBJECTIVES["grpo, KL and entropy"], packed, factor=0.5)
        yield Workload(f"policy_loss, half of it, {layout}", make(B, T), run)
        for bootstrap in (None, "sequence", "token"):
            make, run = _gae(bootstrap, bootstrap != "sequence", packed)
            yield Workload(f"gae, bootstrap {bootstrap}, {layout}", make(B, T), run)
    for ids in (False, True):
        for scale in ("group", "batch", "none"):
            baseline = "leave_one_out" if scale == "none" else "mean"
            make, run = _group_advantages(ids, scale=scale, baseline=baseline)
            yield Workload(f"group_advantages, {scale}, ids {ids}", make(B, T), run)


def of_logits(B, T, V, dtype=torch.float32):
    """All calls on logits."""
    what = f"V {V}, {str(dtype).removeprefix('torch.')}"
    for name, options in {
        "": {"temperature": TEMPERATURE},
        ", softcap": {"logit_softcap": 10.0, "logit_scale": 0.5},
    }.items():
        inputs = _logits(B, T, V, dtype)
        yield Workload(f"token_stats{name}, {what}", inputs, _token_stats(**options))
    for name in (*BY_TOKEN, "sequence"):
        inputs = _logits(B, T, V, dtype)
        run = _logits_policy_loss(OBJECTIVES[name], temperature=TEMPERATURE)
        yield Workload(f"logits_policy_loss, {name}, {what}", inputs, run)
    for inplace in (False, True):
        run = _logits_policy_loss(
            OBJECTIVES["ppo"], factor=0.5, inplace=inplace, temperature=TEMPERATURE
        )
        name = f"logits_policy_loss, half of it{', in place' if inplace else ''}, {what}"
        yield Workload(name, _logits(B, T, V, dtype), run)
    run = _logits_policy_loss(OBJECTIVES["ppo"], inplace=True, temperature=TEMPERATURE)
    yield Workload(f"logits_policy_loss in place, {what}", _logits(B, T, V, dtype), run)


def assert_equals_the_reference(work, backend):
    """Compare a call on the tensors that a backend takes with the reference in float64."""
    device = "cpu" if backend == "cpu" else "cuda"
    came = work.run({name: x.to(device) for name, x in work.inputs.items()}, backend)
    double = {name: x.double() if x.is_floating_point() else x for name, x in work.inputs.items()}
    exact = work.run(double, "reference")
    for k, (actual, wanted) in enumerate(zip(came, exact, strict=True)):
        # what has the dtype of 16-bit logits is rounded to it, all else is float32
        tolerance = TOLERANCE.get(actual.dtype, 0.0)
        size = float(wanted.detach().double().abs().max()) if wanted.numel() else 0.0
        least = 1e-3
        if wanted.ndim == 0 and "wide" in work.inputs:
            # log-probabilities of about -20 are rounded to 2e-6; metrics are means of their
            # differences, and the loss (cispo) of their products with advantages of either sign
            least = 1.0 if k in LOSSES else 0.1
        torch.testing.assert_close(
            actual.cpu().double(),
            wanted.double(),
            rtol=0,
            atol=tolerance * max(size, least),
            msg=lambda text, k=k: f"{work.name}, output {k}: {text}",
        )


def small():
    """A few calls of each kind."""
    torch.manual_seed(0)
    return [*of_tokens(3, 17), *of_logits(2, 3, 1001)]
