"""Which of the slots that hold something a query of token attention sees."""

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sight:
    """See `api.attend`; arrays, or a kernel's references to them.

    newest, used: int32 scalars. reach: int32 [R, N].
    """

    newest: Any = None
    reach: Any = None
    used: Any = None
    protected: int = field(default=0, metadata=dict(static=True))

    def sees(self, position, newest=None, reach=None) -> Any:
        """Where positions of slots are visible. newest, reach: of these slots, where they are not
        the arrays themselves."""
        visible = position >= 0
        if self.newest is None:
            return visible
        newest = self.newest if newest is None else newest
        visible &= position <= newest
        if self.reach is None:
            return visible
        reach = self.reach[..., None] if reach is None else reach
        return visible & ((position < self.protected) | (position > newest - reach))
