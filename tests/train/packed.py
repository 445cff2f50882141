"""Small models of five architectures; a step's loss from packed rows, and by plain formulas."""

import copy

import torch
import transformers

from fastrl import Objective, logits_policy_loss
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.packing import normalizer
from fastrl.train.policy import batches, policy_loss, policy_outputs
from fastrl.train.prompts import encode
from fastrl.train.recomputation import save_memory
from fastrl.train.rollout import Rollout
from fastrl.train.sampling import Sampler

SMALL = {
    "vocab_size": len(character_tokenizer()),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "bos_token_id": None,
}
GEMMA3 = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
GPT2 = {"vocab_size": SMALL["vocab_size"], "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2 |= {"n_positions": 4096, "bos_token_id": 1, "eos_token_id": 1}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=16, **GEMMA3),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=7),
    "gpt2": transformers.GPT2Config(**GPT2, **DROPOUT),
}
TEXTS = ("7 + 5 =", "nine minus three =", "1")
LENGTHS = (1, 9, 30, 2, 17, 5, 41, 8)
PROMPTS = (13, 4, 22)
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.5, 0.7, -0.2, 1.1])


def make_model(kind="qwen3", **changes):
    """A model whose policy is far from uniform, set up for training, and the settings."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=0)
    own = {"loss": "logits"} if kind == "gpt2" else {}
    config = GrpoConfig(**{"tokens_per_micro_batch": 100_000, **own, **changes})
    save_memory(model, config)
    return model, config


def sharp(kind="llama", **changes):
    """Such a model, still sharper, and its tokenizer."""
    model, _ = make_model(kind, **changes)
    with torch.no_grad():
        model.lm_head.weight.mul_(1 if model.config.tie_word_embeddings else 5)
    return model, character_tokenizer()


def sample(model, tokenizer, group_size=4, texts=TEXTS, **options):
    """A rollout of completions of six tokens, or of other options, and their texts."""
    config = GrpoConfig(**{"max_new_tokens": 6, **options})
    return Sampler(model, tokenizer, config).sample(prompts_of(tokenizer, texts), group_size)


def save_reward_model(directory):
    """A reward model with random weights, which is saved; it has a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    own = {"num_labels": 1, "pad_token_id": 0, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(**{**SMALL, **own})
    model = transformers.LlamaForSequenceClassification(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    return model


def save_teacher(directory, kind="qwen3", rows=SMALL["vocab_size"], tokenizer=None, **changes):
    """A random model of another width and architecture than the small new one's, far from uniform.

    Only its first rows are of tokens: those behind would be likely.
    """
    torch.manual_seed(5)
    tokens = SMALL["vocab_size"]
    config = copy.deepcopy(CONFIGS[kind])
    config.vocab_size = rows
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        model.get_output_embeddings().weight[:tokens] *= 3
        model.get_output_embeddings().weight[tokens:] *= 9
    for part in (model, tokenizer or character_tokenizer()):
        part.save_pretrained(directory)
    return str(directory)


def prompts_of(tokenizer, texts):
    return encode([{"prompt": text} for text in texts], tokenizer, GrpoConfig())


def make_rollout(lengths=LENGTHS, prompts=PROMPTS, *, holes=False):
    """Completions of some prompts in turn; holes are tokens that a tool wrote."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(lengths)
    shape = (len(lengths), int(lengths.max()))
    ids = torch.randint(61, shape, generator=generator)
    mask = torch.arange(shape[1]) < lengths[:, None]
    return Rollout(
        prompts=[torch.randint(61, (n,), generator=generator).tolist() for n in prompts],
        prompt_of=torch.arange(len(lengths)) % len(prompts),
        token_ids=ids,
        mask=mask & (ids % 3 != 0) if holes else mask,
        logprobs=-3 + torch.randn(shape, generator=generator),
        truncated=lengths > 20,
    )


def objective_of(preset):
    """A loss with all its parts, which clips some ratios."""
    return Objective.preset(preset, kl_coef=0.1, entropy_coef=0.01, clip_high=9.0)


def learn(model, config, rollout, preset="grpo", *, advantages=ADVANTAGES, teacher=None, seen=None):
    """Log-probabilities ``[N, T]`` and gradients of the loss, from micro-batches.

    Args:
        model: As `make_model` makes it.
        config: Its settings.
        rollout: What is learned from; with a teacher, without an old policy and a reference.
        preset: Of the objective; with a teacher the configuration has it.
        advantages: ``[N]``, or None with a teacher alone.
        teacher: A `TeacherModel`, or None.
        seen: A list, which gets the result of each micro-batch, and the micro-batch.
    """
    model.zero_grad()
    objective = objective_of(preset) if teacher is None else config.policy_objective()
    found = torch.zeros(rollout.mask.shape)
    for batch in batches(rollout, torch.arange(len(found)), rollout.mask, config):
        old = batch.take(rollout.logprobs)
        given = {"old_logprobs": old, "ref_logprobs": old + 0.5}
        if teacher is not None:
            given = {"old_logprobs": None, "teacher": teacher(batch)}
        result = policy_loss(
            policy_outputs(model, batch, config),
            batch,
            config,
            None if advantages is None else advantages[batch.rows],
            **given,
            objective=objective,
            normalizer=normalizer(rollout.mask, objective.aggregation),
        )
        result.loss.backward()
        batch.put(result.logprobs, into=found)
        if seen is not None:
            seen.append((result, batch))
    return [found, *(p.grad.clone() for p in model.parameters())]


def plain(model):
    """The same model, as transformers makes it."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    made.load_state_dict(model.state_dict())
    return made


def padded(model, rollout):
    """Logits, float64, and states that predict the tokens, from padded sequences."""
    longest = max(map(len, rollout.prompts))
    prompts = [rollout.prompts[i] for i in rollout.prompt_of.tolist()]
    left = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    real = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    attention = torch.cat([real, torch.ones_like(rollout.token_ids)], 1)
    out = model(
        input_ids=torch.cat([left, rollout.token_ids], 1),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        output_hidden_states=True,
    )
    before = slice(longest - 1, -1)
    return out.logits[:, before].double(), out.hidden_states[-1][:, before]


@torch.no_grad()
def padded_logprobs(model, rollout, temperature=1.0):
    """Log-probabilities of the tokens from padded sequences, 0 where masked."""
    logits, _ = padded(model, rollout)
    logprobs = (logits / temperature).log_softmax(-1).gather(-1, rollout.token_ids[..., None])
    return logprobs[..., 0].where(rollout.mask, 0.0).float()


def expected(model, rollout, preset="grpo"):
    """What `learn` must find: the reference's loss of padded sequences on a plain model."""
    model, old = plain(model), rollout.logprobs.double()
    logits, _ = padded(model, rollout)
    advantages = ADVANTAGES[: len(old)].double()
    given = {"old_logprobs": old, "ref_logprobs": old + 0.5, "objective": objective_of(preset)}
    tokens = (rollout.token_ids, advantages, rollout.mask)
    logits_policy_loss(logits, *tokens, **given, backend="reference").loss.backward()
    return [padded_logprobs(model, rollout), *(p.grad for p in model.parameters())]


def assert_equal(one, other, tolerance=1e-5):
    """Compare log-probabilities, and gradients relative to the largest of them."""
    scale = max(float(grad.abs().max()) for grad in one[1:])
    assert scale > 1e-3
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=5 * tolerance)
    for a, b in zip(one[1:], other[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)
