"""LoRA adapters of `peft`, which can be attached, saved, restored and switched off.

An adapter is float32 even on bfloat16 or 4-bit weights, so small updates are not lost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModelForCausalLM
from torch import Tensor, nn

from fastrl.train.config import RunConfig

_NAME = "default"


class AdaptedModel(PeftModelForCausalLM):  # type: ignore[misc]
    """A causal LM whose weights are frozen, with an adapter that is trained."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Save only the adapter, without embeddings, for which peft would ask the hub."""
        super().save_pretrained(save_directory, **{"save_embedding_layers": False, **options})

    def base_weights(self) -> dict[str, Tensor]:
        """Return the weights of the model without the adapter, by their names in that model."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self.get_base_model().state_dict().items()
            if self.base_model.prefix not in name
        }

    def save_base(self, directory: Path) -> None:
        """Save the model without the adapter, as a model that loads like any other."""
        self.get_base_model().save_pretrained(directory, state_dict=self.base_weights())

    def load_weights(self, directory: Path) -> None:
        """Load the adapter's weights."""
        result = self.load_adapter(
            str(directory), _NAME, torch_device=str(self.device), is_trainable=True
        )
        if wrong := [*result.missing_keys, *result.unexpected_keys]:
            raise ValueError(f"the adapter in {directory} does not fit the model: {wrong[0]}")

    @contextmanager
    def base_trained(self, frozen: list[nn.Parameter]) -> Iterator[None]:
        """Train the weights, except ``frozen``, instead of the adapter, which is switched off."""
        base = [p for name, p in self.named_parameters() if self.base_model.prefix not in name]
        with self.disable_adapter():
            for parameter in base:
                parameter.requires_grad_(not any(parameter is other for other in frozen))
            try:
                yield
            finally:
                for parameter in base:
                    parameter.requires_grad_(False)


def attach(model: Any, config: RunConfig, base: str) -> AdaptedModel:
    """Return the model with a new adapter that changes nothing yet."""
    everything = config.lora_targets == ("all-linear",)
    names = [name for name, _ in model.named_modules()]
    for target in () if everything else config.lora_targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(f"lora_targets must be names of layers of the model, got {target!r}")
    assert config.lora_rank is not None
    settings = LoraConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=2 * config.lora_rank,
        target_modules="all-linear" if everything else list(config.lora_targets),
        lora_dropout=0.0,
        bias="none",
    )
    try:
        adapted = AdaptedModel(model, settings, adapter_name=_NAME)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"lora_targets: the model cannot be adapted: {error}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if config.freeze_head and any(hasattr(layer, "base_layer") for layer in ends):
        raise ValueError("freeze_head must be off if lora_targets names the embeddings or the head")
    return adapted
