"""Which tokens every head kept while an image was drawn, and a picture of it.

A pattern of one image is bool [K, L, N, T]: [s, l, n, t] tells whether head n of layer l holds
token t when scale s (token by token: stage s, of which the first is the condition) starts. T are
all tokens of the image; it is what a file of `policies.table` holds as `keep_token`.

Letters: K scales or stages, L layers, N heads, T tokens, H and W pixels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, PyTree, UInt8

from varjax import conditions
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.core.sampling import check_seed
from varjax.core.scale_plan import ScalePlan
from varjax.core.sequence import SCALES
from varjax.core.stages import TokenPlan
from varjax.storage import pictures

DROPPED = np.array([20, 33, 61], np.float32)  # the colour of tokens that are not kept
BETWEEN = 170  # the grey between token maps
LEAST = 0.1  # of the picture that is seen through them
SMALLEST, LARGEST, WIDTH = 16, 96, 4000  # pixels of a token map's width, and of all about at most
MARGIN, LINE, GAP = 52, 14, 2  # pixels of the labels, and between token maps


def of_images(generator, given: Mapping, seed: int) -> Bool[np.ndarray, "B K L N T"]:
    """The patterns of the images that a `Generator` draws. They are drawn for it, by a program of
    its own (`telling`), unless the plan knows all contents. given: as of a call, by name."""
    check_seed(seed)
    plan, condition = generator.plan, conditions.resolve(generator.model, **given)
    plan.policy.check_images(len(condition))
    if plan.static_content:
        return of_batch(plan, None, len(condition))
    drawn = generator.telling.batches(condition, seed=seed)
    return np.concatenate([of_batch(plan, told["contents"], len(i)) for i, told in drawn])


def telling(generator):
    """The `Generator` of the same images whose results tell what the cache holds."""
    build = replace(generator.build, keep_contents=True)
    same = {"sampling": generator.spec.sampling, "mesh": generator.mesh, "build": build}
    same |= {name: getattr(generator, name) for name in ("plan", "batch_size", "kv_dtype")}
    return generator if build == generator.build else type(generator)(generator.model, **same)


def of_image(plan: CachePlan, contents: PyTree, row: int = 0) -> Bool[np.ndarray, "K L N T"]:
    """The pattern of one row of a batch; row i is image i with its condition.

    contents: what a generator with `Build(keep_contents=True)` returns so; not looked at where the
      plan knows the contents beforehand.
    """
    return (_by_scales if plan.geometry.kind == SCALES else _by_stages)(plan, contents, row)


def num_bytes(plan: CachePlan) -> int:
    """Bytes of the pattern of an image."""
    g = plan.geometry
    tokens = sum(h * w for h, w in layout(plan)["maps"])
    return len(plan.capacity) * g.num_layers * g.num_heads * tokens


def of_batch(plan: CachePlan, contents: PyTree, count: int) -> Bool[np.ndarray, "B K L N T"]:
    """The patterns of the first `count` images of a batch, conditional rows. Else as `of_image`."""
    if plan.static_content:
        one = of_image(plan, None)
        return np.broadcast_to(one, (count, *one.shape))
    return np.stack([of_image(plan, contents, row) for row in range(count)])


def at_the_end(plan: CachePlan, contents: PyTree, row: int = 0) -> Bool[np.ndarray, "L N F"]:
    """Which of the F tokens that are ever stored (all scales but the last, or all image tokens but
    the last) each head holds when the last scale or token is drawn. Arguments: as of `of_image`."""
    if plan.geometry.kind == SCALES:
        return of_image(plan, contents, row)[-1, ..., : plan.geometry.schedule.persistent_tokens]
    steps, token = plan.sequence.steps, np.arange(plan.sequence.image_tokens)
    if plan.static_content:
        return _ring(plan, token, steps)[..., :steps]
    # nothing leaves in the last stage
    held = of_image(plan, contents, row)[-1] | (token >= _drawn(plan)[-1])
    return held[..., :steps]


def _by_scales(plan: ScalePlan, contents: PyTree, row: int) -> np.ndarray:
    g = plan.geometry
    shape = g.num_layers, g.num_heads, g.schedule.total_tokens
    found = np.zeros((g.schedule.num_scales, *shape), bool)
    for scale in range(1, len(found)):
        if plan.static_content:
            found[scale] = plan.allocation.visible(g, scale)
            continue
        position = np.asarray(contents["position"])[scale - 1, row]  # as the scale before left it
        regions = np.broadcast_to(np.arange(g.num_heads), shape[:2])
        if contents["regions"] is not None:
            regions = np.asarray(contents["regions"])[scale - 1, :, row]
        # slots of every region, [L, N, table entries x slots of a block], and which of them it uses
        inside = np.arange(plan.block_size)
        slots = plan.ids[scale][..., None] * plan.block_size + inside
        used = inside >= plan.start[scale][..., None]
        used &= inside < plan.stop[scale][..., None]
        slots, used = (a.reshape(*shape[:2], -1) for a in (slots, used))
        layer, head, place = np.nonzero(np.take_along_axis(used, regions[..., None], axis=1))
        token = position[slots[layer, regions[layer, head], place]]
        there = token >= 0  # rows may hold fewer tokens than their regions have room for
        found[scale, layer[there], head[there], token[there]] = True
    return found


def _by_stages(plan: TokenPlan, contents: PyTree, row: int) -> np.ndarray:
    g, condition = plan.geometry, plan.sequence.condition
    token, drawn = np.arange(plan.sequence.image_tokens), _drawn(plan)
    found = np.zeros((len(drawn), g.num_layers, g.num_heads, token.size), bool)
    for stage in range(2, len(drawn)):  # the condition and the first stage find no image tokens
        if plan.static_content:
            found[stage] = _ring(plan, token, drawn[stage])
            continue
        for layer, held in enumerate(contents):
            position = np.asarray(held[stage - 2, row]) - condition
            # beside the condition and empty slots, the buffer names tokens that are to come
            head, slot = np.nonzero((position >= 0) & (position < drawn[stage]))
            found[stage, layer, head, position[head, slot]] = True
    return found


def _drawn(plan: TokenPlan) -> np.ndarray:
    """int64 [K]: image tokens that are stored when each stage starts."""
    return np.maximum(np.arange(len(plan.capacity)) - 1, 0) * plan.allocation.period


def _ring(plan: TokenPlan, token: np.ndarray, drawn: int) -> Bool[np.ndarray, "L N T"]:
    """Known contents: the newest tokens behind those that stay."""
    first = plan.allocation.protected
    newest = (drawn - (plan.allocation.slots - first))[:, None]
    held = (token < drawn) & ((token < first) | (token >= newest))
    return np.repeat(held[:, None], plan.geometry.num_heads, axis=1)


# --- a picture ------------------------------------------------------------------------------------


def layout(plan: CachePlan) -> dict[str, list]:
    """How `picture` lays out a pattern, as JSON data: "maps", height and width of its token maps,
    and "drawn", how many tokens are drawn when each scale or stage starts."""
    order = plan.geometry.schedule
    if order.kind == SCALES:
        return {"maps": [list(sides) for sides in order.maps], "drawn": list(order.starts)}
    maps = [[order.image_tokens // order.line, order.line]]  # ends of lines are a column of it
    return {"maps": maps, "drawn": _drawn(plan).tolist()}


def kept_picture(
    plan: CachePlan,
    keep: Bool[np.ndarray, "K L N T"],
    image: np.ndarray,
    layers: Sequence[int] | None = None,
) -> UInt8[np.ndarray, "height width 3"]:
    """A picture of what every head kept: a row for each layer, and for each head its token maps
    side by side, coarse to fine, the image behind them. The clearer a token, the longer it was
    kept: through as large a part of the scales or stages after its own. The last map of several is
    left out: it is never stored.

    Args:
      plan: of the generator. keep: of one image, as `Generator.kept` returns it for each.
      image: [H, W, 3], uint8 or floats in [0, 1].
      layers: which of them; None: all.

    Raises:
      UserError: arrays of other shapes, or a layer that there is not.
    """
    g = arguments.instance("plan", plan, CachePlan, "the plan of a generator").geometry
    tokens = sum(h * w for h, w in layout(plan)["maps"])
    sizes = len(plan.capacity), g.num_layers, g.num_heads, tokens
    if np.shape(keep) != sizes:
        raise UserError(f"keep has shape {np.shape(keep)}: give that of one image, {sizes}")
    keep, image = np.asarray(keep), np.asarray(image)
    if image.ndim != 3 or image.shape[-1] != 3:
        raise UserError(f"image has shape {image.shape}: give one picture [H, W, 3]")
    if layers is not None:
        words = f"give some of 0 to {g.num_layers - 1}"
        layers = arguments.integers("layers", layers, words, g.num_layers)
        if wrong := sorted(set(layers) - set(range(g.num_layers))):
            raise UserError(f"layers: there is no layer {wrong[0]}, {words}")
    return picture(keep, image, **layout(plan), layers=layers)


def picture(
    keep: Bool[np.ndarray, "K L N T"],
    image: np.ndarray,
    maps: Sequence[Sequence[int]],
    drawn: Sequence[int],
    layers: Sequence[int] | None = None,
) -> UInt8[np.ndarray, "height width 3"]:
    """The picture of `kept_picture`, from a `layout`."""
    image = image if image.dtype == np.uint8 else pictures.to_uint8(image[None])[0]
    layers = range(keep.shape[1]) if layers is None else layers
    heads, shown = keep.shape[2], maps[: max(1, len(maps) - 1)]
    side = min(max(WIDTH // (heads * len(shown)), SMALLEST), LARGEST)
    behind = pictures.fit_picture(image, (-(-side * image.shape[0] // image.shape[1]), side))
    (height, width), strip = behind.shape[:2], len(shown) * (behind.shape[1] + GAP) + 3 * GAP
    rows = np.full((len(layers), height + GAP, heads, strip, 3), BETWEEN, np.uint8)
    share, start = _share(keep[:, layers], np.array(drawn)), 0
    for place, (h, w) in enumerate(shown):
        part = share[..., start : start + h * w].reshape(*share.shape[:2], h, w)
        cells = np.arange(height) * h // height, np.arange(width) * w // width
        clear = LEAST + (1 - LEAST) * part[..., cells[0][:, None], cells[1], None]
        tiles = clear * behind + (1 - clear) * DROPPED
        left = place * (width + GAP)
        rows[:, :height, :, left : left + width] = np.moveaxis(tiles, 1, 2)
        start += h * w
    return _labelled(rows.reshape(-1, heads * strip, 3), layers, heads)


def _share(keep: Bool[np.ndarray, "K L N T"], drawn: np.ndarray) -> Float[np.ndarray, "L N T"]:
    """Part of the scales or stages after its own in which each token is held; 1 with none."""
    later = (drawn[:, None] > np.arange(keep.shape[-1])).sum(0)
    return np.where(later, keep.sum(0) / np.maximum(later, 1), 1)


def _labelled(
    rows: UInt8[np.ndarray, "h w 3"], layers: Sequence[int], heads: int
) -> UInt8[np.ndarray, "height width 3"]:
    """The maps with the numbers of layers and heads beside them."""
    high, wide, _ = rows.shape
    canvas = pictures.pillow().new("RGB", (MARGIN + wide, LINE + high), "white")
    canvas.paste(pictures.pillow().fromarray(rows), (MARGIN, LINE))
    text = pictures.pillow("ImageDraw").Draw(canvas).text
    for row, layer in enumerate(layers):
        text((2, LINE + row * high // len(layers)), f"layer {layer}", fill="black")
    for head in range(heads):
        text((MARGIN + head * wide // heads, 1), f"head {head}", fill="black")
    return np.asarray(canvas)
