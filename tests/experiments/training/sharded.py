"""Training on eight CPU devices, in a process of its own: the losses of one device.

JAX_NUM_CPU_DEVICES=8 python -m tests.experiments.training.sharded FOLDER
"""

import json
import pathlib
import shutil
import sys

import jax
import numpy as np

from experiments.aot import kernels
from experiments.aot.hlo import Module
from experiments.training import session
from experiments.training.mesh import TrainingMesh
from experiments.training.var_trainer import VARStage
from tests.experiments.training.conftest import _settings, _write_discs

ONE, EIGHT, TWO = TrainingMesh(), TrainingMesh(data=2, fsdp=4), TrainingMesh(fsdp=2)
STEPS, DIES = 20, 12


class Killed(Exception):
    """A run that ends in the middle."""


def losses(out: pathlib.Path, stage: str) -> np.ndarray:
    lines = (out / stage / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    return np.array([json.loads(line)["loss"] for line in lines])


def compare(what: str, found: pathlib.Path, expected: pathlib.Path, stage: str) -> None:
    ours, theirs = losses(found, stage), losses(expected, stage)
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=what)
    print(f"{what}: same losses")


def check_divided(stage, state) -> None:
    """Every device holds an eighth of the pictures and a quarter of most parameters."""
    held = [(a.size, a.addressable_shards[0].data.size) for a in jax.tree.leaves(state)]
    whole, mine = np.sum(held, axis=0)
    assert len(jax.tree.leaves(state)[0].sharding.device_set) == 8
    assert mine < 0.3 * whole, (mine, whole)


def check_exchanges(stage, state, n) -> None:
    """Parameters and gradients, no activations: by itself the compiler gathers over 20 times the
    parameters."""
    chosen, mirrored = stage.pictures(n)
    pictures = stage.data.train[mirrored.astype(int), chosen], stage.data.train_labels[chosen]
    given = *stage.spread(*pictures), stage.everywhere(stage.key(n))
    lowered = type(stage)._train.lower(stage, state, stage._quantizer, *given)
    sums = {"all-gather": 0}
    for row in kernels.exchanged(Module.parse(lowered.compile().as_text())):
        sums[row["kind"]] = sums.get(row["kind"], 0) + row["bytes"]
    size = sum(a.nbytes for a in jax.tree.leaves(state["params"]))
    assert size <= sums.pop("all-gather") <= 4 * size and sum(sums.values()) < 3 * size, sums


def main(folder: pathlib.Path) -> None:
    assert len(jax.devices()) == 8
    every = {"log_every": 1, "checkpoint_every": 10, "validate_every": STEPS}
    settings = _settings(_write_discs(folder), **every, vqvae_steps=STEPS, var_steps=STEPS)
    one, eight, resumed = (folder / name for name in ("one", "eight", "resumed"))
    session.train(settings, "vqvae", one, quiet=True, mesh=ONE)
    session.train(settings, "vqvae", eight, quiet=True, mesh=EIGHT)
    compare("codec", eight, one, "vqvae")
    session.train(settings, "var", one, quiet=True, mesh=ONE)
    for out in (eight, resumed):  # the transformer of the same tokens
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(one / "vqvae", out / "vqvae")
        (out / "var").mkdir()
        shutil.copy(one / "var" / "tokens.npz", out / "var")
    step = VARStage.step

    def watched(self, state, n):
        if self.mesh == EIGHT:
            check_divided(self, state)
            if n == 0:
                check_exchanges(self, state, n)
        if killed and n == DIES:
            raise Killed
        return step(self, state, n)

    VARStage.step, killed = watched, []
    session.train(settings, "var", eight, quiet=True, mesh=EIGHT)
    compare("transformer", eight, one, "var")
    killed.append(True)
    try:
        session.train(settings, "var", resumed, quiet=True, mesh=EIGHT)
    except Killed:
        killed.clear()
    session.train(settings, "var", resumed, quiet=True, mesh=TWO)
    compare("resumed on two", resumed, one, "var")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
