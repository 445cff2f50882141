"""TRL with `torch_compile=True`: fastrl compiles the backbone, once and whole."""

import pytest
import torch
import transformers

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import check_equal, run

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.slow

LONG = {"epsilon": 0.05, "max_steps": 5}
TWICE = {**LONG, "num_iterations": 2}
#: Trainer, options, whether the loss is fused, and the number of compiled graphs: one for the
#: policy, one for the reference. Unknown with checkpointing, since TRL adds hooks whenever it
#: generates.
CASES = {
    "fused": ("GRPO", TWICE, True, 1),
    "log-probabilities": ("GRPO", TWICE, False, 1),
    "with a reference": ("GRPO", {**LONG, "beta": 0.1}, True, 2),
    "with checkpointing": ("GRPO", {**TWICE, "gradient_checkpointing": True}, True, None),
    "SFT": ("SFT", {}, False, 1),
    "DPO": ("DPO", {}, False, 2),
    "CPO": ("CPO", {}, False, 1),
}
ROWS = [(name, False) for name in CASES]
ROWS += [(name, True) for name, (kind, *_) in CASES.items() if kind == "GRPO"]


@pytest.mark.parametrize(("name", "packed"), ROWS)
def test_backbones_are_compiled_once(name, packed, tiny_path, monkeypatch):
    """Packed rows, on demand, leave the graph for the attention, so they add graphs."""
    kind, options, fused, graphs = CASES[name]
    lengths, own = set(), transformers.LlamaModel.__call__

    def recorded(self, *arguments, **inputs):
        lengths.add(inputs["input_ids"].shape[1])
        return own(self, *arguments, **inputs)

    monkeypatch.setattr(transformers.LlamaModel, "__call__", recorded)
    theirs, *_ = run(make_trainer(tiny_path, kind, **options))

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = make_trainer(tiny_path, kind, **options, **compiled)
    ours, _, handle = run(trainer, lambda t: use_fastrl(t, fused=fused, packed=packed))
    assert handle.fused == fused
    check_equal(ours, theirs)
    assert len(lengths) > 1  # and none of them compiled it again
    if not packed:
        assert not counters["graph_break"]
        assert graphs in (None, counters["stats"]["unique_graphs"])


def test_packed_rows_are_not_the_default(tiny_path):
    trainer = make_trainer(tiny_path, torch_compile=True)
    with use_fastrl(trainer) as handle:
        assert not handle.packed
        assert handle.packed_reason.startswith("torch_compile=True")
