"""The tokens of model and tokenizer: ends, padding, and rows that belong to no token."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.train.config import GrpoConfig
from fastrl.train.endings import Endings
from fastrl.train.loading import character_tokenizer, load
from fastrl.train.prompts import Prompt, encode
from fastrl.train.remarks import ending_remark, evaluation_remark, remarks
from fastrl.train.sampling import Sampler
from fastrl.train.warm_start import demonstrated
from tests.train.packed import make_model, padded_logprobs, plain, prompts_of
from tests.train.runs import run

EXTRA = ["<|im_end|>", "<think>"]  # 98 and 99


def tokenizer_of(extra=EXTRA, **special):
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
    for name, value in special.items():
        setattr(tokenizer, name, value)
    return tokenizer


def save(directory, tokenizer, *, rows=100, ends=1, **generation):
    """A model of random weights; ``generation`` None: it has no generation_config.json."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": rows}
    config = transformers.LlamaConfig(**sizes, eos_token_id=ends, bos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(**generation)
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    if not generation:
        Path(directory, "generation_config.json").unlink()
    return str(directory)


NAMED = [
    ({}, {"eos_token_id": [98, 1]}, "<pad>", [1, 98]),
    ({"eos_token": "<|im_end|>"}, {"eos_token_id": 1}, "<pad>", [1, 98]),
    ({"eos_token": "<|im_end|>"}, {"eos_token_id": None, "pad_token_id": 0}, "<pad>", [98]),
    ({"pad_token": "<eos>"}, {"eos_token_id": 1}, "<eos>", [1]),
    ({"pad_token": None}, {"eos_token_id": [98, 1]}, "<eos>", [1, 98]),
    ({"pad_token": None, "eos_token": None}, {"eos_token_id": 98}, "<|im_end|>", [98]),
    ({"pad_token": None, "eos_token": None}, {}, "<eos>", [1]),
    ({"eos_token": None}, {"eos_token_id": None, "pad_token_id": 0}, "<pad>", [1]),
]


@pytest.mark.parametrize(("special", "generation", "padding", "ends"), NAMED)
def test_all_ends_of_model_and_tokenizer_end_a_completion(
    tmp_path, special, generation, padding, ends
):
    path = save(tmp_path, tokenizer_of(**special), **generation)
    model, tokenizer = load(path, torch.device("cpu"))
    assert (tokenizer.pad_token, model.generation_config.eos_token_id) == (padding, ends)
    sampler = Sampler(model, tokenizer, GrpoConfig(max_new_tokens=60, stop=("7", "x y")))
    names = {1: "'<eos>'", 98: "'<|im_end|>'", 9: "'7'"}
    assert str(sampler.endings) == ", ".join(names[i] for i in sorted([*ends, 9])) + ", 'x y'"
    rollout, _ = sampler.sample(prompts_of(tokenizer, ("1", "22")), 30)
    last = rollout.token_ids.gather(1, rollout.mask.sum(1, keepdim=True) - 1)[:, 0]
    assert {9, *ends} <= set(last[~rollout.truncated].tolist())
    inner = rollout.mask.clone().scatter_(1, rollout.mask.sum(1, keepdim=True) - 1, False)
    assert not (torch.isin(rollout.token_ids, torch.tensor([9, *ends])) & inner).any()


@pytest.mark.parametrize(
    ("special", "changes", "message"),
    [
        ({}, {"prompt": "1 <think>"}, "the prompt '1 <think>', got '<think>' .token 99. and 99 r"),
        ({"pad_token": "<think>"}, {}, "padding, got '<think>' .token 99."),
        ({"eos_token": "<think>"}, {}, "the ends of a completion, got '<think>'"),
        ({}, {"stop": ("<think>",)}, "the ends of a completion, got '<think>'"),
        ({}, {"eos_token_id": 500}, "the ends of a completion, got None .token 500."),
    ],
)
def test_tokens_without_a_row_are_refused(small, special, changes, message):
    ends = {"eos_token_id": changes.pop("eos_token_id", 1)}
    prompt = changes.pop("prompt", "1")
    small |= {"model": save("m", tokenizer_of(**special), rows=99, **ends), "group_size": 4}
    Path(small["prompts"][0]).write_text(json.dumps({"prompt": prompt}))
    with pytest.raises(ValueError, match=f"^model must have a row .* every token of {message}"):
        run("grpo", small, **changes)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}], ids=str)
def test_rows_that_only_pad_the_head_are_never_sampled(settings):
    """They are likely here. The log-probabilities are those without them."""
    model, _ = make_model("llama")
    model.resize_token_embeddings(130, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[98:] = 3 * torch.randn(32, model.lm_head.weight.shape[1])
    tokenizer, config = character_tokenizer(), GrpoConfig(max_new_tokens=6, **settings)
    sampler, prompts = Sampler(model, tokenizer, config), prompts_of(tokenizer, ("1", "22"))
    greedy, (rollout, _) = sampler.greedy(prompts)[0], sampler.sample(prompts, 20)
    assert max(greedy.token_ids.max(), rollout.token_ids.max()) < 98
    model.resize_token_embeddings(98)
    expected = padded_logprobs(plain(model), rollout, 1.0)
    if rollout.kept is None:
        torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)
    else:
        assert rollout.kept.token_ids.max() < 98
        assert (rollout.logprobs >= expected - 1e-5).all()


def test_rewards_read_special_tokens_but_no_end():
    tokenizer = tokenizer_of(eos_token="<|im_end|>")
    model, _ = make_model("llama")
    model.resize_token_embeddings(100)
    model.generation_config.eos_token_id = [1, 98]
    sampler = Sampler(model, tokenizer, GrpoConfig(max_new_tokens=6, stop=("ab", "7")))
    for text, ended, expected in (
        ("<think>1<|im_end|>", True, "<think>1"),
        ("<think>1<eos>", True, "<think>1"),
        ("1<|im_end|>2<eos>", True, "1<|im_end|>2"),  # two turns, from a user's rollout
        ("1<think>", False, "1<think>"),
        ("1<pad>2<pad>", False, "1<pad>2<pad>"),  # an ordinary token for some tokenizers
        ("1ab", True, "1ab"),  # a text is not a token
        ("17", True, "1"),
        ("<eos>", True, ""),
    ):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        completion = sampler.engine.complete([[5]], greedy=True)[0]
        assert sampler.endings.text(completion._replace(token_ids=ids, ended=ended)) == expected


def test_the_last_checkpoint_of_a_run_is_a_model(small, base):
    small |= {"group_size": 4, "steps": 1}
    run("grpo", small, model=str(base))
    run("grpo", small, model=str(base), out="lora", lora_rank=2)
    again = run("grpo", small, model=small["out"], out="again").directory
    settings = json.loads((again / "config.json").read_text())
    assert settings["model"] == str(Path(small["out"], "checkpoints", "step-000001"))
    assert settings["learning_rate"] == 1e-6
    adapted = small | {"model": small["out"], "out": "adapted", "lora_rank": 2}
    run("grpo", adapted)
    run("grpo", small, steps=4, save_every=1, resume=True, model=str(base))  # deletes the first one
    assert run("grpo", adapted, model=settings["model"], steps=2, resume=True).step == 2
    with pytest.raises(ValueError, match=r"got 'lora/checkpoints/step-000001': it is an adapter:"):
        run("grpo", small, model="lora", out="third")


def test_a_demonstration_ends_where_the_chat_template_ends_an_answer():
    tokenizer = tokenizer_of()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    records = [{"prompt": p, "answer": "3"} for p in ("1", [{"role": "user", "content": "2"}])]
    model, _ = make_model("llama")
    model.resize_token_embeddings(100)
    for ends, stop, said, last in (
        ([1, 98], (), 0, 98),
        ([1], (), 1, 1),
        ([1], ("<|im_end|>",), 0, 98),
        ([1], ("_end|>",), 0, 1),
    ):
        model.generation_config.eos_token_id = ends
        config = GrpoConfig(warm_start_steps=1, stop=stop)
        prompts, endings = encode(records, tokenizer, config), Endings(model, tokenizer, config)
        lines = list(ending_remark(prompts, tokenizer, endings))
        assert [line.split(", which")[0].split("with ")[1] for line in lines] == said * [
            "'<|im_end|>'"
        ]
        target = demonstrated(tokenizer, prompts, endings.token_ids, torch.device("cpu"))
        assert target.token_ids[:, -1].tolist() == [1, last]


def test_what_is_said_about_prompts():
    tokenizer = tokenizer_of(bos_token="<think>")
    records = ([{"prompt": text} for text in ("1", "22", "333")], [{"prompt": "4444"}] * 2)
    config = GrpoConfig(
        max_prompt_tokens=2, prompts_per_step=1, group_size=2, eval_every=1, minibatches=1
    )
    train = encode(records[0], tokenizer, config)
    assert [prompt.text for prompt in train] == ["1", "22"]
    with pytest.raises(ValueError, match=r"^max_prompt_tokens must be at least 4, .* got 2"):
        encode(records[1], tokenizer, config)
    begun = Prompt({"prompt": "<think>1"}, [99, 99, 3])
    lines = list(remarks(records, train, [begun, train[0]], tokenizer, config))
    assert [line.split(" prompts")[0] for line in lines] == ["1 of 3", "1 of 2 held-out", "1 of 4"]
    assert "begin with two '<think>'" in lines[2]
    assert list(evaluation_remark(train[:1], config)) == []
    (line,) = evaluation_remark(train, config)
    assert "completes 2 held-out prompts, and the 1 steps between two sample 2 completions" in line


def test_the_learning_rate_depends_on_the_model():
    for settings, rate in (
        ({}, 2e-4),
        ({"model": "x"}, 1e-6),
        ({"model": "x", "lora_rank": 4}, 1e-5),
        ({"lora_rank": 4}, 2e-4),
        ({"model": "x", "learning_rate": 1e-3}, 1e-3),
    ):
        config = GrpoConfig(**settings)
        assert config.peak_learning_rate == config.to_json()["learning_rate"] == rate
        assert replace(GrpoConfig(), **settings).peak_learning_rate == rate
