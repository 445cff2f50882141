"""Which settings several ranks cannot honour."""

from fastrl.train.config import PpoConfig, RunConfig
from fastrl.train.distributed import ranks


def check_supported(config: RunConfig) -> None:
    """Raise a `ValueError` that names a setting which this number of ranks cannot honour."""
    if ranks.count() == 1:
        return
    needed: list[tuple[str, object, str]] = [
        ("sampler", "transformers", "the other engines do not split prompts over ranks"),
        ("rounding", "master", "the random roundings of the ranks could differ"),
        ("offload_checkpoints", False, "moving activations to the host is for one GPU"),
    ]
    for name, allowed, why in needed:
        _check(config, name, allowed, f"with several ranks: {why}")
    if config.optimizer == "adamw_offloaded":
        raise ValueError(
            "optimizer must not be adamw_offloaded with several ranks: parallel=fsdp shards the "
            "optimizer's state instead"
        )
    if config.parallel == "fsdp":
        needed = [
            ("optimizer", "adamw", "8-bit moments are not sharded"),
            ("weights", "float32", "sharded, with precision=bfloat16, they take no more memory"),
            ("lora_rank", None, "an adapter is small enough for parallel=ddp"),
        ]
        for name, allowed, why in needed:
            _check(config, name, allowed, f"with parallel=fsdp on several ranks: {why}")
        if isinstance(config, PpoConfig):
            why = "on several ranks: FSDP2 cannot copy a sharded backbone"
            _check(config, "value_model", "shared", f"with parallel=fsdp {why}")


def _check(config: RunConfig, name: str, allowed: object, why: str) -> None:
    if (value := getattr(config, name)) != allowed:
        raise ValueError(f"{name} must be {allowed} {why}; got {value}")
