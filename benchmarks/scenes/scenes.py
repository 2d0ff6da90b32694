"""Procedurally drawn scenes: the world that the embedded demonstration checkpoint is trained on.

A scene is one or two flat shapes on a flat background. Its caption is made of a small closed vocabulary, and what a
caption leaves out has one documented meaning, so a caption always says which picture is right:

    size left out        the object is medium
    background left out  white; black if an object is white; grey if one object is white and the other black
    relation left out    ("a red circle and a blue square") the first object is left of the second

Positions are in pixels of a picture of SIDE pixels, y downwards. Every function that draws lots takes a
`random.Random`, never the global one, so a seed fixes the data.
"""

import hashlib
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64

SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
OBJECT_COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "white")
BACKGROUND_COLOURS = ("white", "black", "grey", "pink", "cyan", "beige")
SIZES = ("small", "medium", "large")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
RELATIONS = tuple(OPPOSITE)

# No two are closer than 86 in RGB distance, so a soft edge or a decoder's tint does not turn one into another.
PALETTE = {
    "red": (220, 30, 35),
    "green": (25, 150, 60),
    "blue": (35, 70, 215),
    "yellow": (250, 220, 40),
    "orange": (245, 130, 25),
    "purple": (130, 40, 165),
    "black": (20, 20, 20),
    "white": (248, 248, 248),
    "grey": (128, 128, 128),
    "pink": (255, 160, 205),
    "cyan": (120, 215, 235),
    "beige": (208, 184, 136),
}

# Bounding boxes in pixels. A pair has to share the picture, so its sizes lie closer together; 18 is the least at
# which a cross keeps arms of six pixels and a ring its hole.
SIZE_ALONE = {"small": 20, "medium": 30, "large": 42}
SIZE_IN_PAIR = {"small": 18, "medium": 22, "large": 26}

SIZE_WORDS = {"small": ("small", "little"), "medium": ("medium",), "large": ("large", "big")}
RELATION_PHRASES = {
    "left of": ("left of", "to the left of", "on the left of"),
    "right of": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
COLOUR_SPELLINGS = {"grey": ("grey", "gray")}
RELATION_WORDS = {
    "left": "left of",
    "right": "right of",
    "above": "above",
    "over": "above",
    "below": "below",
    "under": "below",
}
KIND_WORDS = ("picture", "drawing", "image")
FILLER_WORDS = ("a", "an", "the", "and", "of", "to", "on", "with", "against", "background", *KIND_WORDS)

_SIZE_OF_WORD = {word: size for size, words in SIZE_WORDS.items() for word in words}
_COLOUR_OF_WORD = {word: name for name in PALETTE for word in COLOUR_SPELLINGS.get(name, (name,))}

VOCABULARY = (*SHAPES, *_COLOUR_OF_WORD, *_SIZE_OF_WORD, *RELATION_WORDS, *FILLER_WORDS)
"""Every word a caption may hold; the comma is the only punctuation."""

HELD_OUT_PERCENT = 3


@dataclass(frozen=True)
class SceneObject:
    """One flat shape."""

    shape: str
    colour: str
    size: str = "medium"

    def __post_init__(self):
        if self.shape not in SHAPES or self.colour not in OBJECT_COLOURS or self.size not in SIZES:
            raise ValueError(f"{self} is none of shapes {SHAPES}, colours {OBJECT_COLOURS}, sizes {SIZES}")


@dataclass(frozen=True)
class Scene:
    """One object, or two objects of which the first is `relation` the second."""

    objects: tuple[SceneObject, ...]
    relation: str | None
    background: str

    def __post_init__(self):
        if self.background not in BACKGROUND_COLOURS:
            raise ValueError(f"background {self.background!r} is none of {BACKGROUND_COLOURS}")
        if any(thing.colour == self.background for thing in self.objects):
            raise ValueError(f"an object of the background's colour, {self.background}, cannot be seen")
        if len(self.objects) == 1:
            if self.relation is not None:
                raise ValueError("one object has no relation")
        elif len(self.objects) != 2 or self.relation not in RELATIONS:
            raise ValueError(f"a scene has one object, or two and one of the relations {RELATIONS}")
        elif _looks(self.objects[0]) == _looks(self.objects[1]):
            raise ValueError("two objects differ in shape or colour")


@dataclass(frozen=True)
class ExpectedObject:
    """What a caption demands of one object; a size it does not state is None."""

    shape: str
    colour: str
    size: str | None = None


@dataclass(frozen=True)
class Expectation:
    """What a caption demands of a picture; what it does not state is None and goes unchecked."""

    objects: tuple[ExpectedObject, ...]
    relation: str | None = None
    background: str | None = None


@dataclass(frozen=True)
class Example:
    """A picture, its caption and SDXL's micro-conditioning, sizes as (height, width), crop as (top, left)."""

    caption: str
    image: np.ndarray
    original_size: tuple[int, int]
    crops_coords_top_left: tuple[int, int]
    target_size: tuple[int, int]


def _looks(thing) -> tuple[str, str]:
    return thing.shape, thing.colour


def default_background(objects) -> str:
    """The background that a caption of these objects means when it names none."""
    colours = {thing.colour for thing in objects}
    if "white" not in colours:
        return "white"
    return "grey" if "black" in colours else "black"


# ---- sampling


def sample_scene(rng: random.Random) -> Scene:
    """Draws a scene; two in five hold one object, and one in three has the background that a caption may leave out."""
    first = _sample_object(rng)
    objects: tuple[SceneObject, ...] = (first,)
    if rng.random() < 0.6:
        second = _sample_object(rng)
        while _looks(second) == _looks(first):
            second = _sample_object(rng)
        objects = (first, second)
    background = default_background(objects)
    if rng.random() < 0.75:
        taken = {thing.colour for thing in objects}
        background = rng.choice([colour for colour in BACKGROUND_COLOURS if colour not in taken])
    return Scene(objects, rng.choice(RELATIONS) if len(objects) == 2 else None, background)


def _sample_object(rng: random.Random) -> SceneObject:
    size = "medium" if rng.random() < 0.5 else rng.choice(("small", "large"))
    return SceneObject(rng.choice(SHAPES), rng.choice(OBJECT_COLOURS), size)


# ---- drawing


def draw(
    scene: Scene, size: int = SIDE, rng: random.Random | None = None, crop: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Draws the scene as uint8 (size, size, 3), smooth-edged.

    With an rng, positions and sizes vary a little; without, the scene is centred. `crop` is the (top, left) of the
    window in pixels of a SIDE-sized picture: the objects move up and left and are cut, and background fills the rest.
    """
    scale = 4 * size / SIDE  # drawn at four times the size and averaged down
    canvas = Image.new("RGB", (4 * size, 4 * size), PALETTE[scene.background])
    pen = ImageDraw.Draw(canvas)
    for thing, (x, y, side) in zip(scene.objects, _layout(scene, rng), strict=True):
        left, top, side = round((x - side / 2 - crop[1]) * scale), round((y - side / 2 - crop[0]) * scale), side * scale
        _draw_shape(pen, thing.shape, left, top, round(side), PALETTE[thing.colour], PALETTE[scene.background])
    return np.array(canvas.reduce(4))


def _layout(scene: Scene, rng: random.Random | None) -> list[tuple[float, float, float]]:
    """Centre x, centre y and side of each object, in pixels of a SIDE-sized picture."""

    def jitter(extent):
        return rng.uniform(-extent, extent) if rng else 0.0

    table = SIZE_ALONE if len(scene.objects) == 1 else SIZE_IN_PAIR
    sides = [table[thing.size] * (1 + jitter(0.04)) for thing in scene.objects]
    middle = SIDE / 2
    if len(sides) == 1:
        return [(middle + jitter(6), middle + jitter(6), sides[0])]

    # Along the axis of the relation: near object, gap, far object, the three together anywhere but two pixels off
    # either edge. Across it: a common line with a little play.
    first_is_near = scene.relation in ("left of", "above")
    near, far = sides if first_is_near else sides[::-1]
    room = SIDE - 4 - near - far
    gap = rng.uniform(5, min(room, 11)) if rng else min(room, 8)
    start = 2 + (room - gap) * (rng.random() if rng else 0.5)
    line = middle + jitter(6)
    places = [(start + near / 2, line + jitter(2), near), (start + near + gap + far / 2, line + jitter(2), far)]
    if scene.relation in ("above", "below"):
        places = [(across, along, side) for along, across, side in places]
    return places if first_is_near else places[::-1]


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, left: int, top: int, side: int, colour, background) -> None:
    right, bottom = left + side - 1, top + side - 1  # Pillow's boxes include their last pixel
    mid_x, mid_y = left + (side - 1) / 2, top + (side - 1) / 2
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=colour)
    elif shape == "triangle":
        pen.polygon(((mid_x, top), (right, bottom), (left, bottom)), fill=colour)
    elif shape == "diamond":
        pen.polygon(((mid_x, top), (right, mid_y), (mid_x, bottom), (left, mid_y)), fill=colour)
    elif shape == "cross":
        arm = round(side / 3)
        pen.rectangle((left + arm, top, right - arm, bottom), fill=colour)
        pen.rectangle((left, top + arm, right, bottom - arm), fill=colour)
    elif shape == "ring":
        wall = round(side / 4)
        pen.ellipse((left, top, right, bottom), fill=colour)
        pen.ellipse((left + wall, top + wall, right - wall, bottom - wall), fill=background)
    else:
        raise ValueError(f"{shape!r} is none of {SHAPES}")


# ---- captions


def caption(scene: Scene, rng: random.Random) -> str:
    """Words the scene in one of many ways, all of them true and none of them ambiguous (see the module's defaults)."""
    objects, relation = scene.objects, scene.relation
    article = rng.choices(("a", "", "the"), (70, 22, 8))[0]
    subject = _noun(objects[0], article, rng)
    if relation == "left of" and rng.random() < 0.15:
        subject = f"{subject} and {_noun(objects[1], article, rng)}"
    elif relation is not None:
        first, second = objects
        if rng.random() < 0.3:
            first, second, relation = second, first, OPPOSITE[relation]
        phrase = rng.choice(RELATION_PHRASES[relation])
        subject = f"{_noun(first, article, rng)} {phrase} {_noun(second, article, rng)}"

    background = rng.choice(COLOUR_SPELLINGS.get(scene.background, (scene.background,)))
    stated = scene.background != default_background(objects) or rng.random() < 0.5
    if stated and rng.random() < 0.1:
        return f"a {background} background with {subject}"
    if article and rng.random() < 0.08:
        subject = f"{_with_article(rng.choice(KIND_WORDS))} of {subject}"
    if not stated:
        return subject
    templates = ("{} on a {} background", "{} on {}", "{}, {} background", "{} against a {} background")
    return rng.choices(templates, (45, 25, 15, 15))[0].format(subject, background)


def _noun(thing: SceneObject, article: str, rng: random.Random) -> str:
    words = [rng.choice(COLOUR_SPELLINGS.get(thing.colour, (thing.colour,))), thing.shape]
    if thing.size != "medium" or rng.random() < 0.1:
        words.insert(0, rng.choice(SIZE_WORDS[thing.size]))
    noun = " ".join(words)
    return _with_article(noun) if article == "a" else f"{article} {noun}".strip()


def _with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def parse_caption(text: str) -> Expectation:
    """Reads what a caption demands; ValueError names the first thing that this world does not know."""
    words = text.lower().replace(",", " ").split()
    for word in words:
        if word not in VOCABULARY:
            raise ValueError(f"{word!r} in {text!r} is not a word of the scenes' vocabulary")
    words = [word for word in words if word not in ("a", "an", "the")]

    objects: list[ExpectedObject] = []
    relation = background = size = colour = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in _SIZE_OF_WORD:
            size = _SIZE_OF_WORD[word]
        elif word in _COLOUR_OF_WORD and following in SHAPES:
            colour = _COLOUR_OF_WORD[word]
        elif word in _COLOUR_OF_WORD:
            background = _COLOUR_OF_WORD[word]
        elif word in SHAPES:
            if colour is None:
                raise ValueError(f"{text!r} names a {word} without a colour")
            objects.append(ExpectedObject(word, colour, size))
            size = colour = None
        elif word in RELATION_WORDS:
            if len(objects) != 1:
                raise ValueError(f"{text!r} has {word!r} elsewhere than between two objects")
            relation = RELATION_WORDS[word]
    if len(objects) not in (1, 2) or (relation and len(objects) == 1):
        raise ValueError(f"{text!r} does not name one object, or two and how they lie")
    return Expectation(tuple(objects), relation, background)


def scene_of(text: str) -> Scene:
    """The scene that a caption means once the defaults of this world have filled in what it leaves out."""
    expected = parse_caption(text)
    objects = tuple(SceneObject(thing.shape, thing.colour, thing.size or "medium") for thing in expected.objects)
    relation = expected.relation or ("left of" if len(objects) == 2 else None)
    return Scene(objects, relation, expected.background or default_background(objects))


PLACES = ("left", "right", "top", "bottom", "middle")
ANSWERS = (len(BACKGROUND_COLOURS), *(len(PLACES) * (len(SHAPES) + 1, len(OBJECT_COLOURS) + 1, len(SIZES) + 1)))
"""How many answers each question of `description` has."""


def description(text: str) -> list[int]:
    """What a caption means, as answers to the questions: which background; what shape, colour and size at each place.

    The last answer to each question about a place is that nothing stands there.
    """
    scene = scene_of(text)
    places = {
        None: ("middle",),
        "left of": ("left", "right"),
        "right of": ("right", "left"),
        "above": ("top", "bottom"),
        "below": ("bottom", "top"),
    }[scene.relation]
    standing = dict(zip(places, scene.objects, strict=True))
    answers = [BACKGROUND_COLOURS.index(scene.background)]
    for place in PLACES:
        if thing := standing.get(place):
            answers += [SHAPES.index(thing.shape), OBJECT_COLOURS.index(thing.colour), SIZES.index(thing.size)]
        else:
            answers += [len(SHAPES), len(OBJECT_COLOURS), len(SIZES)]
    return answers


# ---- the split and the training examples


def is_held_out(text: str) -> bool:
    """Whether a caption belongs to the held-out scenes, HELD_OUT_PERCENT in a hundred.

    The scene is hashed and not its wording, so no paraphrase of a held-out caption, its mirror image included ("a
    below b" for "b above a"), is seen in training.
    """
    scene = scene_of(text)
    objects, relation = scene.objects, scene.relation
    if relation in ("right of", "below"):
        objects, relation = objects[::-1], OPPOSITE[relation]
    meaning = f"{[(thing.shape, thing.colour, thing.size) for thing in objects]} {relation} {scene.background}"
    return int.from_bytes(hashlib.sha256(meaning.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def held_out_captions(count: int, seed: int) -> list[str]:
    """The first `count` different held-out captions that the seed draws."""
    return _captions(count, seed, held_out=True)


def training_captions(count: int, seed: int) -> list[str]:
    """The first `count` different captions, none of them held out, that the seed draws."""
    return _captions(count, seed, held_out=False)


def _captions(count: int, seed: int, held_out: bool) -> list[str]:
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        text = caption(sample_scene(rng), rng)
        if is_held_out(text) == held_out:
            found[text] = None
    return list(found)


def training_example(rng: random.Random) -> Example:
    """Draws a scene outside the held-out ones, words it, and renders it under some micro-conditioning."""
    while True:
        scene = sample_scene(rng)
        text = caption(scene, rng)
        if not is_held_out(text):
            return Example(text, *conditioned_picture(scene, rng))


def conditioned_picture(
    scene: Scene, rng: random.Random
) -> tuple[np.ndarray, tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(image, original_size, crops_coords_top_left, target_size), in 7 of 10 cases the plain picture.

    Otherwise the picture shows what its numbers say: an original_size of 16 to 40 is a picture that was that small
    and has been enlarged, thus blurred; a crop of up to 24 pixels has lost that much at the top and left.
    """
    target = (SIDE, SIDE)
    chance = rng.random()
    if chance < 0.7:
        return draw(scene, rng=rng), target, (0, 0), target
    if chance < 0.85:
        small = rng.randint(16, 40)
        reduced = Image.fromarray(draw(scene, rng=rng)).resize((small, small), Image.Resampling.BOX)
        return np.array(reduced.resize(target, Image.Resampling.BILINEAR)), (small, small), (0, 0), target
    crop = (rng.randint(0, 24), rng.randint(0, 24))
    return draw(scene, rng=rng, crop=crop), target, crop, target
