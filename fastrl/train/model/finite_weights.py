"""The check that no weight is a NaN or an infinity."""

from typing import Any

from fastrl.train.distributed.sharding import local


def check_weights(model: Any) -> None:
    """Raise a `ValueError` that names a tensor with a value that is not finite."""
    if (name := not_finite(model)) is not None:
        raise ValueError(f"model must have finite weights, got a NaN or infinity in {name!r}")


def not_finite(model: Any) -> str | None:
    """The name of the first tensor with a value that is not finite, in this rank's shards."""
    for name, parameter in model.named_parameters():
        weight = local(parameter.detach())
        if not weight.is_floating_point() or weight.itemsize == 1 or weight.numel() == 0:
            continue  # quantized weights have no NaN, or no minimum
        if not all(end.isfinite() for end in weight.aminmax()):
            return str(name)
    return None
