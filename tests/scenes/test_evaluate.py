"""The evaluator is right about pictures whose content is known."""

import random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from benchmarks.scenes.evaluate import judge
from benchmarks.scenes.scenes import (
    OPPOSITE,
    PALETTE,
    SIDE,
    Scene,
    SceneObject,
    caption,
    draw,
    parse_caption,
    sample_scene,
)


def _drawn(count: int, seed: int):
    rng = random.Random(seed)
    for _ in range(count):
        scene = sample_scene(rng)
        yield draw(scene, rng=rng), parse_caption(caption(scene, rng))


@pytest.fixture(scope="module")
def verdicts():
    return [judge(image, expectation) for image, expectation in _drawn(500, seed=3)]


@pytest.mark.parametrize("aspect", ["background", "colours", "shapes", "relation", "all"])
def test_drawn_scenes_are_judged_right_in_99_of_100(aspect, verdicts):
    answers = [getattr(verdict, aspect) for verdict in verdicts]
    asked = [answer for answer in answers if answer is not None]
    assert sum(asked) >= 0.99 * len(asked)


def test_a_slightly_soft_and_noisy_picture_is_still_judged_right():
    rng, right = np.random.default_rng(0), 0
    for image, expectation in _drawn(200, seed=4):
        soft = np.array(Image.fromarray(image).filter(ImageFilter.GaussianBlur(0.7)), np.float32)
        noisy = np.clip(soft + rng.normal(0, 8, soft.shape), 0, 255).astype(np.uint8)
        right += judge(noisy, expectation).all
    assert right >= 0.98 * 200


RED_LEFT_OF_BLUE = Scene((SceneObject("circle", "red"), SceneObject("square", "blue")), "left of", "white")
WORDS = "a red circle left of a blue square on a white background"


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("a green circle left of a blue square on a white background", "colours"),
        ("a red square left of a blue square on a white background", "shapes"),
        ("a blue circle left of a red square on a white background", "shapes"),
        ("a red circle right of a blue square on a white background", "relation"),
        ("a red circle above a blue square on a white background", "relation"),
        ("a red circle left of a blue square on a pink background", "background"),
        ("a red circle on a white background", "colours"),
    ],
)
def test_a_picture_of_something_else_is_judged_wrong(said, wrong):
    image = draw(RED_LEFT_OF_BLUE)
    assert judge(image, parse_caption(WORDS)).all
    verdict = judge(image, parse_caption(said))
    assert getattr(verdict, wrong) is False
    assert not verdict.all


def test_every_relation_is_told_from_its_opposite():
    for relation, opposite in OPPOSITE.items():
        image = draw(Scene(RED_LEFT_OF_BLUE.objects, relation, "white"))
        assert judge(image, parse_caption(WORDS.replace("left of", relation))).relation is True
        assert judge(image, parse_caption(WORDS.replace("left of", opposite))).relation is False


def test_an_empty_picture_and_a_third_object_are_wrong():
    assert not judge(np.full((SIDE, SIDE, 3), PALETTE["white"], np.uint8), parse_caption(WORDS)).all
    image = draw(RED_LEFT_OF_BLUE)
    image[4:12, 28:36] = PALETTE["green"]
    assert judge(image, parse_caption(WORDS)).colours is False
