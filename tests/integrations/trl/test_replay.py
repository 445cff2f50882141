"""`replay_kept_tokens`: a trainer's log-probabilities are those that its sampler sampled with."""

import functools
import warnings

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import VOCABULARY, on

trl = needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.handle import Choices  # noqa: E402
from fastrl.integrations.trl.loss import can_be_fused  # noqa: E402
from fastrl.integrations.trl.replay import KEPT, Replay, kept_of  # noqa: E402
from fastrl.ops.kept_tokens import KeptTokens  # noqa: E402

SCORES, LOSS = "_get_per_token_logps_and_entropies", "_compute_loss"
GENERATE, BATCH = "_generate_single_turn", "_generate_and_score_completions"

LORA = {"r": 2, "target_modules": ["q_proj"]}
TWICE = {"num_iterations": 2, "epsilon": 0.05}
CASES = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "min_p": {"min_p": 0.2, "loss_type": "grpo"},
    "all, in parts": {
        "top_p": 0.8,
        "top_k": 9,
        "min_p": 0.05,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "twice, with KL": {"top_p": 0.7, "beta": 0.04, **TWICE},
    "sequences": {"top_p": 0.7, "importance_sampling_level": "sequence", **TWICE},
    "truncated and padded": {
        "top_p": 0.7,
        "mask_truncated_completions": True,
        "pad_to_multiple_of": 8,
        "max_completion_length": 40,
    },
    "TRL's loss": {"top_p": 0.7, "loss_type": "vespo", **TWICE},
    "RLOO": {"kind": "RLOO", "top_p": 0.7, "learning_rate": 0.02, "beta": 0.04},
    "RLOO, twice": {"kind": "RLOO", "top_p": 0.7, "learning_rate": 0.02, "num_iterations": 2},
    "an adapter": {"top_p": 0.7, "peft_config": LORA, "beta": 0.04, **TWICE},
    "suppressed tokens": {
        "top_k": 9,
        "generation_kwargs": {"suppress_tokens": [5, 6, 7], "renormalize_logits": True},
    },
    "all kept": {},
}


@pytest.fixture
def sampled(monkeypatch):
    """The tokens that `generate` draws, and the log-probabilities by which it does."""
    steps, multinomial = [], torch.multinomial

    def drawn(probabilities, *arguments, **options):
        ids = multinomial(probabilities, *arguments, **options)
        if probabilities.shape[-1] == VOCABULARY:
            steps.append((ids[:, 0], probabilities.gather(1, ids)[:, 0].log()))
        return ids

    monkeypatch.setattr(torch, "multinomial", drawn)
    return steps


def gaps(path, sampled, *, replay, kind="GRPO", packed=None, **options):
    """Train two steps; compare what is scored with what was sampled.

    Returns:
        The handle, the differences of the new log-probabilities in the first step, those of old and
        reference ones in the first batch, and how many tokens were kept for each.
    """
    trainer = make_trainer(path, kind, **{"max_steps": 2, **options})
    handle = use_fastrl(trainer, replay_kept_tokens=replay, packed=packed)
    generate, score, compute = (getattr(trainer, name) for name in (BATCH, SCORES, LOSS))
    new, others, counts, scored = [], [], [], []

    def generated(inputs):
        sampled.clear()
        batch = generate(inputs)
        mask = batch["completion_mask"].bool()
        ids, logprobs = (torch.stack(x, 1) for x in zip(*sampled, strict=True))
        logprobs = torch.nn.functional.pad(logprobs, (0, mask.shape[1] - logprobs.shape[1]))
        drawn = mask[:, : ids.shape[1]]
        assert torch.equal(ids[drawn], batch["completion_ids"][:, : ids.shape[1]][drawn])
        if trainer.state.global_step == 0:
            others.extend(
                (batch[name] - logprobs)[mask]
                for name in ("old_per_token_logps", "ref_per_token_logps")
                if name in batch
            )
            if kind == "RLOO":
                others.append(batch["old_logps"] - (logprobs * mask).sum(1))
        counts.extend(one.counts() for one in batch.get("kept_tokens", ()))
        return batch | {"sampled": logprobs}

    def scores(*arguments, **options):
        result = score(*arguments, **options)
        scored.append(result[0].detach())
        return result

    def loss(model, inputs):
        scored.clear()
        drawn = inputs.pop("sampled")
        assert can_be_fused(inputs)
        value = compute(model, inputs)
        inputs["sampled"] = drawn  # TRL may use the batch again
        assert value.isfinite()
        if trainer.state.global_step == 0:
            new.append((scored[0] - drawn)[inputs["completion_mask"].bool()])
        return value

    for name, function in ((BATCH, generated), (SCORES, scores), (LOSS, loss)):
        setattr(trainer, name, function)
    trainer.train()
    return handle, torch.cat(new).abs(), [gap.abs() for gap in others], counts


@pytest.mark.parametrize("packed", [True, False])
def test_absolute_positions_are_the_samplers(packed, gpt2_path, sampled):
    """Of prompts that TRL pads on the left, where GPT-2 would read other positions."""
    handle, new, others, _ = gaps(
        gpt2_path, sampled, replay=True, packed=packed, top_p=0.8, beta=0.04
    )
    assert handle.packed == packed
    assert max(new.max(), *(gap.max() for gap in others)) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_scores_what_was_sampled(name, tiny_path, sampled):
    handle, new, others, counts = gaps(tiny_path, sampled, replay=True, **CASES[name])
    assert handle.fused == (name != "TRL's loss")
    assert len(new) > 0
    for gap in (new, *others):
        assert gap.mean() <= 1e-5
    assert len(others) >= ("num_iterations" in CASES[name]) + ("beta" in CASES[name])
    kept = torch.cat(counts)
    assert kept.max() < VOCABULARY
    assert (kept.max() > 0) == (name != "all kept")


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_without_replay_it_scores_over_the_whole_vocabulary(kind, tiny_path, sampled):
    _, new, _, counts = gaps(tiny_path, sampled, replay=False, kind=kind, top_p=0.7)
    assert new.mean() > 1e-2
    assert counts == []


@pytest.mark.parametrize("sampling", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {}])
def test_a_sampler_of_fewer_tokens_gives_a_warning(sampling, tiny_path):
    trainer = make_trainer(tiny_path, **sampling)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        use_fastrl(trainer).undo()
        use_fastrl(trainer, replay_kept_tokens=True).undo()
    found = [warning for warning in seen if "replay_kept_tokens=True" in str(warning.message)]
    assert len(found) == len(sampling)
    for warning in found:
        assert str(warning.message).startswith("=".join(map(str, *sampling.items())))
        assert warning.filename == __file__


@pytest.mark.parametrize("fused", [None, False])
def test_evaluation(fused, tiny_path, sampled):
    trainer = make_trainer(tiny_path, top_p=0.7, beta=0.04)
    use_fastrl(trainer, replay_kept_tokens=True, fused=fused)
    trainer.eval_dataset = trainer.train_dataset
    values = trainer.evaluate()
    assert values["eval_kl"] == pytest.approx(0, abs=1e-6)
    assert 0 < values["eval_entropy"] < torch.tensor(VOCABULARY).log()


def test_sets_of_sequences_of_other_lengths():
    sets = [KeptTokens.from_lists(x) for x in ([[3, 4], [5]], [[6]])]
    kept = kept_of(sets, torch.zeros(2, 3, dtype=torch.int64))
    assert kept.token_ids.tolist() == [3, 4, 5, 6]
    assert kept.counts().tolist() == [2, 1, 0, 1, 0, 0]


@pytest.fixture(scope="module")
def trainer(trainers):
    return trainers("GRPO", top_p=0.7)


def rewritten(own, *given, **options):
    completions, logprobs = own(*given, **options)
    return [[3] * len(ids) for ids in completions], logprobs


def written(own, prompts, *_, **__):
    return [[3, 4] for _ in prompts], None


def flipped(own, inputs):
    batch = own(inputs)
    return batch | {"completion_ids": batch["completion_ids"].flip(0)}


def generated_twice(own, inputs):
    batch = own(inputs)
    own(inputs)
    return batch


def cut(own, inputs):
    batch = own(inputs)
    return batch | {"completion_ids": batch["completion_ids"][:-1]}


OTHER = {"temperature": 0.7, "generation_kwargs": {"temperature": 1.0}}  # which needs no processor
MIXED = "does not return the completions of its last generation"
#: Options, another method of the trainer, and what the error says.
STOPPED = [
    ({"repetition_penalty": 1.2}, None, "RepetitionPenaltyLogitsProcessor"),
    (
        {"generation_kwargs": {"sequence_bias": [[[5], 2.0]]}},
        None,
        "SequenceBiasLogitsProcessor",
    ),
    (
        {"generation_kwargs": {"temperature": 0.5}},
        None,
        "temperature 1.0 with replay_kept_tokens, got 0.5",
    ),
    (OTHER, None, "temperature 0.7 with replay_kept_tokens, got 1.0"),
    ({"generation_kwargs": {"do_sample": False}}, None, "a generation by greedy_search"),
    ({"generation_kwargs": {"num_beams": 2}}, None, "a generation by beam_sample"),
    ({"top_k": 2}, (GENERATE, rewritten), "its set lacks, 3 at place 0"),
    ({"top_k": 2}, (GENERATE, written), "sampled 0 for"),
    ({}, (BATCH, flipped), MIXED),
    ({}, (BATCH, generated_twice), MIXED),
    ({}, (BATCH, cut), MIXED),
]


@pytest.mark.parametrize(("options", "changed", "sentence"), STOPPED)
def test_a_generation_that_cannot_be_replayed_stops_the_run(
    options, changed, sentence, tiny_path, monkeypatch
):
    """Other distributions, completions of another sampler, and a subclass with its own batches."""
    if changed is not None:
        name, change = changed
        own = getattr(trl.GRPOTrainer, name)
        method = lambda self, *given, **x: change(functools.partial(own, self), *given, **x)  # noqa: E731
        monkeypatch.setattr(trl.GRPOTrainer, name, method)
    trainer = make_trainer(tiny_path, **{"top_p": 0.7, **options})
    use_fastrl(trainer, replay_kept_tokens=True)
    error = RuntimeError if "top_k" in options else ValueError
    with pytest.raises(error, match=sentence):
        trainer.train()
    assert "_get_logits_processor" not in trainer.model.__dict__


def test_after_undo_nothing_is_left_of_the_sets(tiny_path):
    """A batch that TRL has kept for a second step has old log-probabilities over its sets."""
    options = {"top_p": 0.7, "max_steps": 2, "num_iterations": 2}
    trainer = make_trainer(tiny_path, learning_rate=1e-9, **options)
    handle = use_fastrl(trainer, replay_kept_tokens=True)
    steps = []

    def undo(state, **_):
        steps.append(trainer._buffered_inputs[0].keys())
        if len(steps) == 1:
            handle.undo()
            use_fastrl(trainer)

    trainer.add_callback(on("on_step_end", undo))
    trainer.train()
    assert ["kept_tokens" in names for names in steps] == [True, False]
    assert trainer.state.log_history[1]["clip_ratio/region_mean"] == 0
    batches = trainer._buffered_inputs
    handle.undo()
    assert trainer._buffered_inputs is batches


def test_scores_without_sets_are_refused(trainer):
    ids = torch.tensor([[3, 4, 5]])
    with use_fastrl(trainer, replay_kept_tokens=True):
        with pytest.raises(ValueError, match=r"replay_kept_tokens must be False where .* 1 sequ"):
            getattr(trainer, SCORES)(trainer.model, ids, torch.ones_like(ids), 1)
        with pytest.raises(ValueError, match=r"inputs must have kept_tokens, got prompt_ids"):
            trainer._compute_loss(trainer.model, {"prompt_ids": ids})


def test_sets_are_those_of_the_batch_that_is_scored(trainer):
    """Only while it is scored, also if that raises, and only for as many sequences."""
    replay = Replay(trainer, Choices(replay_kept_tokens=True))
    sets = [KeptTokens.from_lists([[3]])] * 2
    outside = "replay_kept_tokens must be False where"
    with replay.of_batch({KEPT: sets}):
        assert replay.sets(2) is sets
        for sequences in (1, 3):
            with pytest.raises(ValueError, match=f"{outside} .* {sequences} sequences without"):
                replay.sets(sequences)
    with pytest.raises(ZeroDivisionError), replay.of_batch({KEPT: sets}):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match=outside):
        replay.sets(2)


def test_undo_restores_the_methods(trainer, monkeypatch):
    def patched(*arguments):
        return trl.GRPOTrainer._compute_loss(trainer, *arguments)

    monkeypatch.setitem(trainer.__dict__, LOSS, patched)
    before = dict(trainer.__dict__)
    with use_fastrl(trainer, replay_kept_tokens=True):
        replaced = {name: trainer.__dict__[name] for name in (GENERATE, BATCH, SCORES, LOSS)}
    assert trainer.__dict__ == before
    batch = replaced[BATCH]([trainer.train_dataset[0]] * 4)
    assert "kept_tokens" not in batch
