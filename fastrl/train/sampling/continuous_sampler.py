"""Sampling with the continuous batching of `transformers`, whose paged cache is bounded."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from fastrl.train.config import RunConfig
from fastrl.train.data.prompts import Prompt
from fastrl.train.rollout import Rollout
from fastrl.train.sampling.completion import Completion, rollout_of, texts_of
from fastrl.train.sampling.endings import Endings
from fastrl.train.sampling.generation_mode import generation_mode
from fastrl.train.sampling.generators import unchanged_generators
from fastrl.train.sampling.sampler import TokenCount
from fastrl.train.sampling.transformers_sampler import TransformersSampler

# Tokens of a page of the cache, and most tokens of a forward pass. Flash-attention's kernels need
# whole pages of 256; other implementations make a mask of all tokens of a pass and of the cache.
_FLASH = (256, 8192)
_MASKED = (16, 1024)
#: What the engine must be able to be told.
_NEEDED = {"num_blocks", "max_batch_tokens", "return_logprobs", "seed"}


class ContinuousSampler:
    """A completion that ends makes room for the next one, so that nothing is padded.

    Meant for ``attention="flash_attention_2"``: other implementations also compute, and mask, the
    scores between the sequences of a forward pass.
    Its forward passes run in a thread of their own, in the dtype of the weights: ``precision`` has
    no effect on them. The engine knows no stop strings: completions are cut after them, which
    costs the tokens behind but leaves the distribution as it is.

    Args:
        model: A causal LM, or one that PEFT wraps.
        tokenizer: The model's.
        config: The settings of the run.

    Raises:
        ValueError: A setting does not fit the model, its tokenizer or the engine, or this version
            of `transformers` has no such engine.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig) -> None:
        if missing := _NEEDED - _engine_fields().keys():
            raise ValueError(
                'sampler must not be "continuous" with this transformers, which has no '
                f"{', '.join(sorted(missing))} in ContinuousBatchingConfig, got version "
                f"{transformers.__version__}"
            )
        if config.attention == "flex_attention":
            raise ValueError(
                'attention must not be "flex_attention" with sampler "continuous", whose paged '
                "cache supports by_sequence, sdpa, eager and flash_attention_2"
            )
        self.tokens = TokenCount(0, 0)
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._endings = Endings(model, tokenizer, config)
        self._most_likely = TransformersSampler(model, tokenizer, config)

    def sample(self, prompts: list[Prompt], group_size: int) -> tuple[Rollout, list[str]]:
        """See `Sampler.sample`."""
        repeated = [prompt.token_ids for prompt in prompts for _ in range(group_size)]
        seed = int(torch.randint(2**31, (1,)))
        with generation_mode(self._model, self._config), unchanged_generators():
            outputs = self._generate(repeated, seed)
        completions = [self._completion(output) for output in outputs]
        tokens = sum(len(output.prompt_ids) + len(output.generated_tokens) for output in outputs)
        self.tokens = TokenCount(tokens, tokens)
        rollout = rollout_of(prompts, completions, self._tokenizer, self._model.device)
        return rollout, texts_of(completions, self._tokenizer)

    def greedy(self, prompts: list[Prompt]) -> tuple[list[str], list[int]]:
        """See `Sampler.greedy`; uses ``generate``."""
        completed = self._most_likely.greedy(prompts)
        self.tokens = self._most_likely.tokens
        return completed

    def _generate(self, prompts: list[list[int]], seed: int) -> list[Any]:
        """The engine's output for each prompt.

        Raises:
            FloatingPointError: The logits are not finite.
            RuntimeError: A request did not finish.
        """
        config = self._config
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=config.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=config.max_new_tokens,
                eos_token_id=self._endings.token_ids,
                pad_token_id=self._tokenizer.pad_token_id,
            ),
            continuous_batching_config=self._cache_config(prompts, seed),
        )
        finished: dict[str, Any] = {}
        try:
            manager.warmup()
            # All requests are there when the engine starts: its batches depend on nothing else.
            names = manager.add_requests(prompts, max_new_tokens=config.max_new_tokens)
            manager.start()
            while len(finished) < len(names):
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    break
                if output is not None and output.is_finished():
                    _check_output(output)
                    finished[output.request_id] = output
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()
        if len(finished) < len(names):
            cause = manager.background_thread_status.fatal_error
            raise RuntimeError(
                f"continuous batching finished {len(finished)} of {len(names)} requests: {cause}"
            )
        return [finished[name] for name in names]

    def _cache_config(self, prompts: list[list[int]], seed: int) -> Any:
        """A cache of ``tokens_per_generation`` at most, or of one sequence if that is longer."""
        config = self._config
        page, pass_tokens = _FLASH if "flash" in config.attention else _MASKED
        pages = [math.ceil((len(ids) + config.max_new_tokens) / page) for ids in prompts]
        allowed = max(config.tokens_per_generation // page, max(pages))
        known = _engine_fields()
        # older versions of transformers call pages blocks, and never switch the attention
        own: dict[str, Any] = {"page_size" if "page_size" in known else "block_size": page}
        own |= {"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}
        return transformers.ContinuousBatchingConfig(
            num_blocks=min(sum(pages), allowed),
            max_batch_tokens=pass_tokens,
            return_logprobs=True,
            seed=seed,
            **own,
        )

    def _completion(self, output: Any) -> Completion:
        token_ids = torch.tensor(output.generated_tokens)
        length, ended = self._endings.length(token_ids)
        return Completion(token_ids[:length], torch.tensor(output.logprobs)[:length], ended)


def _engine_fields() -> Mapping[str, inspect.Parameter]:
    """The settings of the engine of this version of `transformers`."""
    engine = getattr(transformers, "ContinuousBatchingConfig", None)
    return inspect.signature(engine).parameters if engine is not None else {}


def _check_output(output: Any) -> None:
    if output.error is not None:
        if "probability tensor contains" in output.error:  # of torch.multinomial, on a CPU
            raise FloatingPointError("the logits are not finite while sampling")
        raise RuntimeError(f"continuous batching failed: {output.error}")
    if not 0 < len(output.generated_tokens) == len(output.logprobs):
        raise RuntimeError(
            "continuous batching must return a log-probability per token, got "
            f"{len(output.logprobs)} for {len(output.generated_tokens)} tokens"
        )
