"""The changes of `docs/replace-the-loss` for other packages, on stand-ins of these."""

import functools
import math
import sys
import types

import pytest
import torch
from test_replace_the_loss import blocks

from fastrl.integrations import liger, nemo_rl, openrlhf, torchrl, verl
from tests.integrations import nemo_rl_formulas
from tests.integrations.packages import importable, stand_ins
from tests.integrations.verl import formulas, loss_formulas


@pytest.fixture
def modules(monkeypatch):
    return functools.partial(stand_ins, monkeypatch)


def test_verl(modules):
    written = vars(formulas) | vars(loss_formulas)
    functions = {name: x for name, x in written.items() if isinstance(x, types.FunctionType)}
    del functions["compute_policy_loss_reinforce"]  # another name of its first argument
    modules({"verl.utils.torch_functional": functions, "verl.trainer.ppo.core_algos": functions})
    change, alone = blocks("verl")
    losses = []
    for code in change:
        names = {"loss_mat": torch.arange(6.0).reshape(2, 3), "loss_mask": torch.ones(2, 3)}
        exec(code, names)
        losses.append(names["loss"].double())
        assert (names["core_algos"].agg_loss is verl.agg_loss) == ("replaced" in names)
    names["replaced"].undo()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    names = {}
    exec(alone[1], names)
    assert names["advantages"].shape == (2, 2)


def test_openrlhf(modules):
    everything = dict.fromkeys(("Actor", "aggregate_loss", "get_llm_for_sequence_regression"))
    everything |= dict.fromkeys(("masked_mean", "compute_entropy", "set_z3_leaf_modules"))
    own = dict.fromkeys(("PolicyLoss", "ValueLoss", "compute_approx_kl", "log_probs_from_logits"))
    everything |= own
    modules({"openrlhf.models": everything, "openrlhf.models.utils": everything})
    found = {}
    for before, after in blocks("openrlhf"):
        imported = {}
        for code in (before, after):
            names = {"__package__": "openrlhf.models", "__name__": "openrlhf.models.actor"}
            exec(code, names)
            imported[code] = {key: value for key, value in names.items() if key in everything}
        assert imported[before].keys() == imported[after].keys()
        found |= imported[after]
    assert {name: found[name] for name in own} == {name: getattr(openrlhf, name) for name in own}


def test_nemo_rl(modules):
    name = "from_parallel_hidden_states_to_logprobs"
    modules({"nemo_rl.distributed.model_utils": {name: getattr(nemo_rl_formulas, name)}})
    home, used, settings = sys.modules["nemo_rl.distributed.model_utils"], [], {}
    settings["megatron_cfg"] = {"use_fused_linear_logprobs": True}
    settings["megatron_cfg"]["fused_linear_logprobs_chunk_size"] = 2

    def patch_gpt_model_forward_for_linear_ce_fusion(*, chunk_size):
        used.append(getattr(home, name))

    for code in blocks("nemo-rl")[0]:
        names = {"policy_cfg": settings}
        exec(code, names | {f.__name__: f for f in [patch_gpt_model_forward_for_linear_ce_fusion]})
    assert [f is getattr(nemo_rl, name) for f in used] == [False, True]
    torch.manual_seed(0)
    batch = (torch.randn(5, 2, 4), torch.randn(7, 4), False, torch.randint(7, (2, 5)), 0, 7, None)
    results = [function(*batch).double() for function in used]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_prime_rl_and_skyrl():
    """Against the log-softmax of logits that are -inf for all tokens but those kept."""
    ((_, code),) = blocks("prime-rl-and-skyrl")
    exec(code, names := {})
    torch.manual_seed(0)
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


@pytest.mark.parametrize("place", [0, 1, 2])
def test_liger(place):
    before, after = blocks("liger")[place]
    results = []
    # the score centering loss is in a nightly, and its kernel runs on a GPU
    in_turn = place < 2 and importable("liger_kernel.chunked_loss")
    for code in (before, after) if in_turn else (after,):
        torch.manual_seed(0)
        weight = torch.randn(11, 4, requires_grad=True)
        names = {
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
        exec(code, names)
        metrics = names.get("metrics", ())
        values = metrics.values() if isinstance(metrics, dict) else metrics
        results.append((names["loss"].detach(), *values, weight.grad))
    name = ("GRPOLoss", "JSDLoss", "ScoreCenteringLoss")[place]
    assert names[f"LigerFusedLinear{name}"] is getattr(liger, f"LigerFusedLinear{name}")
    torch.testing.assert_close(results[0], results[-1], rtol=1e-4, atol=1e-5)


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
    results = []
    for code in blocks("torchrl")[0]:
        torch.manual_seed(0)
        names = {name: torch.randn(5, 1) for name in ("value", "next_value", "reward")}
        names["done"] = names["terminated"] = torch.rand(5, 1) < 0.3
        exec(code, names)
        results.append(names["advantage"])
    assert names["gae"] is torchrl.vec_generalized_advantage_estimate
    names["replaced"].undo()
    torch.testing.assert_close(*results)
