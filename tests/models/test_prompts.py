"""Formats of prompts, against what the published processors make.

Janus-Pro (deepseek-ai/Janus): `VLChatProcessor.apply_sft_template_for_multi_turn_prompts` gives the
text of the turns and strips it; `Conversation.get_prompt` of the style DeepSeek writes `role + ": "
+ message + sep` for a turn with a message and `role + ":"` for one without, sep = two new lines for
the first; `generation_inference.py` appends `image_start_tag`; the tokenizer (LlamaTokenizerFast)
puts the begin of a sentence in front.

Lumina-mGPT (Alpha-VLLM/Lumina-mGPT): `generate.py` writes the sentence with WIDTHxHEIGHT;
`Conversation.process` appends the separator to the human's turn and nothing for the answer that is
None; `Tokenizer.encode(bos=True, eos=False)` puts `<s>` in front; the model then writes the image's
start, its height and its width (`FlexARItemProcessor.process_image`).
"""

import pytest

from tests import prompt_models_under_test as small
from varjax.core.errors import UserError
from varjax.text.prompt_tokenizer import PromptTokenizer


def test_ids_of_janus(tmp_path):
    found = small.JANUS.encode_prompt("a red apple", small.tokenizer(tmp_path, "janus"))
    colon, space, line = (small.WORDS[word] for word in (":", "␣", "\n"))
    text = [41, space, 42, space, 43]
    assert found == [0, 10, colon, space, *text, line, line, 11, colon, 12]
    small.JANUS.check_prompt(found)


def test_ids_of_lumina(tmp_path):
    """Height 2 before width 1 in tokens, 32x64 in the sentence."""
    tokenizer = small.tokenizer(tmp_path, "lumina")
    found = small.LUMINA.encode_prompt("two green pears", tokenizer)
    sentence = "Generate an image of 32x64 according to the following prompt:\ntwo green pears"
    assert found == [0, *small.by_hand(sentence), 39, 30, 34, 33]
    small.LUMINA.check_prompt(found)
    wide = small.LUMINA.with_grid((1, 2))
    assert wide.encode_prompt("a", tokenizer)[-3:] == list(wide.opening) == [30, 33, 34]


@pytest.mark.parametrize("family", small.CONFIGS)
def test_a_tokenizer_of_another_model(tmp_path, family):
    config, special = small.CONFIGS[family], small.TOKENS[family]
    for missing in special:
        if missing in ("<｜▁pad▁｜>", "<|User|>", "<|Assistant|>", "<reserved08799>"):
            continue  # ordinary text, or not part of a prompt
        fewer = {name: number for name, number in special.items() if name != missing}
        tokenizer = PromptTokenizer(small.write_tokenizer(tmp_path / "tokenizer.json", fewer))
        if missing == "<reserved08803>":  # the size of another image
            assert config.encode_prompt("a", tokenizer)
            continue
        with pytest.raises(UserError, match=f"tokenizer.json has no token {missing}, which"):
            config.encode_prompt("a", tokenizer)
