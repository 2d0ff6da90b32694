"""An executable that was saved draws the same pictures as one that was compiled, and is loaded only where it fits."""

import base64
import hashlib
import json
import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import zstandard
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from model_handlers import executables, mesh, program, topologies
from model_handlers.attention import attention
from model_handlers.executables import NoExecutableError
from model_handlers.program import Programs
from model_handlers.stable_diffusion.model import StableDiffusion
from tests import cloud
from tests.checkpoints import TINY
from tests.model_handlers.test_program import PER_DEVICE_BATCH_SIZE, REQUESTS, draw_all, load
from tests.topologies import needs_libtpu
from transforms import storage

SIZE = (TINY.height, TINY.width)


def lower(root, devices_mesh):
    """The program of REQUESTS' size, of a checkpoint of which only the configs are read."""
    model = StableDiffusion.outline(root, dtype="float32", place=mesh.of_weights(devices_mesh))
    inputs, _ = model.prepare(REQUESTS[:1] * PER_DEVICE_BATCH_SIZE * devices_mesh.size)
    return program.trace(nnx.split(model.networks), inputs, devices_mesh, *SIZE).lower()


@pytest.fixture(scope="module")
def saved(tiny_checkpoint, tmp_path_factory):
    """A folder with the executable for one CPU device, its key, and the device."""
    folder = tmp_path_factory.mktemp("executables")
    devices_mesh = mesh.make_mesh(jax.devices()[:1])
    options = program.compiler_options(devices_mesh)
    lowered = lower(tiny_checkpoint, devices_mesh)
    key = executables.key_of(lowered, devices_mesh, options)
    for name, data in executables.pack(executables.compile_anew(lowered, options), key, "a test").items():
        (folder / name).write_bytes(data)
    return folder, key, jax.devices()[:1]


def test_what_is_saved_is_compiled_past_jaxs_cache_which_goes_on_to_be_used(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    square = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        executables.compile_anew(jax.jit(lambda x: x @ x).lower(square), None)
        assert list(tmp_path.iterdir()) == []
        jax.jit(lambda x: x @ x + 1).lower(square).compile()
        assert list(tmp_path.iterdir()) != []
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def compiled_names():
    names, counting = [], [True]

    def listen(event, _, **details):
        if counting[0] and event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    counting[0] = False


def programs_of(root, folder):
    compiled = load(root, jax.devices()[:1])
    return compiled, Programs(compiled._model, compiled._mesh, PER_DEVICE_BATCH_SIZE, str(folder))


def test_a_saved_program_draws_the_same_bits_and_nothing_is_compiled(saved, tiny_checkpoint, compiled_names, caplog):
    compiled, loaded = programs_of(tiny_checkpoint, saved[0])
    with caplog.at_level("INFO", "lightmill"):
        pictures = draw_all(loaded, REQUESTS)
    assert [name for name in compiled_names if "program" in name] == []
    assert "loaded program 1: 24 x 16 pixels" in caplog.text
    assert pictures == draw_all(compiled, REQUESTS)
    assert [name for name in compiled_names if "program" in name] == ["jit(program)"]  # the list does grow


def test_a_program_that_none_fits_is_compiled_and_says_why(saved, tiny_checkpoint, caplog):
    _, programs = programs_of(tiny_checkpoint, saved[0])
    inputs, _ = programs.prepare(REQUESTS[:1] * programs.batch_size)
    assert programs.compile(32, 32, inputs)
    assert "no executable fits" in caplog.text
    assert "differs in program (another size, batch, model or code)" in caplog.text


@pytest.mark.parametrize("name", ["program", "jax", "jaxlib", "device_kind", "topology", "compiler_options", "cpu"])
def test_an_executable_of_another_key_is_not_loaded(name, saved):
    folder, key, devices = saved
    here = r"program \(" if name == "program" else rf"{name} \('.*', here 'other'\)$"
    with pytest.raises(NoExecutableError, match=rf"nearest of 1, a test, differs in {here}"):
        executables.load(str(folder), {**key, name: "other"}, devices, [])


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_the_compilers_flags_are_in_the_key_whatever_their_order(variable, monkeypatch):
    monkeypatch.setenv(variable, "--b=1 --a=2")
    assert executables._flags(variable) == "--a=2 --b=1"


def copy_of(saved, folder):
    for path in saved[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (described,), (payload,) = folder.glob("*.json"), folder.glob("*.zst")
    return described, payload


def test_damaged_files_are_not_loaded(saved, tmp_path):
    _, key, devices = saved
    described, payload = copy_of(saved, tmp_path)
    payload.write_bytes(payload.read_bytes()[:-1])
    with pytest.raises(NoExecutableError, match=r"\.zst: not what .*\.json says$"):
        executables.load(str(tmp_path), key, devices, [])
    payload.unlink()
    with pytest.raises(NoExecutableError, match=r"\.zst: cannot be read"):
        executables.load(str(tmp_path), key, devices, [])
    described.write_text("{")
    with pytest.raises(NoExecutableError, match="not valid JSON"):
        executables.load(str(tmp_path), key, devices, [])
    described.write_text('{"key": 1}')
    with pytest.raises(NoExecutableError, match="not the description"):
        executables.load(str(tmp_path), key, devices, [])


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_a_folder_without_executables_is_named(folder, saved, tmp_path):
    with pytest.raises(NoExecutableError, match="no executables there"):
        executables.load(str(tmp_path / folder), saved[1], saved[2], [])


def test_an_executable_in_a_bucket_is_loaded_from_there(saved):
    folder, key, devices = saved
    with cloud.emulator("fake-gcs-server") as port, cloud.use(port) as bucket:
        with pytest.raises(NoExecutableError, match="no executables there"):
            executables.load(f"{bucket}/programs", key, devices, [])
        for path in folder.iterdir():
            storage.write_file(f"{bucket}/programs", path.name, path.read_bytes())
        assert executables.load(f"{bucket}/programs/", key, devices, [])
        with pytest.raises(NoExecutableError, match=r"nearest of 1, a test, differs in jax"):
            executables.load(f"{bucket}/programs", {**key, "jax": "other"}, devices, [])


class Pickle:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def test_a_pickle_in_the_place_of_an_executable_is_not_opened(saved, tmp_path):
    _, key, devices = saved
    described, payload = copy_of(saved, tmp_path)
    data = pickle.dumps(Pickle(tmp_path / "opened"))
    pickle.loads(data)
    (tmp_path / "opened").unlink()  # it would work
    packed = zstandard.compress(data)
    payload.write_bytes(packed)
    text = json.loads(described.read_text())
    described.write_text(json.dumps(text | {"sha256": hashlib.sha256(packed).hexdigest()}))
    with pytest.raises(NoExecutableError, match="cannot be loaded"):
        executables.load(str(tmp_path), key, devices, [])
    assert not (tmp_path / "opened").exists()


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "kind", "sides"), [("v5e:2x2", "TPU v5 lite", "2x2x1"), ("v6e:1x1", "TPU v6 lite", "1x1x1")]
)
def test_the_key_for_a_tpu_says_which_and_by_which_compiler(topology, kind, sides, tiny_checkpoint):
    devices_mesh = mesh.make_mesh(topologies.devices_of(topology))
    key = executables.key_of(lower(tiny_checkpoint, devices_mesh), devices_mesh, None)
    assert (key["device_kind"], key["topology"]) == (kind, sides)
    assert key.keys() >= {"libtpu", "LIBTPU_INIT_ARGS"} and "cpu" not in key


@needs_libtpu
def test_where_the_source_lies_is_not_in_a_program_for_tpu():
    devices_mesh = mesh.make_mesh(topologies.devices_of("v5e:2x2"))
    rows = mesh.sharding(devices_mesh, "batch")
    shapes = [jax.ShapeDtypeStruct((4, 16, 128), jnp.bfloat16)] * 3

    def text_of():
        jitted = jax.jit(lambda q, k, v: attention(q, k, v, 2), in_shardings=(rows,) * 3, out_shardings=rows)
        with jax.set_mesh(devices_mesh):
            text = jitted.trace(*shapes).lower().as_text()
        (kernel,) = re.findall(r"body\\22: \\22([\w+/=]*)", text)
        return base64.b64decode(kernel + "=" * (-len(kernel) % 4))

    with jax._src.config.traceback_in_locations_limit(10):
        assert b"tpu_attention.py" in text_of()  # else there would be nothing to leave out
    assert b"tpu_attention.py" not in text_of()
