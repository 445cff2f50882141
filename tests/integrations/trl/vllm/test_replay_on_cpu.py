"""`replay_kept_tokens` with vLLM itself, on a CPU: `make test-vllm` runs this.

vLLM samples, and returns the log-probabilities by which it did; the trainer's must be the same. The
sets are those of vLLM's own filter, which a processor of `on_cpu.py` applies before vLLM does.
"""

import gc
import math

import pytest
import torch

pytest.importorskip("vllm")
trl = pytest.importorskip("trl")

from trl.generation import vllm_generation  # noqa: E402

from fastrl.integrations.trl import use_fastrl, vllm_returns_kept_tokens  # noqa: E402
from fastrl.integrations.trl.replay import TOP_K  # noqa: E402
from tests.integrations.trl.kinds import make_trainer  # noqa: E402
from tests.integrations.trl.runs import VOCABULARY, save_model  # noqa: E402
from tests.integrations.trl.test_centering import (  # noqa: E402
    first_batch,
    in_float64,
    log_softmax,
)
from tests.integrations.trl.vllm import on_cpu  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BATCH, LOSS = "_generate_and_score_completions", "_compute_loss"
RATIO = "sampling/importance_sampling_ratio/mean"
SCORES = "_get_per_token_logps_and_entropies"
CASES = {
    "top_p": {"top_p": 0.8, "top_k": 60},
    "all, on a temperature": {"top_p": 0.8, "top_k": 9, "min_p": 0.05, "temperature": 0.7},
    "an old and a reference model": {"top_p": 0.8, "top_k": 60, "beta": 0.04, "num_iterations": 2},
    "RLOO": {"kind": "RLOO", "top_p": 0.8, "top_k": 60, "learning_rate": 0.02},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model with heads that vLLM has on a CPU."""
    return save_model(tmp_path_factory.mktemp("model"), hidden_size=32, head_dim=32)


@pytest.fixture
def made(path, tmp_path, monkeypatch):
    """A trainer and its engine. An engine that is collected ends groups of a later one, too."""
    gc.collect()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(vllm_generation, "LLM", on_cpu.LLM)
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "sync_weights", on_cpu.sync_weights)

    def make(kind="GRPO", **options):
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
        return make_trainer(
            path, kind, output_dir=tmp_path, **{"max_steps": 2, **engine, **options}
        )

    return make


def gaps(trainer):
    """Train; return |log-probability - vLLM's| of new and of old tokens, and the sets' sizes.

    The new ones are those of micro-batches whose weights generated the tokens.
    """
    batch, score, loss = (getattr(trainer, name) for name in (BATCH, SCORES, LOSS))
    generation = trainer.vllm_generation
    own, drawn, scored, new, old, counts = generation.generate, [], [], [], [], []

    def generate(*arguments, **options):
        result = own(*arguments, **options)
        drawn[:] = [[entry[0] for entry in row] for row in result[2]]
        return result

    def batched(inputs):
        result = batch(inputs)
        width = result["completion_ids"].shape[1]
        rows = [torch.nn.functional.pad(torch.tensor(x), (0, width - len(x))) for x in drawn]
        result["drawn"] = torch.stack(rows)
        result["of_step"] = torch.full((len(rows),), trainer.state.global_step)
        if "old_per_token_logps" in result:
            mask = result["completion_mask"].bool()
            old.append((result["old_per_token_logps"] - result["drawn"])[mask])
        counts.extend(one.counts() for one in result.get("kept_tokens", ()))
        return result

    def scores(*arguments, **options):
        result = score(*arguments, **options)
        scored.append(result[0].detach())
        return result

    def computed(model, inputs):
        rows, step = inputs.pop("drawn"), inputs.pop("of_step")
        value = loss(model, inputs)
        if step[0] == trainer.state.global_step:
            new.append((scored[-1] - rows)[inputs["completion_mask"].bool()])
        inputs |= {"drawn": rows, "of_step": step}
        return value

    generation.generate, generation.logprobs = generate, 0  # RLOO does not ask for them
    for name, function in ((BATCH, batched), (SCORES, scores), (LOSS, computed)):
        setattr(trainer, name, function)
    trainer.train()
    return torch.cat(new).abs(), [gap.abs() for gap in old], counts


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_scores_what_vllm_sampled(name, made):
    with vllm_returns_kept_tokens():
        trainer = made(**CASES[name])
    assert vllm_generation.LLM is on_cpu.LLM
    handle = use_fastrl(trainer, replay_kept_tokens=True)
    assert handle.fused
    new, old, counts = gaps(trainer)
    for gap in (new, *old):
        assert gap.mean() < 1e-5
    assert bool(old) == (name != "RLOO")
    sizes = torch.cat(counts)
    assert 1 < sizes.float().mean() < VOCABULARY / 2
    if name != "RLOO":  # TRL's importance sampling corrects nothing
        assert trainer.state.log_history[0][RATIO] == pytest.approx(1, abs=1e-5)
    assert "generate" not in trainer.vllm_generation.llm.__dict__


def test_without_sets_the_trainer_scores_another_distribution(made):
    trainer = made(top_p=0.8)
    with pytest.raises(ValueError, match=r"with vllm_returns_kept_tokens\(\): trainer ="):
        use_fastrl(trainer, replay_kept_tokens=True)
    use_fastrl(trainer)
    new, _, _ = gaps(trainer)
    assert 0.1 < new.mean() < new.max() <= -math.log(0.8) + 1e-5  # at least 0.8 is kept
    assert trainer.state.log_history[0][RATIO] < 0.95


def test_vllm_returns_the_likeliest_tokens(made):
    """Of the whole vocabulary, with the model's log-probabilities at the temperature."""
    trainer = made(temperature=0.7, vllm_importance_sampling_mode="token_truncate")
    use_fastrl(trainer, score_centering=5)
    batch = first_batch(trainer)
    mask = batch["completion_mask"].bool()
    ids, found = (batch[name][mask] for name in TOP_K)
    own = log_softmax(trainer, in_float64(trainer.model), batch)[mask]
    assert (own.gather(-1, ids) - found).abs().max() < 1e-5
    assert (own.topk(5).values - found.sort(descending=True).values).abs().max() < 1e-5
    trainer.train()
    step = trainer.state.log_history[0]
    assert step["fastrl/head_kl"] == pytest.approx(0, abs=1e-5)
    assert step[RATIO] == pytest.approx(1, abs=1e-5)
