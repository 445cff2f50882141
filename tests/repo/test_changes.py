"""The changes on the pages of `docs/replace-the-loss` and in the README run, and do what they say.

Before and after, the results are the same; other packages are stand-ins.
"""

import functools
import math
import re
import sys
import types

import pytest
import torch

import fastrl
from fastrl.integrations import liger, nemo_rl, openrlhf, torchrl, verl
from tests.integrations import nemo_rl_formulas
from tests.integrations.packages import importable, needed, stand_ins
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import VOCABULARY, make_model, save_model
from tests.integrations.verl import formulas, loss_formulas
from tests.repo.blocks import BLOCKS, ROOT, TEXTS, changes, script

FOLDER = "docs/replace-the-loss"
PAGES = sorted(page.stem for page in (ROOT / FOLDER).glob("*.md") if page.stem != "index")
#: How many changes of each page these tests run.
CHANGES = {"trl": 2, "verl": 1, "openrlhf": 3, "liger": 3, "torchrl": 1, "custom-loop": 3}
CHANGES["nemo-rl"] = 1

pytestmark = pytest.mark.filterwarnings("ignore")


def of(page):
    return changes(f"{FOLDER}/{page}.md")


def test_every_change_is_run_and_every_page_linked():
    pages = {page: of(page) for page in PAGES}
    found = {page: sum(before is not None for before, _ in code) for page, code in pages.items()}
    assert all(pages.values())
    assert {page: count for page, count in found.items() if count} == CHANGES
    linked = re.findall(r"^\| \[[^]]+\]\(([\w-]+)\.md\) \|", TEXTS[f"{FOLDER}/index.md"], re.M)
    assert sorted(linked) == PAGES


@pytest.fixture
def modules(monkeypatch):
    return functools.partial(stand_ins, monkeypatch)


@pytest.fixture
def verl_stand_in(modules):
    """Modules with verl's formulas."""
    written = vars(formulas) | vars(loss_formulas)
    functions = {name: x for name, x in written.items() if isinstance(x, types.FunctionType)}
    del functions["compute_policy_loss_reinforce"]  # another name of its first argument
    modules({"verl.utils.torch_functional": functions, "verl.trainer.ppo.core_algos": functions})


# --- code that computes the same before and after


def rows(count=8, length=9):
    ids = torch.randint(4, VOCABULARY, (count, length))
    labels = ids.clone()
    labels[:, :3] = -100
    for row in range(count):
        labels[row, length - row % 4 :] = -100
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "advantages": torch.randn(count),
        "old_logprobs": -3 - torch.rand(count, length - 1),
    }


def grpo_loss(logprobs, old_logprobs, advantages, mask):
    ratio, scores = (logprobs - old_logprobs).exp(), advantages[:, None]
    loss = -torch.min(ratio * scores, ratio.clamp(0.8, 1.2) * scores)
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


def of_readme():
    return {
        "fastrl": fastrl,
        "my_grpo_loss": grpo_loss,
        "logits": torch.randn(4, 5, 11, requires_grad=True),
        "ids": torch.randint(11, (4, 5)),
        "advantages": torch.randn(4),
        "mask": torch.ones(4, 4),
        "old_logprobs": -torch.rand(4, 4) - 2,
    }


def of_custom_loop():
    needed("transformers")
    data = rows()
    mask = (data["labels"][:, 1:] != -100).float()
    names = {"grpo_loss": grpo_loss, "model": make_model(), "ids": data["input_ids"], "mask": mask}
    return names | {name: data[name] for name in ("attention_mask", "advantages", "old_logprobs")}


def of_liger():
    weight = torch.randn(11, 4, requires_grad=True)
    return {
        "hidden": torch.randn(2, 3, 4),
        "weight": weight,
        "ids": torch.randint(11, (2, 3)),
        "mask": torch.ones(2, 3),
        "advantages": torch.randn(2),
        "ref": -torch.rand(2, 3) - 2,
        "student_hidden": torch.randn(6, 4),
        "student_weight": weight,
        "teacher_hidden": torch.randn(6, 5),
        "teacher_weight": torch.randn(11, 5),
        "labels": torch.randint(11, (6,)),
        "token_logps": -torch.rand(2, 3),
        "topk_ids": torch.arange(4).expand(2, 3, 4),
        "topk_logps": torch.full((2, 3, 4), -2.0),
    }


def of_torchrl():
    names = {name: torch.randn(5, 1) for name in ("value", "next_value", "reward")}
    return names | dict.fromkeys(("done", "terminated"), torch.rand(5, 1) < 0.3)


def of_verl():
    return {"loss_mat": torch.arange(6.0).reshape(2, 3), "loss_mask": torch.ones(2, 3)}


def computed(code, given):
    """Return the names of a piece of code that has run."""
    torch.manual_seed(0)
    exec(code, names := given())
    return names


def same(change, given, results, **tolerances):
    """Run both, compare what they have computed, and return the names of the second."""
    found = [computed(code, given) for code in change]
    torch.testing.assert_close(*map(results, found), **tolerances)
    return found[-1]


def test_the_diff_of_the_readme():
    (change,) = [b.change() for b in BLOCKS if (b.page, b.language) == ("README.md", "diff")]
    same(change, of_readme, lambda x: (x["loss"], x["logits"].grad), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", range(CHANGES["custom-loop"]))
def test_a_custom_loop(place):
    def results(names):
        return names["loss"], [weight.grad for weight in names["model"].parameters()]

    same(of("custom-loop")[place], of_custom_loop, results, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("place", range(CHANGES["liger"]))
def test_liger(place):
    def results(names):
        metrics = names.get("metrics", ())
        values = metrics.values() if isinstance(metrics, dict) else metrics
        return names["loss"], *values, names["weight"].grad

    before, after = of("liger")[place]
    # the score centering loss is in a nightly, and its kernel runs on a GPU
    in_turn = place < 2 and importable("liger_kernel.chunked_loss")
    change = (before if in_turn else after, after)
    names = same(change, of_liger, results, rtol=1e-4, atol=1e-5)
    name = ("GRPOLoss", "JSDLoss", "ScoreCenteringLoss")[place]
    assert names[f"LigerFusedLinear{name}"] is getattr(liger, f"LigerFusedLinear{name}")


def written_down(
    gamma, lmbda, state_value, next_state_value, reward, done, terminated=None, *, time_dim=-2
):
    trace, found = 0.0, []
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * next_state_value[t] * ~terminated[t] - state_value[t]
        trace = delta + gamma * lmbda * trace * ~done[t]
        found.append(trace)
    advantage = torch.stack(found[::-1])
    return advantage, advantage + state_value


def test_torchrl(modules):
    names = ("generalized_advantage_estimate", "vec_generalized_advantage_estimate")
    modules({"torchrl.objectives.value.functional": dict.fromkeys(names, written_down)})
    names = same(of("torchrl")[0], of_torchrl, lambda x: x["advantage"])
    assert names["gae"] is torchrl.vec_generalized_advantage_estimate
    names["replaced"].undo()


def test_verl(verl_stand_in):
    (before, after), (_, alone) = of("verl")
    names = computed(before, of_verl)
    assert names["core_algos"].agg_loss is not verl.agg_loss
    expected = names["loss"].double()
    names = computed(after, of_verl)
    assert names["core_algos"].agg_loss is verl.agg_loss
    torch.testing.assert_close(names["loss"].double(), expected, rtol=1e-6, atol=0)
    names["replaced"].undo()
    assert computed(alone, dict)["advantages"].shape == (2, 2)


def test_the_verl_script_compares_functions_that_were_replaced(verl_stand_in, capsys):
    assert computed(script("docs/examples/verl.md"), dict)["count"] > 10
    assert "functions of verl run on fastrl" in capsys.readouterr().out


# --- code that replaces names


def test_openrlhf(modules):
    everything = dict.fromkeys(("Actor", "aggregate_loss", "get_llm_for_sequence_regression"))
    everything |= dict.fromkeys(("masked_mean", "compute_entropy", "set_z3_leaf_modules"))
    own = dict.fromkeys(("PolicyLoss", "ValueLoss", "compute_approx_kl", "log_probs_from_logits"))
    everything |= own
    modules({"openrlhf.models": everything, "openrlhf.models.utils": everything})
    found = {}
    for change in of("openrlhf"):
        given = {"__package__": "openrlhf.models", "__name__": "openrlhf.models.actor"}
        before, after = (computed(code, given.copy).items() for code in change)
        before, after = ({k: v for k, v in x if k in everything} for x in (before, after))
        assert before.keys() == after.keys()
        found |= after
    assert {name: found[name] for name in own} == {name: getattr(openrlhf, name) for name in own}


def test_nemo_rl(modules):
    name = "from_parallel_hidden_states_to_logprobs"
    modules({"nemo_rl.distributed.model_utils": {name: getattr(nemo_rl_formulas, name)}})
    home, used = sys.modules["nemo_rl.distributed.model_utils"], []
    fused = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 2}

    def patch(*, chunk_size):
        used.append(getattr(home, name))

    given = {"policy_cfg": {"megatron_cfg": fused}}
    given["patch_gpt_model_forward_for_linear_ce_fusion"] = patch
    for code in of("nemo-rl")[0]:
        computed(code, given.copy)
    assert [f is getattr(nemo_rl, name) for f in used] == [False, True]
    torch.manual_seed(0)
    batch = (torch.randn(5, 2, 4), torch.randn(7, 4), False, torch.randint(7, (2, 5)), 0, 7, None)
    results = [function(*batch).double() for function in used]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_prime_rl_and_skyrl():
    """Against the log-softmax of logits that are -inf for all tokens but those kept."""
    names = computed(script(f"{FOLDER}/prime-rl-and-skyrl.md"), dict)
    hidden, weight = torch.randn(1, 5, 4), torch.randn(7, 4)
    ids = torch.tensor([[3, 0, 6, 2, 1]])
    padded = torch.tensor([[3, 1], [-1, -1], [6, 2], [2, -1], [0, 1]], dtype=torch.int32)
    temperatures = torch.tensor([[0.5, 1.0, 1.0, 2.0, 0.7]])
    forbidden = torch.full((1, 5, 7), -torch.inf)
    forbidden[0, 1] = 0
    for row, members in enumerate(padded.tolist()):
        forbidden[0, row, [i for i in members if i >= 0]] = 0
    logits = hidden @ weight.T
    expected = (logits / temperatures[..., None] + forbidden).log_softmax(-1)
    expected = expected.gather(-1, ids[..., None]).squeeze(-1)
    ours = names["prime_rl_logprobs"](hidden, weight, ids, temperatures, padded[None])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    support = types.SimpleNamespace(values=padded, cu_seqlens=torch.tensor([0, 2, 5]))
    advantages = torch.tensor([1.0, -2.0])
    new = (logits + forbidden).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    rows = (hidden[0], weight, ids[0], advantages, torch.ones(5), new[0] - 0.1, support)
    loss = names["skyrl_loss"](*rows)
    # of both sequences, the mean of the ratio exp(0.1) times the advantage
    assert loss.item() == pytest.approx(-math.exp(0.1) * advantages.mean().item(), rel=1e-5)


# --- trainers


@pytest.mark.slow
def test_trl(tmp_path):
    needed("trl")
    trainer = make_trainer(save_model(tmp_path / "model"), output_dir=tmp_path, max_steps=1)
    given = dict.fromkeys(("model", "reward", "config", "dataset"))
    given["GRPOTrainer"] = lambda **_: trainer
    (_, change), _ = of("trl")  # vllm/test_replay_stand_in.py runs the second
    handle = computed(change, given.copy)["handle"]
    assert trainer.state.global_step == 1
    assert handle.fused
    assert "_compute_loss" in trainer.__dict__
    handle.undo()
    assert "_compute_loss" not in trainer.__dict__


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dapo", "grpo"])
@pytest.mark.parametrize("parts", [1, 4])
def test_hugging_face_trainer(parts, objective, tmp_path):
    transformers = needed("transformers")
    page = f"{FOLDER}/transformers.md"
    code = script(page)
    if objective == "grpo":  # a mean over sequences, as the text after the code says
        sequences = "len(ids) * self.current_gradient_accumulation_steps"
        assert f"`normalizer={sequences}`" in " ".join(TEXTS[page].split())
        code = code.replace('"dapo"', '"grpo"').replace("normalizer=n", f"normalizer={sequences}")
    names = computed(code, dict)
    data = rows()
    examples = [{name: value[i] for name, value in data.items()} for i in range(8)]
    plain_sgd = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    alone = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, max_grad_norm=0.0, logging_steps=1,
        per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts,
        remove_unused_columns=False, **plain_sgd, **alone,
    )  # fmt: skip
    trainer = names["PolicyTrainer"](make_model(), arguments, train_dataset=examples)
    trainer.train()

    model = make_model()
    logits = model(input_ids=data["input_ids"]).logits[:, :-1]
    logprobs = fastrl.token_logprobs(logits, data["input_ids"][:, 1:])
    mask = data["labels"][:, 1:] != -100
    loss = fastrl.policy_loss(
        logprobs, data["advantages"], mask, old_logprobs=data["old_logprobs"], objective=objective
    ).loss
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-4)
    for ours, plain in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain - 0.1 * plain.grad, rtol=0, atol=1e-5)
