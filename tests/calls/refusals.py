"""What can be wrong with a call; `tests/contract` has the words of each refusal."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl

#: What one tensor of a call may be instead.
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "complex": lambda x: x.detach().to(torch.complex64),
    "on another device": lambda x: x.detach().to("meta"),
    "of too many dimensions": lambda x: x.detach()[None, None, None],
    "sparse": lambda x: x.detach().to_sparse(),
}
#: Values that an argument must not have, whatever the others are.
VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, float("nan"), 1e-39, 1e-300, "1"),
    "logit_scale": (0.0, float("inf")),
    "logit_softcap": (0.0, -1.0),
    "ignore_index": (0.5,),
    "chunk_tokens": (0, 1.5),
    "outputs": (("logprob",),),
    "objective": ("pppo", 1.0),
    "rollout_top_k": (1.0,),
    "backend": ("gpu",),
    "gamma": (1.5, -0.1),
    "lam": (1.5,),
    "eps": (-1.0,),
    "baseline": ("median",),
    "scale": ("std",),
    "singleton": ("one",),
    "correction": (-1,),
    "convention": ("TRL",),
    "estimator": ("k4",),
    "clamp": (0.0,),
    "clip": (0.0, -0.2),
    "loss": ("l1",),
    "aggregation": ("mean",),
    "normalizer": (-1.0, float("nan"), {}),
    "group_size": (0, 1.5),
    "dim": (3,),
    "policy_loss": ("max",),
    "token_ids": (torch.tensor(0.0),),
    "mask": (torch.tensor(2),),
}
WRONG = (*TENSORS, "a value")


def refused(function: str, wrong: str, given: dict[str, Any], random: np.random.Generator):
    """Return None if the call is refused with one of its arguments wrong, else what happens."""
    signature = inspect.signature(getattr(fastrl, function))
    arguments = dict(signature.bind(**given).arguments)
    tensors = [name for name, x in arguments.items() if isinstance(x, Tensor) and x.dim()]
    if wrong == "on another device":  # where the first is, the others have to be
        tensors = tensors[1:]
    if tensors and wrong != "a value":
        name = str(random.choice(tensors))
        what, arguments[name] = f"{name} {wrong}", TENSORS[wrong](arguments[name])
    else:
        name = str(random.choice(sorted(VALUES.keys() & signature.parameters.keys())))
        value = VALUES[name][random.integers(len(VALUES[name]))]
        what, arguments[name] = f"{name}={value}", value
    try:
        getattr(fastrl, function)(**arguments)
    except (ValueError, TypeError) as refusal:
        return None if name in str(refusal) else (what, f"refused without {name!r}", str(refusal))
    return what, "not refused", ""
