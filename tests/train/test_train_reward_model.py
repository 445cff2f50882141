"""The loop of a reward model: it learns to rank, repeats, resumes, and names what is wrong."""

import json
import math
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train import gradients, reward
from fastrl.train.command_line import main, parse
from fastrl.train.config import RewardModelConfig
from fastrl.train.data import arithmetic, arithmetic_pairs
from fastrl.train.data.pairs import encode_pairs, pair_batches, read_pairs
from fastrl.train.distributed import ranks
from fastrl.train.model.loading import load
from fastrl.train.model.sequence_scorer import load_scorer
from fastrl.train.plan import report
from fastrl.train.preference import PairScores, bradley_terry, distance_from_center
from fastrl.train.run import reward_model_start
from fastrl.train.run.checkpoint import latest
from fastrl.train.scorer_warm_start import scorer_warm_start
from tests.support.pair_runs import pair_settings, run_pairs, scorer_weights
from tests.support.train_runs import rows


@pytest.fixture
def pairs(tmp_path):
    return pair_settings(tmp_path)


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_it_learns_to_rank_pairs_that_it_has_not_seen(pairs, tmp_path):
    lines = [
        json.dumps({"prompt": f"say {a}{b}:", "chosen": f"{x}", "rejected": f"{y}"}) + "\n"
        for a in range(10)
        for b in range(10)
        for x in range(5)
        for y in range(5, 10)
    ]
    (tmp_path / "train.jsonl").write_text("".join(lines[::2]))
    (tmp_path / "held_out.jsonl").write_text("".join(lines[1::50]))
    summary = run_pairs(pairs, steps=20, learning_rate=3e-3, warmup_steps=2)
    logged = rows(summary.directory)
    assert logged[0]["held_out_accuracy"] < 0.8
    assert logged[-1]["held_out_accuracy"] > 0.95
    assert logged[-1]["held_out_loss"] < logged[0]["held_out_loss"] / 3
    assert summary.held_out == (logged[0]["held_out_accuracy"], logged[-1]["held_out_accuracy"])
    assert "held-out accuracy: " in str(summary)
    assert "after 20 steps" in str(summary)
    assert "Held-out accuracy after" in (summary.directory / "report.html").read_text()
    assert (summary.directory / "curves.png").read_bytes()[:4] == b"\x89PNG"
    expected = {"loss", "accuracy", "reward_chosen", "reward_rejected", "reward_margin"}
    assert expected | {"grad_norm", "real_tokens", "padded_tokens"} <= logged[1].keys()


def test_the_loss_by_hand():
    scores = PairScores(torch.tensor([2.0, 0.5]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3]))
    expected = [math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(3.5))]
    assert bradley_terry(scores).tolist() == pytest.approx(expected)
    assert distance_from_center(scores).tolist() == [9.0, 2.25]


def test_the_logged_loss_is_that_of_the_pairs(pairs, tmp_path):
    rated = [
        {"prompt": "p", "chosen": "a", "rejected": "bcd", "margin": 0.5},
        {"prompt": "q:", "chosen": "ef", "rejected": ""},
    ]
    for name in ("train", "held_out"):
        text = "".join(json.dumps(pair) + "\n" for pair in rated)
        (tmp_path / f"{name}.jsonl").write_text(text)
    directory = run_pairs(pairs, steps=1, pairs_per_step=2, center_coef=0.1).directory
    start = load_scorer(str(directory / "checkpoints" / "step-000000"), "cpu", setting="model")
    total = plain = 0.0
    for pair in rated:
        values = []
        for text in (pair["chosen"], pair["rejected"]):
            ids = start.tokenizer(pair["prompt"] + text + "<eos>", return_tensors="pt")
            values.append(start.model(**ids).logits.item())
        difference = values[0] - values[1] - pair.get("margin", 0)
        plain += math.log1p(math.exp(-difference)) / 2
        total += math.log1p(math.exp(-difference)) / 2 + 0.1 * sum(values) ** 2 / 2
    logged = rows(directory)
    assert logged[0]["held_out_loss"] == pytest.approx(plain, rel=1e-5)
    assert logged[1]["loss"] == pytest.approx(total, rel=1e-5)


def test_centered_rewards_are_nearer_to_zero(pairs):
    pairs |= {"steps": 25, "pairs_per_step": 45, "learning_rate": 1e-3, "warmup_steps": 0}
    free, centered = (
        rows(run_pairs(pairs, center_coef=weight, name=f"c{weight}").directory)[-10:]
        for weight in (0.0, 0.3)
    )
    means = [
        sum(abs(row["reward_chosen"] + row["reward_rejected"]) for row in some)
        for some in (free, centered)
    ]
    assert means[1] < means[0] / 2


@pytest.mark.parametrize(
    "saving", [{}, {"gradient_checkpointing": True, "mlp_tile": 16}, {"attention": "eager"}]
)
def test_settings_that_save_memory_do_not_change_the_step(pairs, saving):
    pairs |= {"steps": 1, "learning_rate": 1e-4, "minibatches": 2}
    one = run_pairs(pairs, name="one").directory
    many = run_pairs(pairs, name="many", tokens_per_micro_batch=40, **saving).directory
    start = load_scorer(str(one / "checkpoints" / "step-000000"), "cpu", setting="model").model
    before, after, other = start.state_dict(), scorer_weights(one), scorer_weights(many)
    for name, weight in before.items():
        step = (after[name] - weight).norm()
        assert step > 0
        assert (other[name] - after[name]).norm() < 1e-2 * step
    first, last = rows(one)[-1], rows(many)[-1]
    del first["padded_tokens"], last["padded_tokens"]
    assert last == pytest.approx(first, rel=1e-3, abs=1e-5)


def test_micro_batches_hold_all_pairs_within_the_bound():
    _, tokenizer = load(None, "cpu")
    records = arithmetic_pairs.split(0)[1][:100]
    encoded = encode_pairs(records, tokenizer, chat_template=False, max_length=99)
    batches = list(pair_batches(encoded, 128))
    for batch in batches:
        longest = max(len(ids) for pair in batch for ids in (pair.chosen, pair.rejected))
        assert 2 * len(batch) * longest <= 128
    assert sorted(pair for batch in batches for pair in batch) == sorted(encoded)
    assert [len(batch) for batch in pair_batches(encoded, 1)] == [1] * 100


def test_a_resumed_run_equals_an_uninterrupted_one(pairs):
    pairs |= {"save_every": 100, "eval_every": 100, "minibatches": 2}
    whole = run_pairs(pairs, name="whole", steps=6).directory
    parts = run_pairs(pairs, name="parts", steps=3).directory
    with (parts / "metrics.jsonl").open("a") as file:  # as if killed, without a checkpoint
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')
    run_pairs(pairs, name="parts", steps=6, resume=True)
    logged = rows(parts)
    for name in ("held_out_accuracy", "held_out_loss"):
        del logged[3][name]  # measured because the first part ended there
    assert logged == rows(whole)
    assert equal(scorer_weights(whole), scorer_weights(parts))
    states = [
        torch.load(latest(path / "checkpoints") / "state.pt", weights_only=True)["optimizer"]
        for path in (whole, parts)
    ]
    for name, moments in states[0]["state"].items():
        assert torch.equal(moments["exp_avg_sq"], states[1]["state"][name]["exp_avg_sq"])


def test_a_warm_start_learns_the_chosen_completions_once(pairs, monkeypatch):
    losses = []

    def watched(*arguments):
        for loss in scorer_warm_start(*arguments):
            losses.append(loss)
            yield loss

    monkeypatch.setattr(reward_model_start, "scorer_warm_start", watched)
    pairs |= {"warm_start_steps": 100, "warm_start_batch": 16, "name": "a"}
    run_pairs(pairs, steps=1)
    assert len(losses) == 100
    assert losses[0] > 4  # log(98) for a guess of the digit and of the end token
    assert losses[-1] < 0.3
    run_pairs(pairs, steps=2, resume=True)
    assert len(losses) == 100


def test_a_run_interrupted_in_the_warm_start_frees_its_name(pairs, monkeypatch):
    def interrupted(*_):
        yield 1.0
        signal.raise_signal(signal.SIGINT)
        yield 1.0

    monkeypatch.setattr(reward_model_start, "scorer_warm_start", interrupted)
    summary = run_pairs(pairs, name="a", train_file=None, held_out_file=None)
    assert str(summary) == "stopped in the warm start: nothing was saved"
    assert not summary.directory.exists()


def test_an_interrupt_finishes_the_step_and_saves(pairs, monkeypatch):
    def interrupted(scores):
        signal.raise_signal(signal.SIGINT)
        return bradley_terry(scores)

    monkeypatch.setattr(reward, "bradley_terry", interrupted)
    summary = run_pairs(pairs, name="a")
    assert (summary.step, summary.interrupted) == (1, True)
    assert "continue with --resume --name a" in str(summary)
    monkeypatch.setattr(reward, "bradley_terry", bradley_terry)
    assert run_pairs(pairs, name="a", resume=True).step == 3


def test_gradients_that_are_not_finite_leave_the_last_step(pairs, monkeypatch):
    apply, calls = gradients.apply, []

    def spoiled(optimizer, config, step):
        calls.append(step)
        if step == 1 and len(calls) == 2:
            optimizer.param_groups[0]["params"][0].grad.fill_(float("nan"))
        return apply(optimizer, config, step)

    monkeypatch.setattr(gradients, "apply", spoiled)
    with pytest.raises(FloatingPointError, match=r"step 2 are not finite; .*step-000001$"):
        run_pairs(pairs, name="a")
    resumed = run_pairs(pairs, name="a", resume=True).directory
    assert rows(resumed) == rows(run_pairs(pairs, name="whole").directory)


def test_a_damaged_checkpoint_is_not_resumed(pairs):
    directory = run_pairs(pairs, name="a", steps=1).directory
    weights = latest(directory / "checkpoints") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"step-000001 cannot be read.*model\.safetensors is"):
        run_pairs(pairs, name="a", resume=True)


def test_a_language_model_gets_a_head(pairs, base, capsys):
    directory = run_pairs(pairs, model=str(base), steps=1, learning_rate=1e-4).directory
    assert "is a language model: its layers get a new head" in capsys.readouterr().out
    start, _, _ = load_scorer(
        str(directory / "checkpoints" / "step-000000"), "cpu", setting="model"
    )
    of_base = load(str(base), "cpu")[0].model.state_dict()
    assert equal(start.model.state_dict(), of_base)
    again = run_pairs(pairs, model=str(latest(directory / "checkpoints")), steps=1).directory
    assert "new head" not in capsys.readouterr().out
    first = load_scorer(str(again / "checkpoints" / "step-000000"), "cpu", setting="model").model
    assert equal(first.state_dict(), scorer_weights(directory))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p", "chosen": "a"}', '"rejected" must be a string, got None'),
        ('{"prompt": "p", "chosen": ["a"], "rejected": "b"}', r'"chosen" must be a string, got \['),
        ('{"prompt": "p", "chosen": "a", "rejected": "a"}', "must differ, both are 'a'"),
        ('{"prompt": "", "chosen": "a", "rejected": "b"}', '"prompt" must be a non-empty str'),
        ('{"prompt": "p", "chosen": "a", "rejected": "b", "margin": -1}', '"margin" must be a num'),
        ('{"prompt": "p", "chosen": "a", "rejected": "b", "margin": "1"}', '"margin" must be a nu'),
        ('{"prompt": "p", "chosen": "a", "rejected": "b", "margin": NaN}', '"margin" must be a nu'),
        ('{"prompt": "p", "chosen"', "not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    good = '{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 2}'
    (tmp_path / "pairs.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"pairs.jsonl:3: .*{message}"):
        read_pairs(tmp_path / "pairs.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out_file": None}, "held_out_file must be given if and only if train_file is"),
        ({"minibatches": 17}, "minibatches must be at most pairs_per_step, 16, got 17"),
        ({"lora_rank": 4}, "lora_rank must be null for a reward model, got 4"),
        ({"loss": "logits"}, 'loss must be "linear" for a reward model, got "logits"'),
        ({"freeze_head": True}, "freeze_head must be false for a reward model, got true"),
        ({"attention": "by_sequence"}, "attention must be one of sdpa, .*, got 'by_sequence'"),
        ({"max_length": 5}, "max_length must cover every prompt .*, got 8 tokens for 'say 0:'"),
        (
            {"train_file": "{tmp}/long.jsonl", "max_length": 999},
            "max_length must be at most 512 tokens for this model, got .* of 602",
        ),
        ({"train_file": "{tmp}/odd.jsonl"}, "prompt 'p': .* cannot be tokenized"),
        ({"chat_template": True}, "chat_template: the tokenizer has none"),
        ({"model": "{tmp}/nothing"}, "model must be a sequence classification model in safetens"),
        ({"model": "m", "warm_start_steps": 2}, "warm_start_steps must be 0 or null with a model"),
        ({"center_coef": -1.0}, "center_coef must be at least 0"),
    ],
)
def test_bad_input_is_found_before_any_work(pairs, tmp_path, change, message):
    for name, text in (("long", "1" * 600), ("odd", "∙")):
        pair = {"prompt": "p", "chosen": text, "rejected": "b"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(pair) + "\n")
    change = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        run_pairs(pairs, **change)
    assert not Path(pairs["out_dir"]).exists()


def test_the_command_line(pairs, monkeypatch, capsys):
    arguments = ["reward", *(f"--{key}={value}" for key, value in pairs.items()), "--steps=1"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="0"):
        main(RewardModelConfig, reward.train)
    assert "held-out accuracy: " in capsys.readouterr().out
    config = parse(RewardModelConfig, ["--resume", "--out_dir", pairs["out_dir"], "--steps", "2"])
    assert (config.name, config.pairs_per_step) == ("reward-1", 16)
    assert reward.train(config).step == 2
    with pytest.raises(ValueError, match="plan: only the memory of grpo and ppo can be predicted"):
        report(RewardModelConfig(), math.inf)


def test_it_learns_on_one_rank(pairs, monkeypatch):
    monkeypatch.setattr(ranks, "count", lambda: 2)
    with pytest.raises(ValueError, match="a reward model learns on one rank, got 2"):
        run_pairs(pairs)


def test_the_arithmetic_pairs():
    train, held_out = arithmetic_pairs.split(0)
    prompts = [{pair["prompt"] for pair in some} for some in (train, held_out)]
    assert not prompts[0] & prompts[1]
    expected = [{record["prompt"] for record in some} for some in arithmetic.split(0)]
    assert prompts == expected
    answers = {r["prompt"]: r["answer"] for some in arithmetic.split(0) for r in some}
    kinds = {"number": 0, "empty": 0, "more": 0}
    for pair in train + held_out:
        assert pair["chosen"] == answers[pair["prompt"]]
        assert pair["rejected"] != pair["chosen"]
        kinds["number"] += pair["rejected"].isdigit()
        kinds["empty"] += pair["rejected"] == ""
        kinds["more"] += len(pair["rejected"]) > 1 and pair["chosen"] in pair["rejected"]
    share = {kind: count / len(train + held_out) for kind, count in kinds.items()}
    assert 0.7 < share["number"] < 0.9
    assert 0.02 < share["empty"] < 0.1
    assert 0.1 < share["more"] < 0.3
    assert arithmetic_pairs.split(0) == (train, held_out)
    assert arithmetic_pairs.split(1)[0] != train


def test_a_run_writes_the_arithmetic_pairs(pairs):
    small = {"train_file": None, "held_out_file": None, "steps": 1}
    data = run_pairs(pairs, **small).directory / "data"
    read = tuple(read_pairs(data / f"{name}.jsonl") for name in ("train", "held_out"))
    assert read == arithmetic_pairs.split(0)
