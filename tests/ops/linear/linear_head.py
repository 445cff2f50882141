"""LM heads of all kinds, calls of the linear forms, and the same from explicit float64 logits."""

import math

import torch

import fastrl

B, T, H, V, R = 4, 25, 24, 311, 3
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale, softcap, temperature": {"logit_scale": 0.5, "logit_softcap": 5.0, "temperature": 0.7},
    "temperature per row": {"temperature": torch.linspace(0.5, 2, B * T).reshape(B, T)},
    "lora": {"lora": True, "bias": True},
}


def batch(dtype=torch.float32, head=()):
    """Parameters of a linear loss, leaves that require gradients, its tokens and its options."""
    parameters = {"hidden": torch.randn(B, T, H), "weight": torch.randn(V, H) / math.sqrt(H) * 3}
    options = dict(head)
    if options.pop("bias", False):
        parameters["bias"] = torch.randn(V)
    if options.pop("lora", False):
        parameters["lora_a"], parameters["lora_b"] = torch.randn(R, H), torch.randn(V, R) * 0.1
    parameters = {k: v.to(dtype).requires_grad_() for k, v in parameters.items()}
    token_ids = torch.randint(V, (B, T))
    tokens = {
        "token_ids": token_ids,
        "advantages": torch.tensor([1.2, 0.0, -0.8, 0.5]),
        "mask": torch.rand(B, T) > 0.3,
    }
    with torch.no_grad():
        logprobs = explicit(parameters, fastrl.token_logprobs, token_ids, **options)
    tokens["old_logprobs"] = logprobs.float() + 0.3 * torch.randn(B, T)
    tokens["ref_logprobs"] = logprobs.float() + 0.3 * torch.randn(B, T)
    return parameters, tokens, options


def explicit(parameters, function, *arguments, **options):
    """Apply a function of logits to explicit logits."""
    p = parameters
    logits = p["hidden"] @ p["weight"].t()
    if "bias" in p:
        logits = logits + p["bias"]
    if "lora_a" in p:
        logits = logits + 2.0 * (p["hidden"] @ p["lora_a"].t()) @ p["lora_b"].t()
    return function(logits, *arguments, **options)


def linear(parameters, function, *arguments, **options):
    """Apply a linear form."""
    p = parameters
    lora = (p["lora_a"], p["lora_b"], 2.0) if "lora_a" in p else None
    return function(p["hidden"], p["weight"], *arguments, bias=p.get("bias"), lora=lora, **options)


def near(found, exact, dtype, what, roundings=1):
    """fp32: rounding of sums of H and N terms; 16 bits: roundings of the result on top.

    Two roundings: the exact value is one of the same dtype, with an error of its own.
    """
    eps = roundings * torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    exact = exact.double()
    budget = eps * exact.abs() + roundings * 2e-5 * exact.abs().amax() + 1e-9
    excess = ((found.double() - exact).abs() / budget).nan_to_num(math.inf).amax()
    assert excess <= 1, f"{what}: error is {float(excess):.2f} times its budget"
