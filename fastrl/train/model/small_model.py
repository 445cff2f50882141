"""A new model of half a million parameters, and a tokenizer of characters for it."""

import string

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512  # tokens of the longest sequence; it sizes no weight
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per printable ASCII character, a padding and an end token."""
    tokens = ["<pad>", "<eos>", *CHARACTERS]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def small_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new Llama of half a million parameters, initialized from torch's generator."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
