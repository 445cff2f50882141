# accelerate launch --num_processes 2 trl_ranks.py fsdp2
import sys

from datasets import Dataset
from torch.distributed import destroy_process_group, is_initialized
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from fastrl.integrations.trl import use_fastrl
from fastrl.train.loading import character_tokenizer, small_model

FSDP2 = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}


def even(completions, **_):
    return [sum(text.count(digit) for digit in "02468") for text in completions]


def main(*layout):  # nothing: DDP; fsdp2: FSDP2
    sharding = {"fsdp": True, "fsdp_config": FSDP2} if layout == ("fsdp2",) else {}
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options |= {"num_generations": 8, "max_completion_length": 16, "loss_type": "dapo"}
    options |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False}
    set_seed(0)  # a model that is made here must be the same on all ranks
    tokenizer = character_tokenizer()
    trainer = GRPOTrainer(
        model=small_model(tokenizer),  # or the name of a model, which TRL loads
        processing_class=tokenizer,
        reward_funcs=even,
        args=GRPOConfig("trl-ranks", **options, **sharding),
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in "123" for b in "45"]}),
    )
    use_fastrl(trainer, fused=True)
    trainer.train()
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history[:-1]:
            print(log["step"], log["grad_norm"], log["reward"], log["completions/mean_length"])


main(*sys.argv[1:])
if is_initialized():  # not with one process
    destroy_process_group()
