"""Sampling with vLLM, in this process and on the GPU of the trainer.

Written against the interface of vLLM 0.11 as its documentation and TRL 1.16 use it, and tested
with a stand-in for the package: it has not run with vLLM itself.
"""

import os
import tempfile
from typing import Any

import torch

from fastrl.train import extras
from fastrl.train.config import RunConfig
from fastrl.train.data.prompts import Prompt
from fastrl.train.rollout import Rollout
from fastrl.train.sampling.completion import Completion, check_finite, rollout_of, texts_of
from fastrl.train.sampling.endings import Endings
from fastrl.train.sampling.generators import unchanged_generators
from fastrl.train.sampling.plain_weights import plain_weights
from fastrl.train.sampling.sampler import TokenCount

_LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to it, and takes the likeliest token near 0


class VllmSampler:
    """The fastest engine. It sleeps while the model learns, and its weights are dropped then.

    The model's weights are handed over whenever it wakes, so that it cannot sample with old ones.
    Its cache holds ``tokens_per_generation`` tokens.

    Args:
        model: A causal LM that vLLM supports, or one that PEFT wraps.
        tokenizer: The model's.
        config: The settings of the run.

    Raises:
        ValueError: vLLM is not installed, or a setting does not fit the model, its tokenizer or
            the engine.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig) -> None:
        extras.require("vllm", extra="vllm", setting="sampler=vllm")
        if not on_gpu(model):
            raise ValueError(f'sampler "vllm" needs a model on a GPU, got {model.device}')
        if config.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f'temperature must be at least {_LEAST_TEMPERATURE} with sampler "vllm", got '
                f"{config.temperature}"
            )
        self.tokens = TokenCount(0, 0)
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._endings = Endings(model, tokenizer, config)
        with unchanged_generators():
            self._llm = self._start()
            self._llm.sleep(level=2)

    def sample(self, prompts: list[Prompt], group_size: int) -> tuple[Rollout, list[str]]:
        """See `Sampler.sample`."""
        completions = self._complete(prompts, group_size, self._config.temperature)
        rollout = rollout_of(prompts, completions, self._tokenizer, self._model.device)
        return rollout, texts_of(completions, self._tokenizer)

    def greedy(self, prompts: list[Prompt]) -> tuple[list[str], list[int]]:
        """See `Sampler.greedy`."""
        completions = self._complete(prompts, 1, None)
        check_finite(completions)
        lengths = [len(completion.token_ids) for completion in completions]
        return texts_of(completions, self._tokenizer), lengths

    def _start(self) -> Any:
        """The engine with the architecture of the model, and random weights until it wakes."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the weights would be copied
        from vllm import LLM

        config, architecture = self._config, self._model.config
        bfloat16 = "bfloat16" in (config.precision, config.weights)
        longest = config.max_prompt_tokens + config.max_new_tokens
        longest = min(longest, getattr(architecture, "max_position_embeddings", None) or longest)
        dtype_bytes = 2 if bfloat16 else 4
        with tempfile.TemporaryDirectory() as directory:
            architecture.save_pretrained(directory)
            self._tokenizer.save_pretrained(directory)
            return LLM(
                model=directory,
                load_format="dummy",
                generation_config="vllm",  # its own defaults, none of the model's
                dtype="bfloat16" if bfloat16 else "float32",
                max_model_len=longest,
                kv_cache_memory_bytes=max(config.tokens_per_generation, longest)
                * cache_bytes_per_token(architecture, dtype_bytes),
                gpu_memory_utilization=0.3,  # must be free at the start; the cache is as above
                enable_sleep_mode=True,
                logprobs_mode="processed_logprobs",  # at the temperature
                seed=config.seed,
            )

    def _complete(
        self, prompts: list[Prompt], group_size: int, temperature: float | None
    ) -> list[Completion]:
        """Sample ``group_size`` completions of each prompt; None takes the likeliest tokens."""
        parameters = [self._parameters(group_size, temperature) for _ in prompts]
        with unchanged_generators():
            outputs = self._outputs(prompts, parameters)
        completions = [_completion(one) for output in outputs for one in output.outputs]
        if len(completions) != len(prompts) * group_size:
            raise RuntimeError(
                f"vLLM must return {group_size} completions for each of {len(prompts)} prompts, "
                f"got {len(completions)}"
            )
        tokens = sum(len(completion.token_ids) for completion in completions)
        tokens += group_size * sum(len(prompt.token_ids) for prompt in prompts)
        self.tokens = TokenCount(tokens, tokens)
        return completions

    def _outputs(self, prompts: list[Prompt], parameters: list[Any]) -> list[Any]:
        """Wake the engine, hand over the weights, generate, and put it back to sleep."""
        torch.cuda.empty_cache()  # vLLM does not share the memory of torch's allocator
        try:
            self._llm.wake_up(tags=["weights"])
            weights = plain_weights(self._model)
            self._llm.apply_model(lambda engine_model: _load(engine_model, weights))
            self._llm.wake_up(tags=["kv_cache"])
            self._llm.reset_prefix_cache()
            return self._llm.generate(  # type: ignore[no-any-return]
                [{"prompt_token_ids": prompt.token_ids} for prompt in prompts],
                parameters,
                use_tqdm=False,
            )
        finally:
            self._llm.sleep(level=2)

    def _parameters(self, group_size: int, temperature: float | None) -> Any:
        from vllm import SamplingParams

        seed = None if temperature is None else int(torch.randint(2**31, (1,)))
        return SamplingParams(
            n=group_size,
            temperature=0.0 if temperature is None else temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=seed,
            max_tokens=self._config.max_new_tokens,
            stop=list(self._config.stop_strings),
            stop_token_ids=self._endings.token_ids,
            ignore_eos=True,  # the end tokens above are all that there are
            detokenize=bool(self._config.stop_strings),
            logprobs=0,  # of the sampled token alone
        )


def on_gpu(model: Any) -> bool:
    """Whether vLLM can share the model's device."""
    return bool(model.device.type == "cuda")


def cache_bytes_per_token(architecture: Any, dtype_bytes: int) -> int:
    """Keys and values of all layers; an upper bound where some have a sliding window."""
    text = architecture.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * dtype_bytes)


def _load(engine_model: Any, weights: Any) -> None:
    """Runs on the model of the engine; returns nothing, so that nothing is sent back."""
    engine_model.load_weights(weights)


def _completion(output: Any) -> Completion:
    """A completion of vLLM.

    Raises:
        RuntimeError: It was cut for another reason than its length.
    """
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM did not finish a completion: {output.finish_reason}")
    token_ids = list(output.token_ids)
    logprobs = [
        each[token_id].logprob for each, token_id in zip(output.logprobs, token_ids, strict=True)
    ]
    return Completion(
        torch.tensor(token_ids),
        torch.tensor(logprobs, dtype=torch.float32),
        output.finish_reason == "stop",
    )
