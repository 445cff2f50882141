"""The types and bounds of settings, which are checked when a config is made."""

import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

_ABOVE_0 = {
    *("temperature", "learning_rate", "max_grad_norm", "reward_timeout", "gamma", "kl_target"),
    *("stop_kl", "plan", "save_minutes", "top_p"),
}
_AT_LEAST = {
    **dict.fromkeys(("seed", "warmup_steps", "warm_start_steps", "clip_low", "clip_high"), 0),
    **dict.fromkeys(("kl_coef", "entropy_coef", "lam", "teacher_coef", "teacher_beta", "min_p"), 0),
    **dict.fromkeys(("steps", "epochs", "minibatches", "prompts_per_step", "group_size"), 1),
    **dict.fromkeys(("sampling_rounds", "max_prompt_tokens", "max_new_tokens", "mlp_tile"), 1),
    **dict.fromkeys(("tokens_per_generation", "tokens_per_micro_batch", "lora_rank"), 1),
    **dict.fromkeys(("eval_every", "save_every", "top_k", "score_centering"), 1),
}
_AT_MOST_1 = {"top_p", "min_p", "gamma", "lam", "teacher_beta"}


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise a `ValueError` if ``value`` is not of the type ``kind`` of a field."""
    if get_origin(kind) in (Union, UnionType):  # or None
        if value is not None:
            check_type(name, value, get_args(kind)[0])
    elif get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
    elif get_origin(kind) is tuple:
        items = get_args(kind)
        fixed = None if items[-1] is ... else len(items)
        if not isinstance(value, tuple) or fixed not in (None, len(value)):
            raise ValueError(f"{name} must be {fixed or 'a list of'} values, got {value!r}")
        for item in value:
            check_type(f"each of {name}", item, items[0])
    else:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not kind and not (kind is float and whole):
            raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def check_bounds(name: str, value: Any) -> None:
    """Raise a `ValueError` if the value of a setting is not None and out of bounds."""
    if value is None:
        return
    if name in _ABOVE_0 and not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    if value < _AT_LEAST.get(name, value):
        raise ValueError(f"{name} must be at least {_AT_LEAST[name]}, got {value}")
    if name in _AT_MOST_1 and value > 1:
        raise ValueError(f"{name} must be at most 1, got {value}")
