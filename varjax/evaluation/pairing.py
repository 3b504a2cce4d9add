"""Which pictures of two sets are the same ones."""

from varjax.errors import UserError, some
from varjax.evaluation.pictures import Pictures


def paired(first: Pictures, second: Pictures) -> tuple[list[int], list[int]]:
    """Places of the same pictures in two sets, in the order of the first.

    Raises:
      UserError: the sets differ in their number, their size or their keys.
    """
    if first.count != second.count:
        raise UserError(
            f"{first.where} has {first.count} pictures, {second.where} has {second.count}: pictures"
            " are compared one by one, so give the same ones in both"
        )
    if first.size != second.size:
        sizes = (f"{s.size[0]}x{s.size[1]} pixels in {s.where}" for s in (first, second))
        raise UserError(f"pictures that are compared need one size: {', '.join(sizes)}")
    ours, theirs = list(first.keys), {key: i for i, key in enumerate(second.keys)}
    if missing := [str(key) for key in ours if key not in theirs]:
        extra = [str(key) for key in theirs if key not in set(ours)]
        raise UserError(
            f"pictures are paired by number or name, and these of {first.where} are not in"
            f" {second.where}: {some(missing, 5)}; there instead: {some(extra, 5)}"
        )
    return list(range(len(ours))), [theirs[key] for key in ours]
