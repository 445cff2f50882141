"""What `inside_forward` refuses, and what it leaves as it was."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.runs import make_model
from tests.ops.ranks.gloo_ranks import on_ranks

needed("transformers")
from fastrl.integrations.transformers import (  # noqa: E402
    inside_forward,
    last_hidden_states,
)

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


def logprobs(hidden, head):
    return fastrl.linear_token_logprobs(hidden[:, :-1], token_ids=IDS[:, 1:], **head.arguments())


def of_logits(model, **inputs):
    logits = model(input_ids=IDS, **inputs).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]


@pytest.mark.parametrize("options", [{"use_cache": True}, {"return_dict": False}, {}])
def test_options_of_the_forward(options):
    model = make_model()
    found = inside_forward(model, logprobs, input_ids=IDS, **options)
    torch.testing.assert_close(found, of_logits(model))


def test_an_error_in_the_function_leaves_no_trace():
    model = make_model()

    def broken(hidden, head):
        raise ZeroDivisionError

    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        inside_forward(model, broken, input_ids=IDS)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert len(model.lm_head._forward_hooks) == 1
    torch.testing.assert_close(inside_forward(model, logprobs, input_ids=IDS), of_logits(model))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("the model", lambda model: lambda hidden, head: model(input_ids=IDS)),
        ("the LM head", lambda model: lambda hidden, head: model.lm_head(hidden)),
    ],
)
def test_a_call_of_the_model_in_the_function_is_refused(name, function):
    model = make_model()
    with pytest.raises(RuntimeError, match=f"{name} must not be called in the function"):
        inside_forward(model, function(model), input_ids=IDS)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="function must be callable, got int"):
        inside_forward(make_model(), 3, input_ids=IDS)


def test_adapters_of_rows_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="adapter_names must not be given"):
        inside_forward(model, logprobs, input_ids=IDS, adapter_names=["a", "b"])
    with pytest.raises(ValueError, match="adapter_names must not be given"):
        last_hidden_states(model, input_ids=IDS, adapter_names=["a", "b"])


@pytest.mark.filterwarnings("ignore")
def test_prompt_tuning():
    peft = needed("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(make_model(), config)
    options = {"attention_mask": torch.ones_like(IDS)}
    found = inside_forward(
        model, lambda hidden, head: logprobs(hidden[:, 4:], head), input_ids=IDS, **options
    )
    logits = model(input_ids=IDS, **options).logits[:, 4:-1].float()
    expected = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(found, expected)


def test_the_autocast_of_accelerate_is_not_lost():
    accelerate = needed("accelerate")
    # a state that other tests have left allows no other precision
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    try:
        model = accelerator.prepare(make_model())
        with pytest.raises(ValueError, match=r"^inside_forward .* `with accelerator.autocast\(\):"):
            inside_forward(model, logprobs, input_ids=IDS)
        with pytest.raises(ValueError, match=r"^last_hidden_states .* `with accelerator.autocast"):
            last_hidden_states(model, input_ids=IDS)
        with accelerator.autocast():
            found = inside_forward(model, logprobs, input_ids=IDS)
            last_hidden_states(model, input_ids=IDS)
        torch.testing.assert_close(found, of_logits(model), rtol=0, atol=0.05)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def hidden_of_wrapped_models():
    """Hidden states of DDP's wrapper: over two ranks without, over one rank with gradients."""
    ddp, fsdp1 = torch.nn.parallel.DistributedDataParallel, FullyShardedDataParallel
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for wrapped in (ddp(make_model()), fsdp1(make_model(), device_id=torch.device("cpu"))):
        refusal = f"a {type(wrapped).__name__} over several ranks .* `inside_forward` calls it"
        with pytest.raises(ValueError, match=refusal):
            last_hidden_states(wrapped, input_ids=IDS)
    with torch.no_grad():
        scored = last_hidden_states(ddp(make_model()), input_ids=IDS)
    learned = last_hidden_states(ddp(make_model(), process_group=alone), input_ids=IDS)
    assert learned.requires_grad
    return scored, learned.detach()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_gradients_that_no_forward_would_reduce_are_refused():
    expected = last_hidden_states(make_model(), input_ids=IDS).detach()
    for found in on_ranks(2, hidden_of_wrapped_models):
        for states in found:
            torch.testing.assert_close(states, expected)


def test_threads_wait_for_each_other_and_see_their_own_forward():
    model, errors = make_model().eval(), []
    expected = of_logits(model)

    def work(function):
        try:
            for _ in range(20):
                torch.testing.assert_close(function(), expected)
        except BaseException as error:
            errors.append(error)

    def inside():
        return inside_forward(model, logprobs, input_ids=IDS)

    functions = (inside, inside, lambda: of_logits(model))
    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not any("forward" in module.__dict__ for module in model.modules())
