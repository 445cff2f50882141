"""Rows of the table by name, and options that many of them have."""

from fastrl.bench.models import MODELS


class Table(dict):
    """Rows: a function and options of its cases."""

    def row(self, function, *which, **options):
        self[": ".join([function, *which])] = function, options


MASKS = ["all", "none", "holes", "ragged", "without-first", "one"]
AUTOCAST = [None, "bfloat16", "float16"]  # which the tensor cores of GPUs follow
FLOATS = ["float32", "bfloat16", "float16"]
DTYPES = ["float64", *FLOATS]  # compiled backends take no float64
LAYOUTS = ["contiguous", "odd", "sliced", "transposed", "strided"]
STATISTICS = ("logprobs", "entropy", "logsumexp", "sum_sq_probs", "is_top1")
#: Vocabularies of models that `fastrl bench` measures.
GPT2, QWEN3 = (MODELS[name].vocabulary for name in ("gpt2", "qwen3-0.6b"))
STATS = {"outputs": STATISTICS, "upstream": "random"}
SIZE = {"sequences": 5, "tokens": 7}
TOKENS = {**SIZE, "masked_values": "nan"}
BY = ["token", "sequence"]
KL = {"kl_coef": 0.1, "entropy_coef": 0.02}
#: Of rows in which a seed decides more than numbers: which tokens are known, or kept.
SEEDS = {"seed": [*range(8)]}
