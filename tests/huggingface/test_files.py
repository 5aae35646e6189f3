"""Files of tensors: everything that is not as the format says is refused, by the names of file and tensor."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import zlib

import ml_dtypes
import numpy as np
import pytest
from folders import BF16, E4M3, checkpoint, config, file_of, header_of, write
from safetensors import safe_open

from haliax_fp8.folders.folder import TensorFolder, TensorSpec, new_folder, write_tensors
from haliax_fp8.folders.header import read_header
from haliax_fp8.folders.strict_json import BrokenCheckpoint


def small():
    random = np.random.default_rng(1)
    return {
        "a.weight": random.standard_normal((4, 6)).astype(E4M3),
        "a.weight_scale": random.uniform(1, 2, (4, 1)).astype(np.float32),
        "b": random.standard_normal(5).astype(BF16),
        "exponents": np.arange(3, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu),
        "nothing": np.zeros((0, 3), np.float32),
        "one": np.float32(2).reshape(()),
    }


def folder_of(path, content):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(content)
    return path


def test_tensors_are_mapped_as_they_are(tmp_path):
    tensors = small()
    folder = TensorFolder.open(write(tmp_path / "x", tensors, config()))
    assert folder.config == config() and list(folder.tensors) == list(tensors)
    for name, array in tensors.items():
        read = folder[name]
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.tobytes() and not read.flags.writeable
    with pytest.raises(ValueError, match="no tensor c"):
        folder["c"]


def test_every_truncation_is_refused(tmp_path):
    content = file_of(small())
    folder = folder_of(tmp_path / "x", content)
    for length in reversed(range(len(content))):
        os.truncate(folder / "model.safetensors", length)
        with pytest.raises(BrokenCheckpoint) as error:
            TensorFolder.open(folder)
        assert error.value.file == "model.safetensors"


def changed(**changes):
    header = header_of(small())
    header["b"] |= changes
    return file_of(small(), header)


def moved(by):
    header = header_of(small())
    header["b"]["data_offsets"] = [offset + by for offset in header["b"]["data_offsets"]]
    return file_of(small(), header)


# The file, and what the error has to say.
FILES = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "trailing bytes": (file_of(small()) + b"x", "follow"),
    **{f"header of {n}": (struct.pack("<Q", n) + b"{}", "truncated") for n in (3, 2**40, 2**63, 2**64 - 1)},
    "no JSON": (file_of({}, b"{nothing}"), "not JSON"),
    "a list": (file_of({}, b"[]"), "object"),
    "deep": (file_of({}, b"[" * 300_000), "deep"),
    "deep objects": (file_of({}, b'{"a":' * 100_000), "deep"),
    "not UTF-8": (file_of({}, b'{"\xff": 1}'), "UTF-8"),
    "half a pair": (file_of({}, b'{"\\ud800": 1}'), "Unicode"),
    "a pickle": (b"\x80\x04\x95" + b"\0" * 100, "truncated"),
    "a name twice": (file_of({}, b'{"b": {}, "b": {}}'), "b: its header has this name twice"),
    "dtype twice": (file_of({}, b'{"b": {"dtype": "F32", "dtype": "F32"}}'), "twice"),
    "overlap": (moved(-2), "overlap"),
    "gap": (moved(2), "gap"),
    "negative": (changed(shape=[-5]), "b: its shape"),
    "fractional": (changed(shape=[5.0]), "b: its shape"),
    "true": (changed(shape=[True]), "b: its shape"),
    "huge": (changed(shape=[2**80]), "b: its shape"),
    "overflowing": (changed(shape=[2**62, 2**62]), "b: its shape"),
    "overflowing without elements": (
        file_of({}, b'{"b": {"dtype": "F32", "shape": [0, %d, %d], "data_offsets": [0, 0]}}' % (2**62, 2**62)),
        "b: its shape [0, ",
    ),
    "wrong shape": (changed(shape=[6]), "b: its shape"),
    "many axes": (changed(shape=[1] * 99 + [5]), "100 axes"),
    "swapped offsets": (changed(data_offsets=[4, 0]), "b: its data_offsets"),
    "three offsets": (changed(data_offsets=[0, 1, 2]), "b: its data_offsets"),
    "negative offsets": (changed(data_offsets=[-10, 0]), "b: its data_offsets"),
    "NaN": (
        file_of({}, b'{"b": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}'),
        "NaN is not a JSON number",
    ),
    "many digits": (file_of({}, b'{"b": ' + b"9" * 5000 + b"}"), "not JSON"),
    "unknown dtype, swapped offsets": (changed(dtype="F4", data_offsets=[4, 0]), "b: its data_offsets [4, 0]"),
    "unknown dtype, gap": (changed(dtype="F4", data_offsets=[42, 52]), "gap"),
    "dtype of a list": (changed(dtype=[]), "b: its dtype"),
    "dtype that is no name": (changed(dtype="F4\x1b[2J"), "b: its dtype 'F4\\x1b[2J' is not the name of a dtype"),
    "no shape": (file_of({}, b'{"b": {"dtype": "F32"}}'), "b: the header"),
    "an entry of one": (file_of({}, b'{"b": 1}'), "b: the header"),
    "metadata": (file_of({}, b'{"__metadata__": {"a": 1}}'), "strings"),
}


@pytest.mark.parametrize(("content", "says"), FILES.values(), ids=FILES)
def test_broken_files_are_refused(tmp_path, content, says):
    with pytest.raises(BrokenCheckpoint) as error:
        TensorFolder.open(folder_of(tmp_path / "x", content))
    assert "model.safetensors: " in str(error.value) and says in str(error.value)


def test_tensors_of_unknown_types_are_refused_alone(tmp_path):
    """Formats come with new versions of safetensors: a tensor that nobody asks for is no reason to read no other."""
    folder = TensorFolder.open(folder_of(tmp_path / "x", changed(dtype="F6_E2M3", shape=[13])))
    assert (folder.tensors["b"].type, folder.tensors["b"].shape, folder.tensors["b"].bytes) == ("F6_E2M3", (13,), 10)
    assert folder["a.weight"].tobytes() == small()["a.weight"].tobytes() and folder["one"] == 2
    with pytest.raises(BrokenCheckpoint, match=r"^model.safetensors: b: its dtype 'F6_E2M3'"):
        folder["b"]


def test_a_named_pipe_is_not_opened(tmp_path):
    """To open one would wait for ever for somebody to write to it."""
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(BrokenCheckpoint, match="model.safetensors: it is not a file"):
        read_header(path)
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "model.safetensors.index.json", "config.json"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(BrokenCheckpoint, match=f"{name}: it is not a file"):
            TensorFolder.open(tmp_path)


SHARDS = {"one.safetensors": ["a.weight", "b"], "two.safetensors": ["a.weight_scale", "one"]}


def sharded(path, change=lambda index: None):
    write(path, small(), {}, SHARDS)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))
    return path


def test_shards(tmp_path):
    folder = TensorFolder.open(sharded(tmp_path / "x"))
    assert folder["one"] == 2 and folder.tensors["one"].file.name == "two.safetensors"


def test_files_end_at_their_limit_and_tensors_begin_at_multiples_of_their_elements(tmp_path):
    """PyTorch fails without the latter, so the widest elements come first."""
    arrays = [np.ones(3, E4M3), np.ones(1, np.float32), np.ones(5, E4M3), np.ones(2, np.float32)]
    specs = [TensorSpec(str(i), x.dtype, x.shape) for i, x in enumerate(arrays)]
    pairs = [((specs[0], specs[1]), lambda: arrays[:2]), ((specs[2], specs[3]), lambda: arrays[2:])]
    for limit, files in ((20, 1), (19, 2), (1, 2)):
        path = tmp_path / str(limit)
        path.mkdir()
        write_tensors(path, pairs, limit)
        paths = sorted(path.glob("*.safetensors"))
        assert len(paths) == files
        for file in paths:
            content = file.read_bytes()
            header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
            for name, entry in header.items():
                if name != "__metadata__":
                    assert entry["data_offsets"][0] % arrays[int(name)].dtype.itemsize == 0, (limit, name)


def test_a_changed_bit_is_found_wherever_it_is(tmp_path):
    """One in each third byte: of names, shapes, offsets, checksums, their keys, padding and tensors."""
    tensors = small()
    specs = [TensorSpec(name, x.dtype, x.shape) for name, x in tensors.items()] + [TensorSpec("é", BF16, (5,))]
    tensors["é"] = tensors["b"]
    write_tensors(tmp_path, [([spec], lambda spec=spec: [tensors[spec.name]]) for spec in specs], 10**9)
    (tmp_path / "config.json").write_text("{}")
    file, random = tmp_path / "model.safetensors", np.random.default_rng(0)

    def changed_tensors():
        folder = TensorFolder.open(tmp_path)
        return [name for name in folder.tensors if folder.has_changed(name)]

    assert changed_tensors() == []
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
        listed = json.loads(metadata["haliax_fp8"])["leaves"]
        # The format is that of saved runs: another reader of it has to find the same.
        seen = zlib.crc32(tensors["a.weight"].tobytes(), zlib.crc32(b"a.weight F8_E4M3 (4, 6)"))
        assert metadata["format"] == "pt" and listed["a.weight"] == {"crc32": f"{seen:08x}"}
        np.testing.assert_array_equal(opened.get_tensor("a.weight_scale"), tensors["a.weight_scale"])
    content = file.read_bytes()
    of_tensors = sum(x.nbytes for x in tensors.values())
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1 << random.integers(8)
        file.write_bytes(changed)
        if position >= len(content) - of_tensors:
            assert len(changed_tensors()) == 1, position
            continue
        with pytest.raises(BrokenCheckpoint):
            changed_tensors()


def test_a_changed_bit_of_the_list_of_files_is_found(tmp_path):
    """In each byte, of the total size too, which nothing else depends on."""
    specs = {name: TensorSpec(name, x.dtype, x.shape) for name, x in small().items()}
    write_tensors(tmp_path, [([spec], lambda name=name: [small()[name]]) for name, spec in specs.items()], 1)
    (tmp_path / "config.json").write_text("{}")
    assert set(TensorFolder.open(tmp_path).tensors) == set(specs)
    file, random = tmp_path / "model.safetensors.index.json", np.random.default_rng(0)
    content = file.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << random.integers(8)
        file.write_bytes(changed)
        with pytest.raises(BrokenCheckpoint, match="safetensors"):
            TensorFolder.open(tmp_path)


def test_checksums_that_do_not_fit_are_refused(tmp_path):
    """Whoever wrote them: only a header that is as it was can have the right one."""
    tensors = {"b": small()["b"]}
    leaves = ("1", "{}", '{"b": 1}', '{"b": {}}', '{"b": {"crc32": 1}}', '{"c": {"crc32": "0"}}')
    for listed in ("", "[]", "{}", "\ud800", *(f'{{"leaves": {text}}}' for text in leaves)):
        header = header_of(tensors)
        described = json.dumps([listed, {"b": ["BF16", [5]]}], ensure_ascii=False).encode(errors="surrogatepass")
        checksum = f"{zlib.crc32(described):08x}"
        header["__metadata__"] = {"haliax_fp8": listed, "haliax_fp8_crc32": checksum}
        with pytest.raises(BrokenCheckpoint, match="its index"):
            TensorFolder.open(folder_of(tmp_path, file_of(tensors, header)))
        header["__metadata__"]["haliax_fp8_crc32"] = "0" * 8
        with pytest.raises(BrokenCheckpoint, match="its index|its header has changed"):
            TensorFolder.open(folder_of(tmp_path, file_of(tensors, header)))


def test_an_index_names_the_files_beside_it_alone(tmp_path):
    """A file elsewhere is never opened, whatever its content is: it would be a good one."""
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(file_of({"b": small()["b"]}))
    for name in ("../outside.safetensors", str(outside), "..", ".", "", "a/../b", "a\\b", "one\0"):
        with pytest.raises(BrokenCheckpoint, match="outside of the folder"):
            TensorFolder.open(sharded(tmp_path / "x", lambda names, name=name: names.update(b=name)))
    path = sharded(tmp_path / "x")
    (path / "two.safetensors").unlink()
    (path / "two.safetensors").symlink_to(outside)
    with pytest.raises(BrokenCheckpoint, match=r"two.safetensors: it is a link.*follow_links"):
        TensorFolder.open(path)
    outside.write_bytes(file_of({name: small()[name] for name in SHARDS["two.safetensors"]}))
    assert TensorFolder.open(path, follow_links=True)["one"] == 2
    os.mkdir(tmp_path / "y")
    (tmp_path / "y" / "two.safetensors").symlink_to("one.safetensors")


def test_broken_indexes_are_refused(tmp_path):
    def refused(says, path):
        with pytest.raises(BrokenCheckpoint, match=says):
            TensorFolder.open(path)

    refused("three.safetensors: it is missing", sharded(tmp_path / "x", lambda m: m.update(b="three.safetensors")))
    refused("one.safetensors: b: .* is in two", sharded(tmp_path / "x", lambda m: m.update(b="two.safetensors")))
    refused("one.safetensors: b: .* does not list it", sharded(tmp_path / "x", lambda m: m.pop("b")))
    refused("two.safetensors: c: it is missing", sharded(tmp_path / "x", lambda m: m.update(c="two.safetensors")))
    refused("no weight_map", sharded(tmp_path / "x", lambda m: m.update(b=1)))
    both = {"one.safetensors": ["a.weight", "b"], "two.safetensors": ["b", "one"]}
    refused("b: it is in one.safetensors too", write(tmp_path / "x", small(), {}, both))
    twice = '{"weight_map": {"b": "one.safetensors", "b": "two.safetensors"}}'
    (tmp_path / "x" / "model.safetensors.index.json").write_text(twice)
    refused("b: its content has this name twice", tmp_path / "x")
    (tmp_path / "x" / "model.safetensors.index.json").write_text("{}")
    refused("no weight_map", tmp_path / "x")


def test_broken_configurations_are_refused(tmp_path):
    path = write(tmp_path / "x", *checkpoint(None))
    for text in ("", "[]", "{", "[" * 100_000, '{"a": 1, "a": 2}'):
        (path / "config.json").write_text(text)
        with pytest.raises(BrokenCheckpoint, match=r"^config.json: "):
            TensorFolder.open(path)
    (path / "config.json").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"^config.json: it is missing"):
        TensorFolder.open(path)
    with pytest.raises(BrokenCheckpoint, match="not a folder; give the one that holds config.json"):
        TensorFolder.open(tmp_path / "nothing")
    pickled = write(tmp_path / "y", {}, {})
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(BrokenCheckpoint, match="model.safetensors: it is missing.*never read"):
        TensorFolder.open(pickled)


WRITE = """
import os, resource, signal, sys
import numpy as np
from haliax_fp8.folders.folder import TensorSpec, new_folder, write_tensors

def groups():
    array = np.zeros((64, 1024), np.float32)
    for i in range(4):
        yield [TensorSpec(str(i), array.dtype, array.shape)], (lambda i=i: made(i, array))

def made(i, array):
    if i == 2 and sys.argv[2].isdigit():
        os.kill(os.getpid(), int(sys.argv[2]))
    return [array]

if sys.argv[2] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
with new_folder(sys.argv[1]) as folder:
    write_tensors(folder, list(groups()), 10**9)
"""


@pytest.mark.skipif(os.name != "posix", reason="has no modes")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_whoever_may_read_any_new_folder_may_read_this_one(tmp_path, umask):
    """A server runs as another user: only the umask says who may not read."""
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "folder") as folder:
            array = np.zeros(4, np.float32)
            write_tensors(folder, [([TensorSpec("a", array.dtype, array.shape)], lambda: [array])], 10**9)
    finally:
        os.umask(before)
    mode = lambda path: path.stat().st_mode & 0o777
    assert mode(tmp_path / "folder") == 0o777 & ~umask
    files = list((tmp_path / "folder").iterdir())
    assert files and {mode(path) for path in files} == {0o666 & ~umask}


@pytest.mark.more
def test_a_folder_is_complete_or_absent(tmp_path):
    """Whether the process is ended or killed in the middle, or there is no room: a file may not grow beyond a limit.

    What a killed one leaves beside the folder, the next one removes; but not that of one that is still writing.
    """
    path, beside = tmp_path / "folder", lambda: sorted(tmp_path.iterdir())

    def write(how):
        return subprocess.run([sys.executable, "-c", WRITE, str(path), how], capture_output=True, text=True)

    assert write(str(int(signal.SIGTERM))).returncode == -signal.SIGTERM and not beside()
    assert "File too large" in write("full").stderr and not beside()
    assert write(str(int(signal.SIGKILL))).returncode == -signal.SIGKILL
    (left,) = beside()
    others = [tmp_path / ".folder.backup", tmp_path / f".another.{'0' * 32}.tmp"]
    for other in others:
        other.mkdir()
    with new_folder(path) as written:
        assert written.is_dir() and not left.exists()
        assert write("well").returncode == 0, "another writer of the same name has removed this one"
        assert beside() == sorted([*others, path, written])
        for part in path.iterdir():
            part.unlink()
    assert beside() == sorted([*others, path]) and not list(path.iterdir())
    assert write("well").returncode == 0
    (path / "config.json").write_text("{}")
    assert list(TensorFolder.open(path).tensors) == list("0123")


HANDLED = """
import ctypes, os, signal, sys
from haliax_fp8.folders.folder import new_folder

if sys.argv[2] == "Python":
    signal.signal(signal.SIGTERM, lambda number, frame: None)
else:
    c = ctypes.CDLL(None)
    c.signal(int(signal.SIGTERM), ctypes.cast(c.abs, ctypes.c_void_p))
with new_folder(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("language", ["Python", "C"])
def test_a_program_that_handles_sigterm_itself_goes_on(language, tmp_path):
    """As Slurm's hooks do in Python, and `jax.distributed` in C++."""
    subprocess.run([sys.executable, "-c", HANDLED, str(tmp_path / "folder"), language], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "new", tmp_path / "file" / "deep" / "new"):
        remedy = "choose a writable folder"
        with pytest.raises(ValueError, match=f"to={re.escape(repr(str(path)))}.*; {remedy}"):
            new_folder(path, "to").__enter__()
    with pytest.raises(ValueError, match="directory='.*file' exists and is not empty"):
        new_folder(tmp_path / "file").__enter__()


def test_a_folder_that_cannot_take_its_name_is_refused_before_anything_is_written(tmp_path):
    """Links, to an empty folder and to nothing, and names of folders that are there already."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "to empty").symlink_to("empty")
    (tmp_path / "to nothing").symlink_to("nothing")
    before = sorted(tmp_path.iterdir())
    for name in ("to empty", "to nothing"):
        with pytest.raises(ValueError, match=f"to='.*{name}' is a link; give the folder that it leads to"):
            new_folder(tmp_path / name, "to").__enter__()
    for name in ("new/..", "empty/.."):
        with pytest.raises(ValueError, match=rf"to='.*{name[:-3]}/\.\.' ends"):
            new_folder(tmp_path / name, "to").__enter__()
    assert sorted(tmp_path.iterdir()) == before
    with new_folder(tmp_path / "empty/../other"):
        pass
    assert (tmp_path / "other").is_dir()
