"""A reward model as a reward: what it reads, that batches do not matter, what is refused."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

from fastrl.train.data.scored_text import encode_scored
from fastrl.train.model.sequence_scorer import PADDING, load_scorer, score_sequences
from fastrl.train.model.small_model import character_tokenizer
from fastrl.train.rewards.reward_model import load_reward_model
from tests.support.pair_runs import pair_settings, run_pairs
from tests.support.train_runs import LOOPS, rows, run

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
PROMPTS = ["1 + 1 =", "1 plus seven =", "2:", "12345678901 + 1 ="]
COMPLETIONS = ["2", "8 and more", "", "<eos><pad>"]


def save(directory, model, tokenizer):
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def small_reward_model(tmp_path, labels=1, **changes):
    """The directory of a new sequence classification model."""
    torch.manual_seed(3)
    scorer = load_scorer(None, "cpu", setting="model")
    config = scorer.model.config
    config.num_labels = labels
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.LlamaForSequenceClassification(config)
    return save(tmp_path / "reward-model", model, scorer.tokenizer)


def alone(path, prompt, completion):
    """What transformers computes of one sequence, without padding."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer(prompt)["input_ids"]
    ids = ids + tokenizer(completion, split_special_tokens=True)["input_ids"]
    with torch.no_grad():
        return float(model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits)


@pytest.mark.parametrize("tokens", [1, 30, 16384])
def test_rewards_are_those_of_each_sequence_alone(tmp_path, tokens):
    path = small_reward_model(tmp_path)
    reward = load_reward_model(path, "cpu", tokens_per_batch=tokens)
    rewards = reward(PROMPTS, COMPLETIONS, [{}] * 4)
    assert all(type(value) is float for value in rewards)
    expected = [alone(path, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert rewards == pytest.approx(expected, abs=1e-6)
    assert len(set(rewards)) == 4
    assert reward(PROMPTS, COMPLETIONS, [{}] * 4) == rewards
    assert reward([], [], []) == []


def test_the_end_token_is_what_is_scored(tmp_path):
    scorer = load_scorer(small_reward_model(tmp_path), "cpu", setting="model")
    ids = encode_scored(scorer.tokenizer, ["1 + 1 ="], ["2"])[0]
    assert ids[-1] == scorer.tokenizer.eos_token_id
    with torch.no_grad():
        states = scorer.model.model(torch.tensor([ids])).last_hidden_state
        at_end = scorer.model.score(states[0, -1])
        scored = score_sequences(scorer.model, [ids, ids + ids])
    assert float(scored[0]) == pytest.approx(float(at_end), abs=1e-6)


def test_special_tokens_in_a_completion_are_text():
    tokenizer = character_tokenizer()
    [ids] = encode_scored(tokenizer, ["1<eos>"], ["<eos><pad>"])
    ends = [i for i, token in enumerate(ids) if token == tokenizer.eos_token_id]
    assert ends == [1, len(ids) - 1]
    assert tokenizer.pad_token_id not in ids


@pytest.mark.parametrize("padding", ["end", "none"])
def test_a_new_head_does_not_take_the_end_for_padding(tmp_path, base, padding):
    config = json.loads((base / "config.json").read_text())
    config["pad_token_id"] = {"end": config["eos_token_id"], "none": None}[padding]
    (base / "config.json").write_text(json.dumps(config))
    tokenizer = character_tokenizer()
    tokenizer.pad_token = {"end": tokenizer.eos_token, "none": None}[padding]
    tokenizer.save_pretrained(base)
    scorer = load_scorer(str(base), "cpu", setting="model", new_head=True)
    assert scorer.new_head
    assert scorer.tokenizer.pad_token == PADDING
    path = save(tmp_path / "reward-model", scorer.model, scorer.tokenizer)
    rewards = load_reward_model(path, "cpu")(PROMPTS, COMPLETIONS, [{}] * 4)
    expected = [alone(path, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert rewards == pytest.approx(expected, abs=1e-6)
    ids = encode_scored(scorer.tokenizer, ["1"], ["2"])[0]
    with torch.no_grad():
        with_end, without = score_sequences(scorer.model, [ids, ids[:-1]]).tolist()
    assert abs(with_end - without) > 1e-4


def test_a_trained_head_keeps_its_padding(tmp_path):
    path = small_reward_model(tmp_path, pad_token_id=1)  # as many on the hub: the end token
    scorer = load_scorer(path, "cpu", setting="model")
    assert scorer.model.config.pad_token_id == scorer.tokenizer.eos_token_id
    rewards = load_reward_model(path, "cpu")(PROMPTS, COMPLETIONS, [{}] * 4)
    expected = [alone(path, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert rewards == pytest.approx(expected, abs=1e-6)


def test_the_chat_template(tmp_path):
    path = small_reward_model(tmp_path)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    templated = load_reward_model(path, "cpu", chat_template=True)(["1"], ["2"], [{}])
    model = load_scorer(path, "cpu", setting="model").model
    ids = tokenizer("[user]1;[assistant]2;")["input_ids"]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}]
    reward = load_reward_model(path, "cpu", system_prompt="s")
    of_messages = reward(["1", "1"], ["2", "2"], [{"prompt": messages}, {"prompt": messages[1:]}])
    with_system = tokenizer("[system]s;[user]1;[assistant]2;")["input_ids"]
    with torch.no_grad():
        assert templated == pytest.approx(score_sequences(model, [ids]).tolist(), abs=1e-6)
        expected = score_sequences(model, [with_system]).tolist()
    assert of_messages == pytest.approx(expected * 2, abs=1e-6)


def test_it_uses_no_random_numbers_and_leaves_no_gradients(tmp_path):
    path = small_reward_model(tmp_path, attention_dropout=0.5)
    reward = load_reward_model(path, "cpu")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.enable_grad():
        assert reward(["1"], ["2"], [{}]) == reward(["1"], ["2"], [{}])
    assert torch.equal(torch.get_rng_state(), before)


def test_it_computes_in_the_dtype_of_its_files(tmp_path):
    path = small_reward_model(tmp_path)
    scorer = load_scorer(path, "cpu", setting="model")
    save(path, scorer.model.bfloat16(), scorer.tokenizer)
    assert load_scorer(path, "cpu", setting="model").model.dtype == torch.bfloat16
    assert all(isinstance(r, float) for r in load_reward_model(path, "cpu")(["1"], ["2"], [{}]))


def test_what_is_not_a_reward_model_is_refused(tmp_path, base):
    with pytest.raises(ValueError, match="must be a reward model, but has no trained head"):
        load_reward_model(str(base), "cpu")
    with pytest.raises(ValueError, match="must have one label, the reward, got 3"):
        load_reward_model(small_reward_model(tmp_path, labels=3), "cpu")
    with pytest.raises(ValueError, match="reward_model must be a sequence classification model"):
        load_reward_model(str(tmp_path / "nothing"), "cpu")
    path = small_reward_model(tmp_path)
    with pytest.raises(ValueError, match="reward_model must have a chat template, got none"):
        load_reward_model(path, "cpu", chat_template=True)
    with pytest.raises(ValueError, match=r"at most 512 tokens for this model, got .* of 603"):
        load_reward_model(path, "cpu")(["1"], ["2" * 601], [{}])
    with pytest.raises(ValueError, match="cannot be tokenized"):
        load_reward_model(path, "cpu")(["1"], ["∙"], [{}])


def test_lost_and_broken_weights_are_refused(tmp_path):
    path = small_reward_model(tmp_path)
    scorer = load_scorer(path, "cpu", setting="model")
    weights = scorer.model.state_dict()
    lost = {k: v for k, v in weights.items() if "layers.1.mlp.up_proj" not in k}
    scorer.model.save_pretrained(path, state_dict=lost)
    with pytest.raises(ValueError, match=r"but lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_reward_model(path, "cpu")
    weights["score.weight"][0, 3] = float("nan")
    scorer.model.save_pretrained(path, state_dict=weights)
    with pytest.raises(ValueError, match=r"finite weights, got a NaN or infinity in score\.weight"):
        load_reward_model(path, "cpu")


def test_pickled_weights_are_not_loaded(tmp_path):
    path = small_reward_model(tmp_path)
    (tmp_path / "reward-model" / "model.safetensors").unlink()
    marker = tmp_path / "executed"

    class Payload:
        def __reduce__(self):
            return open, (str(marker), "w")

    torch.save({"score.weight": Payload()}, tmp_path / "reward-model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"it has no model\.safetensors, and pickled weights are"):
        load_reward_model(path, "cpu")
    assert not marker.exists()


def test_code_of_a_model_runs_only_with_the_switch(tmp_path):
    path = small_reward_model(tmp_path)
    marker = tmp_path / "executed"
    directory = tmp_path / "reward-model"
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(
        f"open({str(marker)!r}, 'w')\n"
        "from transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig):\n"
        "    model_type = 'own'\n"
    )
    with pytest.raises(ValueError, match="only runs with --trust_remote_code"):
        load_reward_model(path, "cpu")
    assert not marker.exists()


def test_a_kernel_that_a_model_names_is_code(tmp_path):
    path = small_reward_model(tmp_path)
    config = json.loads((tmp_path / "reward-model" / "config.json").read_text())
    config["_attn_implementation"] = "somebody/kernel"
    (tmp_path / "reward-model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="only runs with --trust_remote_code"):
        load_reward_model(path, "cpu")


def test_damaged_files_with_checksums_are_refused(tmp_path):
    directory = run_pairs(pair_settings(tmp_path), steps=1).directory
    reward = load_reward_model(str(directory), "cpu")  # the last checkpoint of the run
    last = directory / "checkpoints" / "step-000001"
    assert load_reward_model(str(last), "cpu")(["1"], ["2"], [{}]) == reward(["1"], ["2"], [{}])
    content = bytearray((last / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (last / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_reward_model(str(directory), "cpu")


@pytest.fixture
def judged(small, tmp_path):
    """Settings of a run with a reward model, which is the last checkpoint of a run with one."""
    judge = run_pairs(judge_settings(tmp_path), steps=1).directory
    return {**small, "reward": "reward_model", "reward_model": str(judge), "eval_every": 1}


def judge_settings(tmp_path):
    return {**pair_settings(tmp_path), "save_every": 1, "name": "judge"}


def test_a_resumed_run_keeps_the_reward_model_that_it_began_with(judged, tmp_path, capsys):
    directory = run("grpo", judged, name="a", steps=2).directory
    began_with = Path(judged["reward_model"]) / "checkpoints" / "step-000001"
    assert f"reward_model: {began_with}" in capsys.readouterr().out
    whole = rows(run("grpo", judged, name="whole").directory)

    run_pairs(judge_settings(tmp_path), steps=2, resume=True)  # the last checkpoint is another one
    for name in ("b", "c"):
        shutil.copytree(directory, directory.with_name(name))
    assert rows(run("grpo", judged, name="a", resume=True).directory) == whole
    directory = directory.with_name("b")
    (directory / "reward-model.json").unlink()  # as in a run of an earlier version
    run("grpo", judged, name="b", resume=True)
    kept = json.loads((directory / "reward-model.json").read_text())
    assert kept["checkpoint"] == "step-000002"

    weights = load_file(began_with / "model.safetensors")
    weights["score.weight"] = weights["score.weight"].flip(1).contiguous()
    save_file(weights, began_with / "model.safetensors", {"format": "pt"})
    (began_with / "checksums.json").unlink()
    with pytest.raises(ValueError, match="step-000001 has other weights than when the run began"):
        run("grpo", judged, name="c", resume=True)
    shutil.rmtree(began_with)
    with pytest.raises(ValueError, match=r"began with .*step-000001, which is gone"):
        run("grpo", judged, name="c", resume=True)


SUM = "2:" + 64 * "0"


@pytest.mark.parametrize(
    "kept",
    [
        "",
        "[]",
        "{}",
        json.dumps({"checkpoint": 1, "fingerprint": SUM}),
        json.dumps({"checkpoint": "None", "fingerprint": SUM}),
        json.dumps({"checkpoint": "../step-1", "fingerprint": SUM}),
        json.dumps({"checkpoint": "step-000001", "fingerprint": SUM[2:]}),
    ],
)
def test_a_damaged_record_of_the_reward_model_is_named(judged, kept):
    directory = run("grpo", judged, name="a", steps=1).directory
    (directory / "reward-model.json").write_text(kept)
    with pytest.raises(ValueError, match=r"^resume: .*reward-model\.json is damaged; delete it if"):
        run("grpo", judged, name="a", resume=True)


def test_a_run_that_is_discarded_leaves_no_reward_model_behind(judged, tmp_path, monkeypatch):
    """A run is killed before its first checkpoint, then interrupted in its warm start."""
    directory = run("grpo", judged, name="a", steps=1).directory
    shutil.rmtree(directory / "checkpoints")
    for path in directory.iterdir():
        if path.name not in ("config.json", "reward-model.json"):
            path.unlink()
    assert len(list(directory.iterdir())) == 2

    def interrupted(*arguments):
        yield 1.0
        signal.raise_signal(signal.SIGINT)
        yield 1.0

    monkeypatch.setattr("fastrl.train.run.start.warm_start", interrupted)
    monkeypatch.setattr("fastrl.train.run.start.warm_start_steps", lambda config: 2)
    run("grpo", judged, name="a", resume=True)
    assert not directory.exists()


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_take_a_reward_model_beside_other_rewards(small, tmp_path, loop):
    path = small_reward_model(tmp_path)
    small |= {"reward": ["reward_model", "small_rewards:digits"], "reward_weights": [0.5, 0.0]}
    directory = run(loop, small, reward_model=path, steps=1, sample_every=1).directory
    samples = list(map(json.loads, (directory / "samples.jsonl").read_text().splitlines()))
    assert samples
    for sample in samples:
        expected = alone(path, sample["prompt"], sample["completion"])
        assert sample["parts"]["reward_model"] == pytest.approx(expected, abs=1e-5)
        assert sample["reward"] == pytest.approx(expected / 2, abs=1e-5)
    logged = rows(directory)[1]
    assert logged["reward"] == pytest.approx(logged["reward/reward_model"] / 2, abs=1e-6)
    assert "held_out_reward/digits" in logged


@pytest.mark.parametrize(
    "change", [{"reward": "small_rewards:digits"}, {"reward_model": None}, {"reward_model": "no"}]
)
def test_a_reward_model_is_named_with_its_reward_or_not_at_all(small, tmp_path, change):
    given = {"reward": "reward_model", "reward_model": "no", **change}
    with pytest.raises(ValueError, match=r"reward_model must (be|name) "):
        run("grpo", small, **given)
    assert not list(Path(small["out_dir"]).rglob("config.json"))
