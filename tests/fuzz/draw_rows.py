"""Draws options of cases with a vocabulary: logits, or hidden states and a head."""

from __future__ import annotations

from typing import Any

from .chance import Chance

LINEAR = ("linear_token_logprobs", "linear_token_stats", "linear_policy_loss")
WITH_ROWS = ("token_logprobs", "token_stats", "logits_policy_loss")
DIFFERENTIABLE = ("logprobs", "entropy", "logsumexp")
#: Around powers of two and the 4,096 columns that the CPU kernel reads at once.
SMALL = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 127, 130, 257)
MIDDLE = (500, 1000, 1023, 2049)
LARGE = (4095, 4096, 4097, 4111, 5000, 8192, 8193, 9001, 12289)


def row_options(chance: Chance, function: str, options: dict, interpreted: bool) -> dict[str, Any]:
    size = chance.weighed({"small": 12, "middle": 2, "large": 1.2})
    vocabulary = chance.pick({"small": SMALL, "middle": MIDDLE, "large": LARGE}[size])
    if interpreted:
        vocabulary = chance.pick(SMALL) if size == "small" else chance.pick((500, 1000, 1025))
    drawn: dict[str, Any] = {
        "vocabulary": vocabulary,
        "spread": chance.weighed({0.0: 1, 0.01: 1, 1.0: 4, 4.0: 4, 30.0: 1, 1000.0: 0.3}),
        "logits_layout": chance.weighed(
            {"contiguous": 4, "sliced": 2, "shifted": 2, "transposed": 1.5, "odd": 1.5}
            | {"expanded": 0.5, "strided": 1}
        ),
        "ids_dtype": chance.weighed({"int64": 5, "int32": 1}),
        "temperature": chance.weighed(
            {1.0: 8, 0.7: 2, 1e-3: 0.5, 100.0: 0.3, 1e-28: 0.1, "per-token": 1.5, "0-d": 0.5}
        ),
        "autocast": chance.of(0.03),
    }
    drawn["threads"] = 2 if chance.of(0.1 if size == "small" else 0.5) else 1
    if size == "large":  # few rows take another path than many
        drawn["sequences"] = min(options["sequences"], chance.pick((1, 2, 4)))
    if options["layout"] == "padded" and chance.of(0.15):
        drawn["temperature"] = chance.pick(("per-sequence", "per-sequence-column"))
    if isinstance(drawn["temperature"], str) and chance.of(0.5):
        drawn["temperature_dtype"] = chance.pick(("float16", "bfloat16", "float64"))
    if chance.of(0.15):
        drawn["logit_scale"] = chance.pick((0.5, 0.3, 2.0, 0.0625))
    if chance.of(0.15):
        drawn["logit_softcap"] = chance.pick((1.0, 5.0, 30.0, 50.0))
    if function in WITH_ROWS:
        drawn["inplace"] = options["mode"] == "grad" and chance.of(0.15)
        if drawn["inplace"] and drawn["logits_layout"] == "expanded":
            drawn["logits_layout"] = "contiguous"
    if chance.of(0.1):
        drawn["ignore_index"] = chance.pick((-1, 0, 3))
    if function in ("token_stats", "linear_token_stats"):
        outputs = [name for name in (*DIFFERENTIABLE, "sum_sq_probs", "is_top1") if chance.of(0.6)]
        if options["mode"] == "grad" and not set(outputs) & set(DIFFERENTIABLE):
            outputs.append(chance.pick(DIFFERENTIABLE))
        drawn["outputs"] = tuple(outputs) or ("logprobs",)
    if function.endswith(("stats", "logprobs")) and chance.of(0.2):
        drawn["mask"] = "absent"
    return drawn


def head_options(chance: Chance, function: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "hidden": chance.weighed({1: 1, 2: 1, 3: 1, 8: 2, 17: 1, 32: 2, 65: 1}),
        "bias": chance.of(0.3),
        "lora": chance.weighed({0: 4, 1: 0.5, 3: 0.7}),
        "chunk_tokens": chance.weighed({None: 2, 1: 1, 3: 1, 1000: 1}),
        "compact": chance.of(0.8),
        "logit_softcap": chance.weighed({None: 8, 1.0: 0.5, 30.0: 1}),
    }
    if chance.of(0.15):
        drawn["weight_dtype"] = chance.pick(("float32", "bfloat16", "float16"))
    if drawn["lora"]:
        drawn["lora_scale"] = chance.pick((0.75, 1, 2, -1.5))
        if chance.of(0.4):
            drawn["lora_dtype"] = chance.pick(("float32", "bfloat16", "float16"))
    names = ["hidden", "weight"] + ["bias"] * drawn["bias"]
    names += ["lora_a", "lora_b"] * bool(drawn["lora"])
    if chance.of(0.3):
        drawn["frozen"] = tuple(name for name in names if chance.of(0.4))
    if function == "linear_policy_loss":
        drawn["metrics"] = chance.of(0.8)
    return drawn
