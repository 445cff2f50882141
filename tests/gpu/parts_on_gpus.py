"""Cases on the ranks of a split vocabulary: the kernels of a backend, GEMMs of 16 bits."""

import functools
import operator

from tests.calls.case import Case
from tests.calls.examine import examine
from tests.gpu.device.pretended import Pretended, execute
from tests.ops.ranks.vocabulary_ranks import SplitTrial

SPLIT = (150, 161)
TOKENS = {"sequences": 5, "tokens": 9, "mask": "holes", "masked_values": "nan", "spread": 3.0}
ROWS = {**TOKENS, "vocabulary": sum(SPLIT), "upstream": "random"}
LOSS = {**ROWS, "hidden": 24, "old": "near", "ref": "near", "spread": 1.0}
LOSS |= {"fields": {"kl_coef": 0.1, "entropy_coef": 0.02}}
SCALED = {"logit_scale": 0.5, "logit_softcap": 5.0, "temperature": 0.7}
OF_LOGITS = [
    Case("token_stats", **ROWS, outputs=("logprobs", "entropy", "logsumexp"), **SCALED),
    Case("logits_policy_loss", **{**LOSS, "hidden": 1}, dtype="bfloat16", temperature="per-token"),
    Case("logits_policy_loss", **{**LOSS, "hidden": 1}, objective="gspo"),
]
OF_HIDDEN = [
    Case("linear_policy_loss", **LOSS, dtype="bfloat16", lora=3, bias=True, chunk_tokens=32),
    Case("linear_policy_loss", **LOSS, dtype="float16", chunk_tokens=50, compact=False),
    Case("linear_policy_loss", **LOSS, autocast="bfloat16", chunk_tokens=64, **SCALED),
    Case("linear_policy_loss", **LOSS, temperature="per-token", bias=True),
]


def on_parts(backend, cases):
    """Compare with the oracle; return what every rank has."""
    execute(backend, operator.setitem, setattr)
    seen = []
    with Pretended():
        for case in cases:
            found = examine(case, backend, "cuda", functools.partial(SplitTrial, SPLIT, seen))
            assert not found.refused, case
            assert not found.differences, f"{case}: {'; '.join(map(str, found.differences))}"
    return seen
