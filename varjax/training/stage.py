"""What training the codec and training the transformer have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import optax
from flax import nnx

from varjax.models import parameters
from varjax.training import data_order
from varjax.training.data import Dataset
from varjax.training.optimizer import initial_state
from varjax.training.settings import TrainingSettings


@dataclass(frozen=True)
class Stage:
    """One stage of a training run: a model, its recipe and its data.

    Everything random in step n follows from the seed and n. So a state and its step are all that a
    checkpoint needs, and a resumed run repeats exactly what an uninterrupted one does.

    The compiled methods take the stage as a static argument, so that stages of the same settings in
    one process share them: they must not read `data`, which does not count in comparisons.
    """

    settings: TrainingSettings
    config: object
    data: Dataset = field(compare=False, repr=False)

    name: ClassVar[str]
    network: ClassVar[type[nnx.Module]]
    ema: ClassVar[float]  # decay of the averaged weights

    def optimizer(self) -> optax.GradientTransformation:
        raise NotImplementedError

    def step(self, state: dict, n: int) -> tuple[dict, Mapping]:
        """State after step n, counted from 0, and metrics, which are scalars on the device."""
        raise NotImplementedError

    def validate(self, state: dict) -> dict:
        """Numbers about the averaged weights."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        return getattr(self.settings, f"{self.name}_steps")

    @property
    def batch_size(self) -> int:
        return getattr(self.settings, f"{self.name}_batch_size")

    def initial_state(self) -> dict:
        model = self.network(self.config, rngs=nnx.Rngs(self.settings.seed))
        return initial_state(parameters.named(model), self.optimizer())

    def model(self, params: Mapping) -> nnx.Module:
        """The network with these parameters, for example `state["ema"]`."""
        abstract = parameters.abstract(lambda: self.network(self.config, rngs=nnx.Rngs(0)))
        return parameters.fill(abstract, params)

    def key(self, n: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.settings.seed), n)

    def drawn(self, n: int):
        """int [B] and bool [B]: pictures of step n, and which of them are mirrored."""
        size, seed = self.batch_size, self.settings.seed
        chosen = data_order.indices(len(self.data.train_labels), size, seed, n)
        return chosen, data_order.flips(size, seed, n)
