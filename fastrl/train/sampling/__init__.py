"""Engines that sample completions, behind one interface. (To be replaced.)"""

from typing import Any

import torch

from fastrl.train.gradients import autocast
from fastrl.train.rollout import Rollout


def completion_mask(token_ids, end_ids):
    ends = torch.isin(token_ids, torch.as_tensor(end_ids, device=token_ids.device))
    return ends.cumsum(1) - ends.long() == 0


class _Generate:
    def __init__(self, model, tokenizer, config):
        self.model, self.tokenizer, self.config = model, tokenizer, config

    @torch.no_grad()
    def _run(self, prompts, group_size, choice):
        model, tokenizer = self.model, self.tokenizer
        was = model.config._attn_implementation
        training = model.training
        model.set_attn_implementation("sdpa")
        model.eval()
        try:
            encoded = tokenizer.pad(
                {"input_ids": [p.token_ids for p in prompts for _ in range(group_size)]},
                padding_side="left",
                return_tensors="pt",
            ).to(model.device)
            ids = encoded["input_ids"]
            with autocast(self.config, model.device):
                out = model.generate(
                    input_ids=ids,
                    attention_mask=encoded["attention_mask"],
                    max_new_tokens=self.config.max_new_tokens,
                    use_cache=True,
                    return_dict_in_generate=True,
                    output_scores=True,
                    **choice,
                )
        finally:
            model.set_attn_implementation(was)
            model.train(training)
        token_ids = out.sequences[:, ids.shape[1] :]
        mask = completion_mask(token_ids, model.generation_config.eos_token_id)
        lp = torch.stack(
            [
                s.float().log_softmax(-1).gather(1, token_ids[:, i : i + 1])[:, 0]
                for i, s in enumerate(out.scores)
            ],
            1,
        )
        token_ids = token_ids.masked_fill(~mask, tokenizer.pad_token_id)
        ends = torch.as_tensor(model.generation_config.eos_token_id)
        truncated = mask.all(1) & ~torch.isin(token_ids[:, -1], ends)
        if token_ids.shape[1] < self.config.max_new_tokens:
            truncated = torch.zeros_like(truncated)
        rollout = Rollout(
            [p.token_ids for p in prompts],
            torch.arange(len(prompts)).repeat_interleave(group_size),
            token_ids,
            mask,
            lp.masked_fill(~mask, 0.0),
            truncated,
        )
        return rollout, tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    def sample(self, prompts, group_size=1):
        return self._run(
            prompts,
            group_size,
            {"do_sample": True, "temperature": self.config.temperature, "top_k": 0, "top_p": 1.0},
        )

    def greedy(self, prompts):
        return self._run(prompts, 1, {"do_sample": False})[1]

    def update(self):
        pass


def make_sampler(model: Any, tokenizer: Any, config: Any) -> Any:
    return _Generate(model, tokenizer, config)


def rollout_correction(config):
    return None
