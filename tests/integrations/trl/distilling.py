"""Trainers of TRL that distil a teacher, on the small model."""

from tests.integrations.packages import needed
from tests.integrations.trl.runs import OPTIONS, make_model, make_tokenizer, prompts


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
