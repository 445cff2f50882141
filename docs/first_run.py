"""GRPO in TRL on a small pretrained model, with TRL's own loss or, by --fastrl, with fastrl's."""

import resource
import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from fastrl.integrations.trl import use_fastrl


def digits(completions, **_):
    """The share of digits in each completion. Put your own reward here."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


trainer = GRPOTrainer(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=digits,
    train_dataset=Dataset.from_dict({"prompt": [f"Count from {n} to 99:" for n in range(64)]}),
    args=GRPOConfig(
        output_dir="runs/first",
        max_steps=3,
        per_device_train_batch_size=16,  # two prompts with eight completions each
        max_completion_length=128,
        logging_steps=1,
        bf16=False,
        report_to="none",
        save_strategy="no",
    ),
)
if "--fastrl" in sys.argv:
    handle = use_fastrl(trainer)
    print("the loss is fused" if handle.fused else f"TRL computes the loss: {handle.reason}")
trainer.train()

for entry in trainer.state.log_history[:-1]:
    names = ("reward", "loss", "grad_norm", "step_time")
    print("step", entry["step"], {name: round(entry[name], 3) for name in names})
used = resource.getrusage(resource.RUSAGE_SELF)
print(f"peak memory: {used.ru_maxrss / 2**20:.2f} GiB, CPU time: {used.ru_utime:.0f} s")
