"""The vLLM engine: its calls, on a stand-in for the package; the weights that it is handed."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.train.config import GrpoConfig
from fastrl.train.data.prompts import encode
from fastrl.train.model.loading import load
from fastrl.train.sampling import make_sampler
from fastrl.train.sampling.plain_weights import plain_weights
from fastrl.train.sampling.vllm_sampler import cache_bytes_per_token

TEXTS = ("7 + 5 =", "1")


class StandIn:
    """What `LLM` of vLLM 0.11 does, as far as it is called, with the model's own forward pass.

    It checks that it is awake, and that its weights are the ones it was given since.
    """

    def __init__(self, **options):
        torch.manual_seed(options["seed"])  # as vLLM does, for the whole process
        self.options, self.calls, self.weights, self.reason = options, [], {}, None
        self.awake = {"weights", "kv_cache"}
        self.architecture = transformers.AutoConfig.from_pretrained(options["model"])
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(options["model"])

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.awake.clear()
        self.weights = {}

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")
        self.awake |= set(tags)

    def apply_model(self, function):
        assert "weights" in self.awake
        self.calls.append("apply")
        return [function(self)]

    def load_weights(self, weights):
        self.weights = {name: weight.clone() for name, weight in weights}
        return set(self.weights)

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def generate(self, prompts, parameters, use_tqdm):
        assert self.awake == {"weights", "kv_cache"}
        self.calls.append("generate")
        self.parameters = parameters
        model = transformers.AutoModelForCausalLM.from_config(self.architecture)
        model.load_state_dict(self.weights, strict=True)
        return [
            SimpleNamespace(outputs=[self.complete(model, prompt, one, i) for i in range(one.n)])
            for prompt, one in zip(prompts, parameters, strict=True)
        ]

    def complete(self, model, prompt, parameters, index):
        ids, completed, logprobs = list(prompt["prompt_token_ids"]), [], []
        random = torch.Generator().manual_seed((parameters.seed or 0) + index)
        reason = "length"
        while len(completed) < parameters.max_tokens:
            with torch.no_grad():
                logits = model(torch.tensor([ids + completed])).logits[0, -1].float()
            each = (logits / (parameters.temperature or 1.0)).log_softmax(-1)
            token_id = int(each.argmax())
            if parameters.temperature:
                token_id = int(torch.multinomial(each.exp(), 1, generator=random))
            completed.append(token_id)
            others = {(token_id + 1) % len(each): SimpleNamespace(logprob=0.0)}
            logprobs.append({**others, token_id: SimpleNamespace(logprob=float(each[token_id]))})
            text = self.tokenizer.decode(completed)
            if token_id in parameters.stop_token_ids or any(s in text for s in parameters.stop):
                reason = "stop"
                break
        return SimpleNamespace(
            token_ids=tuple(completed), logprobs=logprobs, finish_reason=self.reason or reason
        )


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in as the installed package, and models that say they are on a GPU."""
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.SamplingParams = lambda **options: SimpleNamespace(**options)
    module.LLM = lambda **options: setattr(module, "llm", StandIn(**options)) or module.llm
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(
        "fastrl.train.sampling.vllm_sampler.on_gpu", lambda model: True, raising=True
    )
    return module


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(3)
    model, tokenizer = load(None, "cpu")
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] += 0.4 * torch.randn(128)
        model.lm_head.weight.mul_(20)
    return model, tokenizer


def prompts_of(tokenizer):
    records = [{"prompt": text} for text in TEXTS]
    return encode(records, tokenizer, chat_template=False, max_tokens=64)


def config_of(**options):
    return GrpoConfig(
        **{"sampler": "vllm", "max_new_tokens": 5, "max_prompt_tokens": 40, **options}
    )


def test_the_engine_is_started_with_the_architecture_and_sleeps(vllm, small):
    state = torch.get_rng_state()
    make_sampler(*small, config_of(tokens_per_generation=1000, precision="bfloat16"))
    assert torch.equal(state, torch.get_rng_state())
    options = vllm.llm.options
    assert vllm.llm.calls == ["sleep 2"]
    assert options["enable_sleep_mode"] is True
    assert options["logprobs_mode"] == "processed_logprobs"
    assert options["load_format"] == "dummy"
    assert options["dtype"] == "bfloat16"
    assert options["max_model_len"] == 45
    assert options["kv_cache_memory_bytes"] == 1000 * 2 * 2 * 4 * 32 * 2
    assert vllm.llm.architecture.vocab_size == small[0].config.vocab_size


def test_the_cache_of_a_token_has_keys_and_values_of_all_layers(small):
    grouped = transformers.Qwen3Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
    )
    assert cache_bytes_per_token(grouped, 2) == 2 * 3 * 2 * 16 * 2
    assert cache_bytes_per_token(small[0].config, 4) == 2 * 2 * 128 * 4


def test_a_call_wakes_hands_over_the_weights_generates_and_sleeps(vllm, small):
    model, tokenizer = small
    sampler = make_sampler(model, tokenizer, config_of(temperature=0.7))
    torch.manual_seed(0)
    rollout, texts = sampler.sample(prompts_of(tokenizer), 30)
    cycle = ["wake weights", "apply", "wake kv_cache", "reset", "generate", "sleep 2"]
    assert vllm.llm.calls == ["sleep 2", *cycle]
    sampler.greedy(prompts_of(tokenizer))
    assert vllm.llm.calls == ["sleep 2", *cycle, *cycle]

    assert rollout.prompt_of.tolist() == [k for k in range(2) for _ in range(30)]
    assert 0 < rollout.truncated.sum() < 60
    rows = zip(rollout.token_ids, rollout.mask, rollout.truncated, texts, strict=True)
    for ids, mask, truncated, text in rows:
        n = int(mask.sum())
        assert truncated == (ids[n - 1] != tokenizer.eos_token_id)
        assert (ids[n:] == tokenizer.pad_token_id).all()
        assert tokenizer.decode(ids[:n], skip_special_tokens=True) == text
    expected = torch.zeros_like(rollout.logprobs)
    for row, k in enumerate(rollout.prompt_of.tolist()):
        n, prompt = int(rollout.mask[row].sum()), rollout.prompts[k]
        ids = rollout.token_ids[row, :n]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids.tolist()])).logits[0, len(prompt) - 1 : -1]
        expected[row, :n] = (logits / 0.7).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)
    tokens = int(rollout.mask.sum()) + 30 * sum(map(len, rollout.prompts))
    assert make_count(sampler, tokenizer) == (tokens, tokens)


def make_count(sampler, tokenizer):
    torch.manual_seed(0)
    sampler.sample(prompts_of(tokenizer), 30)
    return tuple(sampler.tokens)


def test_samples_come_from_the_weights_of_now(vllm, small):
    """Also without `update`: the engine has no others."""
    model, tokenizer = load(None, "cpu")
    sampler = make_sampler(model, tokenizer, config_of())
    before, _ = sampler.greedy(prompts_of(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert sampler.greedy(prompts_of(tokenizer))[0] != before


def test_the_parameters_of_a_request(vllm, small):
    model, tokenizer = small
    sampler = make_sampler(
        model, tokenizer, config_of(temperature=0.7, end_tokens=("7",), stop_strings=("ab",))
    )
    torch.manual_seed(1)
    sampler.sample(prompts_of(tokenizer), 3)
    first = vllm.llm.parameters
    assert first[0].seed != first[1].seed
    for one in first:
        assert (one.n, one.temperature, one.max_tokens, one.logprobs) == (3, 0.7, 5, 0)
        assert (one.top_p, one.top_k, one.min_p) == (1.0, 0, 0.0)
        assert one.stop_token_ids == sorted([1, tokenizer.get_vocab()["7"]])
        assert (one.ignore_eos, one.stop, one.detokenize) == (True, ["ab"], True)
    torch.manual_seed(1)
    sampler.sample(prompts_of(tokenizer), 3)
    assert [one.seed for one in vllm.llm.parameters] == [one.seed for one in first]
    state = torch.get_rng_state()
    sampler.greedy(prompts_of(tokenizer))
    assert torch.equal(state, torch.get_rng_state())
    assert {(one.temperature, one.n) for one in vllm.llm.parameters} == {(0.0, 1)}


def test_an_error_leaves_the_engine_asleep(vllm, small, monkeypatch):
    model, tokenizer = small
    sampler = make_sampler(model, tokenizer, config_of())
    vllm.llm.reason = "abort"
    with pytest.raises(RuntimeError, match="did not finish a completion: abort"):
        sampler.sample(prompts_of(tokenizer), 2)
    vllm.llm.reason = None
    monkeypatch.setattr(vllm.llm, "load_weights", lambda weights: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler.sample(prompts_of(tokenizer), 2)
    assert vllm.llm.calls[-1] == "sleep 2"


def test_what_vllm_cannot_do_is_refused_at_the_start(vllm, small, monkeypatch):
    with pytest.raises(ValueError, match=r"temperature must be at least 0\.01"):
        make_sampler(*small, config_of(temperature=0.001))
    monkeypatch.setattr("fastrl.train.sampling.vllm_sampler.on_gpu", lambda model: False)
    with pytest.raises(ValueError, match="needs a model on a GPU, got cpu"):
        make_sampler(*small, config_of())
    monkeypatch.delitem(sys.modules, "vllm")
    with pytest.raises(ValueError, match=r"pip install .*vllm"):
        make_sampler(*small, config_of())


# ---------------------------------------------------------------- the weights


def adapted(**options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, _ = load(None, "cpu")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)
    wrapped = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return wrapped


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_merged_weights_are_those_of_a_plain_model(options):
    wrapped = adapted(**options)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    plain, _ = load(None, "cpu")
    with torch.no_grad():
        for tensor in plain.parameters():
            tensor.zero_()
    plain.load_state_dict(dict(plain_weights(wrapped)), strict=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, wrapped(ids).logits, rtol=1e-4, atol=1e-4)
        with wrapped.disable_adapter():
            assert (plain(ids).logits - wrapped(ids).logits).abs().max() > 0.1
    after = wrapped.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_merging_does_not_round_the_frozen_weights():
    """A thousand merges in bfloat16 would drift; one must not change a bit, used or not."""
    wrapped = adapted().to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    for name, _ in plain_weights(wrapped):
        if "layers.1" in name:
            break  # left in the middle
    after = wrapped.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(getattr(module, "merged", False) for module in wrapped.modules())


def test_weights_of_a_plain_model_are_its_own(small):
    weights = dict(plain_weights(small[0]))
    assert weights.keys() == dict(small[0].named_parameters()).keys()
    assert all(not weight.requires_grad for weight in weights.values())
