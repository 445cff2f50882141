"""Options, batches and methods that change while a trainer runs with fastrl."""

import pytest
import torch

from tests.support.trl_runs import make_trainer, needed, run, save_model

trl = needed("trl")
transformers = needed("transformers")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

METRICS = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean")
OPTIONS = {"max_steps": 6, "beta": 0.04, "num_iterations": 2, "epsilon": 0.05}


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"))


class After(transformers.TrainerCallback):
    """Calls a function when two steps are done."""

    def __init__(self, function):
        self.function = function

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            self.function()


def equal_runs(path, tmp_path, change=lambda trainer: None, changed_later=None, **options):
    """Train with and without fastrl, compare the numbers; the handle and steps of the first."""
    found = []
    for use in ((), (use_fastrl,)):
        trainer = make_trainer(path, output_dir=tmp_path, **{**OPTIONS, **options})
        change(trainer)
        if changed_later is not None:
            trainer.add_callback(After(lambda trainer=trainer: changed_later(trainer)))
        found.append(run(trainer, *use))
    (theirs, their_losses, _), (ours, our_losses, handle) = found
    assert our_losses == pytest.approx(their_losses, abs=1e-4)
    for a, b in zip(ours, theirs, strict=True):
        for name in METRICS:
            if name in b:
                assert a[name] == pytest.approx(b[name], abs=1e-4), name
    return handle, ours


CHANGES = {
    "a loss type that TRL computes": {"loss_type": "vespo"},
    "a value that no objective has": {"delta": 1.01},
    "another clipping range": {"epsilon_low": 0.4},
    "a temperature, which TRL reads once": {"temperature": 0.3},
    "no KL": {"beta": 0.0},
    "sequences": {"importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_that_a_callback_changes(name, tiny_path, tmp_path):
    def change(trainer):
        for option, value in CHANGES[name].items():
            setattr(trainer.args if option == "delta" else trainer, option, value)

    handle, steps = equal_runs(tiny_path, tmp_path, changed_later=change)
    assert handle.fused
    assert len(steps) == 6


def rollout(prompts, trainer):
    """Completions as an engine would return them, whose log-probabilities are not the policy's."""
    completions = [[4 + (7 * i + 5 * j) % 50 for j in range(3 + i)] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-3.5 for _ in ids] for ids in completions],
    }


@pytest.mark.parametrize("times", [1, 2])
def test_the_off_policy_mask_measures_the_distance_from_the_engine(times, tiny_path, tmp_path):
    def change(trainer):
        trainer.rollout_func = rollout

    # TRL sends old log-probabilities with two iterations, and none with one
    options = {"num_iterations": times, "off_policy_mask_threshold": 0.2}
    handle, _ = equal_runs(tiny_path, tmp_path, change, **options)
    assert handle.fused


@pytest.mark.parametrize("adapter", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_prompt_learning(adapter, beta, tiny_path, tmp_path):
    peft = needed("peft")

    def config():
        torch.manual_seed(1)
        return getattr(peft, adapter)(task_type="CAUSAL_LM", num_virtual_tokens=2)

    found = []
    for use in ((), (use_fastrl,)):
        options = {**OPTIONS, "beta": beta, "peft_config": config(), "learning_rate": 0.05}
        trainer = make_trainer(tiny_path, output_dir=tmp_path, **options)
        found.append(run(trainer, *use))
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-4)
    assert found[1][2].fused
    assert found[1][0][-1]["grad_norm"] == pytest.approx(found[0][0][-1]["grad_norm"], abs=1e-4)


def test_hooks_on_the_model_get_what_trl_gives_them(tiny_path, tmp_path):
    ids = torch.tensor([[0, 5, 6, 7, 8], [9, 10, 11, 12, 0]])
    mask = torch.ones_like(ids)
    mask[0, 0] = mask[1, 4] = 0
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    outputs = []
    trainer.model.register_forward_hook(lambda *arguments: outputs.append(arguments[-1]))
    for use in (False, True):
        if use:
            use_fastrl(trainer)
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, 3, compute_entropy=True
            )
    theirs, ours = outputs
    for name in ("loss", "log_probs", "entropy", "label_mask"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-5)


def test_undo_under_a_method_that_was_patched_on_top(tiny_path, tmp_path):
    def change(trainer):
        handle = use_fastrl(trainer)
        own = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: 2 * own(model, inputs)
        handle.undo()

    def patched(trainer):
        own = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: 2 * own(model, inputs)

    found = []
    for how in (patched, change):
        trainer = make_trainer(tiny_path, output_dir=tmp_path, **OPTIONS)
        how(trainer)
        found.append(run(trainer))
    assert found[1][1] == found[0][1]
    assert not any(METRIC in step for step in found[1][0])


def test_no_output_outlives_a_call(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, **OPTIONS)
    _, _, handle = run(trainer, use_fastrl)
    assert handle._outputs is None
