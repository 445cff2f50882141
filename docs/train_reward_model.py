"""A small Llama learns the right answers to sums, then, as a reward model, to prefer them."""

import argparse
import random
import string
import tempfile

from datasets import Dataset
from transformers import LlamaForSequenceClassification, set_seed
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from fastrl.train.arithmetic import split
from fastrl.train.loading import character_tokenizer, small_model

CHARACTERS = string.digits + string.ascii_letters + string.punctuation


def pairs(records, chance):
    """The right answer against numbers near it, two others, and two texts that are no answer."""
    for record in records:
        answer, digit, extra = record["answer"], *map(chance.choice, (string.digits, CHARACTERS))
        near = {*range(max(0, int(answer) - 2), int(answer) + 3)}
        numbers = [*(near - {int(answer)}), *chance.sample([*({*range(20)} - near)], 2)]
        noise = "".join(chance.choices(CHARACTERS, k=chance.randint(1, 4)))
        others = ["", noise, answer + digit, digit + answer, answer + extra, extra + answer]
        for wrong in [*map(str, numbers), *chance.sample([*others, f"{answer} {answer}"], 2)]:
            if wrong != answer:
                yield {"prompt": record["prompt"], "chosen": answer, "rejected": wrong}


def main(out, seed, answer_steps, steps):
    set_seed(seed)
    tokenizer, chance, records = character_tokenizer(), random.Random(seed), split(seed)
    train, held_out = (Dataset.from_list([*pairs(part, chance)]) for part in records)
    answers = [{"prompt": row["prompt"], "completion": row["answer"]} for row in records[0]]
    options = {"seed": seed, "per_device_train_batch_size": 128, "per_device_eval_batch_size": 256}
    options |= {"bf16": False, "gradient_checkpointing": False, "warmup_steps": 20}
    options |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as layers:
        first = {"learning_rate": 3e-3, "adam_beta2": 0.98, "weight_decay": 0.1, **options}
        config = SFTConfig(layers, max_steps=answer_steps, **first)
        data = {"train_dataset": Dataset.from_list(answers), "processing_class": tokenizer}
        trainer = SFTTrainer(small_model(tokenizer), config, **data)
        trainer.train()
        trainer.save_model()
        model = LlamaForSequenceClassification.from_pretrained(layers, num_labels=1)
    options |= {"learning_rate": 5e-4, "per_device_train_batch_size": 64}
    config = RewardConfig(out, max_steps=steps, **options)
    trainer = RewardTrainer(model, config, train_dataset=train, processing_class=tokenizer)
    trainer.train()
    print("held-out accuracy:", trainer.evaluate(held_out)["eval_accuracy"])
    trainer.save_model()  # with the tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/judge")
    for name, default in {"seed": 0, "answer_steps": 450, "steps": 800}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
