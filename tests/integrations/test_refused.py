"""What the drop-ins refuse, by the name of the argument.

The rows are in refused.txt, and use the names of `NAMES`.
"""

import re
from pathlib import Path

import pytest
import torch

from fastrl.integrations import liger, nemo_rl, openrlhf, torchrl, verl
from fastrl.integrations.verl.fused_linear import FusedLinearForPPO, linear_cross_entropy
from tests.contract.test_bad_input import refuses
from tests.integrations.verl.cases import (
    COUNTS,
    INDEX,
    LOSSES,
    OURS,
    batch,
    estimate,
    fused_inputs,
    policy_loss,
    transcribed,
)

KINDS = {kind.__name__: kind for kind in (TypeError, ValueError, NotImplementedError)}
X = torch.ones(2, 3)
#: hidden states, head, ids, mask and advantages of Liger's losses
TOKENS = (torch.ones(4, 7, 8), torch.ones(23, 8), torch.ones(4, 7).long(), torch.ones(4, 7))
TOKENS = (*TOKENS, torch.ones(4))


def weighed(ratio, old=TOKENS[3], **options):
    loss = liger.LigerFusedLinearGRPOLoss(beta=0.0, **options)
    return loss(*TOKENS, old_per_token_logps=old, vllm_is_ratio=ratio)


def gae(**changes):
    x = torch.zeros(5, 1)
    given = {"gamma": 0.9, "lmbda": 0.9, "state_value": x, "next_state_value": x, "reward": x}
    return torchrl.generalized_advantage_estimate(**{**given, "done": x.bool(), **changes})


IDS = torch.ones(3, 8).long()


def nemo(ids=IDS, end=22, cp_group=None):
    hidden, head = torch.ones(8, 3, 16), torch.ones(22, 16)
    function = nemo_rl.from_parallel_hidden_states_to_logprobs
    return function(hidden, head, False, ids, 0, end, None, cp_group=cp_group)


def estimated(case, **options):
    more = {"non_tensor_batch": {"x": [0.0] * 9}, "batch": {}} if case == "gdpo" else {}
    return estimate(OURS, case, batch("floats", B=9), **more, **options)


def lost(name, policy_loss_options=(), **fields):
    own = {**LOSSES[name].get("policy_loss", {}), **dict(policy_loss_options)}
    config = transcribed(own, global_batch_info=COUNTS["local"], **fields)
    return policy_loss(OURS, name, batch(), config)


NAMES = {
    "inf": torch.inf,
    "ones": torch.ones,
    "x": X,
    "tokens": TOKENS,
    "ratio": TOKENS[3],
    "learned": torch.tensor(0.9, requires_grad=True),
    "nested": torch.nested.nested_tensor([X, X], layout=torch.jagged),
    "grpo": liger.LigerFusedLinearGRPOLoss,
    "weighed": weighed,
    "jsd": liger.LigerFusedLinearJSDLoss,
    "centering": liger.LigerFusedLinearScoreCenteringLoss,
    "weight": liger.ISCorrection,
    "policy": openrlhf.PolicyLoss,
    "compute_approx_kl": openrlhf.compute_approx_kl,
    "gae": gae,
    "nemo": nemo,
    "ids": IDS,
    "verl": verl,
    "estimated": estimated,
    "lost": lost,
    "INDEX": INDEX,
    "linear_cross_entropy": linear_cross_entropy,
    "FusedLinearForPPO": FusedLinearForPPO,
    "fused": fused_inputs(5, 16, 33)[:3],
}
ROWS = Path(__file__).with_name("refused.txt").read_text().replace("\n    ", "  ").splitlines()


@pytest.mark.parametrize("row", [row for row in ROWS if row and not row.startswith("#")])
def test_it_is_refused(row, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group)  # NeMo RL's
    call, error, message = re.fullmatch(r"(.*?)  (\w+Error): (.*)", row).groups()
    refuses(lambda: eval(call, dict(NAMES)), KINDS[error], message)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_verl_without_its_configuration(name):
    with pytest.raises(TypeError, match="config must be verl's ActorConfig, got None"):
        policy_loss(OURS, name, batch(), None)
