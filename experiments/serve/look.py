"""How the page looks, and the script that runs in it."""

from experiments.serve.guard import MOST_FILE
from varjax.engine.memory import show_bytes

CSS = """
.picture img {image-rendering: pixelated}
.keeps {overflow-x: auto}
.keeps svg {max-width: none; background: white}
#gallery .grid-container {grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)) !important}
footer {display: none !important}
"""
# gradio drops files that are too large without a word
SCRIPT = """() => {
  const told = (event) => {
    const given = event.target.files ?? (event.dataTransfer ?? event.clipboardData)?.files;
    const place = document.querySelector("#canvas");
    if (!given?.length || !place?.contains(event.target)) return;
    const words = document.querySelector("#too-large") ?? document.createElement("p");
    words.id = "too-large";
    words.setAttribute("role", "alert");
    const large = [...given].some((file) => file.size > MOST);
    words.textContent = large ? "This file is too large: at most WORDS. Choose another one." : "";
    place.after(words);
  };
  for (const name of ["change", "drop", "paste"]) document.addEventListener(name, told, true);
}""".replace("MOST", str(MOST_FILE)).replace("WORDS", show_bytes(MOST_FILE))
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
