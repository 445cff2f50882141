"""Nothing that a model, an adapter or a checkpoint brings along runs, unless a person asks."""

import ast
import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.command_line import parse
from fastrl.train.config import GrpoConfig
from fastrl.train.model.loading import load
from fastrl.train.model_shape import model_shape
from fastrl.train.rewards import make_rewards
from fastrl.train.run import checkpoint
from tests.support.train_runs import OWN, run

ROOT = Path(__file__).parents[2]

MODEL_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({ran!r}).touch()
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that exists after foreign code ran; a question on the terminal fails."""

    def asked(*_):
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    return tmp_path / "ran"


def change(file, **settings):
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.fixture
def of_own_code(base, ran):
    """A model whose architecture is code in its directory."""
    (base / "own.py").write_text(MODEL_CODE.format(ran=str(ran)))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(base / "config.json", model_type="own", auto_map=classes, architectures=["OwnModel"])
    return base


@pytest.mark.parametrize("use", ["train", "plan"])
def test_code_of_a_model_runs_only_with_the_switch(of_own_code, ran, small, use):
    def start(**settings):
        if use == "train":
            settings |= {"model": str(of_own_code), "steps": 1, "loss": "logits", "name": "a"}
            return run("grpo", small, **settings)
        return model_shape(GrpoConfig(model=str(of_own_code), **settings))

    with pytest.raises(ValueError, match="brings or names code, which only runs with --trust"):
        start()
    assert not ran.exists()
    start(trust_remote_code=True)
    assert ran.exists()
    if use == "train":
        settings = {"trust_remote_code": True, "loss": "logits", "model": str(of_own_code)}
        assert run("grpo", small, name="a", steps=2, resume=True, **settings).step == 2


def test_code_of_a_tokenizer_runs_only_with_the_switch(base, ran):
    (base / "own.py").write_text(TOKENIZER_CODE.format(ran=str(ran)))
    classes = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    change(base / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)
    with pytest.raises(ValueError, match="--trust_remote_code"):
        load(str(base), "cpu")
    assert not ran.exists()
    load(str(base), "cpu", trust_remote_code=True)
    assert ran.exists()


def test_code_of_the_base_of_an_adapter_runs_only_with_the_switch(of_own_code, ran, small):
    pytest.importorskip("peft")
    small |= {"model": str(of_own_code), "lora_rank": 2, "steps": 1, "loss": "logits"}
    directory = run("grpo", small, trust_remote_code=True).directory
    ran.unlink()
    with pytest.raises(ValueError, match=r"is an adapter of .* --trust_remote_code"):
        load(str(checkpoint.latest(directory / "checkpoints")), "cpu")
    assert not ran.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("use", ["load", "plan"])
def test_a_kernel_that_a_model_names_is_not_loaded(base, key, use):
    change(base / "config.json", **{key: "someone/kernel"})
    with pytest.raises(ValueError, match="names code, which only runs with --trust_remote_code"):
        load(str(base), "cpu") if use == "load" else model_shape(GrpoConfig(model=str(base)))


def test_code_that_generates_is_never_used(base, ran):
    (base / "custom_generate").mkdir()
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\ndef generate(*_, **__): 1\n"
    (base / "custom_generate" / "generate.py").write_text(code)
    load(str(base), "cpu")
    assert not ran.exists()


def test_a_run_does_not_bring_the_switch_along_when_it_is_resumed(small, base):
    small |= {"model": str(base), "name": "a", "steps": 1, "trust_remote_code": True}
    run("grpo", small)
    place = ["--resume", "--name", "a", "--out_dir", small["out_dir"]]
    resumed = parse(GrpoConfig, place)
    assert not resumed.trust_remote_code
    with pytest.raises(ValueError, match="trust_remote_code must remain True"):
        run("grpo", {**small, **OWN["grpo"]}, resume=True, trust_remote_code=False)
    assert parse(GrpoConfig, [*place, "--trust_remote_code"]).trust_remote_code


def test_pickled_weights_are_not_loaded(base, ran, small):
    (base / "model.safetensors").rename(base / "kept")
    torch.save({"lm_head.weight": Payload(ran)}, base / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors, and pickled weights are not"):
        run("grpo", small, model=str(base))
    assert not ran.exists()
    (base / "kept").rename(base / "model.safetensors")
    assert run("grpo", small, model=str(base), steps=1).step == 1
    assert not ran.exists()


def test_a_pickled_adapter_is_not_loaded(base, ran, small):
    pytest.importorskip("peft")
    directory = run("grpo", small, model=str(base), lora_rank=2, steps=1).directory
    adapter = base.with_name("adapter")
    shutil.copytree(checkpoint.latest(directory / "checkpoints"), adapter)
    for name in ("adapter_model.safetensors", "checksums.json"):
        (adapter / name).unlink()
    torch.save({"a": Payload(ran)}, adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors, and pickled weights"):
        run("grpo", small, model=str(adapter), name="b")
    assert not ran.exists()


def test_an_adapter_that_names_a_module_to_import_is_not_loaded(base, small):
    pytest.importorskip("peft")
    directory = run("grpo", small, model=str(base), lora_rank=2, steps=1).directory
    adapter = checkpoint.latest(directory / "checkpoints")
    named = {"megatron_config": {"a": 1}, "megatron_core": "antigravity"}
    change(adapter / "adapter_config.json", **named)
    with pytest.raises(ValueError, match="adapter of layers of Megatron cannot be merged"):
        load(str(adapter), "cpu")


def test_a_pickle_in_a_checkpoint_does_not_run(small, ran):
    directory = run("grpo", small, name="a", steps=1).directory
    latest = checkpoint.latest(directory / "checkpoints")
    torch.save({"optimizer": Payload(ran)}, latest / "state.pt")
    (latest / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"resume: .* cannot be read.*[Ww]eights.only"):
        run("grpo", small, name="a", steps=2, resume=True)
    assert not ran.exists()


def calls(*names):
    """The calls of functions and methods of these names in the package: file and keywords."""
    for path in (ROOT / "fastrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(names):
                yield path, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


def test_every_torch_load_reads_weights_only():
    found = list(calls("torch.load"))
    assert found
    assert [path for path, keywords in found if keywords.get("weights_only") != "True"] == []


def test_everything_that_is_loaded_says_whether_its_code_may_run():
    """Without an answer, transformers asks on the terminal. peft's configurations have no code."""
    found = list(calls(".from_pretrained", "AutoModelForCausalLM.from_config"))
    assert len(found) >= 6
    for path, keywords in found:
        if path.name == "adapters.py":
            continue
        assert {"trust_remote_code", None} & keywords.keys(), path  # None: **trusted


def test_nothing_else_reads_pickles():
    modules = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for path in (ROOT / "fastrl").rglob("*.py"):
        if path.name == "ranks.py":  # it loads what it has dumped itself
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            names.append(getattr(node, "module", None) or "")
            assert not modules & {name.partition(".")[0] for name in names}, path
    assert not list(calls("np.load"))
    assert not list(calls("numpy.load"))


def test_a_file_does_not_switch_remote_code_on(tmp_path):
    (tmp_path / "a.yaml").write_text("trust_remote_code: true")
    arguments = ["--config", str(tmp_path / "a.yaml")]
    with pytest.raises(ValueError, match="asks for trust_remote_code, which a person must"):
        parse(GrpoConfig, arguments)
    assert parse(GrpoConfig, [*arguments, "--trust_remote_code"]).trust_remote_code


def test_a_reward_that_a_file_names_is_imported(tmp_path, monkeypatch, ran):
    """As docs/training.md says."""
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\ndef score(p, c, r): return 1\n"
    (tmp_path / "named_by_a_file.py").write_text(code)
    (tmp_path / "a.yaml").write_text("reward: [named_by_a_file:score]")
    monkeypatch.syspath_prepend(tmp_path)
    config = parse(GrpoConfig, ["--config", str(tmp_path / "a.yaml")])
    assert not ran.exists()
    make_rewards(config).close()
    assert ran.exists()
