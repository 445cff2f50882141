"""Trainers of TRL that distil a teacher, on the small model."""

from tests.integrations.packages import needed
from tests.integrations.trl.runs import (
    OPTIONS,
    make_model,
    make_tokenizer,
    prompts,
    reward_even,
    words,
)


def make_distillation(
    model, _="Distillation", output_dir="unused", teacher=None, lora=None, **options
):
    """A `DistillationTrainer`, whose teacher is wider than the student.

    Args:
        model: The student's directory.
        output_dir: As TRL takes it.
        teacher: Another teacher.
        lora: Options of `LoraConfig`, or None.
        **options: Of `DistillationConfig`.
    """
    trl, datasets = needed("trl"), needed("datasets")
    config = trl.DistillationConfig(
        **{**OPTIONS, "output_dir": output_dir, "max_completion_length": 7, **options}
    )
    return trl.DistillationTrainer(
        model=model,
        teacher_model=make_model(hidden_size=32) if teacher is None else teacher,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts()}),
        processing_class=make_tokenizer(),
        peft_config=None if lora is None else needed("peft").LoraConfig(**lora),
    )


def make_chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return tokenizer


def make_gkd(model, kind="GKD", output_dir="unused", teacher=None, lora=None, **options):
    """A `GKDTrainer`, `GOLDTrainer` or `IWOPDTrainer`; arguments as for `make_distillation`."""
    name = "iw_opd" if kind == "IWOPD" else kind.lower()
    module, datasets = needed(f"trl.experimental.{name}"), needed("datasets")
    length = "max_new_tokens" if kind == "GKD" else "max_completion_length"
    config = getattr(module, f"{kind}Config")(
        **{**OPTIONS, "output_dir": output_dir, "max_length": 32, length: 6, **options}
    )
    pairs = [(words(i, 2 + i % 3), words(3 * i, 3 + i % 4)) for i in range(16)]
    tokenizer = make_chat_tokenizer()
    if kind != "GOLD":
        roles = ("user", "assistant")
        column = [
            [{"role": r, "content": c} for r, c in zip(roles, pair, strict=True)] for pair in pairs
        ]
        rows = {"messages": column}
    else:  # which tokenizes with a byte-level tokenizer alone
        ids = [[tokenizer(text)["input_ids"] for text in pair] for pair in pairs]
        rows = {
            "input_ids": [prompt + completion for prompt, completion in ids],
            "completion_mask": [[0] * len(x) + [1] * len(y) for x, y in ids],
            "original_prompt_text": [prompt for prompt, _ in pairs],
            "original_completion_text": [completion for _, completion in pairs],
        }
    return getattr(module, f"{kind}Trainer")(
        model=transformers_model(model),
        teacher_model=make_model(hidden_size=32) if teacher is None else teacher,
        args=config,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=None if lora is None else needed("peft").LoraConfig(**lora),
    )


def transformers_model(path):
    return needed("transformers").AutoModelForCausalLM.from_pretrained(path)


def make_self_distillation(
    model, kind="SDFT", output_dir="unused", lora=None, privileged="w3 w9 w4", **options
):
    """An `SDFTTrainer` or `SDPOTrainer`, whose teacher reads more before the same completion."""
    module, datasets = needed(f"trl.experimental.{kind.lower()}"), needed("datasets")
    if kind == "SDPO":  # only groups with a success have a teacher
        options = {"success_reward_threshold": 0.5, **options}
    config = getattr(module, f"{kind}Config")(
        **{
            **OPTIONS,
            "output_dir": output_dir,
            "num_generations": 4,
            "max_completion_length": 7,
            **options,
        }
    )
    columns = {"prompt": prompts(), "privileged_context": [privileged] * len(prompts())}
    return getattr(module, f"{kind}Trainer")(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=make_chat_tokenizer(),
        peft_config=None if lora is None else needed("peft").LoraConfig(**lora),
        **({"reward_funcs": reward_even} if kind == "SDPO" else {}),
    )
