"""TRL with `torch_compile=True`: fastrl compiles the backbone, once and whole."""

import pytest
import torch
import transformers

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import check_equal, run

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Options, whether the loss is fused, and the number of compiled graphs: one for the policy, one
#: for the reference. Unknown with checkpointing, since TRL adds hooks whenever it generates.
CASES = {
    "fused": ({"num_iterations": 2}, None, 1),
    "log-probabilities": ({"num_iterations": 2}, False, 1),
    "with a reference": ({"beta": 0.1}, None, 2),
    "with checkpointing": ({"num_iterations": 2, "gradient_checkpointing": True}, None, None),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_backbones_are_compiled_once(name, packed, tiny_path, tmp_path, monkeypatch):
    """Packed rows, on demand, leave the graph for the attention, so they add graphs."""
    options, fused, graphs = CASES[name]
    lengths = set()
    own = transformers.LlamaModel.__call__

    def recorded(self, *arguments, **inputs):
        lengths.add(inputs["input_ids"].shape[1])
        return own(self, *arguments, **inputs)

    monkeypatch.setattr(transformers.LlamaModel, "__call__", recorded)
    options = {"output_dir": tmp_path, "epsilon": 0.05, "max_steps": 5, **options}
    theirs, *_ = run(make_trainer(tiny_path, **options))

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = make_trainer(tiny_path, **options, **compiled)
    ours, _, handle = run(trainer, lambda t: use_fastrl(t, fused=fused, packed=packed))
    assert handle.fused == (fused is None)
    check_equal(ours, theirs)
    assert len(lengths) > 1  # and none of them compiled it again
    if not packed:
        assert not counters["graph_break"]
        assert graphs in (None, counters["stats"]["unique_graphs"])


def test_packed_rows_are_not_the_default(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, torch_compile=True)
    with use_fastrl(trainer) as handle:
        assert not handle.packed
        assert handle.packed_reason.startswith("torch_compile=True")
