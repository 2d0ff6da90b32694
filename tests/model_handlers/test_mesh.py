"""What a mesh may be, and where it lays weights; that pictures stay the same is in test_program."""

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from model_handlers import mesh
from model_handlers.mesh import MeshError, MeshShape


@pytest.mark.parametrize(
    ("text", "devices", "sizes", "rows"),
    [
        ("data=4", 4, (4, 1, 1), 4),
        ("data=2,fsdp=2", 4, (2, 2, 1), 4),
        ("context=2,data=2", 4, (2, 1, 2), 2),
        ("context=2", 8, (4, 1, 2), 4),
        ("fsdp=4", 4, (1, 4, 1), 4),
    ],
)
def test_a_mesh_has_all_devices_and_data_takes_what_is_left(text, devices, sizes, rows):
    shape = MeshShape.parse(text)
    assert tuple(shape.sizes(devices).values()) == sizes
    assert shape.rows(devices) == rows
    assert MeshShape.parse(str(shape)) == shape
    assert MeshShape().sizes(devices) == {"data": devices, "fsdp": 1, "context": 1}


@pytest.mark.parametrize(
    "text", ["", "data", "data=0", "data=-1", "data=two", "data=2,data=2", "tensor=2", "data=2;fsdp=2"]
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(MeshError, match="is not one of data, fsdp, context, once, with a whole number"):
        MeshShape.parse(text)


@pytest.mark.parametrize("text", ["data=3", "data=2", "data=8", "fsdp=3", "context=8", "data=2,fsdp=4"])
def test_a_mesh_of_another_number_of_devices_is_refused(text):
    with pytest.raises(MeshError, match=f"^--mesh={text}: the product must be the number of devices of a worker, 4$"):
        MeshShape.parse(text).sizes(4)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((10, 1280, 5120), (None, None, ("fsdp",))),
        ((3, 3, 640, 320), (None, None, ("fsdp",), None)),
        ((49409, 1280), (None, ("fsdp",))),  # the longest does not divide
        ((49409, 1281), (None, None)),
        ((1280,), (None,)),  # not worth a gather
    ],
)
def test_a_weight_is_divided_along_the_longest_dimension_that_divides(shape, spec):
    place = mesh.of_weights(AbstractMesh((2, 2, 1), mesh.AXES), on_host=["text_encoder"])
    assert place("unet", shape).spec == PartitionSpec(*spec)
    kinds = [place(network, shape).memory_kind for network in ("text_encoder", "unet")]
    assert kinds == ["pinned_host", None]
    on_data = mesh.of_weights(AbstractMesh((4, 1, 1), mesh.AXES))
    assert on_data("unet", shape).is_fully_replicated
