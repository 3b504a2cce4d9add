"""Host memory of a conversion: the converted weights and, while it reads a file of safetensors, the
tensor in work, since only its bytes are read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ported_weights.readers import sources
from tests import models_under_test as models

# Converts the first folder, then the second; prints by how many bytes the second raised the peak
# until all is read, and until all is written.
SCRIPT = """
import sys
from pathlib import Path
from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from varjax.storage import arrays

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def write(*arguments, own=arrays.write_arrays):
    print(status("VmHWM") - before)
    own(*arguments)

arrays.write_arrays = write
for folder in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = status("VmRSS")
    config = str(Path(folder) / "config.json")
    files = PublishedModel(model="janus-custom", source=folder, config=config)
    convert(files, folder + "-out", say=lambda line: None)
print(status("VmHWM") - before)
"""
WIDTH, HIDDEN, DEPTH, WORDS = 768, 2048, 8, 24000
LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.")
SLACK = 2**25  # what is not given back


def _weights() -> dict[str, np.ndarray]:
    """A Janus-Pro of about 0.2 GB with the fixture's image tokenizer."""
    rng, found = np.random.default_rng(0), {}
    wide = {64: WIDTH, 144: HIDDEN, 120: WORDS}  # sizes of the fixture: of this model
    for name, tensor in sources.open_source(models.JANUS_FIXTURES / "janus_tiny").tensors.items():
        shape, layer = tensor.shape, LAYER.match(name)
        if not name.startswith("gen_vision_model."):
            shape = tuple(wide.get(n, n) for n in shape)
        copies = range(DEPTH if layer and layer[1] == "0" else 0 if layer else 1)
        for number in copies if ".lm_head." not in name else ():
            bits = rng.integers(0, 0x3F80, shape, np.uint16)  # finite numbers, hard to compress
            one = name.replace("layers.0.", f"layers.{number}.") if layer else name
            found[one] = bits.view(ml_dtypes.bfloat16)
    return found


def _configuration() -> dict:
    config = json.loads((models.JANUS_FIXTURES / "janus_tiny" / "config.json").read_text())
    config["language_config"] |= {"hidden_size": WIDTH, "intermediate_size": HIDDEN}
    config["language_config"] |= {"num_hidden_layers": DEPTH, "vocab_size": WORDS}
    config["gen_head_config"]["params"]["n_embed"] = WIDTH
    config["gen_aligner_config"]["params"]["n_embed"] = WIDTH
    return config


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read in /proc")
def test_peak_of_a_conversion(tmp_path):
    arrays, large = _weights(), tmp_path / "large"
    large.mkdir()
    save_file(arrays, large / "model.safetensors")
    (large / "config.json").write_text(json.dumps(_configuration()))
    tree = sum(array.nbytes for array in arrays.values())
    beside = 2 * max(array.nbytes for array in arrays.values())  # in the file and as an array
    (small := tmp_path / "small").symlink_to(models.JANUS_FIXTURES / "janus_tiny")
    command = [sys.executable, "-c", SCRIPT, str(small), str(large)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    reading, rise = map(int, ended.stdout.split()[-2:])
    assert beside + SLACK < tree  # else a whole file in memory would pass, too
    assert tree - SLACK < reading < tree + beside + SLACK
    # Orbax holds what it compresses, up to a whole parameter, and the allocator keeps some of it:
    # 95 to 130 MiB here
    assert rise < 2 * tree + beside
