"""The teacher of a distillation: a frozen model that runs over the policy's own samples."""

from typing import Any

import torch

from fastrl import Teacher
from fastrl.integrations.transformers import lm_head
from fastrl.train.checkpoint import fingerprint, unchanged_generators
from fastrl.train.config import GrpoConfig, RunConfig
from fastrl.train.loading import load, model_path
from fastrl.train.packing import PackedBatch
from fastrl.train.policy import check_head, check_packing, policy_outputs
from fastrl.train.vocabulary import limit_rows, token_count


class TeacherModel:
    """The model that ``config.teacher`` names, which must have the same tokens as the policy.

    It computes in the run's precision and at its temperature, as the policy does: if the two agree,
    they agree at every temperature.

    Raises:
        ValueError: There is no such model, it cannot be run like the policy, or it has other
            tokens.
    """

    def __init__(self, config: GrpoConfig, policy: Any, tokenizer: Any) -> None:
        self._config, name = config, str(config.teacher)
        path = model_path(name)
        dtype = "bfloat16" if config.precision == "bfloat16" else config.dtype
        try:
            with unchanged_generators():  # a run with a teacher begins as one without
                self.model, own = load(path, policy.device, dtype)
            check_head(self.model, config)
            self.model.requires_grad_(False).set_attn_implementation(config.attention)
            check_packing(self.model, config)
        except (ImportError, ValueError) as error:
            raise ValueError(f"teacher: {error}") from error
        rows = {model: _rows(model, config) for model in (policy, self.model)}
        needed = min(token_count(tokenizer), rows[policy])
        if own.get_vocab() != tokenizer.get_vocab() or rows[self.model] < needed:
            raise ValueError(
                f"teacher must have the tokens of the model, {config.model or 'the small new one'}"
                f": {len(tokenizer)}; {path} has {len(own)} tokens and a head of "
                f"{rows[self.model]} rows, "
                f"{len(own.get_vocab().items() & tokenizer.get_vocab().items())} tokens are the "
                "same"
            )
        # heads may be padded to different numbers of rows: leave out what only one of them has
        for model, count in rows.items():
            if count > min(rows.values()):
                limit_rows(model, min(rows.values()))

    def fingerprint(self) -> str:
        """Return a checksum of the weights."""
        return fingerprint(self.model.named_parameters())

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Teacher:
        """Return the teacher's distributions at the scored tokens of a packed row."""
        states, logits, head = policy_outputs(self.model, batch, self._config)
        beta, temperature = self._config.teacher_beta, self._config.temperature
        options: dict[str, Any] = {"beta": beta, "temperature": temperature}
        if logits is not None:
            return Teacher.from_logits(logits, **options)
        assert states is not None
        assert head is not None
        return Teacher.from_hidden(states, **head.arguments(), **options)


def load_teacher(config: RunConfig, policy: Any, tokenizer: Any) -> TeacherModel | None:
    """Return the teacher, if the settings name one."""
    if isinstance(config, GrpoConfig) and config.teacher is not None:
        return TeacherModel(config, policy, tokenizer)
    return None


def _rows(model: Any, config: RunConfig) -> int:
    """Return the number of rows of the head that the loss reads."""
    head = lm_head(model) if config.loss == "linear" else model.get_output_embeddings()
    return len(head.weight)
