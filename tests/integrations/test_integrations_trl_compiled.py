"""TRL with `torch_compile=True`: fastrl compiles the backbone, once and whole."""

import pytest
import torch

from tests.support.trl_runs import make_trainer, needed, run, save_model

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.scoring import CompiledBackbones  # noqa: E402
from tests.integrations.test_integrations_trl_families import check_equal  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_the_backbone_is_compiled_once_and_the_numbers_are_the_same(
    fused, options, tmp_path, monkeypatch
):
    own, lengths = CompiledBackbones.run, set()

    def recorded(self, part, **inputs):
        lengths.add(inputs["input_ids"].shape[1])
        return own(self, part, **inputs)

    monkeypatch.setattr(CompiledBackbones, "run", recorded)
    path = save_model(tmp_path / "model", num_hidden_layers=2)
    options = {
        "output_dir": tmp_path,
        "max_steps": 5,
        "num_iterations": 2,
        "epsilon": 0.05,
        **options,
    }
    theirs, *_ = run(make_trainer(path, **options))

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trainer = make_trainer(path, **options, **COMPILED)
    ours, _, handle = run(trainer, lambda t: use_fastrl(t, fused=fused))
    assert handle.fused == (fused is None)
    check_equal(ours, theirs, 1e-4)
    assert len(lengths) > 1  # and none of them compiled it again
    assert not counters["graph_break"]
    if not trainer.args.gradient_checkpointing:  # with it TRL adds hooks whenever it generates
        assert counters["stats"]["unique_graphs"] == 1


def test_the_reference_is_compiled_too(tmp_path):
    path = save_model(tmp_path / "model")
    options = {"output_dir": tmp_path, "max_steps": 3, "beta": 0.1}
    theirs, *_ = run(make_trainer(path, **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, *_ = run(make_trainer(path, **options, **COMPILED), use_fastrl)
    check_equal(ours, theirs, 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
