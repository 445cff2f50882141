"""On-policy distillation: a student learns a teacher's distribution on its own answers."""

import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastrl
from fastrl.integrations.transformers import last_hidden_states, lm_head

STUDENT, TEACHER = "Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-1.7B-Base"
STEPS, PROMPTS, TOKENS = 30, 16, 32
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(STUDENT, padding_side="left")
student = AutoModelForCausalLM.from_pretrained(STUDENT, dtype="auto").to(device)
teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype="auto").to(device)
teacher.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-6)
objective = fastrl.Objective(teacher_coef=1.0, aggregation="token-mean")
questions = [f"{a} + {b} =" for a in range(10) for b in range(10)]

for step in range(STEPS):
    chosen = random.sample(questions, PROMPTS)
    prompt = tokenizer(chosen, return_tensors="pt", padding=True).to(device)
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    ids = student.generate(**prompt, **sampling, max_new_tokens=TOKENS)
    answers = ids[:, prompt["input_ids"].shape[1] :]
    ends = torch.isin(answers, torch.tensor(student.generation_config.eos_token_id, device=device))
    mask = ends.cumsum(1) - ends.long() == 0
    attention = torch.cat([prompt["attention_mask"], mask], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)

    inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
    scored = slice(-answers.shape[1] - 1, -1)
    hidden = last_hidden_states(student, **inputs)[:, scored]
    result = fastrl.linear_policy_loss(
        hidden,
        **lm_head(student).arguments(),
        token_ids=answers,
        advantages=None,
        mask=mask,
        teacher=fastrl.Teacher.from_hidden(
            last_hidden_states(teacher, **inputs)[:, scored], lm_head(teacher).weight, beta=1.0
        ),
        objective=objective,
    )
    result.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    divergence, agrees = (result.metrics[name] for name in ("divergence", "teacher_agreement"))
    print(f"{step} divergence {divergence:.4f} agreement {agrees:.3f}")
