"""vLLM in this process: `make test-vllm` runs it on a CPU; it has not run on a GPU."""

import os
import tempfile
from dataclasses import fields
from typing import Any

import torch

from fastrl import KeptTokens, TopKLogprobs, kl_divergence, token_logprobs
from fastrl.train.checkpoint import unchanged_generators
from fastrl.train.config import RunConfig
from fastrl.train.endings import Endings
from fastrl.train.rollout import Completion, TokenCount
from fastrl.train.transformers_sampler import generation_mode
from fastrl.train.vllm_weights import hand_over_weights
from fastrl.train.vocabulary import row_count

_CHECKED = 8, 64  # completions, and tokens of each, whose log-probabilities are compared
# The largest mean KL (k3) to the model. Rounding caused at most 2e-12 and 5e-4 on a CPU; an engine
# that kept its initial random weights had 0.03 to 0.7.
_MOST_KL = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class VllmEngine:
    """The fastest engine. On a GPU it sleeps and drops its weights while the model learns.

    Each call hands over the model's weights, and compares log-probabilities of the samples with
    the model's. The engine's cache holds ``tokens_per_generation`` tokens.

    Raises:
        ValueError: vLLM is missing or for another device, or a setting does not fit.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig, endings: Endings) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the weights would be copied
        if config.keeps_tokens:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the one that returns kept tokens
        try:
            from vllm.platforms import current_platform
        except ModuleNotFoundError as error:
            raise ValueError(
                "sampler=vllm needs vLLM: pip install 'fastrl-kernels[vllm]'"
            ) from error
        needed = current_platform.device_type
        if config.keeps_tokens:
            _check_replay(config, needed)
        if config.temperature < 0.01:  # vLLM raises lower ones to it, or takes the likeliest token
            raise ValueError(f"temperature must be at least 0.01 in vLLM, got {config.temperature}")
        if model.device.type != needed:
            raise ValueError(f"this vLLM needs a model on {needed}, got {model.device}")
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._endings = endings
        half = "bfloat16" in (config.precision, config.weights)
        self._dtype = torch.bfloat16 if half else torch.float32
        self._can_sleep, self._tokens = needed != "cpu", 0
        self._top = min(config.score_centering or 0, row_count(model))
        with unchanged_generators():
            self._llm = self._start()
            self._call("sleep", level=2)

    def complete(self, prompts: list[list[int]], *, greedy: bool) -> list[Completion]:
        """See `TransformersEngine.complete`.

        Raises:
            RuntimeError: The engine failed, or has other weights.
        """
        from vllm import SamplingParams

        config, temperature = self._config, 0.0 if greedy else self._config.temperature
        keeps: dict[str, Any] = {}
        top = 0 if greedy else self._top
        if config.keeps_tokens:
            keeps = {"top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
        if config.keeps_tokens and greedy:  # that engine has no temperature of 0
            keeps, temperature = {"top_k": 1}, 1.0
        parameters = [
            SamplingParams(  # the defaults do not change the distribution
                temperature=temperature,
                seed=None if greedy else int(torch.randint(2**31, (1,))),
                max_tokens=config.max_new_tokens,
                stop=list(self._endings.texts),
                stop_token_ids=self._endings.token_ids,
                ignore_eos=True,  # there are no end tokens but those above
                detokenize=bool(self._endings.texts),
                logprobs=top,  # 0: of the sampled token alone
                **keeps,
            )
            for _ in prompts
        ]
        with unchanged_generators():
            outputs = self._outputs(prompts, parameters)
        completions = [
            _completion(output.outputs[0], keeps=bool(keeps), top=top) for output in outputs
        ]
        self._check(prompts, completions, temperature or 1.0)
        self._tokens += sum(map(len, prompts)) + sum(len(one.token_ids) for one in completions)
        return completions

    def computed(self) -> TokenCount:
        """See `TransformersEngine.computed`."""
        tokens, self._tokens = self._tokens, 0
        return TokenCount(tokens, tokens)

    def _start(self) -> Any:
        """Return an engine with the architecture of the model, and random weights at first."""
        from vllm import LLM

        config, model, architecture = self._config, self._model, self._model.config
        plain = model.get_base_model() if hasattr(model, "peft_config") else model
        longest = config.max_prompt_tokens + config.max_new_tokens
        longest = min(longest, getattr(architecture, "max_position_embeddings", None) or longest)
        cache = max(config.tokens_per_generation, longest + 256)  # two blocks more
        with tempfile.TemporaryDirectory() as directory:
            architecture.save_pretrained(directory)
            self._tokenizer.save_pretrained(directory)
            return LLM(
                model=directory,
                hf_overrides={
                    "architectures": [type(plain).__name__],  # new models name none
                    "head_dtype": "float32",  # like the trainer's, whose logits are not rounded
                },
                load_format="dummy",
                generation_config="vllm",  # its own defaults, none of the model's
                dtype=self._dtype,
                max_model_len=longest,
                kv_cache_memory_bytes=cache * _cache_bytes(architecture, self._dtype.itemsize),
                gpu_memory_utilization=0.3,  # must be free at the start; the cache is as above
                enable_sleep_mode=self._can_sleep,
                enforce_eager=not self._can_sleep,  # compiling for a CPU takes 15 seconds
                logprobs_mode="processed_logprobs",  # at the temperature, over the kept tokens
                **({"max_logprobs": self._top} if self._top else {}),
                **({"return_sampling_mask": True} if config.keeps_tokens else {}),
            )

    def _outputs(self, prompts: list[list[int]], parameters: list[Any]) -> list[Any]:
        """Wake the engine, hand over the weights, generate, and put it back to sleep."""
        try:
            torch.cuda.empty_cache()  # vLLM does not share the memory of torch's allocator
            self._call("wake_up", tags=["weights"])
            hand_over_weights(self._llm, self._model)
            self._call("wake_up", tags=["kv_cache"])
            self._llm.reset_prefix_cache()
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            return list(self._llm.generate(requests, parameters, use_tqdm=False))
        finally:
            self._call("sleep", level=2)

    def _call(self, method: str, **options: Any) -> None:
        if self._can_sleep:
            getattr(self._llm, method)(**options)

    def _check(self, prompts: list[list[int]], done: list[Completion], temperature: float) -> None:
        """Raise a `RuntimeError` if the engine's log-probabilities are not the model's."""
        kls, device, most = [], self._model.device, _MOST_KL[self._dtype]
        with generation_mode(self._model, self._config):
            for row in range(0, len(done), -(-len(done) // _CHECKED[0])):
                ids = done[row].token_ids[: _CHECKED[1]].to(device)
                inputs = torch.cat([torch.tensor(prompts[row], device=device), ids[:-1]])
                logits = self._model(inputs[None], use_cache=False, logits_to_keep=len(ids)).logits
                kept = done[row].kept
                if kept is not None:
                    kept = kept.take(torch.arange(len(ids))).to(device)
                own = token_logprobs(logits[0], ids, temperature=temperature, kept=kept)
                kls.append(kl_divergence(done[row].logprobs[: len(ids)], own.cpu()))
        kl = float(torch.cat(kls).mean())
        if kl > most:  # a NaN comes from the model, and is reported later
            raise RuntimeError(
                f"vLLM does not sample with the model's weights: the mean KL to the model in "
                f'{self._dtype} must be at most {most}, got {kl:.2g}; use sampler "transformers"'
            )


def _cache_bytes(architecture: Any, element: int) -> int:
    """Return the bytes of all layers' keys and values per token, ignoring sliding windows."""
    text = architecture.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * element)


def _check_replay(config: RunConfig, device: str) -> None:
    """Raise a `ValueError` if vLLM cannot tell which tokens it keeps."""
    from vllm import EngineArgs

    if device == "cpu":  # where it has no Model Runner V2
        raise ValueError(
            "top_p, top_k and min_p must be left at their defaults with vLLM on a CPU, which does "
            'not return the tokens that it keeps: use sampler "transformers"'
        )
    if "return_sampling_mask" not in {field.name for field in fields(EngineArgs)}:
        raise ValueError(
            "top_p, top_k and min_p must be left at their defaults with this vLLM, which has no "
            "return_sampling_mask: without the tokens that it keeps, every ratio would be biased"
        )
    if config.top_k is None:
        raise ValueError(
            "top_k must be set with top_p or min_p in vLLM, which returns at most top_k tokens"
        )


def _completion(output: Any, *, keeps: bool, top: int = 0) -> Completion:
    """Return a completion of vLLM; raise a `RuntimeError` if something but its length cut it."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM did not finish a completion: {output.finish_reason}")
    ids = list(output.token_ids)
    logprobs = [each[token].logprob for each, token in zip(output.logprobs, ids, strict=True)]
    if keeps and output.sampling_mask is None and ids:
        raise RuntimeError(
            "vLLM did not return the tokens that it kept, without which every ratio would be "
            'biased: use sampler "transformers", or leave top_p, top_k and min_p at their defaults'
        )
    kept = KeptTokens.from_vllm([output]) if keeps else None
    ended = output.finish_reason == "stop"
    return Completion(
        torch.tensor(ids),
        torch.tensor(logprobs, dtype=torch.float32),
        ended,
        kept=kept,
        top_logprobs=TopKLogprobs.from_vllm([output], top_k=top) if top else None,
    )
