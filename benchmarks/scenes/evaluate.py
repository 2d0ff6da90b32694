"""Judges a picture against its caption by pixels alone: no network has a say in its own score.

The border tells the background, connected patches of one object colour are the objects, and a patch's outline,
compared with drawn outlines, tells its shape.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage

from benchmarks.scenes.scenes import (
    BACKGROUND_COLOURS,
    PALETTE,
    SHAPES,
    SIDE,
    Expectation,
    Scene,
    SceneObject,
    draw,
)

BORDER = 2  # pixels; objects do not come so near to the edge
MIN_AREA = 30  # pixels of a patch after opening; the smallest object drawn has about 100
OUTLINE = 24  # side of the outlines that are compared
MAX_DIFFERENCE = 0.17  # of outlines, mean; drawn shapes stay below 0.10, and below 0.14 under a blur of one pixel
MAX_STRETCH = 1.3  # longer side by shorter; drawn shapes stay below 1.1
BELOW, RIGHT = 0, 1  # axes of a position


@dataclass(frozen=True)
class SeenObject:
    """A patch of a picture; shape None if it is like none, position (y, x) of its centre in pixels."""

    shape: str | None
    colour: str
    position: tuple[float, float]


@dataclass(frozen=True)
class Verdict:
    """Whether a picture has what its caption asks for; None where it asks for nothing."""

    background: bool | None
    colours: bool
    shapes: bool
    relation: bool | None

    @property
    def all(self) -> bool:
        """Whether nothing is wrong."""
        return False not in (self.background, self.colours, self.shapes, self.relation)


def judge(image: np.ndarray, expectation: Expectation) -> Verdict:
    """Judges a uint8 picture (SIDE, SIDE, 3).

    Colours are right if the picture has exactly the objects' colours, shapes if each colour has its shape, the
    relation if the objects of the right colours (or, where these are the same, shapes) stand so.
    """
    background, seen = look(image)
    wanted = expectation.objects
    # All ways to take the patches for the objects; a patch too many or too few leaves none.
    pairings = list(itertools.permutations(seen)) if len(seen) == len(wanted) else []
    by_colour = [p for p in pairings if all(s.colour == w.colour for s, w in zip(p, wanted, strict=True))]
    by_both = [p for p in by_colour if all(s.shape == w.shape for s, w in zip(p, wanted, strict=True))]
    relation = None
    if expectation.relation is not None:
        relation = any(_stands(a.position, b.position, expectation.relation) for a, b in by_both or by_colour)
    return Verdict(
        background=None if expectation.background is None else background == expectation.background,
        colours=bool(by_colour),
        shapes=bool(by_both),
        relation=relation,
    )


def look(image: np.ndarray) -> tuple[str, list[SeenObject]]:
    """The background's colour and the objects of a uint8 picture (SIDE, SIDE, 3)."""
    pixels = image.astype(np.float32)
    inside = np.zeros(image.shape[:2], bool)
    inside[BORDER:-BORDER, BORDER:-BORDER] = True
    background = _nearest(np.median(pixels[~inside], axis=0)[None], BACKGROUND_COLOURS)[0]
    # All of the palette, not only the colours of objects: a pink object is a wrong one, not an unseen one.
    colours = (background, *(name for name in PALETTE if name != background))
    names = _nearest(pixels.reshape(-1, 3), colours).reshape(image.shape[:2])
    seen = []
    for colour in colours[1:]:
        # Opening takes away soft edges, which are two pixels wide at most and may have any colour.
        patches, count = ndimage.label(ndimage.binary_opening(names == colour, np.ones((3, 3))), np.ones((3, 3)))
        for patch in (patches == number for number in range(1, count + 1)):
            if patch.sum() >= MIN_AREA:
                seen.append(SeenObject(_shape(patch), colour, ndimage.center_of_mass(patch)))
    return background, seen


def _nearest(pixels: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    distances = np.linalg.norm(pixels[:, None] - np.array([PALETTE[name] for name in names], np.float32), axis=-1)
    return np.array(names)[distances.argmin(axis=1)]


def _stands(first: tuple[float, float], second: tuple[float, float], relation: str) -> bool:
    """Whether the first position is `relation` the second, more so than anything else."""
    axis, sign = {"left of": (RIGHT, 1), "right of": (RIGHT, -1), "above": (BELOW, 1), "below": (BELOW, -1)}[relation]
    offset = np.subtract(second, first)
    return bool(sign * offset[axis] > abs(offset[1 - axis]))


def _shape(patch: np.ndarray) -> str | None:
    """The most similar shape; None if none is similar, so that a smudge or an ellipse is not right by chance."""
    height, width = (np.ptp(np.flatnonzero(patch.any(axis))) + 1 for axis in (1, 0))
    if max(height, width) > MAX_STRETCH * min(height, width):
        return None
    outline = _outline(patch)
    differences = {shape: min(np.abs(outline - drawn).mean() for drawn in _drawn_outlines(shape)) for shape in SHAPES}
    nearest = min(differences, key=differences.__getitem__)
    return nearest if differences[nearest] <= MAX_DIFFERENCE else None


def _outline(patch: np.ndarray) -> np.ndarray:
    """A patch stretched to OUTLINE x OUTLINE; float32, 1 inside."""
    rows, columns = (np.flatnonzero(patch.any(axis)) for axis in (1, 0))
    box = patch[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    stretched = Image.fromarray((box * 255).astype(np.uint8)).resize((OUTLINE, OUTLINE), Image.Resampling.BILINEAR)
    return np.asarray(stretched, np.float32) / 255


@functools.cache
def _drawn_outlines(shape: str) -> list[np.ndarray]:
    """Outlines of a shape at every size in which scenes have it, found as in a picture."""
    scenes = [Scene((SceneObject(shape, "black", size),), None, "white") for size in ("small", "medium", "large")]
    outlines = []
    for picture in (draw(scene, SIDE) for scene in scenes):
        mask = ndimage.binary_opening(picture.mean(axis=-1) < 128, np.ones((3, 3)))
        outlines.append(_outline(mask))
    return outlines
