"""The learning rate of each step: the warm-up, the schedules of transformers, and a resumed run."""

from typing import get_args, get_type_hints

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from fastrl.train.config import GrpoConfig
from fastrl.train.schedules import learning_rate
from fastrl.train.settings.learning import LearningSettings
from tests.support.train_runs import rows, run, weights

NAMES = get_args(get_type_hints(LearningSettings)["schedule"])
NEEDED = {
    "cosine_with_min_lr": ("min_lr=1e-5",),
    "cosine_warmup_with_min_lr": ("min_lr=1e-5",),
    "warmup_stable_decay": ("num_decay_steps=6",),
}


def rates(schedule, **settings):
    settings = {"steps": 20, "schedule_options": NEEDED.get(schedule, ()), **settings}
    config = GrpoConfig(schedule=schedule, **settings)
    return [learning_rate(config, step) for step in range(config.steps)]


def test_all_schedules_of_transformers_that_need_no_state_are_there():
    named = {kind.value for kind in transformers.SchedulerType}
    assert named - set(NAMES) <= {
        "constant_with_warmup",  # as `constant` is here
        "reduce_lr_on_plateau",
        "greedy",
    }
    assert set(NAMES) <= named


@pytest.mark.parametrize("warmup", [0, 1, 5, 7, 30])
def test_the_constant_rate_is_bit_equal_to_its_formula(warmup):
    found = rates("constant", warmup_steps=warmup, learning_rate=3e-4, steps=40)
    assert found == [3e-4 * min(1.0, (step + 1) / (warmup + 1)) for step in range(40)]


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("warmup", [0, 5])
def test_every_schedule_has_the_same_warm_up_and_no_step_without_effect(schedule, warmup):
    found = rates(schedule, warmup_steps=warmup, learning_rate=1e-3)
    assert found[: warmup + 1] == pytest.approx(
        rates("constant", warmup_steps=warmup, learning_rate=1e-3)[: warmup + 1]
    )
    assert min(found) > 0
    assert max(found) == pytest.approx(1e-3)
    if schedule != "constant":
        assert found[-1] < 0.9e-3


@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "constant"])
def test_a_schedule_steps_as_in_transformers(schedule):
    options = dict(option.split("=") for option in NEEDED.get(schedule, ()))
    options = {name: float(value) for name, value in options.items()}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    shift = schedule != "cosine_warmup_with_min_lr"
    scheduler = transformers.get_scheduler(schedule, optimizer, 4, 20 + shift, options)
    expected = []
    for _ in range(20 + shift):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(schedule, warmup_steps=3, learning_rate=1e-3) == expected[shift:]


def test_linear_by_hand():
    found = rates("linear", steps=4, warmup_steps=1, learning_rate=1.0)
    assert found == pytest.approx([1 / 2, 1, 2 / 3, 1 / 3])


def test_an_option_of_text():
    options = ("num_decay_steps=6", "decay_type=linear")
    found = rates("warmup_stable_decay", schedule_options=options, learning_rate=1.0)
    assert found[-6:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("cosine_with_min_lr", (), "must be those of the schedule cosine_with_min_lr, got none"),
        ("linear", ("min_lr=1",), "of the schedule linear, got min_lr=1: .*unexpected keyword"),
        ("polynomial", ("lr_end=1",), "got lr_end=1: "),
        ("warmup_stable_decay", (), "of the schedule warmup_stable_decay, got none"),
        ("polynomial", ("lr_end=-1",), "must give a learning rate of at least 0, got -"),
    ],
)
def test_options_that_the_schedule_does_not_have_end_the_run_before_it_starts(
    small, tmp_path, schedule, options, message
):
    small |= {"warmup_steps": 0}
    with pytest.raises(ValueError, match=message):
        run("grpo", small, schedule=schedule, schedule_options=options)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("cosine", ("fast",), "must be like min_lr=1e-5, got 'fast'"),
        ("cosine", ("=1",), "must be like min_lr=1e-5, got '=1'"),
        ("cosine", ("a=1", "a=2"), "must have each name once, got a twice"),
        ("constant", ("min_lr=1",), "another schedule than constant, got min_lr"),
        ("greedy", (), "schedule must be one of constant, linear"),
    ],
)
def test_bad_schedules(schedule, options, message):
    with pytest.raises(ValueError, match=message):
        GrpoConfig(schedule=schedule, schedule_options=options)


@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_a_resumed_run_continues_its_schedule(small, loop):
    small |= {"schedule": "cosine", "warmup_steps": 1, "learning_rate": 1e-2, "save_every": 2}
    whole = run(loop, small, name="whole", steps=4).directory
    stopped = run(loop, small, name="stopped", steps=4).directory
    logged = [row["learning_rate"] for row in rows(whole) if row["step"]]
    assert logged == rates("cosine", steps=4, warmup_steps=1, learning_rate=1e-2)
    (stopped / "checkpoints" / "step-000004").rename(stopped / "of-the-end")
    run(loop, small, name="stopped", steps=4, resume=True)
    assert rows(stopped) == rows(whole)
    one, two = weights(stopped), weights(whole)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("schedule", NAMES)
def test_steps_may_change_on_resume_only_if_the_rates_before_do_not(small, schedule):
    settings = {"schedule": schedule, "schedule_options": NEEDED.get(schedule, ())}
    settings |= {"warmup_steps": 1, "prompts_per_step": 4}
    depends = rates(schedule, steps=20) != rates(schedule, steps=30)[:20]
    run("grpo", small, name="a", steps=8, save_every=9, eval_every=9, **settings)
    if depends:
        message = f"steps must remain 8 when a run is resumed, since the schedule {schedule} dep"
        with pytest.raises(ValueError, match=message):
            run("grpo", small, name="a", steps=9, resume=True, **settings)
    else:
        assert run("grpo", small, name="a", steps=9, resume=True, **settings).step == 9


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("cosine", ("last_epoch=5",), "schedule_options must be those of the schedule cosine"),
        ("cosine", ("num_cycles=nan",), "num_cycles must be finite, got nan"),
        ("warmup_stable_decay", ("num_decay_steps=20",), "must leave room for the warm-up"),
    ],
)
def test_options_that_spoil_the_rate_are_refused(schedule, options, message):
    config = GrpoConfig(schedule=schedule, schedule_options=options, steps=10, warmup_steps=5)
    with pytest.raises(ValueError, match=message):
        learning_rate(config, 0)
