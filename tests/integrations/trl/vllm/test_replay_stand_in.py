"""`replay_kept_tokens` and `score_centering` with a stand-in for vLLM's engine.

`make test-vllm` has the real one.
"""

import contextlib
import dataclasses
import os
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import VOCABULARY

needed("trl")
from trl.generation import vllm_generation  # noqa: E402

from fastrl.integrations.trl import use_fastrl, vllm_returns_kept_tokens  # noqa: E402
from fastrl.integrations.trl.replay import KEPT  # noqa: E402
from tests.integrations.trl.test_centering import (  # noqa: E402
    by_hand,
    check_step,
    first_batch,
    in_float64,
    log_softmax,
    loss_of,
)
from tests.repo.blocks import changes  # noqa: E402

GENERATE, BATCH = "_generate_single_turn", "_generate_and_score_completions"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


class LLM:
    """An engine whose completions and sets are random, and in no order."""

    def __init__(self, *, return_sampling_mask=False, **_):
        config = SimpleNamespace(
            return_sampling_mask=return_sampling_mask, max_model_len=64, max_logprobs=20
        )
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=mock.Mock()))
        executor = SimpleNamespace(driver_worker=worker)
        self.llm_engine = SimpleNamespace(model_config=config, model_executor=executor)
        self.runner, self.returned = os.environ.get(RUNNER), []

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        assert (sampling_params.n, use_tqdm) == (1, False)
        count = sampling_params.logprobs or 0
        outputs = [self.output(prompt["prompt_token_ids"], count) for prompt in prompts]
        self.returned = [output.outputs[0] for output in outputs]
        return outputs

    def output(self, prompt, wanted):
        count = int(torch.randint(1, 8, ()))
        sets = [torch.randperm(VOCABULARY)[: 2 + i].tolist() for i in range(count)]
        one = SimpleNamespace(
            token_ids=[ids[0] for ids in sets],
            logprobs=[logprobs(ids[0], wanted) for ids in sets],
            sampling_mask=SimpleNamespace(token_ids=[sorted(ids) for ids in sets]),
        )
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[one])


def logprobs(token, count):
    """What vLLM returns of a random distribution: the sampled token and the `count` likeliest."""
    values = torch.randn(VOCABULARY).log_softmax(0)
    order = values.argsort(descending=True).tolist()
    places = {token: order.index(token), **dict(zip(order[:count], range(count), strict=True))}
    return {
        t: SimpleNamespace(logprob=values[t].item(), rank=place + 1) for t, place in places.items()
    }


def stand_in(*flags):
    module = ModuleType("vllm")
    module.EngineArgs = dataclasses.make_dataclass("EngineArgs", ["model", *flags])
    module.__version__ = "0.27.1"
    return module


@pytest.fixture
def made(tiny_path, monkeypatch):
    """A trainer on the engine, whose flag is set in the block of the library."""
    monkeypatch.setitem(sys.modules, "vllm", stand_in("return_sampling_mask"))
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", LLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)

    def make(kind="GRPO", *, with_sets=True, **options):
        options = {"use_vllm": True, "vllm_mode": "colocate", "top_p": 0.8, "top_k": 60, **options}
        flag = vllm_returns_kept_tokens() if with_sets else contextlib.nullcontext()
        # TRL sets the variables of a rank, by which the next trainer would join a process group
        with flag, mock.patch.dict(os.environ):
            return make_trainer(tiny_path, kind, **options)

    return make


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_sets_of_the_engine_reach_the_loss(kind, made):
    trainer = made(kind, num_iterations=2, learning_rate=0.02)
    engine = trainer.vllm_generation.llm
    assert use_fastrl(trainer, replay_kept_tokens=True).fused
    batch = getattr(trainer, BATCH)([trainer.train_dataset[i // 4] for i in range(8)])
    assert len(batch[KEPT]) == len(engine.returned) == 8
    for sets, one in zip(batch[KEPT], engine.returned, strict=True):
        rows = one.sampling_mask.token_ids
        assert sets.token_ids.tolist() == [i for row in rows for i in row]
        assert sets.counts().tolist() == [len(row) for row in rows]
    every = log_softmax(trainer, in_float64(trainer.model), batch).detach()
    expected = every.gather(-1, batch["completion_ids"][..., None])[..., 0]
    mask = batch["completion_mask"].bool()
    if kind == "GRPO":
        assert (batch["old_per_token_logps"] - expected)[mask].abs().max() < 1e-5
    else:
        assert (batch["old_logps"] - (expected * mask).sum(1)).abs().max() < 1e-5
    assert "generate" not in engine.__dict__
    trainer.train()
    assert all(step["loss"] == step["loss"] for step in trainer.state.log_history[:-1])


def test_the_change_on_the_page_of_trl(made):
    names = dict.fromkeys(("model", "reward", "config", "dataset"))
    names["GRPOTrainer"] = lambda **_: made(with_sets=False)  # the change has the block
    _, (_, change) = changes("docs/replace-the-loss/trl.md")
    exec(change, names)
    trainer = names["trainer"]
    assert KEPT in getattr(trainer, BATCH)([trainer.train_dataset[0]] * 4)


@pytest.mark.parametrize("before", [None, "0"])
def test_the_flag_is_set_in_the_block_alone(before, made, monkeypatch):
    if before is not None:
        monkeypatch.setenv(RUNNER, before)
    engine = made().vllm_generation.llm
    assert engine.llm_engine.model_config.return_sampling_mask
    assert engine.runner == "1"
    with pytest.raises(ZeroDivisionError), vllm_returns_kept_tokens():
        raise ZeroDivisionError
    assert vllm_generation.LLM is LLM
    assert os.environ.get(RUNNER) == before


def test_a_vllm_without_the_flag_is_refused(made, monkeypatch):
    for module, sentence in ((stand_in(), "0.28 or later, got 0.27.1"), (None, "not installed")):
        monkeypatch.setitem(sys.modules, "vllm", module)
        with pytest.raises(ValueError, match=f"needs vLLM .*{sentence}"):
            made()
        assert vllm_generation.LLM is LLM


TOKENS = {"with_sets": False, "vllm_importance_sampling_mode": "token_mask"}
#: `options of the trainer and of use_fastrl -> what the error says`; sets are replayed unless
#: scores are centered
BAD = r"""
with_sets=False -> with vllm_returns_kept_tokens\(\): trainer
vllm_tensor_parallel_size=2 -> `vllm_tensor_parallel_size > 1`: TRL generates
vllm_mode="server" -> vllm_mode="server"`: TRL asks `/v1/completions`
repetition_penalty=1.2 -> repetition_penalty must be 1.0 .* got 1.2
vllm_structured_outputs_regex="a" -> structured_outputs_regex must be None
generation_kwargs={"presence_penalty": 0.1, "logit_bias": {3: 1.0}, "seed": 3}
    -> must not have logit_bias, presence_penalty with
generation_kwargs={"bad_words": ["w3"], "n": 2} -> must not have bad_words, n with
generation_kwargs={"temperature": 0.7} -> the trainer's temperature 1.0 .* got 0.7
temperature=0.005 -> with a temperature below 0.01 in vLLM, got 0.005
top_k=0 -> top_k must be above 0 .* got 0
generation_kwargs={"top_k": -1} -> top_k must be above 0 .* got -1
score_centering=4, with_sets=False -> "sequence_mask"` or .*: the weight of a token must be
score_centering=21, **TOKENS -> at most 20, the max_logprobs of vLLM, got 21: .*max_logprobs=21
score_centering=4, vllm_mode="server", **TOKENS -> score_centering=K` with `vllm_mode="server"
score_centering=4, temperature=0.005, **TOKENS -> score_centering None with a temperature below 0.01
score_centering=4, num_iterations=2, loss_type="cispo", epsilon_high=2.0, **TOKENS
    -> several optimizer steps per generation
"""


@pytest.mark.parametrize("row", re.sub(r"\n +", " ", BAD.strip()).splitlines())
def test_what_is_refused(row, made, monkeypatch):
    options, sentence = row.split(" -> ")
    options = eval(f"dict({options})")
    later = ("vllm_mode", "vllm_tensor_parallel_size")  # a server, or two processes
    changes = {name: options.pop(name) for name in later if name in options}
    use = {"score_centering": options.pop("score_centering", None)}
    trainer = made(**options)
    for name, value in changes.items():
        monkeypatch.setattr(trainer, name, value)
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer, **use, replay_kept_tokens=use["score_centering"] is None)
    assert trainer.__dict__ == before
    use_fastrl(trainer).undo()


def test_options_that_change_later_are_refused(made):
    trainer = made()
    use_fastrl(trainer, replay_kept_tokens=True)
    trainer.vllm_generation.repetition_penalty = 1.1
    with pytest.raises(ValueError, match=r"repetition_penalty must be 1\.0"):
        trainer.train()


def without_mask(outputs):
    outputs[1].outputs[0].sampling_mask = None
    return outputs


def short_mask(outputs):
    outputs[1].outputs[0].sampling_mask.token_ids.pop()
    return outputs


def other_sets(outputs):
    one = outputs[1].outputs[0]
    one.sampling_mask.token_ids[0] = [(one.token_ids[0] + 1) % VOCABULARY]
    return outputs


def in_another_order(generated):
    return tuple(of_all[::-1] for of_all in generated)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_mask, "a completion without the tokens that it kept"),
        (short_mask, "outputs must have a set for each token"),
        (other_sets, "a token that its set lacks, .* at place 0"),
        (in_another_order, "4 completions, and the 4 that vLLM generated are others"),
    ],
)
def test_sets_that_do_not_fit_stop_the_run(change, sentence, made, monkeypatch):
    trainer = made()
    owner, name = (type(trainer), GENERATE) if change is in_another_order else (LLM, "generate")
    own = getattr(owner, name)
    changed = lambda self, *given, **options: change(own(self, *given, **options))  # noqa: E731
    monkeypatch.setattr(owner, name, changed)
    use_fastrl(trainer, replay_kept_tokens=True)
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        trainer.train()
    assert "generate" not in trainer.vllm_generation.llm.__dict__


def test_a_patched_engine_stays_patched(made):
    trainer = made()
    engine = trainer.vllm_generation.llm
    patch = mock.Mock(side_effect=engine.generate)
    engine.generate = patch
    use_fastrl(trainer, replay_kept_tokens=True)
    getattr(trainer, BATCH)([trainer.train_dataset[0]] * 4)
    assert engine.generate is patch
    assert patch.call_count == 1


MODES = {
    "truncate": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.0,
    },
    "truncate both": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.5,
        "loss_type": "sapo",
    },
    "mask": {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.2,
        "loss_type": "cispo",
        "epsilon_high": 2.0,
    },
    "none": {"vllm_importance_sampling_correction": False},
}


@pytest.mark.parametrize("name", MODES)
def test_score_centering_by_hand(name, made):
    """Without centering, TRL's loss equals one computed with weights that depend on p / q."""
    trainer = made(with_sets=False, gradient_accumulation_steps=2, **MODES[name])
    engine = trainer.vllm_generation.llm
    with use_fastrl(trainer, score_centering=4):
        batch = first_batch(trainer)
        for i, one in enumerate(batch["completion_ids"].tolist()):  # TRL has shuffled them
            [own] = [x for x in engine.returned if one[: len(x.token_ids)] == x.token_ids]
            drawn = [found[t].logprob for found, t in zip(own.logprobs, own.token_ids, strict=True)]
            assert [*map(len, own.logprobs)] == [1] * len(drawn)
            sampled = batch["sampling_per_token_logps"][i, : len(drawn)]
            assert sampled.tolist() == pytest.approx(drawn)
        metrics = check_step(trainer, batch)
    assert (metrics["fastrl/zero_weight_fraction"][0] > 0) == (name == "mask")
    theirs, expected = loss_of(trainer, batch), by_hand(trainer, batch, centered=False)
    assert theirs[0].item() == pytest.approx(expected[0], abs=1e-5)
    torch.testing.assert_close(theirs[2], expected[2], rtol=1e-4, atol=1e-5)
