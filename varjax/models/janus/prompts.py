"""From a text to the prompt of Janus-Pro.

As `generation_inference.py` of deepseek-ai/Janus and its README for Janus-Pro do it: one turn of
the user and the begin of the assistant's in the format "deepseek" without a system prompt
(`VLChatProcessor.apply_sft_template_for_multi_turn_prompts`, `Conversation.get_prompt`), then the
tag that begins an image. The published tokenizer puts the begin of a sentence before it.
"""

from varjax.text.prompt_tokenizer import PromptTokenizer

USER, ASSISTANT = "<|User|>", "<|Assistant|>"
BEGIN = "<｜begin▁of▁sentence｜>"
IMAGE_START = "<begin_of_image>"


def chat(text: str) -> str:
    """The conversation that asks for the image. A turn without a text has no colon and space."""
    text = text.strip()
    turn = f"{USER}: {text}\n\n" if text else f"{USER}:"
    return f"{turn}{ASSISTANT}:{IMAGE_START}"


def encode(text: str, tokenizer: PromptTokenizer) -> list[int]:
    """Token ids of the conditional row. `UserError` if the tokenizer is another model's."""
    found = [tokenizer.id_of(BEGIN), *tokenizer.ids(chat(text))]
    tokenizer.check_end(found, IMAGE_START)
    return found
