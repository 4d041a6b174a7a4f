"""Chat templates: found where models keep them, rendered as they are written, and kept in their sandbox."""

import json
from pathlib import Path

import pytest

from mtp_jax.chat import ChatTemplate, checked_messages, load_template
from mtp_jax.core.errors import ConfigError

CHATML = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate.compiled(source, {"eos_token": "<end>"}, Path("here"))


def test_a_conversation_ends_where_the_assistant_begins() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "<c>"},
    ]
    rendered = template(CHATML).render(messages)
    assert rendered == ("<|im_start|>user\nab<end>\n<|im_start|>assistant\n<c><end>\n<|im_start|>assistant\n")
    assert template(CHATML).render(messages, {"add_generation_prompt": False}).endswith("<c><end>\n")


def test_json_is_written_without_html_escapes() -> None:
    assert template("{{ messages[0].content | tojson }}").render([{"role": "user", "content": "é<'"}]) == '"é<\'"'


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content.nothing.at_all }}", "has no attribute"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_sentence(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"The chat template does not take these messages: .*{reason}"):
        template(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages is []; it must be a list of at least one message."),
        ("hi", "messages is 'hi'; it must be a list of at least one message."),
        ([7], "messages[0] is 7; it must be an object with a role."),
        ([{"role": "user"}], "messages[0].content is None; it must be text, or parts of type 'text'."),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0] has a part of type 'image_url'; only 'text' is served here.",
        ),
        ([{"role": "user", "content": [3]}], "messages[0] has a part of type 3; only 'text' is served here."),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0] has a part whose text is None."),
        (
            [{"role": "user", "content": "x", "tool_calls": []}],
            "messages[0] has 'tool_calls'; a message takes role, content and name.",
        ),
    ],
)
def test_what_is_no_conversation_is_named(messages: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        checked_messages(messages)
    assert str(caught.value) == sentence


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}1"}))
    said = [{"role": "user", "content": "x"}]
    found = load_template(tmp_path)
    assert found is not None
    assert found.render(said) == "<s>1"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "2"}]}))
    by_name = load_template(tmp_path)
    assert by_name is not None
    assert by_name.render(said) == "2"
    (tmp_path / "chat_template.jinja").write_text("3")
    beside = load_template(tmp_path)
    assert beside is not None
    assert beside.render(said) == "3"
    assert by_name.digest != beside.digest
    (tmp_path / "own.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat template of .*own.jinja is not valid"):
        load_template(tmp_path, tmp_path / "own.jinja")
    with pytest.raises(ConfigError, match=r"no.jinja cannot be read"):
        load_template(tmp_path, tmp_path / "no.jinja")
