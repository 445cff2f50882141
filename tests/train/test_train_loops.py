"""The loops from end to end: they learn, repeat, resume, and stop without losing anything."""

import json
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.train import grpo
from fastrl.train.command_line import main, parse
from fastrl.train.config import GrpoConfig
from fastrl.train.data.prompts import encode
from fastrl.train.model.loading import load
from fastrl.train.policy import policy_loss
from fastrl.train.rewards import RewardError, Rewards
from fastrl.train.run import start
from fastrl.train.run.checkpoint import latest
from fastrl.train.run.interrupt import Interrupt
from fastrl.train.warm_start import warm_start
from tests.support.train_runs import LOOPS, rows, run, start_process, wait_for, weights


@pytest.mark.parametrize("loop", LOOPS)
def test_the_reward_rises(small, loop):
    many = {"grpo": {"group_size": 4}, "ppo": {"prompts_per_step": 64, "kl_coef": 0.001}}[loop]
    summary = run(loop, small, steps=15, learning_rate=3e-3, warmup_steps=0, **many)
    logged = rows(summary.directory)
    assert logged[1]["reward"] < 0.3
    assert logged[-1]["reward"] > 0.7
    assert summary.held_out[1] > 0.7
    assert {"config.json", "metrics.jsonl", "curves.png"} <= {
        path.name for path in summary.directory.iterdir()
    }
    assert (summary.directory / "curves.png").read_bytes()[:4] == b"\x89PNG"
    expected = {"reward", "kl_old", "entropy", "clip_fraction", "length"}
    expected |= {"explained_variance", "value_loss", "kl"} if loop == "ppo" else set()
    assert expected <= logged[1].keys()  # once every completion is rewarded, none has a loss


def test_the_warm_start_learns_the_answers():
    torch.manual_seed(0)
    model, tokenizer = load(None, "cpu")
    records = [{"prompt": f"{i} =", "answer": str(i)} for i in range(10)]
    prompts = encode(records, tokenizer, chat_template=False, max_tokens=9)
    losses = list(
        warm_start(model, tokenizer, prompts, GrpoConfig(warm_start_steps=60, warm_start_batch=32))
    )
    assert losses[0] > 4
    assert losses[-1] < 1


@pytest.mark.parametrize("loop", LOOPS)
def test_a_resumed_run_equals_an_uninterrupted_one(small, loop):
    small |= {"kl_coef": 0.05, "save_every": 100, "eval_every": 100}
    whole = run(loop, small, name="whole", steps=6).directory
    parts = run(loop, small, name="parts", steps=3).directory
    with (parts / "metrics.jsonl").open(
        "a"
    ) as file:  # as if killed in step 5, without a checkpoint
        file.write('{"step": 4, "reward": 0.0}\n{"step": 5, "rew')
    run(loop, small, name="parts", steps=6, resume=True)
    logged = rows(parts)
    del logged[3]["held_out_reward"]  # measured because the first part ended there
    assert logged == rows(whole)
    one, other = weights(whole), weights(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)
    state, again = (
        torch.load(latest(path / "checkpoints") / "state.pt", weights_only=True)
        for path in (whole, parts)
    )
    assert torch.equal(state["rng"]["torch"], again["rng"]["torch"])
    for name, moments in state["optimizer"]["state"].items():
        assert torch.equal(moments["exp_avg"], again["optimizer"]["state"][name]["exp_avg"])


def test_each_sample_gets_the_advantage_of_its_record(small, monkeypatch):
    _, tokenizer = load(None, "cpu")
    seen = []

    def spied(outputs, batch, config, advantages, **options):
        starts = (batch.position_ids[0] == 0).nonzero()[:, 0].tolist()
        lasts = batch.token_ids[batch.cu_seqlens[1:] - 1].tolist()  # predicted, not in the row
        row = batch.input_ids[0].tolist()
        for begin, end, last, advantage in zip(
            starts, [*starts[1:], len(row)], lasts, advantages.tolist(), strict=True
        ):
            text = tokenizer.decode([*row[begin:end], last], skip_special_tokens=True)
            seen.append((text, advantage))
        return policy_loss(outputs, batch, config, advantages, **options)

    monkeypatch.setattr(grpo, "policy_loss", spied)
    small |= {"reward": "small_rewards:by_record", "prompts_per_step": 6, "steps": 1}
    # With a KL, completions without advantage are in the loss as well.
    run("grpo", small, tokens_per_micro_batch=40, scale="none", kl_coef=0.01)
    assert len(seen) == 6 * 4
    for i in range(6):
        prompt = f"{i} + 1 ="
        group = [(text.removeprefix(prompt), a) for text, a in seen if text.startswith(prompt)]
        assert len(group) == 4
        rewards = [sum(map(ord, completion)) * (i + 1) % 7 for completion, _ in group]
        assert [a for _, a in group] == pytest.approx([r - sum(rewards) / 4 for r in rewards])


def test_the_same_seed_gives_the_same_run(small):
    first, second = (run("grpo", small).directory for _ in range(2))
    assert (first.name, second.name) == ("grpo-1", "grpo-2")
    assert rows(first) == rows(second)
    assert rows(first) != rows(run("grpo", small, seed=1).directory)


@pytest.mark.parametrize(
    ("loop", "own", "saving"),
    [
        ("grpo", {}, {}),
        ("grpo", {"objective": "dapo", "kl_coef": 0.1}, {"share_prompts": True}),
        ("grpo", {"objective": "gspo"}, {"gradient_checkpointing": True, "mlp_tile": 16}),
        ("grpo", {}, {"loss": "logits", "attention": "sdpa"}),
        ("ppo", {"kl_coef": 0.1}, {"gradient_checkpointing": True, "mlp_tile": 16}),
        ("ppo", {}, {"loss": "logits"}),
    ],
)
def test_settings_that_save_memory_do_not_change_the_step(small, loop, own, saving):
    small |= {"steps": 1, "learning_rate": 1e-4, "minibatches": 2, **own}
    one = run(loop, small, name="one", tokens_per_micro_batch=9999).directory
    many = run(loop, small, name="many", tokens_per_micro_batch=40, **saving).directory
    start, split = weights(one), weights(many)
    assert max(float((start[k] - split[k]).abs().max()) for k in start) <= 1e-6
    first, other = rows(one)[-1], rows(many)[-1]
    del first["learned_tokens"], other["learned_tokens"]  # a shared prompt counts once
    assert other == pytest.approx(first, rel=1e-3, abs=1e-5)


def test_groups_without_information_are_sampled_again(small):
    small |= {"reward": "small_rewards:by_record", "steps": 2, "prompts_per_step": 4}
    logged = rows(run("grpo", small, dynamic_sampling=True, minibatches=2).directory)
    assert all(row["informative"] == 1 and row["left_out"] < 0.5 for row in logged[1:])
    constant = {"reward": "small_rewards:constant"}
    last = rows(
        run(
            "grpo", small | constant, dynamic_sampling=True, max_sampling_rounds=2, steps=1
        ).directory
    )[-1]
    assert (last["sampling_rounds"], last["informative"], last["left_out"]) == (2, 0, 1)


def test_a_step_without_information_still_decays_the_weights(small):
    small |= {"reward": "small_rewards:constant", "steps": 1, "learning_rate": 0.1}
    idle, decayed = (
        weights(run("grpo", small, name=name, weight_decay=decay).directory)
        for name, decay in (("idle", 0.0), ("decayed", 0.5))
    )
    assert any(not torch.equal(idle[k], decayed[k]) for k in idle)


@pytest.mark.parametrize("loop", LOOPS)
def test_truncated_completions_may_have_no_loss(small, loop):
    small |= {"steps": 1, "max_new_tokens": 1, "warmup_steps": 0}
    logged = rows(run(loop, small, name="mask", truncated="mask").directory)[-1]
    assert logged["truncated"] > 0.9
    assert (
        logged["learned_tokens"]
        < rows(run(loop, small, name="count").directory)[-1]["learned_tokens"]
    )


@pytest.mark.parametrize("loop", LOOPS)
def test_bfloat16(small, loop):
    logged = rows(run(loop, small, steps=1, precision="bfloat16").directory)
    assert abs(logged[-1]["ratio_mean"] - 1) < 0.05


def test_a_model_is_trained_from_where_it_was_saved(small, tmp_path):
    torch.manual_seed(5)
    model, tokenizer = load(None, "cpu")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    small |= {"model": str(tmp_path / "model"), "steps": 1}
    moved = weights(run("grpo", small).directory)
    steps = [float((moved[k] - v).abs().max()) for k, v in model.state_dict().items()]
    assert 0 < max(steps) < 0.01
    message = "model must be a causal LM with its tokenizer, got .*: there is no such directory"
    with pytest.raises(ValueError, match=message):
        run("grpo", small, model=str(tmp_path / "nothing"))


@pytest.mark.parametrize("loop", LOOPS)
def test_held_out_prompts_are_not_the_file_for_training(small, tmp_path, loop):
    (tmp_path / "link.jsonl").symlink_to(small["train_file"])
    with pytest.raises(ValueError, match=r"^held_out_file must not be train_file, got .*link"):
        run(loop, small, held_out_file=str(tmp_path / "link.jsonl"))


def test_held_out_prompts_that_are_also_for_training_are_counted(small, capsys):
    shared = Path(small["train_file"]).read_text().splitlines(keepends=True)[:2]
    with Path(small["held_out_file"]).open("a") as file:
        file.writelines(shared)
    held_out = len(Path(small["held_out_file"]).read_text().splitlines())
    run("grpo", small, steps=1)
    assert f"2 of {held_out} held-out prompts are also training prompts;" in capsys.readouterr().out


def test_a_run_is_not_overwritten_or_resumed_with_other_settings(small):
    directory = run("grpo", small, name="a", steps=1).directory
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="already contains a run; resume it with --resume"):
        run("grpo", small, name="a", steps=1)
    with pytest.raises(ValueError, match="learning_rate must remain"):
        run("grpo", small, name="a", steps=2, resume=True, learning_rate=0.1)
    with pytest.raises(ValueError, match="b contains no run"):
        run("grpo", small, name="b", resume=True)
    assert before == {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_reward_that_fails_later_leaves_a_checkpoint_to_resume_from(small):
    small |= {"reward": "small_rewards:fails_later", "name": "a", "save_every": 100}
    with pytest.raises(RewardError, match="must be finite in float32, got nan"):
        run("grpo", small)  # two calls on trial, one on the held-out prompts, then two steps
    directory = Path(small["out_dir"]) / "a"
    assert latest(directory / "checkpoints").name == "step-000002"
    assert rows(directory)[-1]["step"] == 2
    sys.modules["small_rewards"].calls = -100
    assert run("grpo", small, resume=True).step == 3


@pytest.mark.parametrize("loop", LOOPS)
def test_a_reward_that_fails_in_an_evaluation_leaves_the_step_in_the_log(small, loop):
    small |= {"reward": "small_rewards:fails_later", "name": "a", "eval_every": 3}
    with pytest.raises(RewardError, match="must be finite"):
        run(loop, small)  # the sixth call is step 3, the seventh its evaluation
    assert rows(Path(small["out_dir"]) / "a")[-1]["step"] == 2
    sys.modules["small_rewards"].calls = 0
    with pytest.raises(RewardError, match="must be finite"):
        run(loop, small, name="b", eval_every=2)  # the sixth call evaluates step 2
    last = rows(Path(small["out_dir"]) / "b")[-1]
    assert last["step"] == 2
    assert "reward" in last
    assert latest(Path(small["out_dir"]) / "b" / "checkpoints").name == "step-000002"


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_that_are_not_finite_leave_the_weights_unchanged(small, loop, monkeypatch):
    def spoiled(*arguments):
        scored = score(*arguments)
        return scored._replace(total=scored.total * float("inf"))

    score = Rewards.score
    monkeypatch.setattr(Rewards, "score", spoiled)
    with pytest.raises(FloatingPointError, match="gradients of step 1 are not finite"):
        run(loop, small, name="a")
    saved = weights(Path(small["out_dir"]) / "a")
    assert all(tensor.isfinite().all() for tensor in saved.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "small_rewards:short"}, "must return 6 numbers, got 1"),
        ({"reward": "small_rewards:gone"}, "has no function 'gone'"),
        ({"train_file": "gone.jsonl"}, "gone.jsonl cannot be read"),
        ({"max_prompt_tokens": 2}, "max_prompt_tokens must cover"),
        ({"max_new_tokens": 508}, "max_new_tokens must be at most 505 for this model"),
        ({"device": "foo"}, "device must be available, got 'foo'"),
        (
            {"train_file": "{tmp}/lacks.jsonl", "reward": "fastrl.train.rewards:exact_match"},
            'reward exact_match: raised ValueError: "answer" must be a string, got None',
        ),
        (
            {"train_file": "{tmp}/odd.jsonl", "warm_start_steps": 1},
            "warm_start_steps: '∙' cannot be tokenized",
        ),
        (
            {"train_file": "{tmp}/lacks.jsonl", "warm_start_steps": 1},
            'warm_start_steps: needs "demonstrations" or "answer" as text',
        ),
        ({"out_dir": "{tmp}/odd.jsonl"}, "out_dir must be a directory, but .*odd.jsonl is a file"),
    ],
)
def test_bad_input_is_found_before_any_work(small, tmp_path, change, message):
    good = '{"prompt": "1 + 1 =", "answer": "2"}\n'
    (tmp_path / "odd.jsonl").write_text(good * 9 + '{"prompt": "1", "answer": "∙"}\n')
    (tmp_path / "lacks.jsonl").write_text(good * 9 + '{"prompt": "1"}\n')
    change = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        run("grpo", small, **change)
    assert not list(Path(small["out_dir"]).rglob("metrics.jsonl"))


@pytest.mark.parametrize("damaged", ["state.pt", "model.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_resumes(small, damaged):
    small |= {"name": "a", "save_every": 1}
    directory = run("grpo", small, steps=2).directory / "checkpoints"
    last = latest(directory)
    content = (last / damaged).read_bytes()
    (last / damaged).write_bytes(content[: len(content) // 2])
    (directory / ".step-000001.partial").mkdir()
    with pytest.raises(ValueError, match="step-000002 cannot be read; delete it to resume from"):
        run("grpo", small, resume=True)
    shutil.rmtree(last)
    assert run("grpo", small, resume=True).step == 3
    assert not list(directory.glob(".*"))


def test_both_signals_are_noted_once_and_then_restored():
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        with Interrupt() as interrupt:
            assert not interrupt.requested
            signal.raise_signal(number)
            assert interrupt.requested
            assert signal.getsignal(number) == before


def test_ctrl_c_finishes_the_step_and_saves(small, tmp_path):
    settings = small | {"steps": 100_000, "save_every": 100_000, "name": "a"}
    process = start_process(tmp_path, settings)
    metrics = Path(small["out_dir"]) / "a" / "metrics.jsonl"
    wait_for(process, lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    step = rows(metrics.parent)[-1]["step"]
    assert process.returncode == 130
    assert f"stopped after step {step}; continue with --resume --name a" in out
    assert latest(metrics.parent / "checkpoints").name == f"step-{step:06d}"
    assert (metrics.parent / "curves.png").exists()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_interrupted_in_the_warm_start_says_so_and_frees_its_name(small, loop, monkeypatch):
    def interrupted(*_):
        yield 1.0
        signal.raise_signal(signal.SIGINT)
        yield 1.0

    monkeypatch.setattr(start, "warm_start", interrupted)
    summary = run(loop, small, name="a", train_file=None, held_out_file=None)
    assert summary.interrupted
    assert str(summary) == "stopped in the warm start: nothing was saved"
    assert not summary.directory.exists()


def test_the_printed_continuation_continues_with_the_settings_of_the_run(small):
    small |= {"seed": 1, "steps": 1}
    summary = run("grpo", small, name="a b")
    assert "resume" not in json.loads((summary.directory / "config.json").read_text())
    hint = str(summary._replace(interrupted=True)).split("continue with ")[1].splitlines()[0]
    config = parse(GrpoConfig, [*shlex.split(hint), "--steps", "2"])
    assert (config.seed, config.steps, config.group_size) == (1, 2, 4)
    assert grpo.train(config).step == 2
    with pytest.raises(ValueError, match="seed must remain 1 when a run is resumed, got 2"):
        grpo.train(parse(GrpoConfig, [*shlex.split(hint), "--seed", "2"]))


def test_a_failed_start_is_not_a_run_to_resume(small):
    directory = run("grpo", small, steps=1).directory
    (directory.parent / "grpo-2").mkdir()
    assert run("grpo", small, steps=2, resume=True).directory == directory
    with pytest.raises(ValueError, match="max_prompt_tokens must cover"):
        run("grpo", small, train_file=None, held_out_file=None, max_prompt_tokens=2, name="b")
    assert not (directory.parent / "b").exists()


def test_bad_settings_on_the_command_line_end_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo", "--steps", "0"])
    with pytest.raises(SystemExit, match="2"):
        main(GrpoConfig, grpo.train)
    assert capsys.readouterr().err == "error: steps must be at least 1, got 0\n"


def test_a_head_without_a_linear_loss_is_refused_before_any_work(small, tmp_path):
    _, tokenizer = load(None, "cpu")
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        is_decoder=True,
        eos_token_id=1,
        bos_token_id=1,
        pad_token_id=0,
    )
    # its head is more than a linear layer
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    small |= {"model": str(tmp_path / "bert"), "steps": 1}
    small |= {"attention": "sdpa", "tokens_per_micro_batch": 1}
    with pytest.raises(ValueError, match=r'loss must be "logits" for this model.*BertLMHeadModel'):
        run("grpo", small)
    run("grpo", small, loss="logits", name="by-logits")
