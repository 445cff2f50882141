"""The vLLM engine itself, on a CPU: `make test-vllm` runs this in an environment of its own."""

import gc

import pytest
import torch

pytest.importorskip("vllm")

import transformers

from fastrl.train.config import GrpoConfig
from fastrl.train.endings import Endings
from fastrl.train.loading import load
from fastrl.train.sampling import Sampler
from tests.train.packed import SMALL, padded_logprobs, prompts_of

pytestmark = pytest.mark.slow

TEXTS = ("7 + 5 =", "1", "the quick brown fox")
STALE = "does not sample with the model's weights"


def config_of(**options):
    common = {"sampler": "vllm", "max_new_tokens": 12, "max_prompt_tokens": 40}
    return GrpoConfig(**{**common, **options})


def started(model, tokenizer, **options):
    """The sampler. An engine that is collected ends the process groups of a later one, too."""
    gc.collect()
    return Sampler(model, tokenizer, config_of(**options))


def of(kind, dtype=torch.float32):
    """A model whose distributions are neither flat nor certain, and its tokenizer."""
    torch.manual_seed(3)
    model, tokenizer = load(None, torch.device("cpu"))
    if kind == "qwen3":  # its head is its embedding; vLLM's CPU has no heads of 8
        sizes = {**SMALL, "pad_token_id": 0, "head_dim": 32, "tie_word_embeddings": True}
        settings = model.generation_config
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
        model.generation_config = settings
    change(model, 0.1)
    return model.to(dtype).eval(), tokenizer


@torch.no_grad()
def change(model, size):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(size * torch.randn_like(parameter))


def difference(model, rollout, temperature=1.0):
    """The largest difference of the rollout's log-probabilities to the model's own."""
    return float((padded_logprobs(model, rollout, temperature) - rollout.logprobs).abs().max())


def keep_weights(sampler, monkeypatch):
    """The engine keeps the weights that it has, and nothing says so."""
    engine = sampler.engine._llm
    monkeypatch.setattr(engine, "collective_rpc", lambda method, args: list(args[0]))
    monkeypatch.setattr(engine, "apply_model", lambda function: None)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def small(request):
    """An engine for several tests, which must be before those that start their own."""
    model, tokenizer = of(request.param)
    return model, tokenizer, started(model, tokenizer, temperature=0.7)


def test_the_engine_follows_the_weights(small):
    model, tokenizer, sampler = small
    for _ in range(3):
        rollout, _ = sampler.sample(prompts_of(tokenizer, TEXTS), 4)
        assert difference(model, rollout, 0.7) < 2e-5
        change(model, 0.01)
        assert difference(model, rollout, 0.7) > 1e-2


def test_equal_states_give_equal_samples(small):
    _, tokenizer, sampler = small
    rollouts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        rollouts.append(sampler.sample(prompts_of(tokenizer, TEXTS), 4)[0].token_ids)
    assert torch.equal(rollouts[0], rollouts[1])
    assert not torch.equal(rollouts[0], rollouts[2])
    assert len({tuple(row) for row in rollouts[0].tolist()}) > len(TEXTS)  # within groups, too


def test_greedy_is_that_of_transformers(small):
    model, tokenizer, sampler = small
    state = torch.get_rng_state()
    _, texts = sampler.greedy(prompts_of(tokenizer, TEXTS))
    assert torch.equal(state, torch.get_rng_state())
    plain = Sampler(model, tokenizer, config_of(sampler="transformers"))
    assert plain.greedy(prompts_of(tokenizer, TEXTS))[1] == texts


def test_an_engine_without_the_new_weights_stops_the_run(small, monkeypatch):
    model, tokenizer, sampler = small
    sampler.sample(prompts_of(tokenizer, TEXTS), 4)
    keep_weights(sampler, monkeypatch)
    sampler.sample(prompts_of(tokenizer, TEXTS), 4)  # the same weights
    change(model, 0.003)
    with pytest.raises(RuntimeError, match=STALE):
        sampler.sample(prompts_of(tokenizer, TEXTS), 4)
    with pytest.raises(RuntimeError, match=STALE):
        sampler.greedy(prompts_of(tokenizer, TEXTS))


def test_a_tied_head_must_be_packed_again(small, monkeypatch):
    model, tokenizer, sampler = small
    change(model, 0.003)
    monkeypatch.setattr("fastrl.train.vllm_weights._pack_head", lambda model: None)
    if model.config.tie_word_embeddings:
        with pytest.raises(RuntimeError, match=STALE):
            sampler.sample(prompts_of(tokenizer, TEXTS), 4)
        monkeypatch.undo()
    sampler.sample(prompts_of(tokenizer, TEXTS), 4)


def test_bfloat16_and_its_stale_engine(monkeypatch):
    model, tokenizer = of("qwen3", torch.bfloat16)
    options = {"weights": "bfloat16", "precision": "bfloat16", "tokens_per_generation": 1}
    sampler = started(model, tokenizer, **options)
    states = torch.randn(2, model.config.hidden_size).bfloat16()
    for _ in range(2):
        rollout, _ = sampler.sample(prompts_of(tokenizer, TEXTS), 4)
        assert difference(model, rollout) < 0.3
        (logits,) = sampler.engine._llm.apply_model(lambda engine: engine.compute_logits(states))
        exact = states.double() @ model.lm_head.weight.detach().double().T
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)  # not rounded
        change(model, 0.05)
    keep_weights(sampler, monkeypatch)
    with pytest.raises(RuntimeError, match=r"bfloat16 .* at most 0\.02, got"):
        sampler.sample(prompts_of(tokenizer, TEXTS), 4)


def test_adapters_are_merged():
    peft = pytest.importorskip("peft")
    model, tokenizer = of("llama")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    wrapped = peft.get_peft_model(model, lora).eval()
    sampler = started(wrapped, tokenizer)
    for _ in range(2):
        change(wrapped, 0.1)
        rollout, _ = sampler.sample(prompts_of(tokenizer, TEXTS), 4)
        assert difference(wrapped, rollout) < 2e-5
        with wrapped.disable_adapter():
            assert difference(wrapped, rollout) > 0.1


def test_completions_end_where_they_must():
    model, tokenizer = of("llama")
    options = {"max_new_tokens": 40, "stop": ("q", "z", "ab", "7X")}
    sampler = started(model, tokenizer, **options)
    rollout, texts = sampler.sample(prompts_of(tokenizer, TEXTS), 40)
    endings = Endings(model, tokenizer, config_of(**options))
    reasons = set()
    rows = zip(rollout.token_ids, rollout.mask, rollout.truncated, texts, strict=True)
    for ids, mask, truncated, text in rows:
        ids = ids[mask]
        assert endings.length(ids) == (len(ids), not truncated)
        assert len(ids) == 40 or not truncated
        written = ids[:-1] if int(ids[-1]) in endings.token_ids else ids
        assert tokenizer.decode(written) == text
        reasons.add("length" if truncated else tokenizer.convert_ids_to_tokens(int(ids[-1])))
    assert {"<eos>", "q", "z", "length"} <= reasons
    with torch.no_grad():  # last, since NaN stays in the cache of the engine
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite while sampling"):
        sampler.sample(prompts_of(tokenizer, TEXTS), 2)


def test_on_a_cpu_it_does_not_tell_what_it_keeps():
    with pytest.raises(ValueError, match=r"top_p, top_k and min_p .* with vLLM on a CPU"):
        started(*of("llama"), top_p=0.9, top_k=20)
