"""The chat template: arguments, a system message, and what it writes of the answer."""

import json

import pytest

pytest.importorskip("transformers")

from fastrl.train.chat import Chat, chat_arguments
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.prompts import encode
from fastrl.train.run_log import RunLog
from tests.train.runs import run

QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- if loop.last %}
            {{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}
{%- endif %}{{ bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}{% endif %}
{%- if message.role == 'assistant' %}{% set content = message.content.split('</think>')[-1] %}
{{- '<|Assistant|>' + content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
LLAMA3 = """{% for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim }}
{{- '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{- '[INST] ' + message.content + ' [/INST]' }}{% else %}
{{- ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""
GPT_OSS = """{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{{- '<|end|>' }}
{%- for message in messages %}{% if message.role == 'assistant' %}{% generation %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endgeneration %}{% else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
THINK = "<think>\n\n</think>\n\n"


def tokenizer_of(template):
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "settings", "prefill"),
    [
        (QWEN3, (), ""),
        (QWEN3, ("enable_thinking=true",), ""),
        (QWEN3, ("enable_thinking=false",), THINK),
        (QWEN3, ("system=Be brief.", "enable_thinking=false"), THINK),
        (DEEPSEEK, (), "<think>\n"),
        (LLAMA3, (), ""),
        (GEMMA, (), ""),
        (MISTRAL, (), ""),
        (GPT_OSS, ("reasoning_effort=high",), ""),
        ("{{ messages | length }}{{ undefined.attribute }}", (), ""),
    ],
)
def test_what_a_template_writes_of_the_answer(template, settings, prefill):
    assert Chat(tokenizer_of(template), settings).prefill == prefill


def test_arguments_and_a_system_message_reach_the_template():
    def rendered(template, *settings, prompt="1 + 1"):
        return Chat(tokenizer_of(template), settings).render(prompt)

    assert "Reasoning: high" in rendered(GPT_OSS, "reasoning_effort=high")
    asked = "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    said = "<|im_start|>system\n42=x<|im_end|>\n"
    assert rendered(QWEN3, "system=42=x") == said + asked
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "1 + 1"}]
    assert rendered(QWEN3, "system=42", prompt=own) == said.replace("42=x", "own") + asked
    assert rendered(QWEN3, "system=42=x", prompt=own[1:]) == said + asked
    values = chat_arguments(["a=1", "b=[true]", "c=x y", "d=", "system=1"])
    assert values == {"a": 1, "b": [True], "c": "x y", "d": "", "system": "1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("enable_thinkin=false",), "does not read .* 'enable_thinkin', only .*enable_thinking$"),
        (("add_generation_prompt=false",), "'add_generation_prompt' is set by the loops"),
        (("messages=[]",), "'messages' is set by the loops"),
        (("tools=[]",), "does not read the argument 'tools'"),
    ],
)
def test_an_argument_without_effect_is_refused(settings, message):
    with pytest.raises(ValueError, match=rf"^chat_template: .*{message}"):
        Chat(tokenizer_of(QWEN3), settings)
    with pytest.raises(ValueError, match="the tokenizer's template is invalid"):
        Chat(tokenizer_of("{% for %}"), ("a=1",))


def test_rewards_get_what_the_template_wrote_of_the_answer(small):
    tokenizer = tokenizer_of(DEEPSEEK)
    settings = GrpoConfig(chat_template=())
    records = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "2"}]}]
    for record, prompt in zip(records, encode(records, tokenizer, settings), strict=True):
        assert prompt.record is record
        assert prompt.judged == {**record, "prefill": "<think>\n"}
    text, chat = encode(records, tokenizer, GrpoConfig())
    assert (text.judged, chat.prefill) == (records[0], "<think>\n")
    with pytest.raises(ValueError, match=r"^prompts: a record must not have a field 'prefill'"):
        encode([{"prompt": "1", "prefill": "x"}], tokenizer, settings)
    assert encode([{"prompt": "1", "prefill": "x"}], tokenizer, GrpoConfig())[0].judged


def test_runs_of_earlier_versions_resume(small):
    directory = run("grpo", small, steps=1).directory
    path = directory / "config.json"
    for stored, now, fits in ((False, None, True), (True, (), True), (True, None, False)):
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": stored}))
        config = GrpoConfig(**small | {"group_size": 4, "resume": True}, chat_template=now)
        if fits:
            RunLog(config).close()
        else:
            with pytest.raises(ValueError, match=r"^chat_template must remain \[\] when a run"):
                RunLog(config)
