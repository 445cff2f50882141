"""Tiny models and tokenizers to sample from, and the log-probabilities of what was sampled."""

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.prompts import encode
from fastrl.train.sampling import Sampler

TEXTS = ("7 + 5 =", "nine minus three =", "1")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
KINDS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def tiny(kind="llama"):
    """A model of this kind with random weights, whose policy is sharper than uniform."""
    torch.manual_seed(3)
    tokenizer = character_tokenizer()
    build, own = KINDS[kind]
    model = transformers.AutoModelForCausalLM.from_config(
        build(vocab_size=len(tokenizer), **{**TINY, **own})
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
        model.lm_head.weight.mul_(1 if model.config.tie_word_embeddings else 5)
    model.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=0)
    return model, tokenizer


def tiny_reward_model(directory):
    """A reward model with random weights, which is saved; it has a chat template."""
    torch.manual_seed(3)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_labels=1, **TINY)
    model = transformers.LlamaForSequenceClassification(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    return model


def prompts_of(tokenizer, texts=TEXTS):
    records = [{"prompt": text} for text in texts]
    return encode(records, tokenizer, GrpoConfig())


def sample(model, tokenizer, group_size=4, texts=TEXTS, **options):
    config = GrpoConfig(**{"max_new_tokens": 6, **options})
    return Sampler(model, tokenizer, config).sample(prompts_of(tokenizer, texts), group_size)


def model_logprobs(model, rollout, temperature=1.0):
    """Log-probabilities of the sampled tokens from one plain forward pass per completion."""
    model.eval()
    logprobs = torch.zeros_like(rollout.logprobs)
    for row, prompt in enumerate(rollout.prompt_of.tolist()):
        n, ids = int(rollout.mask[row].sum()), rollout.prompts[prompt]
        completion = rollout.token_ids[row, :n]
        with torch.no_grad():
            logits = model(torch.tensor([ids + completion.tolist()])).logits[0]
        each = (logits[len(ids) - 1 : -1].float() / temperature).log_softmax(-1)
        logprobs[row, :n] = each.gather(1, completion[:, None])[:, 0]
    return logprobs


def pieces_tokenizer(pieces, **special):
    """A tokenizer of longer pieces, so that tokens run over the end of a stop string."""
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *pieces])}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = Split(" ", "removed")
    names = {"pad_token": "<pad>", "eos_token": "<eos>", **special}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.backend_tokenizer.decoder = Fuse()
    return wrapped


# "abcdef" must be tokenizable for the stop strings of transformers.
PIECES = ["a", "b", "sto", "p", "st", "op", "opera", "x", "abcdef"]


def pieces_model(tokenizer, pad):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **{**TINY, "pad_token_id": pad})
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=pad)
    return model
