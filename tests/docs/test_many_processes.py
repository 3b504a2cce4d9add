"""Every command of docs/howto/many_processes.md runs as it is written, with small values of the
variables that the page names. Hosts are processes of this machine, chips are fake devices."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.experiments.evaluation import recipe

PAGE = ROOT / "docs" / "howto" / "many_processes.md"
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRAINING = (
    "--max_images=16 --image_size=16 --settings=val_fraction=0.5,ch=8,norm_groups=4,ch_mult=1,1,"
    "num_res_blocks=1,patch_nums=1,2,8,depth=1,width=32,heads=2,vocab_size=16,z_channels=4,"
    "vqvae_steps=2,autoencoder_steps=1,var_steps=2,vqvae_batch_size=8,var_batch_size=8,log_every=1,"
    "validate_every=2,checkpoint_every=2 --quiet"
)
HOSTS = 4  # of `# every host`
# (section, its folders of pictures, largest difference to a process that draws one at a time: other
# batches on a device, and sums over `model`, are added in another order)
SECTIONS = (
    ("Parts", ["parts"], 1),
    ("Processes that work as one", ["together"], 0),
    ("Training", [], 0),
    ("Example: one host with 8 GPUs", ["gpus"], 0),
    ("Example: a v5e-16 slice", ["slice"], 1),
    ("Example: a SLURM array", ["array"], 0),
)


def blocks(text: str) -> list[str]:
    """All blocks of shell in a text, in order, but those that compile for chips or are a result."""
    return [block for block in BLOCK.findall(text) if "experiments.aot" not in block]


def sections() -> dict[str, str]:
    """{title without flags: text} of the page; what comes before the first has an empty one."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = [title.split(": `")[0] for title in parts[1::2]]
    return {"": parts[0], **dict(zip(titles, parts[2::2], strict=True))}


def as_run(block: str, job: int) -> str:
    """A block for one shell. Commands of several hosts run beside each other, those of every host
    with what SLURM tells its tasks; an array's script runs once for each of its numbers."""
    lines = []
    for line in block.splitlines():
        if "# every host" in line:
            lines += [f"(export {_slurm(i, job)}; {line}\n) &" for i in range(HOSTS)]
        else:
            lines.append(f"({line}\n) &" if re.search(r"# host \d$", line) else line)
    if any("# host" in line or "# every host" in line for line in lines):
        lines = ["export JAX_NUM_CPU_DEVICES=4", *lines]
    text = "\n".join([*lines, 'for p in $(jobs -p); do wait "$p" || exit 1; done'])
    if array := re.search(r"#SBATCH --array=0-(\d+)", block):
        numbers = " ".join(map(str, range(int(array[1]) + 1)))
        text = f'srun() {{ "$@"; }}\nfor SLURM_ARRAY_TASK_ID in {numbers}; do\n{text}\ndone'
    return text


def _slurm(task: int, job: int) -> str:
    said = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost"}
    said |= {"SLURM_NTASKS": HOSTS, "SLURM_PROCID": task, "SLURM_LOCALID": task}
    return " ".join(f"{name}={value}" for name, value in said.items())


def free_port(among=(0,)) -> int:
    """A port that is free now, one of these; 0: any."""
    for port in among:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return found.getsockname()[1]
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The values of the variables, and what a shell needs besides; a cache of programs."""
    folder, rng = tmp_path_factory.mktemp("page"), np.random.default_rng(0)
    for name in "ab":
        (folder / "pictures" / name).mkdir(parents=True)
        for i in range(8):
            image = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
            image.save(folder / "pictures" / name / f"{i}.png")
    np.savez(folder / "reference.npz", arr_0=rng.integers(0, 256, (8, 64, 64, 3), np.uint8))
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "CHECKPOINT": str(ROOT / "ported_weights" / "demo"),
        "IMAGES": "8",
        "BATCH": "8",
        "REFERENCE": str(folder / "reference.npz"),
        "INCEPTION": str(recipe.converted("inception-fid")),
        "PICTURES": str(folder / "pictures"),
        "TRAINING": TRAINING,
    }


def shell(script: str, variables: dict, folder) -> None:
    """Run a script; it fails if a command fails."""
    found = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        env=os.environ | variables,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]


def pictures(folder) -> np.ndarray:
    with np.load(folder / "samples.npz") as archive:
        return archive["arr_0"].astype(int)


@pytest.fixture(scope="module")
def one(given, tmp_path_factory):
    """The pictures that one process draws, one at a time, as each device of the page does."""
    folder = tmp_path_factory.mktemp("one")
    flags = "--num_images=8 --batch_size=1 --out=out"
    shell(f"python -m experiments.run --checkpoint=$CHECKPOINT {flags}", given, folder)
    return pictures(folder / "out")


def test_all_sections_are_run():
    """The page's commands are in the sections that are tested, and its variables are set."""
    said = sections()
    titles = [title for title, text in said.items() if title and blocks(text)]
    assert titles == [title for title, *_ in SECTIONS]
    names = re.findall(r"(\w+)=\$\{(\w+):-", said[""])
    assert all(name == default for name, default in names) and len(names) == 9
    assert {name for name, _ in names} == VARIABLES


VARIABLES = set("CHECKPOINT IMAGES BATCH SHARED HOST0 REFERENCE INCEPTION PICTURES".split()) | {
    "TRAINING"
}


@pytest.mark.slow
@pytest.mark.parametrize(("title", "drawn", "apart"), SECTIONS, ids=[s[0] for s in SECTIONS])
def test_the_commands_of_a_section(title, drawn, apart, given, one, tmp_path):
    said, port = sections(), free_port()
    first = 2**16 - 2**12  # JAX takes one of these ports by the number of SLURM's job
    job = free_port(range(first + os.getpid() % 4000, 2**16)) - first
    variables = given | {"SHARED": str(tmp_path), "HOST0": f"127.0.0.1:{port}"}
    scripts = [as_run(block, job) for block in (*blocks(said[""]), *blocks(said[title]))]
    shell("\n".join(scripts), variables, tmp_path)
    for folder in drawn:
        found = pictures(tmp_path / folder)
        assert np.abs(found - one[: len(found)]).max() <= apart, folder
    if title == "Training":
        assert (tmp_path / "training" / "model" / "model.json").is_file()
    if "GPUs" in title:
        report = json.loads((tmp_path / "fid" / "metrics.json").read_text(encoding="utf-8"))
        assert report["fid"] > 0
