"""The prompt of a chat: its messages and tools, by the model's template."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from worker_client.errors import request_error
from worker_client.inputs.chat_template import ChatTemplate
from worker_client.inputs.request_fields import Json
from worker_client.service.chat_messages import MESSAGES, read_messages
from worker_client.service.engine import renamed
from worker_client.service.fields import BodyFields

TEMPLATE_FIELDS: Final = (
    *("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)


class ChatPrompt(NamedTuple):
    """Fields of a body that its prompt is made of."""

    messages: Json
    add_generation_prompt: bool
    continues: bool
    """True if the output goes on with the last message."""
    variables: Mapping[str, Any]
    """Further ones of the template."""

    def render(self, template: ChatTemplate, tools: list[dict[str, Any]] | None) -> str:
        """Return the prompt, special tokens included; on a thread.

        Raises:
            RequestError: the messages are malformed, or the template refuses them or fails.
        """
        messages = read_messages(self.messages, has_developer=template.compares("developer"))
        final = messages[-1].get("content") if self.continues else ""
        if not isinstance(final, str) or (self.continues and not final.strip()):
            path = f"{MESSAGES}[{len(messages) - 1}].content"
            raise request_error(path, final, "there is no text to go on with", "give a text")
        with renamed({"variables": "chat_template_kwargs"}):
            text = template.render(
                messages,
                tools,
                add_generation_prompt=self.add_generation_prompt,
                variables=self.variables,
            )
        return _up_to(text, final) if self.continues else text


def take_prompt(fields: BodyFields) -> ChatPrompt:
    """Return the fields of a body that its prompt is made of. Raises RequestError."""
    continues: bool = fields.take("continue_final_message", bool, False)
    generation: bool = fields.take("add_generation_prompt", bool, not continues)
    if continues and generation:
        problem = "the output either begins a message or goes on with one"
        fix = "leave one of add_generation_prompt and continue_final_message out"
        raise request_error("continue_final_message", continues, problem, fix)
    variables: dict[str, Any] = fields.take("chat_template_kwargs", dict[str, Any], {})
    return ChatPrompt(fields.take_raw(MESSAGES), generation, continues, variables)


def _up_to(prompt: str, final: str) -> str:
    """Return a prompt up to the end of its last message, without what the template puts behind it.
    Templates may strip messages. Raises RequestError."""
    place = prompt.rfind(final.strip())
    if place < 0:
        problem = "the template does not show the last message as it is"
        fix = "leave continue_final_message out"
        raise request_error("continue_final_message", True, problem, fix)
    whole = final.lstrip()
    length = len(whole) if prompt.startswith(whole, place) else len(whole.rstrip())
    return prompt[: place + length]
