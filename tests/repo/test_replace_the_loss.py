"""The changes on the pages of `docs/replace-the-loss` run, and do what the pages say of them."""

import re
from pathlib import Path

import pytest
import torch

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import VOCABULARY, make_model, save_model

transformers = needed("transformers")
from fastrl.integrations.transformers import (  # noqa: E402
    inside_forward,
    last_hidden_states,
    lm_head,
)

FOLDER = Path(__file__).parents[2] / "docs" / "replace-the-loss"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore")


def text_of(page):
    return (FOLDER / f"{page}.md").read_text()


def blocks(page):
    """Return (before, after) of the code of a page; a block that is no diff has no before."""
    found = []
    for kind, code in BLOCK.findall(text_of(page)):
        lines = code.splitlines()
        if kind == "python":
            found.append((None, code))
        else:
            before, after = ([x[1:] for x in lines if x[:1] != left] for left in "+-")
            found.append(("\n".join(before), "\n".join(after)))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_code_is_python(page):
    assert blocks(page)
    for pair in blocks(page):
        for code in pair:
            compile(code or "", page, "exec")


def test_every_page_is_linked():
    linked = re.findall(r"^\| \[[^]]+\]\(([\w-]+)\.md\) \|", text_of("index"), flags=re.MULTILINE)
    assert sorted(linked) == PAGES


#: How many changes of each page these tests run, and those of the file for other packages.
CHANGES = {"trl": 2, "verl": 1, "openrlhf": 3, "liger": 3, "torchrl": 1, "custom-loop": 3}
CHANGES["nemo-rl"] = 1


def test_every_change_is_run():
    found = {page: sum(before is not None for before, _ in blocks(page)) for page in PAGES}
    assert {page: count for page, count in found.items() if count} == CHANGES


@pytest.mark.slow
def test_trl(tmp_path):
    needed("trl")
    trainer = make_trainer(save_model(tmp_path / "model"), output_dir=tmp_path, max_steps=1)
    names = dict.fromkeys(("model", "reward", "config", "dataset"))
    names["GRPOTrainer"] = lambda **_: trainer
    (_, change), _ = blocks("trl")  # vllm/test_replay_stand_in.py runs the second
    exec(change, names)
    assert trainer.state.global_step == 1
    assert names["handle"].fused
    assert "_compute_loss" in trainer.__dict__
    names["handle"].undo()
    assert "_compute_loss" not in trainer.__dict__


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


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dapo", "grpo"])
@pytest.mark.parametrize("parts", [1, 4])
def test_hugging_face_trainer(parts, objective, tmp_path):
    names = {}
    ((_, code),) = blocks("transformers")
    if objective == "grpo":  # a mean over sequences, as the text after the code says
        sequences = "len(ids) * self.current_gradient_accumulation_steps"
        assert f"`normalizer={sequences}`" in " ".join(text_of("transformers").split())
        code = code.replace('"dapo"', '"grpo"').replace("normalizer=n", f"normalizer={sequences}")
    exec(code, names)
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


def grpo_loss(logprobs, old_logprobs, advantages, mask):
    ratio, scores = (logprobs - old_logprobs).exp(), advantages[:, None]
    loss = -torch.min(ratio * scores, ratio.clamp(0.8, 1.2) * scores)
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_custom_loop(which):
    data, found = rows(), []
    for code in blocks("custom-loop")[which]:
        model = make_model()
        names = {
            "fastrl": fastrl,
            "lm_head": lm_head,
            "last_hidden_states": last_hidden_states,
            "inside_forward": inside_forward,
            "grpo_loss": grpo_loss,
            "model": model,
            "ids": data["input_ids"],
            "mask": (data["labels"][:, 1:] != -100).float(),
            **{k: data[k] for k in ("attention_mask", "advantages", "old_logprobs")},
        }
        exec(code, names)
        found.append((names["loss"].detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
