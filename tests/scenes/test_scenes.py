"""Scenes are drawn as they say, and captions say what is drawn."""

import random

import numpy as np
import pytest

from benchmarks.scenes.scenes import (
    BACKGROUND_COLOURS,
    HELD_OUT_PERCENT,
    OBJECT_COLOURS,
    OPPOSITE,
    PALETTE,
    RELATIONS,
    SHAPES,
    SIDE,
    SIZES,
    VOCABULARY,
    ExpectedObject,
    Scene,
    SceneObject,
    caption,
    conditioned_picture,
    draw,
    held_out_captions,
    is_held_out,
    parse_caption,
    sample_scene,
    scene_of,
    training_example,
)

RED_CIRCLE, BLUE_SQUARE = SceneObject("circle", "red"), SceneObject("square", "blue")


def _scenes(count: int, seed: int = 0) -> list[Scene]:
    rng = random.Random(seed)
    return [sample_scene(rng) for _ in range(count)]


def _is(image: np.ndarray, colour: str) -> np.ndarray:
    return (image == PALETTE[colour]).all(axis=-1)


def test_samples_hold_every_shape_colour_size_relation_and_background():
    scenes = _scenes(500)
    objects = [thing for scene in scenes for thing in scene.objects]
    assert {thing.shape for thing in objects} == set(SHAPES)
    assert {thing.colour for thing in objects} == set(OBJECT_COLOURS)
    assert {thing.size for thing in objects} == set(SIZES)
    assert {scene.relation for scene in scenes} == {None, *RELATIONS}
    assert {scene.background for scene in scenes} == set(BACKGROUND_COLOURS)


def test_the_seed_fixes_the_examples():
    first, second = ([training_example(random.Random(seed)) for seed in range(20)] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.caption == b.caption
        assert np.array_equal(a.image, b.image)


@pytest.mark.parametrize(
    ("objects", "relation", "background"),
    [
        ((SceneObject("circle", "white"),), None, "white"),
        ((RED_CIRCLE,), "left of", "white"),
        ((RED_CIRCLE, BLUE_SQUARE), None, "white"),
        ((RED_CIRCLE, RED_CIRCLE), "above", "white"),
        ((RED_CIRCLE,), None, "red"),
        ((), None, "white"),
    ],
)
def test_a_scene_that_cannot_be_drawn_or_told_apart_is_refused(objects, relation, background):
    with pytest.raises(ValueError):
        Scene(objects, relation, background)


def test_palette_colours_are_far_apart():
    names = list(PALETTE)
    distances = [
        np.linalg.norm(np.subtract(PALETTE[a], PALETTE[b])) for i, a in enumerate(names) for b in names[i + 1 :]
    ]
    assert min(distances) > 86


def test_objects_never_overlap_and_stay_off_the_edge():
    rng = random.Random(1)
    for scene in _scenes(300):
        image = draw(scene, rng=rng)
        assert image.shape == (SIDE, SIDE, 3)
        assert image.dtype == np.uint8
        assert _is(image, scene.background)[[0, -1]].all()
        assert _is(image, scene.background)[:, [0, -1]].all()
        for thing in scene.objects:
            # The smallest, a ring of 17 pixels, has at least 100 that are not mixed with the background.
            area = sum(other.colour == thing.colour for other in scene.objects) * 90
            assert _is(image, thing.colour).sum() >= area


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_first_object_lies_where_the_relation_says(relation):
    rng = random.Random(2)
    for _ in range(20):
        image = draw(Scene((RED_CIRCLE, BLUE_SQUARE), relation, "white"), rng=rng)
        (first_y, first_x), (second_y, second_x) = (
            np.argwhere(_is(image, colour)).mean(axis=0) for colour in ("red", "blue")
        )
        offset = {
            "left of": second_x - first_x,
            "right of": first_x - second_x,
            "above": second_y - first_y,
            "below": first_y - second_y,
        }
        assert max(offset, key=offset.__getitem__) == relation


def test_larger_objects_cover_more():
    for shape in SHAPES:
        areas = [_is(draw(Scene((SceneObject(shape, "red", size),), None, "white")), "red").sum() for size in SIZES]
        assert areas == sorted(set(areas))


def test_a_caption_means_the_scene_that_it_was_made_for():
    rng = random.Random(3)
    for scene in _scenes(2000):
        meant = scene_of(caption(scene, rng))
        if meant.relation and meant.relation != scene.relation:  # "b right of a" for "a left of b"
            meant = Scene(meant.objects[::-1], OPPOSITE[meant.relation], meant.background)
        assert meant == scene


def test_captions_use_the_vocabulary_and_all_of_it():
    rng = random.Random(4)
    words = {word for scene in _scenes(3000) for word in caption(scene, rng).replace(",", "").split()}
    assert words == set(VOCABULARY)
    assert len(set(VOCABULARY)) == len(VOCABULARY)


def test_a_scene_is_worded_in_many_ways():
    rng = random.Random(5)
    scene = Scene((RED_CIRCLE, BLUE_SQUARE), "left of", "white")
    wordings = {caption(scene, rng) for _ in range(3000)}
    assert len(wordings) > 300
    assert "a red circle left of a blue square on a white background" in wordings
    assert "blue square to the right of red circle on white" in wordings
    assert "red circle" in {caption(Scene((RED_CIRCLE,), None, "white"), rng) for _ in range(300)}


def test_what_a_caption_leaves_out_is_not_demanded_but_has_a_meaning():
    assert parse_caption("red circle").objects == (ExpectedObject("circle", "red", None),)
    assert parse_caption("red circle").background is None
    assert parse_caption("a red circle and a blue square").relation is None
    assert scene_of("red circle") == Scene((RED_CIRCLE,), None, "white")
    assert scene_of("a white circle").background == "black"
    assert scene_of("a white circle above a black ring").background == "grey"
    assert scene_of("a red circle and a blue square").relation == "left of"


def test_a_caption_reads_the_same_in_capitals_and_with_other_words_for_the_same():
    expected = parse_caption("a small red circle over a large blue square on a gray background")
    assert parse_caption("A Gray background with a little red circle above a big blue square") == expected
    assert expected.background == "grey"


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("a red zebra", "zebra"),
        ("a circle on white", "circle"),
        ("left of a red circle", "left"),
        ("a red circle left of", "name"),
        ("a white background", "name"),
    ],
)
def test_a_caption_outside_this_world_is_refused_with_its_culprit(text, culprit):
    with pytest.raises(ValueError, match=culprit):
        parse_caption(text)


def test_about_three_scenes_in_a_hundred_are_held_out():
    rng = random.Random(6)
    held_out = sum(is_held_out(caption(scene, rng)) for scene in _scenes(5000))
    # Three standard deviations of a binomial of 5000 are 0.7 in a hundred.
    assert abs(held_out / 50 - HELD_OUT_PERCENT) < 0.8


def test_no_paraphrase_of_a_held_out_scene_is_trained_on():
    rng = random.Random(7)
    for text in held_out_captions(100, seed=1):
        scene = scene_of(text)
        if scene.relation is not None:
            assert is_held_out(caption(Scene(scene.objects[::-1], OPPOSITE[scene.relation], scene.background), rng))
        assert all(is_held_out(caption(scene, rng)) for _ in range(10))
    assert not any(is_held_out(training_example(rng).caption) for _ in range(300))


def test_held_out_captions_differ_and_come_from_their_seed():
    captions = held_out_captions(200, seed=1)
    assert len(set(captions)) == 200
    assert captions == held_out_captions(200, seed=1)
    assert captions != held_out_captions(200, seed=2)


def test_seven_pictures_in_ten_are_plain_and_the_rest_show_their_conditioning():
    rng, scene = random.Random(8), Scene((RED_CIRCLE,), None, "white")
    conditions = [conditioned_picture(scene, rng)[1:] for _ in range(1000)]
    plain = sum(original == (SIDE, SIDE) and crop == (0, 0) for original, crop, _ in conditions)
    small = sum(original != (SIDE, SIDE) for original, _, _ in conditions)
    assert 650 < plain < 750
    assert 110 < small < 190
    assert {target for _, _, target in conditions} == {(SIDE, SIDE)}


def test_a_small_original_size_blurs():
    rng, scene = random.Random(9), Scene((SceneObject("square", "black"),), None, "white")

    for _ in range(200):
        image, original, crop, _ = conditioned_picture(scene, rng)
        if crop == (0, 0):
            mixed = (~_is(image, "white") & ~_is(image, "black")).sum()
            # A sharp outline, of at most 4 x 31 pixels, is one pixel wide. Enlarged from 40 it is at least two.
            assert (mixed > 200) == (original != (SIDE, SIDE))


def test_a_crop_moves_the_picture_up_and_left_by_as_much():
    scene = Scene((RED_CIRCLE, BLUE_SQUARE), "right of", "pink")
    whole, cropped = draw(scene), draw(scene, crop=(9, 5))
    assert np.array_equal(cropped[:-9, :-5], whole[9:, 5:])
    assert _is(cropped, "pink")[-9:].all()
    assert _is(cropped, "pink")[:, -5:].all()


def test_a_picture_of_another_size_shows_the_same():
    large = draw(Scene((RED_CIRCLE, BLUE_SQUARE), "above", "beige"), size=2 * SIDE)
    assert large.shape == (2 * SIDE, 2 * SIDE, 3)
    small = draw(Scene((RED_CIRCLE, BLUE_SQUARE), "above", "beige"))
    shrunk = large.reshape(SIDE, 2, SIDE, 2, 3).mean(axis=(1, 3))
    # Shapes' corners are rounded to a quarter of a pixel of each picture.
    assert np.abs(shrunk - small).mean() < 1
