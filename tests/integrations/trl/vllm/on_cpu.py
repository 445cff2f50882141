"""vLLM on a CPU under TRL: what it keeps, as it returns it on a GPU, and new weights.

On a CPU vLLM does not return the tokens that it kept, and TRL's `load_weights` does not reach the
packed weights.
"""

import itertools
import os

import pytest
import torch

vllm = pytest.importorskip("vllm")  # the run of doctests imports this file, too

from vllm.outputs import SamplingMask  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # noqa: E402

from fastrl.train.vllm_weights import hand_over_weights  # noqa: E402

#: The sets of each request, at the places of its tokens.
RECORDED = {}
NUMBERS = itertools.count()


class Recorder(LogitsProcessor):
    """The last processor before the sampler's top-k and top-p, which it applies to a copy."""

    def __init__(self, config, device, is_pin_memory):
        self.requests = {}

    def is_argmax_invariant(self):
        return True  # such processors run at the temperature, and this one behind vLLM's min-p

    def update_state(self, update):
        process_dict_updates(self.requests, update, lambda params, _, done: (params, done))

    def apply(self, logits):
        for row, (params, done) in self.requests.items():
            number = (params.extra_args or {}).get("number")
            if number is not None:
                k, p = torch.tensor([params.top_k]), torch.tensor([params.top_p])
                left = apply_top_k_top_p(logits[row : row + 1].clone(), k, p)[0] > -torch.inf
                RECORDED[number][len(done)] = left.nonzero()[:, 0].tolist()
        return logits


class LLM(vllm.LLM):
    """An engine on a CPU that returns its sets."""

    def __init__(self, *, return_sampling_mask=False, **options):
        if return_sampling_mask:
            assert os.environ.pop("VLLM_USE_V2_MODEL_RUNNER") == "1"  # a CPU has none
            options["logits_processors"] = [Recorder]
        super().__init__(**options, enforce_eager=True, dtype="float32")
        self.llm_engine.model_config.return_sampling_mask = return_sampling_mask

    def generate(self, prompts, sampling_params, **options):
        requests = [sampling_params.clone() for _ in prompts]
        for request in requests:
            request.extra_args = {"number": next(NUMBERS)}
            RECORDED[request.extra_args["number"]] = {}
        outputs = super().generate(prompts, requests, **options)
        if self.llm_engine.model_config.return_sampling_mask:
            for request, output in zip(requests, outputs, strict=True):
                sets = RECORDED.pop(request.extra_args["number"])
                [one] = output.outputs
                one.sampling_mask = SamplingMask([sets[i] for i in range(len(one.token_ids))])
        return outputs


def sync_weights(generation):
    """What TRL's `VLLMGeneration.sync_weights` does on a GPU."""
    hand_over_weights(generation.llm, generation.accelerator.unwrap_model(generation.model))
    generation.llm.reset_prefix_cache()
