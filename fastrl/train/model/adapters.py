"""LoRA and DoRA adapters through `peft`: attached, restored, switched off, merged.

An adapter is float32, also on bfloat16 weights, and so takes small updates.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModelForCausalLM
from torch import Tensor, nn
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from fastrl.train.config import LoopConfig
from fastrl.train.model.stored_model import BASE

_NAME = "default"


class AdaptedModel(PeftModelForCausalLM):  # type: ignore[misc]
    """A causal LM whose weights are frozen, with an adapter that is trained."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Save the adapter alone: never the embeddings, about which peft would ask the hub."""
        super().save_pretrained(save_directory, **{"save_embedding_layers": False, **options})

    def base_weights(self) -> dict[str, Tensor]:
        """The weights of the model without the adapter, by their names in that model."""
        return {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in self.get_base_model().named_parameters()
            if self.base_model.prefix not in name
        }

    def save_base(self, directory: Path) -> None:
        """Save the model without the adapter; it loads as any other."""
        base = self.get_base_model()
        weights = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict().items()
            if self.base_model.prefix not in name
        }
        base.save_pretrained(directory, state_dict=weights)

    def load_weights(self, directory: str | Path) -> None:
        """Load the adapter's weights.

        Raises:
            ValueError: They belong to another model or adapter, or are pickled.
        """
        try:
            cached_file(str(directory), "adapter_model.safetensors")
        except OSError as error:
            raise ValueError(
                f"the adapter in {directory} has no adapter_model.safetensors, and pickled weights "
                "are not loaded, since they can run code"
            ) from error
        result = self.load_adapter(
            str(directory), _NAME, torch_device=str(self.device), is_trainable=True
        )
        wrong = [*result.missing_keys, *result.unexpected_keys]
        if wrong:
            raise ValueError(f"the adapter in {directory} does not fit the model: {wrong[0]}")

    @contextmanager
    def base_trained(self, frozen: list[nn.Parameter]) -> Iterator[None]:
        """Train the weights instead of the adapter, all but ``frozen``; the adapter is off.

        Afterwards the adapter changes nothing still: the magnitudes of DoRA follow the weights.
        """
        base = [p for name, p in self.named_parameters() if self.base_model.prefix not in name]
        with self.disable_adapter():
            for parameter in base:
                parameter.requires_grad_(not any(parameter is other for other in frozen))
            try:
                yield
            finally:
                for parameter in base:
                    parameter.requires_grad_(False)
                self.reset_magnitudes()

    def reset_magnitudes(self) -> None:
        """Set the magnitudes of DoRA to the norms of the weights, with which it changes nothing."""
        for module in self.modules():
            for name, variant in getattr(module, "lora_variant", {}).items():
                magnitudes = module.lora_magnitude_vector
                trained = magnitudes[name]
                variant.init(module, name)
                trained.weight.data.copy_(magnitudes[name].weight.data)
                magnitudes[name] = trained  # the parameter that the optimizer knows


def attach(model: Any, config: LoopConfig, base: str) -> AdaptedModel:
    """The model with a new adapter that changes nothing yet.

    Args:
        model: A causal LM; its weights are frozen.
        config: Rank, scale and layers of the adapter.
        base: Where the model can be loaded from, for whoever loads the adapter.

    Raises:
        ValueError: A layer to adapt does not exist or cannot be adapted.
    """
    everything = config.lora_targets == ("all-linear",)
    names = [name for name, _ in model.named_modules()]
    for target in () if everything else config.lora_targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(f"lora_targets must be names of layers of the model, got {target!r}")
    rank = config.lora_rank
    assert rank is not None
    settings = LoraConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank if config.lora_alpha is None else config.lora_alpha,
        target_modules="all-linear" if everything else list(config.lora_targets),
        use_dora=config.dora,
        lora_dropout=0.0,
        bias="none",
    )
    try:
        adapted = AdaptedModel(model, settings, adapter_name=_NAME)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"lora_targets, dora: the model cannot be adapted: {error}") from error
    adapted.reset_magnitudes()  # peft's are rounded to the dtype of the weights
    if config.freeze_head and any(_is_adapted(layer) for layer in _ends(model)):
        raise ValueError("freeze_head must be off if lora_targets names the embeddings or the head")
    return adapted


def base_of(adapter: str) -> str:
    """The model that an adapter belongs to, as a directory or hub name.

    Raises:
        ValueError: The adapter does not name one.
    """
    found = find_adapter_config_file(adapter)
    settings = {} if found is None else json.loads(Path(found).read_text())
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str):
        raise ValueError(f"the adapter {adapter!r} does not name its base model")  # noqa: TRY004
    kept = Path(adapter).resolve().parent.parent / BASE  # of the run, which may have been moved
    moved = Path(base).name == BASE and not Path(base).is_dir() and kept.is_dir()
    return str(kept) if moved else base


def merge(model: Any, adapter: str) -> Any:
    """The model with the weights of an adapter added to its own.

    Raises:
        ValueError: The adapter belongs to another model, or cannot be merged.
    """
    tied = len({id(layer.weight) for layer in _ends(model)}) == 1
    settings = PeftConfig.from_pretrained(adapter)
    if getattr(settings, "megatron_config", None):  # peft would import a module that it names
        raise ValueError(f"an adapter of layers of Megatron cannot be merged: {adapter!r}")
    settings.inference_mode = True
    adapted = AdaptedModel(model, settings, adapter_name=_NAME)
    adapted.load_weights(adapter)
    if tied and any(_is_adapted(layer) for layer in _ends(model)):
        raise ValueError(
            f"the adapter {adapter!r} changes the embeddings or the head, which are tied in its "
            "base model: it cannot be merged into one of them"
        )
    if not hasattr(adapted, "merge_and_unload"):
        raise ValueError(f"an adapter of type {settings.peft_type} cannot be merged: {adapter!r}")
    return adapted.merge_and_unload().requires_grad_(True)


def _ends(model: Any) -> list[Any]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _is_adapted(layer: Any) -> bool:
    return hasattr(layer, "base_layer") or hasattr(layer, "modules_to_save")
