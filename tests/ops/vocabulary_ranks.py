"""What each rank of a split vocabulary computes, beside the whole one in the same process."""

import math

import torch
import torch.distributed as dist

import fastrl
from fastrl import Objective

ROWS, WIDTH, RANK = 45, 24, 3
NAMES = ("logprobs", "entropy", "logsumexp", "sum_sq_probs", "is_top1")
BOUNDS = torch.tensor([0, 10, 10, 31, ROWS])

#: name -> options of everything that turns logits into log-probabilities
SCALINGS = {
    "plain": {},
    "scale, softcap, temperature": {"logit_scale": 0.5, "logit_softcap": 5.0, "temperature": 0.7},
    # 1 is also an id that tokens of other parts have when they count from their part
    "temperature per row": {
        "temperature": torch.linspace(0.5, 2, ROWS),
        "logit_scale": 1.3,
        "ignore_index": 1,
    },
}
#: name -> (objective, options of the linear loss)
LOSSES = {
    "clipped, KL": (Objective.preset("grpo", kl_coef=0.1), {}),
    "entropy": (Objective(entropy_coef=0.05), {"chunk_tokens": 14}),
    "rows without metrics": (Objective.preset("dapo"), {"metrics": False, "chunk_tokens": 5}),
    "all rows": (Objective.preset("grpo", kl_coef=0.1), {"compact": False, "chunk_tokens": 9}),
    "sequences": (Objective.preset("gspo", clip_low=0.2, clip_high=0.2), {"chunk_tokens": 14}),
    "a function": (Objective(surrogate=lambda new, old, ref, a: -(new - old).exp() * a), {}),
}


def columns(sizes):
    """The columns of this rank."""
    rank = dist.get_rank()
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def leaves(tensors):
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def batch(V, dtype=torch.float32, banned=slice(0, 0)):
    """Rows whose tokens lie on every part, some masked (they hold NaN), some of advantage 0.

    ``banned`` columns have logits of -inf.
    """
    head = {
        "hidden": torch.randn(ROWS, WIDTH),
        "weight": torch.randn(V, WIDTH) / math.sqrt(WIDTH) * 3,
        "bias": torch.randn(V),
        "lora_a": torch.randn(RANK, WIDTH),
        "lora_b": torch.randn(V, RANK) * 0.1,
    }
    head["bias"][banned] = -math.inf
    allowed = [i for i in range(V) if not banned.start <= i < banned.stop]
    ids = torch.tensor(allowed)[torch.arange(ROWS) * 97 % len(allowed)]
    mask = torch.rand(ROWS) > 0.3
    head["hidden"][~mask] = math.nan
    ids[torch.arange(ROWS) % 11 == 3] = -100
    advantages = torch.randn(ROWS)
    advantages[::5] = 0.0
    tokens = {"token_ids": ids, "mask": mask, "advantages": advantages}
    return {name: x.to(dtype) for name, x in head.items()}, tokens


def ids_of(tokens, options):
    """The token ids, with the ``ignore_index`` of these options at ignored tokens."""
    ids = tokens["token_ids"]
    return torch.where(ids == -100, options.get("ignore_index", -100), ids)


def near(found, expected, dtype, what):
    """A gradient: roundings of its dtype, and of float32 sums in another order.

    Twice the former, since a gradient is rounded before and after it is multiplied by the factor.
    """
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    exact = expected.double()
    budget = 2 * eps * exact.abs() + 2e-5 * exact.abs().amax() + 1e-9
    excess = ((found.double() - exact).abs() / budget).nan_to_num(math.inf).amax()
    assert excess <= 1, f"{what}: {float(excess):.2f} times the budget"


def same_statistics(found, expected, what):
    """Relative to 1e-6, and to the rounding of what was added up where that cancels."""
    for name in NAMES:
        torch.testing.assert_close(
            getattr(found, name),
            getattr(expected, name),
            rtol=1e-6,
            atol=2e-6 if name == "entropy" else 1e-6,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )


def logits_on_ranks(sizes, backend, dtype, banned, scalings=tuple(SCALINGS), losses=tuple(LOSSES)):
    """Compare statistics, losses and gradients from logits; the results of this rank."""
    V, own, results = sum(sizes), columns(sizes), []
    group = dist.group.WORLD
    _, tokens = batch(V, banned=slice(*banned))
    logits = (3 * torch.randn(ROWS, V)).to(dtype)
    logits[~tokens["mask"]] = math.nan
    logits[:, slice(*banned)] = -math.inf
    old = torch.randn(ROWS) - 3
    upstream = torch.randn(3, ROWS)
    for scaling in scalings:
        options = SCALINGS[scaling]
        what = f"{backend}, {dtype}, {sizes}, {scaling}"
        whole, part = (x.clone().requires_grad_() for x in (logits, logits[:, own]))
        ids, mask = ids_of(tokens, options), tokens["mask"]
        expected, found = (
            fastrl.token_stats(x, ids, outputs=NAMES, mask=mask, backend=backend, **options, **more)
            for x, more in ((whole, {}), (part, {"vocab_group": group}))
        )
        same_statistics(found, expected, what)
        for each in (expected, found):
            sum(w @ x for w, x in zip(upstream, each[:3], strict=True)).backward()
        near(part.grad, whole.grad[:, own], dtype, what)
        results.append([x.detach() for x in found])
        for name in losses:
            objective = LOSSES[name][0]
            chosen = "auto" if name == "a function" and backend != "reference" else backend
            outcomes = []
            for x, more in ((whole, {}), (part, {"vocab_group": group, "inplace": True})):
                x.grad = None
                outcome = fastrl.logits_policy_loss(
                    x * 1.0, ids, tokens["advantages"], mask, old_logprobs=old, cu_seqlens=BOUNDS,
                    ref_logprobs=old + 0.1 if objective.kl_coef else None, objective=objective,
                    backend=chosen, **options, **more,
                )  # fmt: skip
                (outcome.loss * 1.5).backward()
                outcomes.append(outcome)
            torch.testing.assert_close(
                outcomes[1].metrics.vector, outcomes[0].metrics.vector, rtol=1e-5, atol=1e-5
            )
            near(part.grad, whole.grad[:, own], dtype, f"{what}, {name}")
            results.append([outcomes[1].loss.detach(), outcomes[1].logprobs])
    return results


def linear_on_ranks(sizes, backend, dtype, banned):
    """Compare statistics, losses and gradients from hidden states; the results of this rank."""
    V, own, results = sum(sizes), columns(sizes), []
    head, tokens = batch(V, dtype, banned=slice(*banned))
    parts = {**head, **{name: head[name][own] for name in ("weight", "bias", "lora_b")}}
    mask = tokens["mask"]
    old, upstream = torch.randn(ROWS) - 3, torch.randn(3, ROWS)
    for scaling, options in SCALINGS.items():
        what, ids = f"{backend}, {dtype}, {sizes}, {scaling}", ids_of(tokens, options)
        outcomes = []
        for tensors, more in ((head, {}), (parts, {"vocab_group": dist.group.WORLD})):
            x = leaves(tensors)
            lora = (x["lora_a"], x["lora_b"], 0.5)
            stats = fastrl.linear_token_stats(
                x["hidden"], x["weight"], ids, outputs=NAMES, bias=x["bias"], lora=lora, mask=mask,
                chunk_tokens=13, backend=backend, **options, **more,
            )  # fmt: skip
            sum(w @ y for w, y in zip(upstream, stats[:3], strict=True)).backward()
            outcomes.append((stats, x))
        same_statistics(outcomes[1][0], outcomes[0][0], what)
        same_gradients(*(x for _, x in outcomes), own, dtype, what)
        results.append([y.detach() for y in outcomes[1][0]] + shared_gradients(outcomes[1][1]))
        for name, (objective, more_options) in LOSSES.items():
            chosen = "auto" if name == "a function" and backend != "reference" else backend
            outcomes = []
            for tensors, more in ((head, {}), (parts, {"vocab_group": dist.group.WORLD})):
                x = leaves(tensors)
                outcome = fastrl.linear_policy_loss(
                    x["hidden"], x["weight"], ids, tokens["advantages"], mask, old_logprobs=old,
                    ref_logprobs=old + 0.1 if objective.kl_coef else None, cu_seqlens=BOUNDS,
                    bias=x["bias"], lora=(x["lora_a"], x["lora_b"], 0.5), objective=objective,
                    backend=chosen, **options, **more_options, **more,
                )  # fmt: skip
                (outcome.loss * 1.5).backward()
                outcomes.append((outcome, x))
            (expected, whole), (found, part) = outcomes
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
            if expected.metrics:
                torch.testing.assert_close(
                    found.metrics.vector, expected.metrics.vector, rtol=1e-5, atol=1e-5
                )
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)
            same_gradients(whole, part, own, dtype, f"{what}, {name}")
            results.append([found.loss.detach(), found.logprobs, *shared_gradients(part)])
    return results


def same_gradients(whole, part, own, dtype, what):
    for name in whole:
        expected, found = whole[name].grad, part[name].grad
        expected = expected[own] if name in ("weight", "bias", "lora_b") else expected
        near(found, expected, dtype, f"{what}, d {name}")


def shared_gradients(part):
    return [part[name].grad for name in ("hidden", "lora_a")]
