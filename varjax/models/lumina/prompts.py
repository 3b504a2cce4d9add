"""From a text to the prompt of Lumina-mGPT.

As `generate_examples/generate.py` of Alpha-VLLM/Lumina-mGPT does it: a sentence with the width and
height in pixels, then the text. The conversation is one turn of the user and its separator
(`data/convertsation.py`); the begin of a sentence stands before it (`xllmx/model/tokenizer.py`).
There the model draws the tokens that follow: the image's start, its height and its width. Here they
are part of the prompt, so that all images of a run have the shape that was asked for.
"""

from varjax.text.prompt_tokenizer import PromptTokenizer

BEGIN, END_OF_TURN = "<s>", "<reserved08706>"
IMAGE_START = "<racm3:break>"
UNIT = 32  # pixels, in the sentence that the model was trained on
SIZES_FROM = 8800  # the token of n units is <reserved{8800 + n}>


def request(text: str, units: tuple[int, int]) -> str:
    """The user's turn. units: height and width. The sentence has the width first."""
    height, width = (UNIT * count for count in units)
    return f"Generate an image of {width}x{height} according to the following prompt:\n{text}"


def encode(text: str, units: tuple[int, int], tokenizer: PromptTokenizer) -> list[int]:
    """Token ids, the width token included. `UserError` if the tokenizer is another model's.

    units: height and width of the image in units of 32 pixels.
    """
    turn = tokenizer.ids(request(text, units) + END_OF_TURN)
    tokenizer.check_end(turn, END_OF_TURN)
    sizes = (f"<reserved{SIZES_FROM + n:05d}>" for n in units)
    opening = (IMAGE_START, *sizes)
    return [tokenizer.id_of(BEGIN), *turn, *map(tokenizer.id_of, opening)]
